// AVX-512 with vpdpbusd: Ice Lake and later servers, Zen 4, Zen 5.
#include "llamafile/by_element.h"
#include "llamafile/floats/kernel.h"
#include "llamafile/gemm.h"
#include "llamafile/gemm_i16.h"
#include "llamafile/gemm_in_registers.h"
#include "llamafile/gemv.h"

namespace ktk::llamafile {
namespace {

// More than a dozen rows.
struct ManyRows {
  RunProduct* run;
  ScratchSize* scratch_size;
};

template <size_t kType>
constexpr ManyRows many_rows() {
  constexpr BlockType kOf = kTypes[kType];
  if constexpr (fits_i16(kOf)) {
    return {gemm<GemmI16<kOf.bits>>, GemmI16<kOf.bits>::scratch_size};
  } else {
    using Kernel = GemmInRegisters<kOf.bits, scaling_of(kOf)>;
    return {gemm<Kernel>, Kernel::scratch_size};
  }
}

const ManyRows& many_rows_of(const ktk_matrix* matrix) {
  static constexpr auto kTable = type_table([]<size_t kType> { return many_rows<kType>(); });
  return kTable[block_type(matrix->format.element)];
}

// Up to here, writing operands takes longer than it saves.
constexpr size_t kMaxRowsUnwritten = 20;

void multiply_many(const ktk_matmul* mm) {
  const BlockType& type = block_type(mm->matrix->format.element);
  if (defers_d(scaling_of(type)) && mm->m <= kMaxRowsUnwritten) return multiply(mm);
  many_rows_of(mm->matrix).run(mm);
}

size_t many_scratch_size(const ktk_matrix* matrix, size_t m) {
  return many_rows_of(matrix).scratch_size(matrix, m);
}

struct Blocks {
  using Weight = BlockWeight;
  using Act = BlockAct;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemv_2x32_avx512_vnni", kGemvRows, multiply_few),
      ukernel("gemm_12x32_avx512_vnni", kFewRows, multiply),
      ukernel("gemm_6x32_avx512_vnni", multiply_many, many_scratch_size),
  };
};
constexpr ktk_variant kBlocks = make_variant<Blocks>();
constexpr ktk_variant kFloats = make_variant<FloatVariant<floats::multiply<Dot>>>();

struct Variant : ByElement<kBlocks, kFloats> {
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel<0>("gemv_2x32_avx512_vnni", kGemvRows),
      ukernel<1>("gemm_12x32_avx512_vnni", kFewRows),
      ukernel<2>("gemm_6x32_avx512_vnni"),
  };
};

}  // namespace
}  // namespace ktk::llamafile

KTK_EXPORT_VARIANT(llamafile, ktk::llamafile::Variant)

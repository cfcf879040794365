// AVX-512 with vdpbf16ps: Zen 4, Zen 5. Floats, and up to a dozen rows of block types, are
// avx512_vnni, the same code. More rows are not: decoding and scaling have ports of their own here,
// and stores of dst take long.
#include "llamafile/by_element.h"
#include "llamafile/by_type.h"
#include "llamafile/gemm_i16.h"
#include "llamafile/gemm_in_registers.h"

extern "C" {
extern const ktk_variant ktk_llamafile_avx512_vnni;
}

namespace ktk::llamafile {
namespace {

// More than a dozen rows of block types.
using ManyRows = ByType<[]<size_t kType>() -> TypeProduct {
  constexpr BlockType kOf = kTypes[kType];
  constexpr Kind kKind = kind_of(kOf);
  if constexpr (fits_i16(kOf)) {
    return {gemm<GemmI16<kKind>>, GemmI16<kKind>::scratch_size};
  } else {
    using Kernel = GemmInRegisters<kKind>;
    return {gemm<Kernel>, Kernel::scratch_size};
  }
}>;

// Up to here, writing operands takes longer than it saves: measured on Zen 4, and no count says so.
// decode_rows, of the table by CPU, asks about decoding alone, and Zen 4 never wants that; tiles
// that read written operands also scale with fewer instructions (gemm_i16.h).
constexpr size_t kMaxRowsUnwritten = 20;

using Shared =
    ByElement<ktk_llamafile_avx512_vnni, ktk_llamafile_avx512_vnni, ktk_llamafile_avx512_vnni>;
constexpr ktk_ukernel kSharedFew = Shared::ukernel<1>("gemm_12x32_avx512_vnni", kFewRows);
constexpr ktk_ukernel kSharedMany = Shared::ukernel<2>("");

void multiply_many(const ktk_matmul* mm) {
  const BlockType& type = block_type(mm->matrix->format.element);
  const bool is_unwritten = defers_d(scaling_of(type)) && mm->m <= kMaxRowsUnwritten;
  (is_unwritten ? kSharedFew.run : ManyRows::run)(mm);
}

bool has_blocks(const ktk_matrix* matrix) {
  const ktk_element element = matrix->format.element;
  return element >= KTK_GGML && !floats::find_float_block(element);
}

void multiply_any(const ktk_matmul* mm) {
  (has_blocks(mm->matrix) ? multiply_many : kSharedMany.run)(mm);
}
size_t any_scratch_size(const ktk_matrix* matrix, size_t m) {
  return (has_blocks(matrix) ? ManyRows::scratch_size : kSharedMany.scratch_size)(matrix, m);
}

struct Variant : Shared {
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel<0>("gemv_2x32_avx512_vnni", kGemvRows),
      kSharedFew,
      ktk::ukernel("gemm_6x32_avx512_vnni", multiply_any, any_scratch_size),
  };
};

}  // namespace
}  // namespace ktk::llamafile

KTK_EXPORT_VARIANT(llamafile, ktk::llamafile::Variant)

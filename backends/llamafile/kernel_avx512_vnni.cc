// AVX-512 with vpdpbusd: Cascade Lake, Ice Lake and what follows on them, where instructions on
// 512-bit registers have two ports. Zen 4 and Zen 5 are avx512_bf16.
#include "llamafile/by_element.h"
#include "llamafile/floats/blocks_kernel.h"
#include "llamafile/gemm.h"
#include "llamafile/gemm_decoded_i16.h"
#include "llamafile/gemv.h"

namespace ktk::llamafile {
namespace {

// More than kFewRows rows.
struct DecodedProduct {
  RunProduct* run;
  ScratchSize* scratch_size;
};

template <size_t kType>
constexpr DecodedProduct decoded_product() {
  constexpr BlockType kOf = kTypes[kType];
  constexpr Kind kKind = kind_of(kOf);
  if constexpr (fits_i16(kOf)) {
    return {gemm<GemmDecodedI16<kKind>>, GemmDecodedI16<kKind>::scratch_size};
  } else {
    using Kernel = GemmDecoded<kKind>;
    return {gemm<Kernel>, Kernel::scratch_size};
  }
}

const DecodedProduct& decoded_product_of(const ktk_matrix* matrix) {
  static constexpr auto kTable = type_table([]<size_t kType> { return decoded_product<kType>(); });
  return kTable[block_type(matrix->format.element)];
}

void multiply_decoded(const ktk_matmul* mm) { decoded_product_of(mm->matrix).run(mm); }
size_t decoded_scratch_size(const ktk_matrix* matrix, size_t m) {
  return decoded_product_of(matrix).scratch_size(matrix, m);
}

struct Blocks {
  using Weight = BlockWeight;
  using Act = BlockAct;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemv_2x32_avx512_vnni", kGemvRows, multiply_few),
      ukernel("gemm_12x32_avx512_vnni", kFewRows, multiply),
      ukernel("gemm_decoded_12x32_avx512_vnni", multiply_decoded, decoded_scratch_size),
  };
};
constexpr ktk_variant kBlocks = make_variant<Blocks>();
constexpr ktk_variant kFloatBlocks = make_variant<floats::BlocksVariant>();
constexpr ktk_variant kFloats = make_variant<FloatVariant<floats::multiply<Dot>>>();

struct Variant : ByElement<kBlocks, kFloatBlocks, kFloats> {
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel<0>("gemv_2x32_avx512_vnni", kGemvRows),
      ukernel<1>("gemm_12x32_avx512_vnni", kFewRows),
      ukernel<2>("gemm_decoded_12x32_avx512_vnni"),
  };
};

}  // namespace
}  // namespace ktk::llamafile

KTK_EXPORT_VARIANT(llamafile, ktk::llamafile::Variant)

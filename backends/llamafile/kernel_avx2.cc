// Plain AVX2. Types whose operands are small sum products as words; the others have signed weights.
#include "llamafile/by_element.h"
#include "llamafile/floats/blocks_kernel.h"
#include "llamafile/gemm.h"
#include "llamafile/gemm_words.h"

namespace ktk::llamafile {
namespace {

template <size_t kType, bool kDecoded>
constexpr RunProduct* product() {
  constexpr Kind kKind = kind_of(kTypes[kType]);
  constexpr int kWordSteps = word_steps(kTypes[kType]);
  if constexpr (kWordSteps == 0) {
    return gemm<Gemm<kKind>>;
  } else if constexpr (kDecoded) {
    return gemm<GemmWords<kKind, kWordSteps>>;
  } else {
    return gemm<GemmFewWords<kKind, kWordSteps>>;
  }
}

template <bool kDecoded>
void multiply_blocks(const ktk_matmul* mm) {
  static constexpr auto kProducts =
      type_table([]<size_t kType> { return product<kType, kDecoded>(); });
  kProducts[block_type(mm->matrix->format.element)](mm);
}
size_t decoded_size(const ktk_matrix*, size_t) { return kWordScratch; }

constexpr char kFew[] = "gemm_2x16_avx2", kMany[] = "gemm_decoded_3x16_avx2";

struct Blocks {
  using Weight = BlockWeight;
  using Act = BlockAct;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel(kFew, kReadRows, multiply_blocks<false>),
      ukernel(kMany, multiply_blocks<true>, decoded_size),
  };
};
constexpr ktk_variant kBlocks = make_variant<Blocks>();
constexpr ktk_variant kFloatBlocks = make_variant<floats::BlocksVariant>();
constexpr ktk_variant kFloats = make_variant<FloatVariant<floats::multiply<Dot>>>();

struct Variant : ByElement<kBlocks, kFloatBlocks, kFloats> {
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel<0>(kFew, kReadRows),
      ukernel<1>(kMany),
  };
};

}  // namespace
}  // namespace ktk::llamafile

KTK_EXPORT_VARIANT(llamafile, ktk::llamafile::Variant)

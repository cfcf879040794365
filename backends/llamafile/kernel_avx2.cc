// Plain AVX2: products of bytes are summed as words, as far as these hold them.
#include "llamafile/by_element.h"
#include "llamafile/floats/blocks_kernel.h"
#include "llamafile/gemm_words.h"

namespace ktk::llamafile {
namespace {

// For more than kReadRows rows.
template <Kind kKind, int kWordSteps>
void multiply_many(const ktk_matmul* mm) {
  constexpr size_t kRead = 2 * read_rows<kKind, kWordSteps>;
  if constexpr (kRead > kReadRows) {
    if (mm->m <= kRead) return gemm<GemmFewWords<kKind, kWordSteps>>(mm);
  }
  gemm<GemmWords<kKind, kWordSteps>>(mm);
}

template <size_t kType, bool kDecoded>
constexpr RunProduct* product() {
  constexpr Kind kKind = kind_of(kTypes[kType]);
  constexpr int kWordSteps = word_steps(kTypes[kType]);
  if constexpr (kDecoded) {
    return multiply_many<kKind, kWordSteps>;
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

// What the kernels of all variants state in the same way (gemm/driver.h): where weights are, and
// what becomes of the sums of a group. A slab is the depth of a group of activations.
#pragma once

#include "amxint8/layout.h"
#include "gemm/driver.h"

namespace ktk::amxint8 {
namespace {

template <class Act>
class KernelBase {
 public:
  static constexpr size_t kNr = amxint8::kNr;

  explicit KernelBase(const ktk_matmul* mm) : matrix_(mm->matrix), packed_(mm->weight) {}
  size_t slabs() const { return Act::num_groups(matrix_); }
  size_t offset(size_t slab) const {
    return smaller(slab * (Act::kGroup / kStepDepth), num_steps(matrix_)) * kStepBytes;
  }

 protected:
  const ktk_matrix* matrix() const { return matrix_; }
  size_t num_steps_of(size_t slab) const { return (offset(slab + 1) - offset(slab)) / kStepBytes; }
  const float* scales_of(const char* block) const {
    const size_t bytes = static_cast<size_t>(block - static_cast<const char*>(packed_));
    return weight_scales(matrix_, packed_) + bytes / padded_k(matrix_);
  }

 private:
  const ktk_matrix* matrix_;
  const void* packed_;
};

alignas(kLine) constexpr float kZeros[kNr] = {};
alignas(kLine) constexpr float kOnes[kNr] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                             1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// The end of a group, for all micro-kernels: dst = fma(float(sum), scale of the activations, dst),
// from zero on in the first one, and times the scale of the weights in the last one. Sums are exact
// in int32, so a row has the same bits whoever added them up.
struct GroupEnd {
  const float* before;  // dst, or zeros
  size_t before_stride;
  const float* factor;  // of columns
  float* dst;
  size_t dst_stride;

  GroupEnd(float* to, size_t stride, const float* scales, bool is_first, bool is_last)
      : before(is_first ? kZeros : to),
        before_stride(is_first ? 0 : stride),
        factor(is_last ? scales : kOnes),
        dst(to),
        dst_stride(stride) {}

  template <class Simd>
  void store(size_t column, typename Simd::Int sum, typename Simd::Float act_scale) const {
    const auto value = Simd::fma(Simd::convert(sum), act_scale, Simd::load(before + column));
    Simd::store(dst + column, Simd::mul(value, Simd::load(factor + column)));
  }
  void next_row() {
    before += before_stride;
    dst += dst_stride;
  }
};

}  // namespace
}  // namespace ktk::amxint8

// What the kernels of all variants state in the same way (gemm/driver.h): where weights are, and
// how the sums of a slab become a part of dst.
//
//   dst += float(sum of products - zero * sum of act codes) * act scale * weight scale
//
// slab after slab, in order of k. Integer sums have no order and dst is the only accumulator
// between slabs, hence all micro-kernels return the same bits, wherever runs are cut.
#pragma once

#include "codec/int4/act.h"
#include "codec/int4/dot.h"
#include "gemm/driver.h"

namespace ktk::int4 {
namespace {

// Where things are in the operands of a product.
struct Operands {
  size_t slabs, slab_depth, slab_bytes, slabs_in_group;
  size_t header_bytes, group_bytes;
  size_t act_scales;  // offset in a row of act
  bool f16_scales, has_zeros;

  template <class Act>
  static Operands of(const ktk_matrix* matrix) {
    const size_t depth = Act::slab_depth(matrix);
    return {
        .slabs = Act::num_slabs(matrix),
        .slab_depth = depth,
        .slab_bytes = depth / kStepDepth * kStepBytes,
        .slabs_in_group = group_depth(matrix) / depth,
        .header_bytes = int4::header_bytes(matrix),
        .group_bytes = int4::group_bytes(matrix),
        .act_scales = padded_k(matrix),
        .f16_scales = matrix->format.scale == KTK_F16,
        .has_zeros = int4::has_zeros(matrix),
    };
  }

  // In a block: of the header of the group that a slab is in, of its codes, and of the slab, to
  // whose first one in a group the header belongs.
  size_t header(size_t slab) const { return slab / slabs_in_group * group_bytes; }
  size_t codes(size_t slab) const {
    return header(slab) + header_bytes + slab % slabs_in_group * slab_bytes;
  }
  size_t offset(size_t slab) const { return slab % slabs_in_group ? codes(slab) : header(slab); }
};

template <class ActCodec>
class KernelBase {
 public:
  static constexpr size_t kNr = int4::kNr;

  explicit KernelBase(const ktk_matmul* mm) : operands_(Operands::of<ActCodec>(mm->matrix)) {}
  size_t slabs() const { return operands_.slabs; }
  size_t offset(size_t slab) const { return operands_.offset(slab); }

 protected:
  Operands operands_;
};

// Where the zero points of weights are: 8 for all, or in the header of each group.
enum class Zeros { kFixed, kStored };

// Scales and zero points of one vector of columns.
template <class Dot, Zeros kZeros>
struct WeightScales {
  typename Dot::Float scale, zero;

  void load(const uint16_t* scales, bool f16_scales) {
    scale = f16_scales ? Dot::load_f16(scales) : Dot::load_bf16(scales);
    if constexpr (kZeros == Zeros::kStored) {
      const uint16_t* zeros = scales + kNr;
      zero = f16_scales ? Dot::load_f16(zeros) : Dot::load_bf16(zeros);
    }
  }
};

// When sums were given the correction for a zero of 8: as what they started at, or not yet.
enum class Correction { kAtStart, kNow };

// `before` plus what one slab gives to a vector of columns.
template <class Dot, Zeros kZeros, Correction kCorrection>
inline typename Dot::Float with_slab(typename Dot::Float before, typename Dot::Int sum,
                                     const ActScale* act_scale, typename Dot::Float scale,
                                     const WeightScales<Dot, kZeros>& weight) {
  if constexpr (kZeros == Zeros::kFixed && kCorrection == Correction::kNow) {
    sum = Dot::add(sum, Dot::set1_int(act_scale->correction));
  }
  auto value = Dot::convert(sum);
  if constexpr (kZeros == Zeros::kStored) {
    const float act_sum = __builtin_bit_cast(float, act_scale->correction);
    value = Dot::fma(weight.zero, Dot::set1(act_sum), value);
  }
  return Dot::fma(Dot::mul(value, scale), weight.scale, before);
}

// The same in memory.
template <class Dot, Zeros kZeros, Correction kCorrection>
inline void add_slab(float* dst, typename Dot::Int sum, const ActScale* act_scale,
                     typename Dot::Float scale, const WeightScales<Dot, kZeros>& weight) {
  const auto before = Dot::load(dst);
  Dot::store(dst, with_slab<Dot, kZeros, kCorrection>(before, sum, act_scale, scale, weight));
}

// Ahead of the first slab.
template <class Dot, size_t kCols>
inline void clear(float* dst, size_t dst_stride, size_t rows) {
  for (size_t i = 0; i < rows; ++i, dst += dst_stride) {
    for (size_t j = 0; j < kCols; j += Dot::kLanes) Dot::store(dst + j, Dot::set1(0));
  }
}

}  // namespace
}  // namespace ktk::int4

#include "step/rotary.h"

#include "ops/select.h"

namespace ktk {

Rotary::Rotary(const void* cosine, ktk_element cosine_type, const void* sine, ktk_element sine_type,
               size_t n)
    : cosine_(n), sine_(n), swapped_(n) {
  ops().to_f32(cosine, cosine_type, n, cosine_.data());
  ops().to_f32(sine, sine_type, n, sine_.data());
}

void Rotary::operator()(const void* from, ktk_element type, size_t columns, void* to) {
  const ktk_ops& o = ops();
  const size_t half = n() / 2;
  row_.resize(columns);
  rounded_.resize(block_of(type).bytes_of(n()));
  const auto round = [&](float* values) {
    if (type == KTK_F32) return;
    o.from_f32(values, type, n(), rounded_.data());
    o.to_f32(rounded_.data(), type, n(), values);
  };
  o.to_f32(from, type, columns, row_.data());
  for (size_t i = 0; i < half; ++i) {
    swapped_[i] = -row_[half + i];
    swapped_[half + i] = row_[i];
  }
  o.multiply(cosine_.data(), n(), row_.data());
  o.multiply(sine_.data(), n(), swapped_.data());
  round(row_.data());
  round(swapped_.data());
  o.add(swapped_.data(), n(), row_.data());
  o.from_f32(row_.data(), type, columns, to);
}

}  // namespace ktk

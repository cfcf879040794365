#include "step/norm.h"

#include "ops/select.h"

namespace ktk {

Norm::Norm(const void* weight, ktk_element type, size_t n, float epsilon, float offset, bool early)
    : scale_(n), row_(n), epsilon_(epsilon), early_(early) {
  ops().to_f32(weight, type, n, scale_.data());
  if (offset != 0) {
    for (float& one : scale_) one += offset;
  }
}

void Norm::operator()(const void* from, ktk_element type, void* to) {
  ops().to_f32(from, type, n(), row_.data());
  finish(type, to);
}

void Norm::of_sum(const void* a, const void* b, ktk_element type, void* sum, void* to) {
  const ktk_ops& o = ops();
  std::vector<float> other(n());
  o.to_f32(a, type, n(), row_.data());
  o.to_f32(b, type, n(), other.data());
  o.add(other.data(), n(), row_.data());
  o.from_f32(row_.data(), type, n(), sum);
  (*this)(sum, type, to);
}

void Norm::finish(ktk_element type, void* to) {
  const ktk_ops& o = ops();
  float* const row = row_.data();
  o.normalize(row, epsilon_, n(), row);
  if (early_ && type != KTK_F32) {
    o.from_f32(row, type, n(), to);
    o.to_f32(to, type, n(), row);
  }
  o.multiply(scale_.data(), n(), row);
  o.from_f32(row, type, n(), to);
}

}  // namespace ktk

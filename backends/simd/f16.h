// IEEE half precision -> f32 in integer arithmetic: exact, subnormals included, whatever MXCSR
// says.
#pragma once

#include <stdint.h>

namespace ktk {
namespace {

inline float f32_from_f16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = half >> 10 & 31, mantissa = half & 0x3ff;
  uint32_t bits = (exponent + 112) << 23 | mantissa << 13;
  if (exponent == 31) bits = 0x7f800000 | mantissa << 13;
  if (exponent == 0) {
    bits = __builtin_bit_cast(uint32_t, static_cast<float>(mantissa) * 0x1p-24f);
  }
  return __builtin_bit_cast(float, sign | bits);
}

}  // namespace
}  // namespace ktk

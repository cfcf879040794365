// x16.h in four registers of NEON.
#pragma once

#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>

namespace ktk {
namespace {

struct F32x16 {
  float32x4_t v[4];
};
struct I32x16 {
  int32x4_t v[4];
};

template <class Result, class Of>
inline Result four(Of of) {
  return {{of(0), of(1), of(2), of(3)}};
}

inline F32x16 load_f32(const float* p) {
  return four<F32x16>([p](int i) { return vld1q_f32(p + 4 * i); });
}
inline F32x16 load_f16(const uint16_t* p) {
  return four<F32x16>(
      [p](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline F32x16 load_bf16(const uint16_t* p) {
  return four<F32x16>(
      [p](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}
inline int8x16_t load_bytes(const uint8_t* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
inline void store_bytes(uint8_t* p, int8x16_t bytes) { vst1q_u8(p, vreinterpretq_u8_s8(bytes)); }
// Both round to nearest even, whatever FPCR says.
inline I32x16 round_product(F32x16 x, float factor) {
  return four<I32x16>([&](int i) { return vcvtnq_s32_f32(vmulq_n_f32(x.v[i], factor)); });
}
inline I32x16 round_quotient(F32x16 x, float divisor) {
  const float32x4_t d = vdupq_n_f32(divisor);
  return four<I32x16>([&](int i) { return vcvtnq_s32_f32(vdivq_f32(x.v[i], d)); });
}
inline I32x16 zero_i32() {
  return four<I32x16>([](int) { return vdupq_n_s32(0); });
}
inline I32x16 add(I32x16 a, I32x16 b) {
  return four<I32x16>([&](int i) { return vaddq_s32(a.v[i], b.v[i]); });
}
inline int32_t sum(I32x16 a) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3])));
}
inline int8x16_t narrow(I32x16 a) {
  const int16x8_t low = vcombine_s16(vqmovn_s32(a.v[0]), vqmovn_s32(a.v[1]));
  const int16x8_t high = vcombine_s16(vqmovn_s32(a.v[2]), vqmovn_s32(a.v[3]));
  return vcombine_s8(vqmovn_s16(low), vqmovn_s16(high));
}
// 16 bytes as f32, each times `factor`.
inline void store_product(float* out, int8x16_t q, float factor) {
  const int16x8_t low = vmovl_s8(vget_low_s8(q)), high = vmovl_s8(vget_high_s8(q));
  const int16x4_t quarters[4] = {vget_low_s16(low), vget_high_s16(low), vget_low_s16(high),
                                 vget_high_s16(high)};
  for (int i = 0; i < 4; ++i) {
    vst1q_f32(out + 4 * i, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(quarters[i])), factor));
  }
}

}  // namespace
}  // namespace ktk

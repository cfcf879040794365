// Decoding on 128-bit registers: one look-up finds the exponents of two lines, in the low and in
// the high bytes of words.
#pragma once

#include <arm_neon.h>

#include "bf16z/layout.h"

namespace ktk::bf16z {
namespace {

struct NeonDecoder {
  uint8x16_t table;

  explicit NeonDecoder(const uint8_t* exponents) : table(vld1q_u8(exponents)) {}

  static uint16x8_t join(uint16x8_t sign_mantissa, uint16x8_t exponent) {
    return vbslq_u16(vdupq_n_u16(0x7f80), exponent, sign_mantissa);
  }
  static uint16x8_t exchange_bytes(uint16x8_t words) {
    return vreinterpretq_u16_u8(vrev16q_u8(vreinterpretq_u8_u16(words)));
  }
  uint16x8_t exponents(uint8x16_t indices) const {
    return vreinterpretq_u16_u8(vqtbl1q_u8(table, indices));
  }

  void group(const char* in, char* step, size_t number) const {
#pragma GCC unroll 4
    for (size_t quarter = 0; quarter < kLine; quarter += kLine / 4) {
      const auto load = [&](size_t line) {
        return vld1q_u16(reinterpret_cast<const uint16_t*>(in + line * kLine + quarter));
      };
      const auto store = [&](size_t line, uint16x8_t weights) {
        char* const to = plain_line(step, number, line) + quarter;
        vst1q_u16(reinterpret_cast<uint16_t*>(to), weights);
      };
      const uint16x8_t x = load(0), y = load(1);
      const uint8x16_t n = vreinterpretq_u8_u16(load(2));
      const uint16x8_t ac = exponents(vandq_u8(n, vdupq_n_u8(15)));
      const uint16x8_t bd = exponents(vshrq_n_u8(n, 4));
      store(0, join(x, vshlq_n_u16(ac, 7)));
      store(1, join(y, vshlq_n_u16(bd, 7)));
      store(2, join(exchange_bytes(x), vshrq_n_u16(ac, 1)));
      store(3, join(exchange_bytes(y), vshrq_n_u16(bd, 1)));
    }
  }
};

}  // namespace
}  // namespace ktk::bf16z

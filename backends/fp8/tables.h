// E4M3 to bf16 by table: the value of each of the 128 codes without sign.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace ktk::fp8 {
namespace {

struct alignas(64) Tables {
  uint8_t low[128], high[128];  // bytes of bf16
};

constexpr Tables make_tables() {
  Tables tables = {};
  for (uint32_t code = 0; code < 128; ++code) {
    uint32_t exponent = code >> 3, mantissa = code & 7;
    uint32_t bits = 0;
    if (exponent) {
      bits = (exponent + 120) << 7 | mantissa << 4;
    } else if (mantissa) {  // subnormal: m * 2^-9, which bf16 holds as a normal number
      exponent = 121;
      for (; mantissa < 8; mantissa *= 2) --exponent;
      bits = exponent << 7 | (mantissa & 7) << 4;
    }
    if (code == 127) bits = 0x7fc0;
    tables.low[code] = static_cast<uint8_t>(bits);
    tables.high[code] = static_cast<uint8_t>(bits >> 8);
  }
  return tables;
}
constexpr Tables kTables = make_tables();

// Codes whose exponent is zero, as bf16 of 2^-8 times their values. 64, because vpermb takes six
// bits of a code.
struct alignas(64) Subnormals {
  uint8_t low[64], high[64];
};

constexpr Subnormals make_subnormals() {
  Subnormals tables = {};
  for (uint32_t code = 1; code < 8; ++code) {
    tables.low[code] = kTables.low[code];
    // 8 less in the exponent, whose upper seven bits this byte holds.
    tables.high[code] = static_cast<uint8_t>(kTables.high[code] - 4);
  }
  return tables;
}
constexpr Subnormals kSubnormals = make_subnormals();

}  // namespace
}  // namespace ktk::fp8

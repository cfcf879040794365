// The product of bytes on 512-bit registers with VNNI, for avx512_vnni and, with few rows,
// amx_int8.
#pragma once

#include "simd/zmm.h"

namespace ktk::amxint8 {
namespace {

struct Vnni512 : Zmm {
  static constexpr size_t kLineProducts = 1;
  using Weight = Int;
  using Act = Int;
  static Weight load_weight(const char* p) { return load_bytes(p); }
  static Act broadcast_act(const char* p) { return broadcast(p); }
  static Int dot(Int sums, Weight w, Act a) {
    // The intrinsic is the same instruction, but gcc 12 moves and spills its accumulators.
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(w), "v"(a));
    return sums;
  }
};

}  // namespace
}  // namespace ktk::amxint8

// Four products per dword on 256-bit registers with AVX-VNNI.
#pragma once

#include "simd/ymm.h"

namespace ktk::int4 {
namespace {

struct Vnni256 : Ymm {
  static constexpr bool kSumsWords = false;
  static Int dot(Int acc, Int weight, const uint8_t* act) {
    const Int four = broadcast(act);
    // The intrinsic is the same instruction, but gcc 12 moves and spills its accumulators.
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(weight), "x"(four));
    return acc;
  }
};

}  // namespace
}  // namespace ktk::int4

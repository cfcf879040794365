// Four products per dword on 512-bit registers with VNNI.
#pragma once

#include "simd/zmm.h"

namespace ktk::int4 {
namespace {

struct Vnni512 : Zmm {
  static constexpr bool kSumsWords = false;
  static Int dot(Int acc, Int weight, const uint8_t* act) {
    // The intrinsic is the same instruction, but gcc 12 moves and spills its accumulators.
    asm("vpdpbusd %2%{1to16%}, %1, %0"
        : "+v"(acc)
        : "v"(weight), "m"(*reinterpret_cast<const int32_t*>(act)));
    return acc;
  }
};

}  // namespace
}  // namespace ktk::int4

// Products of four bytes of weights and activations, added to the dwords of a register. A target
// says what a weight has to look like for it:
//
//   kWeightOffset   is added to table[code]
//   kMaxRows        of a tile, kVecs registers wide
//   kMaxHalfRows    the same where a unit has two groups: twice the accumulators
//   dot(acc, weight, act, stride, row, offset)   the four bytes of act are at
//                                                act + row * stride + offset, row < 3
#pragma once

#include "llamafile/act.h"

#if defined(__AVX512VNNI__)
#include "common/zmm.h"
#else
#include "common/ymm.h"
#endif

namespace ktk::llamafile {
namespace {

constexpr int kVecs = 2;  // registers of weights of a tile

#if defined(__AVX512VNNI__)

struct Dot : Zmm {
  static constexpr int kWeightOffset = kOffset;
#if defined(__AMX_INT8__)
  static constexpr int kMaxRows = 4, kMaxHalfRows = 4;  // more are for AMX
#else
  static constexpr int kMaxRows = 12, kMaxHalfRows = 6;
#endif

  // The intrinsic is the same instruction, but gcc 12 moves and spills its accumulators, and the
  // sums of pointers and strides.
  [[gnu::always_inline]] static Int dot(Int acc, Int weight, const uint8_t* act, size_t stride,
                                        int row, int offset) {
    const auto& read = *reinterpret_cast<const uint8_t (*)[]>(act);
    if (row == 0) {
      asm("vpdpbusd %c3(%2)%{1to16%}, %1, %0"
          : "+v"(acc)
          : "v"(weight), "r"(act), "i"(offset), "m"(read));
    } else if (row == 1) {
      asm("vpdpbusd %c3(%2,%4)%{1to16%}, %1, %0"
          : "+v"(acc)
          : "v"(weight), "r"(act), "i"(offset), "r"(stride), "m"(read));
    } else {
      asm("vpdpbusd %c3(%2,%4,2)%{1to16%}, %1, %0"
          : "+v"(acc)
          : "v"(weight), "r"(act), "i"(offset), "r"(stride), "m"(read));
    }
    return acc;
  }
};

#else

// Reads memory every time: gcc 12 would keep what it has loaded for one register of columns on the
// stack until the next one needs it.
inline __m256i broadcast_anew(const uint8_t* act) {
  __m256i four;
  asm volatile("vpbroadcastd %1, %0" : "=x"(four) : "m"(*reinterpret_cast<const int32_t*>(act)));
  return four;
}

struct Dot : Ymm {
  static constexpr int kMaxRows = 4, kMaxHalfRows = 2;

#if defined(__AVXVNNI__)
  static constexpr int kWeightOffset = kOffset;

  [[gnu::always_inline]] static Int dot(Int acc, Int weight, const uint8_t* act, size_t stride,
                                        int row, int offset) {
    const Int four = broadcast_anew(act + static_cast<size_t>(row) * stride + offset);
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(weight), "x"(four));
    return acc;
  }
#else
  // vpmaddubsw takes unsigned weights: the sign of a weight goes to the activation, and two
  // products of 128 * 127 at most fit into a word.
  static constexpr int kWeightOffset = 0;
  alignas(32) static constexpr int16_t kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

  [[gnu::always_inline]] static Int dot(Int acc, Int weight, const uint8_t* act, size_t stride,
                                        int row, int offset) {
    const Int four = broadcast_anew(act + static_cast<size_t>(row) * stride + offset);
    const Int pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weight), _mm256_sign_epi8(four, weight));
    // acc + sums of two, but gcc 12 moves and spills accumulators that it may put elsewhere. Ones
    // are read from memory: sixteen registers are few.
    Int sum;
    asm("vpmaddwd %2, %1, %0" : "=x"(sum) : "x"(pairs), "m"(kOnes));
    asm("vpaddd %1, %0, %0" : "+x"(acc) : "x"(sum));
    return acc;
  }
#endif
};

#endif

constexpr size_t kTileColumns = kVecs * Dot::kLanes;

}  // namespace
}  // namespace ktk::llamafile

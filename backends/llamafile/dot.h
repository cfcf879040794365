// Products of four bytes of weights and activations, added to the dwords of a register. A target
// says what a weight has to look like for it:
//
//   kWeightOffset   is added to table[code]
//   kMaxRows        of a tile, kVecs registers wide; half of it where a unit has two groups
//   kThinRows       of a tile that decodes weights itself
//   dot(acc, weight, act, stride, row, offset)   the four bytes of act are at
//                                                act + row * stride + offset, row < 3
#pragma once

#include "llamafile/act.h"

#if defined(__AVX512VNNI__)
#include "common/zmm.h"
#elif defined(__AVXVNNI__)
#include "common/int4/vnni256.h"
#else
#include "common/ymm.h"
#endif

namespace ktk::llamafile {
namespace {

constexpr int kVecs = 2;  // registers of weights of a tile

#if defined(__AVX512VNNI__)

struct Dot : Zmm {
  static constexpr int kWeightOffset = kOffset;
  static constexpr int kMaxRows = 12, kThinRows = 4;

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

#elif defined(__AVXVNNI__)

struct Dot : int4::Vnni256 {
  static constexpr int kWeightOffset = kOffset;
  static constexpr int kMaxRows = 4, kThinRows = 1;

  static Int dot(Int acc, Int weight, const uint8_t* act, size_t stride, int row, int offset) {
    return int4::Vnni256::dot(acc, weight, act + row * stride + offset);
  }
};

#else

// vpmaddubsw takes unsigned weights: the sign of a weight goes to the activation, and two products
// of 128 * 127 at most fit into a word.
struct Dot : Ymm {
  static constexpr int kWeightOffset = 0;
  static constexpr int kMaxRows = 4, kThinRows = 1;

  static Int dot(Int acc, Int weight, const uint8_t* act, size_t stride, int row, int offset) {
    const Int four = broadcast(act + row * stride + offset);
    const Int pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weight), _mm256_sign_epi8(four, weight));
    const Int sum = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    // acc + sum, but gcc 12 moves and spills accumulators that it may put elsewhere.
    asm("vpaddd %1, %0, %0" : "+x"(acc) : "x"(sum));
    return acc;
  }
};

#endif

constexpr size_t kTileColumns = kVecs * Dot::kLanes;

}  // namespace
}  // namespace ktk::llamafile

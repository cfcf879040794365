// Products of four bytes of weights and activations, added to the dwords of a register. A target
// says what a weight has to look like for it:
//
//   kOffset    is added to table[code]
//   kMaxRows   of a tile, kVecs registers wide; half of it where a unit has two groups
#pragma once

#include "llamafile/act.h"

#if defined(__AVX512VNNI__)
#include "common/int4/vnni512.h"
#elif defined(__AVXVNNI__)
#include "common/int4/vnni256.h"
#else
#include "common/ymm.h"
#endif

namespace ktk::llamafile {
namespace {

constexpr int kVecs = 2;  // registers of weights of a tile

#if defined(__AVX512VNNI__)

struct Dot : int4::Vnni512 {
  static constexpr int kWeightOffset = kOffset;
  static constexpr int kMaxRows = 12, kThinRows = 4;
};

#elif defined(__AVXVNNI__)

struct Dot : int4::Vnni256 {
  static constexpr int kWeightOffset = kOffset;
  static constexpr int kMaxRows = 4, kThinRows = 3;
};

#else

// vpmaddubsw takes unsigned weights: the sign of a weight goes to the activation, and two products
// of 128 * 127 at most fit into a word.
struct Dot : Ymm {
  static constexpr int kWeightOffset = 0;
  static constexpr int kMaxRows = 4, kThinRows = 2;

  static Int dot(Int acc, Int weight, const uint8_t* act) {
    const Int pairs =
        _mm256_maddubs_epi16(_mm256_abs_epi8(weight), _mm256_sign_epi8(broadcast(act), weight));
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

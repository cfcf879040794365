// Products of four bytes of weights and activations, added to the dwords of a register. A target
// says what a weight has to look like for it:
//
//   kWeightOffset   is added to table[code]
//   kMaxRows        of a tile, kVectors registers wide
//   kMaxHalfRows    the same where a sub-block has two groups: twice the accumulators
//   kMaxRowsInRegisters, kMaxHalfRowsInRegisters   of a tile that also holds dst in registers
//   broadcast_row<at>(act, stride, row)   four bytes of a row of act, row < 3
#pragma once

#include "llamafile/act.h"

#if defined(__AVX512VNNI__)
#include "simd/zmm.h"
#else
#include "simd/ymm.h"
#endif

namespace ktk::llamafile {
namespace {

constexpr int kVectors = 2;  // registers of weights of a tile

#if defined(__AVX512VNNI__)

struct Dot : Zmm {
  static constexpr int kWeightOffset = kOffset;
#if defined(__SANITIZE_ADDRESS__)
  static constexpr int kMaxRows = 3, kMaxHalfRows = 2;  // gcc 12 takes minutes to check large ones
#elif defined(__AMX_INT8__)
  static constexpr int kMaxRows = 4, kMaxHalfRows = 4;  // more are for AMX
#else
  static constexpr int kMaxRows = 12, kMaxHalfRows = 6;
#endif
  // Of a tile that multiplies decoded operands, with C in memory; the second one if it has a t for
  // every sum.
#if defined(__SANITIZE_ADDRESS__)
  static constexpr int kMaxRowsDecoded = 3, kMaxHalfRowsDecoded = 2;
#else
  static constexpr int kMaxRowsDecoded = 12, kMaxHalfRowsDecoded = 7;
#endif
  static constexpr int kMaxRowsInRegisters = kMaxRows / 2, kMaxHalfRowsInRegisters = kMaxRows / 3;

  // The intrinsics are the same instructions, but gcc 12 keeps every sum of a pointer and a stride,
  // and moves and spills accumulators.
  template <size_t kAt>
  [[gnu::always_inline]] static Int broadcast_row(const char* act, size_t stride, int row) {
#if defined(__clang__)
    int32_t few;  // clang knows no memory operand of unknown length
    __builtin_memcpy(&few, act + static_cast<size_t>(row) * stride + kAt, sizeof few);
    return set1_int(few);
#else
    Int four;
    const auto& read = *reinterpret_cast<const char (*)[]>(act);
    if (row == 0) {
      asm("vpbroadcastd %c2(%1), %0" : "=v"(four) : "r"(act), "i"(kAt), "m"(read));
    } else if (row == 1) {
      asm("vpbroadcastd %c2(%1,%3), %0" : "=v"(four) : "r"(act), "i"(kAt), "r"(stride), "m"(read));
    } else {
      asm("vpbroadcastd %c2(%1,%3,2), %0"
          : "=v"(four)
          : "r"(act), "i"(kAt), "r"(stride), "m"(read));
    }
    return four;
#endif
  }
  [[gnu::always_inline]] static Int dot(Int acc, Int weight, Int act) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(weight), "v"(act));
    return acc;
  }
  template <int kMask>
  static Int mask_bytes(Int x) {
    return bit_and(x, set1_byte(kMask));
  }
};

#else

// A byte, 32 times: an operand in memory, because sixteen registers are few.
template <int kByte>
struct Bytes {
  alignas(32) uint8_t byte[32];
  constexpr Bytes() : byte{} {
    for (uint8_t& b : byte) b = kByte;
  }
};
template <int kByte>
constexpr Bytes<kByte> kBytes;

struct Dot : Ymm {
#if defined(__SANITIZE_ADDRESS__)
  static constexpr int kMaxRows = 3, kMaxHalfRows = 2;
#else
  static constexpr int kMaxRows = 4, kMaxHalfRows = 2;
#endif

  template <size_t kAt>
  [[gnu::always_inline]] static Int broadcast_row(const char* act, size_t stride, int row) {
    return broadcast(reinterpret_cast<const uint8_t*>(act) + static_cast<size_t>(row) * stride +
                     kAt);
  }
  template <int kMask>
  static Int mask_bytes(Int x) {
    asm("vpand %1, %0, %0" : "+x"(x) : "m"(kBytes<kMask>));
    return x;
  }

#if defined(__AVXVNNI__)
  static constexpr int kWeightOffset = kOffset;

  [[gnu::always_inline]] static Int dot(Int acc, Int weight, Int act) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(weight), "x"(act));
    return acc;
  }
#else
  // vpmaddubsw takes unsigned weights: the sign of a weight goes to the activation, and two
  // products of 128 * 127 at most fit into a word.
  static constexpr int kWeightOffset = 0;
  alignas(32) static constexpr int16_t kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

  [[gnu::always_inline]] static Int dot(Int acc, Int weight, Int act) {
    const Int pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weight), _mm256_sign_epi8(act, weight));
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

constexpr size_t kTileNr = kVectors * Dot::kLanes;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kGemvRows = 1;
#else
constexpr size_t kGemvRows = 2;
#endif
constexpr size_t kFewRows = 12;  // those of a lone tile, which is faster where memory is the limit

}  // namespace
}  // namespace ktk::llamafile

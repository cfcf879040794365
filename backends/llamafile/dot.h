// Products of four bytes of weights and activations, added to the dwords of a register. A target
// says what a weight has to look like for it:
//
//   kWeightOffset   is added to table[code]
//   kMaxRows        of a tile, kVectors registers wide
//   kMaxHalfRows    the same where a sub-block has two groups: twice the accumulators
//   kMaxRowsInRegisters, kMaxHalfRowsInRegisters   of a tile that also holds dst in registers
//   broadcast_row<at>(act, stride, row)   four bytes of a row of act, row < 3
//   add_from(x, bytes)     x plus as many bytes of memory
//   sum_of_bytes<begin>(x) begin + the four bytes of each dword, none above 127
//   keep_where(bits, x)    dwords of x where there is a bit, 0 elsewhere
//   shuffle_by_bit<bit>(lower, upper, index, bytes)   upper[index] where a byte of memory has that
//                          bit, lower[index] elsewhere
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

// A byte, as often as a register has bytes: an operand in memory, where registers are few.
template <int kByte>
struct Bytes {
  alignas(64) uint8_t byte[64];
  constexpr Bytes() : byte{} {
    for (uint8_t& b : byte) b = kByte;
  }
};
template <int kByte>
constexpr Bytes<kByte> kBytes;

// Four bytes of a row, as often as a register has dwords. The intrinsics are the same instructions,
// but gcc 12 keeps every sum of a pointer and a stride, and moves and spills accumulators.
template <class Registers, size_t kAt>
[[gnu::always_inline]] inline typename Registers::Int broadcast_of(const char* act, size_t stride,
                                                                   int row) {
#if defined(__clang__)
  int32_t few;  // clang knows no memory operand of unknown length
  __builtin_memcpy(&few, act + static_cast<size_t>(row) * stride + kAt, sizeof few);
  return Registers::set1_int(few);
#else
  typename Registers::Int four;
  const auto& read = *reinterpret_cast<const char (*)[]>(act);
  if (row == 0) {
    asm("vpbroadcastd %c2(%1), %0" : "=v"(four) : "r"(act), "i"(kAt), "m"(read));
  } else if (row == 1) {
    asm("vpbroadcastd %c2(%1,%3), %0" : "=v"(four) : "r"(act), "i"(kAt), "r"(stride), "m"(read));
  } else {
    asm("vpbroadcastd %c2(%1,%3,2), %0" : "=v"(four) : "r"(act), "i"(kAt), "r"(stride), "m"(read));
  }
  return four;
#endif
}

#if defined(__AVX512VNNI__)

struct Dot : Zmm {
  static constexpr int kWeightOffset = kOffset;
#if defined(__SANITIZE_ADDRESS__)
  static constexpr int kMaxRows = 3, kMaxHalfRows = 2;  // gcc 12 takes minutes to check large ones
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

  template <size_t kAt>
  [[gnu::always_inline]] static Int broadcast_row(const char* act, size_t stride, int row) {
    return broadcast_of<Zmm, kAt>(act, stride, row);
  }
  [[gnu::always_inline]] static Int dot(Int acc, Int weight, Int act) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(weight), "v"(act));
    return acc;
  }
  template <int kBegin>
  static Int sum_of_bytes(Int x) {
    return dot(set1_int(kBegin), x, set1_byte(1));
  }
  template <int kMask>
  static Int mask_bytes(Int x) {
    return bit_and(x, set1_byte(kMask));
  }
  [[gnu::always_inline]] static Int add_from(Int x, const uint8_t* bytes) {
    asm("vpaddb %1, %0, %0" : "+v"(x) : "m"(*reinterpret_cast<const Int*>(bytes)));
    return x;
  }
  // Of sums that begin with -kOffset * (sum of the act codes): plus kShift * (that sum) where there
  // is a bit.
  template <int kShift>
  [[gnu::always_inline]] static Int add_shift(Int begin, const uint8_t* bits) {
    static_assert(kOffset == 128 && kShift < 8);
    Int codes[3];  // 1, 2 and 4 times their negative sum
    codes[0] = divide_int<7>(begin);
    codes[1] = divide_int<6>(begin);
    codes[2] = divide_int<5>(begin);
    const __mmask16 is_shifted = *reinterpret_cast<const __mmask16*>(bits);
    Int sum = begin;
#pragma GCC unroll 3
    for (int bit = 0; bit < 3; ++bit) {
      if (kShift >> bit & 1) sum = _mm512_mask_sub_epi32(sum, is_shifted, sum, codes[bit]);
    }
    return sum;
  }
  static Int keep_where(const uint8_t* bits, Int x) {
    return _mm512_maskz_mov_epi32(*reinterpret_cast<const __mmask16*>(bits), x);
  }
  template <int kBit>
  [[gnu::always_inline]] static Int shuffle_by_bit(Int lower, Int upper, Int index,
                                                   const uint8_t* bits) {
    // Not the intrinsic: gcc 12 would keep a register for each bit.
    __mmask64 is_upper;
    asm("vptestmb %2, %1, %0" : "=k"(is_upper) : "v"(load_bytes(bits)), "m"(kBytes<1 << kBit>));
    return _mm512_mask_shuffle_epi8(shuffle(lower, index), is_upper, upper, index);
  }
};

#else

struct Dot : Ymm {
#if defined(__SANITIZE_ADDRESS__)
  static constexpr int kMaxRows = 3, kMaxHalfRows = 2;
#else
  static constexpr int kMaxRows = 4, kMaxHalfRows = 2;
#endif

  [[gnu::always_inline]] static Int add_from(Int x, const uint8_t* bytes) {
    // With an asm as above, gcc 12 also stores what it adds to.
    return add_bytes(x, load_bytes(bytes));
  }
  static Int keep_where(const uint8_t* bits, Int x) {
    const Int of_lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return bit_and(_mm256_cmpeq_epi32(bit_and(set1_int(*bits), of_lane), of_lane), x);
  }
  template <int kBit>
  [[gnu::always_inline]] static Int shuffle_by_bit(Int lower, Int upper, Int index,
                                                   const uint8_t* bits) {
    const Int is_upper = shift_left(load_bytes(bits), 7 - kBit);  // in the highest bit of a byte
    return _mm256_blendv_epi8(shuffle(lower, index), shuffle(upper, index), is_upper);
  }

#if defined(__AVXVNNI__)
  static constexpr int kWeightOffset = kOffset;

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

  [[gnu::always_inline]] static Int dot(Int acc, Int weight, Int act) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(weight), "x"(act));
    return acc;
  }
  template <int kBegin>
  static Int sum_of_bytes(Int x) {
    return dot(set1_int(kBegin), x, set1_byte(1));
  }
#else
  // vpmaddubsw takes unsigned weights. The sign of a signed one goes to the activation, and two
  // products of 128 * 127 at most fit into a word.
  static constexpr int kWeightOffset = 0;

  template <size_t kAt>
  [[gnu::always_inline]] static Int broadcast_row(const char* act, size_t stride, int row) {
    return broadcast_of<Ymm, kAt>(act, stride, row);
  }
  template <int kMask>
  static Int mask_bytes(Int x) {
    return bit_and(x, set1_byte(kMask));
  }
  // Read from memory: sixteen registers are few.
  alignas(32) static constexpr int16_t kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

  // The parts of a product, for sums of words (word_tile.h). asm, because gcc 12 moves and spills
  // accumulators that it may put elsewhere.
  static Int multiply_unsigned(Int weight, Int act) { return _mm256_maddubs_epi16(weight, act); }
  static Int size_of_bytes(Int x) { return _mm256_abs_epi8(x); }  // of signed ones, up to 128
  static Int multiply_signed(Int size, Int weight, Int act) {
    return multiply_unsigned(size, _mm256_sign_epi8(act, weight));
  }
  static Int multiply_words(Int a, Int b) { return _mm256_madd_epi16(a, b); }  // and adds pairs
  [[gnu::always_inline]] static Int add_pairs(Int words) {
    Int sum;
    asm("vpmaddwd %2, %1, %0" : "=x"(sum) : "x"(words), "m"(kOnes));
    return sum;
  }
  [[gnu::always_inline]] static void add_words(Int& acc, Int x) {
    asm("vpaddw %1, %0, %0" : "+x"(acc) : "x"(x));
  }
  [[gnu::always_inline]] static void add_dwords(Int& acc, Int x) {
    asm("vpaddd %1, %0, %0" : "+x"(acc) : "x"(x));
  }
  template <int kBegin>
  static Int sum_of_bytes(Int x) {
    const Int pairs = _mm256_maddubs_epi16(x, set1_byte(1));
    return add(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)), set1_int(kBegin));
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

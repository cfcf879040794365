// From the plain steps of BF16 to 12 bits.
#pragma once

#include "bf16z/table.h"

namespace ktk::bf16z {
namespace {

// Where the patches of a block are written. No more than fit: the source may have changed since
// they were counted.
struct PatchWriter {
  uint32_t *at, *end;

  void add(const char* step, size_t weight) {
    uint16_t bits;
    memcpy(&bits, step + 2 * weight, sizeof bits);
    if (at != end) *at++ = make_patch(bits, weight);
  }
};

#if defined(__AVX2__)

class Encoder {
 public:
  explicit Encoder(const Table& table) {
    for (size_t row = 0; row < kMostExponents; row += 16) {
      bool is_empty = true;
      for (size_t i = 0; i < 16; ++i) is_empty &= table.index[row + i] == 0;
      if (is_empty) continue;
      const __m128i indices = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table.index + row));
      indices_[rows_] = _mm256_broadcastsi128_si256(indices);
      row_[rows_++] = _mm256_set1_epi8(static_cast<char>(row));
    }
  }

  void group(const char* step, size_t number, char* out, PatchWriter& patches) const {
    for (size_t half = 0; half < kLine; half += kLine / 2) {
      __m256i line[4];
#pragma GCC unroll 4
      for (size_t i = 0; i < 4; ++i) {
        line[i] =
            _mm256_load_si256(reinterpret_cast<const __m256i*>(plain_line(step, number, i) + half));
      }
      const auto store = [&](size_t i, __m256i words) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(out + i * kLine + half), words);
      };
      store(0, join(line[0], line[2]));
      store(1, join(line[1], line[3]));
      const __m256i ac = find(line[0], line[2]), bd = find(line[1], line[3]);
      const __m256i low = _mm256_set1_epi8(15);
      const __m256i high = _mm256_slli_epi16(_mm256_and_si256(bd, low), 4);
      store(2, _mm256_or_si256(_mm256_and_si256(ac, low), high));
      add_missing(step, number, 0, half, ac, patches);
      add_missing(step, number, 1, half, bd, patches);
    }
  }

 private:
  // Sign and mantissa of the first line, and, with exchanged bytes, of the second.
  static __m256i join(__m256i first, __m256i second) {
    const __m256i swap = _mm256_set_epi64x(0x0e0f0c0d0a0b0809, 0x0607040502030001,
                                           0x0e0f0c0d0a0b0809, 0x0607040502030001);
    const __m256i mask = _mm256_set1_epi16(0x7f80);
    return _mm256_or_si256(_mm256_andnot_si256(mask, first),
                           _mm256_and_si256(mask, _mm256_shuffle_epi8(second, swap)));
  }

  // What the table says of the exponents of the first line, in low bytes, and of the second.
  __m256i find(__m256i first, __m256i second) const {
    const __m256i exponents =
        _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(first, 7), _mm256_set1_epi16(0xff)),
                        _mm256_andnot_si256(_mm256_set1_epi16(0xff), _mm256_slli_epi16(second, 1)));
    const __m256i column = _mm256_and_si256(exponents, _mm256_set1_epi8(15));
    const __m256i row = _mm256_andnot_si256(_mm256_set1_epi8(15), exponents);
    __m256i found = _mm256_setzero_si256();
    for (size_t i = 0; i < rows_; ++i) {
      const __m256i here = _mm256_shuffle_epi8(indices_[i], column);
      found = _mm256_or_si256(found, _mm256_and_si256(here, _mm256_cmpeq_epi8(row, row_[i])));
    }
    return found;
  }

  // The weights of lines `first` and `first` + 2 that find() has no index for.
  static void add_missing(const char* step, size_t number, size_t first, size_t half, __m256i found,
                          PatchWriter& patches) {
    uint32_t missing = ~static_cast<uint32_t>(_mm256_movemask_epi8(found));
    for (; missing; missing &= missing - 1) {
      const size_t byte = static_cast<size_t>(__builtin_ctz(missing));
      const char* line = plain_line(step, number, first + byte % 2 * 2);
      patches.add(step, static_cast<size_t>(line - step + half) / 2 + byte / 2);
    }
  }

  __m256i indices_[16], row_[16];  // of 16 exponents each that begin alike
  size_t rows_ = 0;
};

#else

class Encoder {
 public:
  explicit Encoder(const Table& table) : table_(table) {}

  void group(const char* step, size_t number, char* out, PatchWriter& patches) const {
    for (size_t word = 0; word < kLine / 2; ++word) {
      uint16_t weight[4];
      uint32_t n = 0;
      for (size_t i = 0; i < 4; ++i) {
        const char* at = plain_line(step, number, i) + 2 * word;
        memcpy(weight + i, at, sizeof weight[i]);
        const uint8_t index = table_.index[weight[i] >> 7 & 255];
        n |= (index & 15u) << 4 * i;
        if (!index) patches.add(step, static_cast<size_t>(at - step) / 2);
      }
      store(out, word, join(weight[0], weight[2]));
      store(out + kLine, word, join(weight[1], weight[3]));
      store(out + 2 * kLine, word, n);
    }
  }

 private:
  static uint32_t join(uint16_t first, uint16_t second) {
    return (first & 0x807fu) | (second >> 8 & 0x80u) | (second & 0x7fu) << 8;
  }
  static void store(char* line, size_t word, uint32_t value) {
    const uint16_t bits = static_cast<uint16_t>(value);
    memcpy(line + 2 * word, &bits, sizeof bits);
  }

  const Table& table_;
};

#endif

}  // namespace
}  // namespace ktk::bf16z

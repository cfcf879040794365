// The exponents of a block: which of them its table has, and how many weights have others.
#pragma once

#include <string.h>

#include "bf16/weight_codec.h"
#include "bf16z/count.h"
#include "bf16z/layout.h"

namespace ktk::bf16z {
namespace {

struct Table {
  static constexpr uint8_t kHas = 0x80;

  uint8_t exponents[kExponents] = {};
  uint8_t index[kMostExponents] = {};  // kHas | where it is in `exponents`, or 0
  size_t patches = 0;                  // weights with other exponents
  // What padding holds, which meets zeros of act only: as long as it is finite and has no sign, the
  // products add nothing to a sum, just as zeros do not.
  uint16_t padding = 0;
};

// Rows of a block as they are given.
template <ktk_element kElement>
struct BlockSource {
  static constexpr size_t kBytes = kElement == KTK_F32 ? 4 : 2;

  const char* rows;
  size_t stride, num_rows, depth;

  // Of the columns from n on, up to n_end.
  BlockSource(const ktk_matrix* matrix, const ktk_source* source, size_t n, size_t n_end)
      : rows(static_cast<const char*>(source->data) + n * source->data_stride),
        stride(source->data_stride),
        num_rows(smaller(n_end - n, kNr)),
        depth(matrix->k) {}

  // Calls body(weights, count) for weights as bf16, some hundred at a time.
  template <class Body>
  void for_weights(const Body& body) const {
    for (size_t row = 0; row < num_rows; ++row) {
      const char* from = rows + row * stride;
      for (size_t k = 0; k < depth; k += kMostWeights, from += kMostWeights * kBytes) {
        const size_t count = smaller(depth - k, kMostWeights);
        if constexpr (kElement == KTK_BF16) {
          body(reinterpret_cast<const Bits*>(from), count);
        } else {
          alignas(64) uint16_t weights[kMostWeights];
          round(from, count, weights);
          body(static_cast<const Bits*>(weights), count);
        }
      }
    }
  }

 private:
  static void round(const char* from, size_t count, uint16_t* weights) {
    size_t i = 0;
#if defined(__AVX2__)
    for (; i + 16 <= count; i += 16, from += 16 * kBytes) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(weights + i), bf16::load_bf16<kElement>(from));
    }
#endif
    for (; i < count; ++i, from += kBytes) weights[i] = bf16::element_as_bf16<kElement>(from);
  }
};

// The 16 most frequent exponents; of equally frequent ones the larger.
template <ktk_element kElement>
inline Table choose_table(const BlockSource<kElement>& source) {
  ExponentCounts counts;
  source.for_weights([&](const Bits* weights, size_t count) { counts.add(weights, count); });
  struct Found {
    uint32_t count;
    uint8_t exponent;
  } found[kMostExponents];
  size_t left = 0;
  Table table;
  for (size_t e = 0; e < kMostExponents; ++e) {
    const uint32_t count = counts.of(e);
    table.patches += count;
    if (count) found[left++] = {count, static_cast<uint8_t>(e)};
  }
  // Where there are fewer, the others stay 0.
  for (size_t i = 0; i < kExponents && i < left; ++i) {
    size_t best = i;
    for (size_t at = i + 1; at < left; ++at) {
      const bool is_more = found[at].count > found[best].count;
      const bool is_larger = found[at].exponent > found[best].exponent;
      if (is_more || (found[at].count == found[best].count && is_larger)) best = at;
    }
    table.exponents[i] = found[best].exponent;
    table.patches -= found[best].count;
    found[best] = found[i];
  }
  for (size_t i = kExponents; i-- > 0;) {
    const uint8_t exponent = table.exponents[i];
    table.index[exponent] = static_cast<uint8_t>(Table::kHas | i);
    if (exponent != 255) table.padding = static_cast<uint16_t>(exponent << 7);
  }
  return table;
}

// The patches that a block takes, or more, but not more than `enough` if that can be told without
// counting each exponent: the largest 15 and zero are what most blocks have.
template <ktk_element kElement>
inline size_t most_patches(const BlockSource<kElement>& source, size_t enough) {
  uint16_t largest = 0;
  source.for_weights([&](const Bits* weights, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      const uint16_t exponent = weights[i] & 0x7f80;
      largest = exponent > largest ? exponent : largest;
    }
  });
  constexpr uint16_t kWindow = (kExponents - 1) << 7;
  const uint16_t limit = largest < kWindow ? 0 : static_cast<uint16_t>(largest - kWindow + 0x80);
  size_t others = 0;
  source.for_weights([&](const Bits* weights, size_t count) {
    uint16_t here = 0;
    for (size_t i = 0; i < count; ++i) {
      const uint16_t exponent = weights[i] & 0x7f80;
      here = static_cast<uint16_t>(here + (exponent != 0 && exponent < limit));
    }
    others += here;
  });
  return others <= enough ? others : choose_table(source).patches;
}

}  // namespace
}  // namespace ktk::bf16z

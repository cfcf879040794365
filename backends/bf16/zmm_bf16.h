// BF16 with vdpbf16ps: bf16 rows. A pair of act values is broadcast from memory and multiplied with
// the pairs of 16 columns.
#pragma once

#include "bf16/zmm_tile.h"

namespace ktk::bf16 {
namespace {

struct DotBf16 {
  static constexpr size_t kActBytes = 2;
  // How far the form was measured, on Zen 4: 1, 4 and 8 rows came from .59, .58 and .51 of plain
  // reading to 1.00, .97 and .9 by it and by fetching in its order. No count of instructions says
  // so. A CPU that wants it up to fewer products has that in its row (in_order_products).
  static constexpr size_t kInOrderRows = 8;
  static constexpr size_t kLineProducts = 1;

  static __m512bh broadcast_pair(const char* pair) {
    int bits;
    memcpy(&bits, pair, sizeof bits);
    return (__m512bh)_mm512_set1_epi32(bits);
  }

  template <size_t kRows, size_t kTiles>
  [[gnu::always_inline]] static void add(__m512 (&acc)[kRows][2], size_t tile,
                                         const __m512i (&pairs)[kTiles],
                                         const RowPointers<kRows>& act) {
#pragma GCC unroll 12
    for (size_t i = 0; i < kRows; ++i) {
      const __m512bh a = broadcast_pair(act.row(i));
#pragma GCC unroll 2
      for (size_t t = 0; t < kTiles; ++t) {
        acc[i][tile + t] = _mm512_dpbf16_ps(acc[i][tile + t], (__m512bh)pairs[t], a);
      }
    }
  }
};

}  // namespace
}  // namespace ktk::bf16

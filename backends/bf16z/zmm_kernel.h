// The product of up to 12 rows on 512-bit registers, which waits for memory: weights are decoded in
// registers, a group at a time, and multiplied as in bf16/zmm_tile.h.
//
// Steps with patches, one in some dozen, are decoded into memory for their patches to be written.
#pragma once

#include "bf16/zmm_tile.h"
#include "bf16z/decode_zmm.h"
#include "bf16z/kernel.h"

namespace ktk::bf16z {
namespace {

template <class Dot, size_t kRows>
[[gnu::always_inline]] inline void add_patched_step(__m512 (&acc)[kRows][2], const char* plain,
                                                    RowPointers<kRows>& act, Fetch& fetch) {
  for (size_t group = 0; group < kGroups; ++group) fetch.next_of<kGroupBytes / kLine>();
#pragma GCC unroll 1
  for (const char* end = plain + bf16::kTileBytes; plain != end; plain += kLine) {
    bf16::add_lines<Dot, 2>(acc, 0, plain, act);
    act.advance(2 * Dot::kActBytes);
  }
}

template <class Dot, size_t kRows>
[[gnu::always_inline]] inline void add_step(__m512 (&acc)[kRows][2], const ZmmDecoder& decoder,
                                            const char* step, RowPointers<kRows>& act,
                                            Fetch& fetch) {
#pragma GCC unroll 1
  for (const char* end = step + kStepBytes; step != end; step += kGroupBytes) {
    fetch.next_of<kGroupBytes / kLine>();
    __m512i pairs[2];
    decoder.first_lines(step, pairs);
    Dot::add(acc, 0, pairs, act);
    act.advance(2 * Dot::kActBytes);
    decoder.second_lines(step, pairs);
    Dot::add(acc, 0, pairs, act);
    act.advance(2 * Dot::kActBytes);
  }
}

template <class Dot, size_t kRows>
void multiply_tile(const Tile& t, BlockReader<ZmmDecoder>& reader, char* plain) {
  __m512 acc[kRows][2];
#pragma GCC unroll 12
  for (size_t i = 0; i < kRows; ++i) {
    const float* dst = t.dst + i * t.dst_stride;
    acc[i][0] = t.is_first() ? _mm512_setzero_ps() : _mm512_loadu_ps(dst);
    acc[i][1] = t.is_first() ? _mm512_setzero_ps() : _mm512_loadu_ps(dst + bf16::kTileCols);
  }
  RowPointers<kRows> act(bf16::first_act<Dot::kActBytes>(t), t.act_stride);
  Fetch fetch = t.fetch;
  for (size_t slab = t.begin; slab < t.end; ++slab) {
    if (__builtin_expect(reader.has_patches(), 0)) {
      reader.read_step(plain);
      keep_order();
      add_patched_step<Dot>(acc, plain, act, fetch);
    } else {
      add_step<Dot>(acc, reader.decoder(), reader.step(), act, fetch);
      reader.pass_step();
    }
  }
#pragma GCC unroll 12
  for (size_t i = 0; i < kRows; ++i) {
    float* dst = t.dst + i * t.dst_stride;
    _mm512_storeu_ps(dst, acc[i][0]);
    _mm512_storeu_ps(dst + bf16::kTileCols, acc[i][1]);
  }
}

template <class Dot>
struct ZmmKernel : BlockKernel<ZmmDecoder> {
  using BlockKernel<ZmmDecoder>::BlockKernel;
  // f32 takes registers for what the pairs of bf16 become.
  static constexpr size_t kMr = Dot::kActBytes == 4 ? 11 : 12;
  static constexpr size_t kLineProducts = Dot::kLineProducts;
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &multiply_tile<Dot, kRows>; });

  static size_t passes(size_t) { return 1; }
  void tile(const Tile& t) { kTiles[t.rows](t, reader_, scratch_); }
};

}  // namespace
}  // namespace ktk::bf16z

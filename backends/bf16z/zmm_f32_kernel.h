// The product of many rows of f32 on 512-bit registers: a run is decoded into f32, 16 KiB that stay
// in L1 while all tiles of rows pass them. The tiles of BF16 widen weights again for each tile.
#pragma once

#include "bf16/zmm_f32.h"
#include "bf16/zmm_tile.h"
#include "bf16z/decode_zmm.h"
#include "bf16z/kernel.h"

namespace ktk::bf16z {
namespace {

constexpr size_t kWidePairBytes = 4 * kLine;  // two k of both tiles of columns
constexpr size_t kWideStepBytes = bf16::kPairs * kWidePairBytes;

// A pair of k of 32 columns.
[[gnu::always_inline]] inline void widen(const __m512i (&pairs)[2], char* out) {
#pragma GCC unroll 2
  for (size_t i = 0; i < 2; ++i, out += kLine) {
    _mm512_store_ps(out, bf16::DotF32::even_k(pairs[i]));
    _mm512_store_ps(out + 2 * kLine, bf16::DotF32::odd_k(pairs[i]));
  }
}

template <size_t kRows>
void multiply_wide(const Tile& t, const char* weight) {
  __m512 acc[kRows][2];
#pragma GCC unroll 12
  for (size_t i = 0; i < kRows; ++i) {
    const float* dst = t.dst + i * t.dst_stride;
    acc[i][0] = t.is_first() ? _mm512_setzero_ps() : _mm512_loadu_ps(dst);
    acc[i][1] = t.is_first() ? _mm512_setzero_ps() : _mm512_loadu_ps(dst + bf16::kTileCols);
  }
  RowPointers<kRows> act(bf16::first_act<sizeof(float)>(t), t.act_stride);
  Fetch fetch = t.fetch;
#pragma GCC unroll 1
  for (const char* end = weight + (t.end - t.begin) * kWideStepBytes; weight != end;) {
    fetch.next_unseen_of<2>();
#pragma GCC unroll 2
    for (size_t odd = 0; odd < 2; ++odd, weight += 2 * kLine) {
      keep_order();
      const __m512 w[2] = {_mm512_load_ps(weight), _mm512_load_ps(weight + kLine)};
#pragma GCC unroll 12
      for (size_t i = 0; i < kRows; ++i) {
        const __m512 a = bf16::DotF32::broadcast(act.row(i) + odd * sizeof(float));
        bf16::DotF32::multiply_add(acc[i][0], a, w[0]);
        bf16::DotF32::multiply_add(acc[i][1], a, w[1]);
      }
    }
    act.advance(2 * sizeof(float));
  }
#pragma GCC unroll 12
  for (size_t i = 0; i < kRows; ++i) {
    float* dst = t.dst + i * t.dst_stride;
    _mm512_storeu_ps(dst, acc[i][0]);
    _mm512_storeu_ps(dst + bf16::kTileCols, acc[i][1]);
  }
}

class ZmmF32Kernel : public BlockKernel<ZmmDecoder> {
 public:
  using BlockKernel<ZmmDecoder>::BlockKernel;
  static constexpr size_t kMr = 12;
  static constexpr size_t kLineProducts = 2;
  static constexpr size_t kRunSlabs = kRunBytes / kWideStepBytes;
  static constexpr bool kFetchesNextRun = true;
  static constexpr auto kTiles = row_table<kMr>([]<size_t kRows> { return &multiply_wide<kRows>; });

  static size_t passes(size_t) { return 1; }

  void prepare_run(const Run& run) {
    char* out = scratch_;
    for (size_t step = run.begin; step < run.end; ++step, out += kWideStepBytes) {
      if (__builtin_expect(reader_.has_patches(), 0)) {
        widen_patched(out);
      } else {
        const ZmmDecoder decoder = reader_.decoder();
        const char* in = reader_.step();
        for (size_t group = 0; group < kGroups; ++group, in += kGroupBytes) {
          __m512i pairs[2];
          decoder.first_lines(in, pairs);
          widen(pairs, out + 2 * group * kWidePairBytes);
          decoder.second_lines(in, pairs);
          widen(pairs, out + (2 * group + 1) * kWidePairBytes);
        }
        reader_.pass_steps(1);
      }
    }
    keep_order();
  }

  void tile(const Tile& t) const {
    Tile wide = t;
    wide.fetch.step = fetch_step(t.fetch.step);
    kTiles[t.rows](wide, scratch_);
  }

 private:
  void widen_patched(char* out) {
    alignas(64) char plain[kPlainStepBytes];
    reader_.read_step(plain);
    for (size_t pair = 0; pair < bf16::kPairs; ++pair) {
      const char* line = plain + pair * kLine;
      const __m512i pairs[2] = {_mm512_load_si512(line),
                                _mm512_load_si512(line + bf16::kTileBytes)};
      widen(pairs, out + pair * kWidePairBytes);
    }
  }
};

}  // namespace
}  // namespace ktk::bf16z

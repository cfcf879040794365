// The product on 512-bit registers: weights are decoded in registers, a group at a time, and
// multiplied as in bf16/zmm_tile.h. Every tile of rows decodes them again, which costs less than to
// write them and to read them back: decoding and products mostly take different ports.
#pragma once

#include "bf16/zmm_tile.h"
#include "bf16z/decode_zmm.h"
#include "bf16z/group_patches.h"
#include "bf16z/kernel.h"

namespace ktk::bf16z {
namespace {

// Writes the patches of a group to its lines a and b, or to c and d.
inline void apply(const GroupPatches& patches, bool second, __m512i (&lines)[2]) {
  for (const uint32_t patch : patches) {
    const size_t at = patch >> 16, tile = at / (bf16::kTileBytes / 2);
    const uint32_t lane = (at / (kLine / 2) % 2 == second) ? 1u << at % (kLine / 2) : 0;
    const short weight = static_cast<short>(patch);
    lines[0] = _mm512_mask_set1_epi16(lines[0], tile == 0 ? lane : 0, weight);
    lines[1] = _mm512_mask_set1_epi16(lines[1], tile == 0 ? 0 : lane, weight);
  }
}

template <class Dot, size_t kRows>
void multiply_tile(const Tile& t, const BlockReader<ZmmDecoder>& reader) {
  __m512 acc[kRows][2];
#pragma GCC unroll 12
  for (size_t i = 0; i < kRows; ++i) {
    const float* dst = t.dst + i * t.dst_stride;
    acc[i][0] = t.is_first() ? _mm512_setzero_ps() : _mm512_loadu_ps(dst);
    acc[i][1] = t.is_first() ? _mm512_setzero_ps() : _mm512_loadu_ps(dst + bf16::kTileCols);
  }
  RowPointers<kRows> act(bf16::first_act<Dot::kActBytes>(t), t.act_stride);
  Fetch fetch = t.fetch;
  const ZmmDecoder decoder = reader.decoder();
  const char* group = reader.step();
  const char* const end = group + (t.end - t.begin) * kStepBytes;
  GroupPatches patches(reader);
  const char* patched = patches.find(end);
#pragma GCC unroll 1
  for (; group != end; group += kGroupBytes) {
    fetch.next_unseen_of<kGroupBytes / kLine>();
    __m512i pairs[2];
    decoder.first_lines(group, pairs);
    if (__builtin_expect(group == patched, 0)) apply(patches, false, pairs);
    Dot::add(acc, 0, pairs, act);
    act.advance(2 * Dot::kActBytes);
    decoder.second_lines(group, pairs);
    if (__builtin_expect(group == patched, 0)) {
      apply(patches, true, pairs);
      patched = patches.next(end);
    }
    Dot::add(acc, 0, pairs, act);
    act.advance(2 * Dot::kActBytes);
  }
#pragma GCC unroll 12
  for (size_t i = 0; i < kRows; ++i) {
    float* dst = t.dst + i * t.dst_stride;
    _mm512_storeu_ps(dst, acc[i][0]);
    _mm512_storeu_ps(dst + bf16::kTileCols, acc[i][1]);
  }
}

template <class Dot>
class ZmmKernel : public BlockKernel<ZmmDecoder> {
 public:
  using BlockKernel<ZmmDecoder>::BlockKernel;
  // f32 takes registers for what the pairs of bf16 become.
  static constexpr size_t kMr = Dot::kActBytes == 4 ? 11 : 12;
  static constexpr size_t kLineProducts = Dot::kLineProducts;
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &multiply_tile<Dot, kRows>; });

  static size_t passes(size_t) { return 1; }
  void prepare_run(const Run& run) {
    if (run.begin > 0) reader_.pass_steps(run.begin - begin_);
    begin_ = run.begin;
  }
  void tile(const Tile& t) const { kTiles[t.rows](t, reader_); }

 private:
  size_t begin_ = 0;  // of the run, where reader_ is
};

}  // namespace
}  // namespace ktk::bf16z

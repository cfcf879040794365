// The product of zmm_bytes.h for more rows: a run becomes bytes in scratch, 16 KiB that stay in L1
// while all tiles of rows pass them twice, with the high bytes of act and with the low ones.
//
// The sums of a group for the high bytes, shifted by eight bits, go on with the low ones: a row has
// one register for each half. They are exact, so a row gets the same bits.
#pragma once

#include "mxfp4/zmm_bytes.h"

namespace ktk::mxfp4 {
namespace {

// Adds the products of the next kCount fours of k, and moves `act` behind them.
template <size_t kCount, size_t kRows>
inline void add_run(__m512i (&sum)[kRows][2], const char* weights, RowPointers<kRows>& act,
                    Fetch& fetch) {
#pragma GCC unroll 1
  for (const char* const end = weights + kCount * 2 * kLine; weights != end; weights += 2 * kLine) {
    fetch.next_unseen();
    const __m512i left = _mm512_load_si512(weights), right = _mm512_load_si512(weights + kLine);
#pragma GCC unroll 12
    for (size_t i = 0; i < kRows; ++i) {
      const __m512i both = _mm512_set1_epi32(*reinterpret_cast<const int*>(act.row(i)));
      add_fours(sum[i][0], left, both);
      add_fours(sum[i][1], right, both);
    }
    act.advance(kFour);
  }
}

// A group, `part` of those that share a group of act.
template <class Scales, size_t kRows, size_t kPart>
[[gnu::always_inline]] inline void multiply_decoded_group(const char* weights,
                                                          const RowPointers<kRows>& act,
                                                          const ZmmScales<Scales>& scales,
                                                          float* dst, size_t dst_stride,
                                                          Fetch& fetch) {
  constexpr size_t kDepth = Scales::kGroupDepth;
  const auto group = [&](size_t i) { return reinterpret_cast<const ActGroup*>(act.row(i)); };
  __m512i sum[kRows][2];
#pragma GCC unroll 12
  for (size_t i = 0; i < kRows; ++i) sum[i][0] = sum[i][1] = _mm512_setzero_si512();
  RowPointers<kRows> bytes = act;
  bytes.advance(kPart * kDepth);
  add_run<kDepth / kFour>(sum, weights, bytes, fetch);
#pragma GCC unroll 12
  for (size_t i = 0; i < kRows; ++i) {
    const __m512i start = group_start<Scales>(*group(i), kPart);
    sum[i][0] = _mm512_add_epi32(_mm512_slli_epi32(sum[i][0], 8), start);
    sum[i][1] = _mm512_add_epi32(_mm512_slli_epi32(sum[i][1], 8), start);
  }
  bytes.advance(ActGroup::kDepth - kDepth);
  add_run<kDepth / kFour>(sum, weights, bytes, fetch);
  const __m512 scale[2] = {weight_scale(scales, 0), weight_scale(scales, 1)};
#pragma GCC unroll 12
  for (size_t i = 0; i < kRows; ++i) {
    float* const to = dst + i * dst_stride;
    add_scaled(to, sum[i][0], group(i)->half_scale, scale[0]);
    add_scaled(to + kHalfCols, sum[i][1], group(i)->half_scale, scale[1]);
  }
}

template <class Layout, size_t kRows>
void multiply_decoded_bytes(const ScaledKernel<Layout>& kernel, const char* weights,
                            const Tile& t) {
  using Scales = typename Layout::Scales;
  // What is fetched beside every four of k, of codes and scales: all of a step, in both passes.
  Fetch fetch = t.fetch;
  fetch.step = ceil_div(fetch.step * Layout::kStepBytes / kLine, 2 * kStepDepth / kFour);
  RowPointers<kRows> act(t.act + t.begin * kStepDepth / ActGroup::kDepth * sizeof(ActGroup),
                         t.act_stride);
  ZmmScales<Scales> scales(nullptr);
  for (const char *step = kernel.begin(t), *const end = kernel.end(t); step != end;
       step += Layout::kStepBytes) {
    scales.begin(step);
#pragma GCC unroll 1
    for (size_t i = 0; i < kStepDepth; i += ActGroup::kDepth) {
      unroll<kActShare<Scales>>([&]<size_t part>() __attribute__((always_inline)) {
        multiply_decoded_group<Scales, kRows, part>(weights, act, scales, t.dst, t.dst_stride,
                                                    fetch);
        weights += Scales::kGroupDepth / kFour * 2 * kLine;
        scales.advance();
      });
      act.advance(sizeof(ActGroup));
    }
  }
}

template <class Layout>
class DecodedBytesKernel : public ScaledKernel<Layout> {
  using Base = ScaledKernel<Layout>;

 public:
  static constexpr size_t kMr = 12;
  static constexpr size_t kLineProducts = 4;
  static constexpr size_t kStepScratch = 2 * Layout::kCodeBytes;
  static constexpr size_t kRunSlabs = kRunBytes / kStepScratch;
  static constexpr bool kFetchesNextRun = true;
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &multiply_decoded_bytes<Layout, kRows>; });

  explicit DecodedBytesKernel(const ktk_matmul* mm)
      : Base(mm), scratch_(static_cast<char*>(mm->scratch)) {}

  void prepare_run(const Run& run) const {
    const ByteLookup lookup;
    char* out = scratch_;
    for (const char *line = this->begin(run), *const end = this->end(run); line != end;) {
      const char* const step_end = line + Layout::kStepBytes;
      line += Layout::Scales::kLineBytes;
      for (; line != step_end; line += 2 * kLine, out += 4 * kLine) {
        const __m512i left = _mm512_load_si512(line), right = _mm512_load_si512(line + kLine);
        _mm512_store_si512(out, lookup.low(left));
        _mm512_store_si512(out + kLine, lookup.low(right));
        _mm512_store_si512(out + 2 * kLine, lookup.high(left));
        _mm512_store_si512(out + 3 * kLine, lookup.high(right));
      }
    }
  }

  void tile(const Tile& t) const { kTiles[t.rows](*this, scratch_, t); }

 private:
  char* scratch_;
};

inline size_t decoded_bytes_size(const ktk_matrix*, size_t) { return kRunBytes; }

}  // namespace
}  // namespace ktk::mxfp4

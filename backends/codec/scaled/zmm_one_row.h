// The product of zmm.h for one row, two groups of k at once.
//
// A row's sums are a chain for each half of the columns: with f32 products of four cycles and four
// of them a line, two chains take 8 cycles a line, longer than decoding it. Two groups are four
// chains:
//
//   group g      line 0, 1 | 2, 3 | ...      two lines of group g, two of g + 1, and so on
//   group g + 1  line 0, 1 | 2, 3 | ...
//
// Their sums are scaled and added in the order of k, so a row gets the same bits.
#pragma once

#include "codec/scaled/zmm.h"

namespace ktk {
namespace {

// Not inlined, or the driver's pointers would take registers from it.
template <class Decoder, class Layout>
[[gnu::noinline]] void multiply_one_row(const ScaledKernel<Layout>& kernel, const Tile& t) {
  using Scales = typename Layout::Scales;
  static_assert(ScaledKernel<Layout>::kSlabDepth == Scales::kGroupDepth);
  constexpr size_t kLineActBytes = Decoder::kVectors * kActBytes;
  constexpr size_t kGroupBytes = Layout::kGroupBytes, kGroupLines = kGroupBytes / kLine;
  const Decoder decoder;
  ZmmRows<1> act(kernel.template act<kLineActBytes / Layout::kLineDepth>(t), t.act_stride);
  ZmmScales<Scales> scales(kernel.scales(t));
  ZmmTotalsOf<Scales, 1> totals(t.dst, t.dst_stride);
  Fetch fetch = t.fetch;
  Tile rest = t;
  const char* line = kernel.begin(t);
  const char* const run_end = kernel.end(t);
  for (; run_end - line >= static_cast<ptrdiff_t>(2 * kGroupBytes); line += kGroupBytes) {
    ZmmRows<1> second_act = act;
    second_act.advance(kGroupLines / 2 * kLineActBytes);
    Fetch second_fetch = fetch;
    second_fetch.line += kGroupLines * second_fetch.step;
    __m512 first[1][2], second[1][2];
    first[0][0] = first[0][1] = second[0][0] = second[0][1] = _mm512_setzero_ps();
    const char* const end = line + kGroupBytes;
    do {
      add_lines(first, decoder, line, act, fetch);
      add_lines(second, decoder, line + kGroupBytes, second_act, second_fetch);
      act.advance(kLineActBytes);
      second_act.advance(kLineActBytes);
      line += 2 * kLine;
    } while (line != end);
    totals.add_scaled(first, decoder, scales);
    scales.advance();
    totals.add_scaled(second, decoder, scales);
    scales.advance();
    act = second_act;
    fetch = second_fetch;
    rest.begin += 2;
  }
  totals.store();
  rest.fetch = fetch;
  if (rest.begin < rest.end) multiply_tile<Decoder, Layout, 1>(kernel, rest);
}

// ZmmKernel, with that form for one row where groups have no lines of scales between them.
template <class Decoder, class Layout>
struct ZmmOneRowKernel : ZmmKernel<Decoder, Layout> {
  using Base = ZmmKernel<Decoder, Layout>;
  using Base::Base;

  void tile(const Tile& t) const {
    if constexpr (Layout::Scales::kLineBytes == 0) {
      if (t.rows == 1) return multiply_one_row<Decoder, Layout>(*this, t);
    }
    Base::tile(t);
  }
};

}  // namespace
}  // namespace ktk

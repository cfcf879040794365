// The product of the layouts of layout.h on 512-bit registers, for as many rows as the CPU wants it
// for (ktk_prefetch.decode_rows): a run is decoded into scratch, 16 KiB that stay in L1 while all
// tiles of rows pass them. Without codes and tables in registers, an act value that is broadcast
// once meets both halves of a block.
//
// Sums are the same chains of additions as in zmm.h, so a row gets the same bits.
#pragma once

#include "codec/scaled/zmm.h"

namespace ktk {
namespace {

template <class Layout, class Decoder>
constexpr size_t kDecodedSlabBytes =
    ScaledKernel<Layout>::kSlabDepth / Layout::kLineDepth * Decoder::kVectors * 2 * kLine;

// One vector of weights of each half and one value of each row.
template <class Decoder, size_t kRows>
inline void add_decoded(__m512 (&sum)[kRows][2], const char* weights,
                        const RowPointers<kRows>& act) {
  const __m512i low = _mm512_load_si512(weights), high = _mm512_load_si512(weights + kLine);
#pragma GCC unroll 12
  for (size_t i = 0; i < kRows; ++i) {
    const __m512i a = _mm512_set1_epi32(*reinterpret_cast<const int*>(act.row(i)));
    Decoder::Dot::add(sum[i][0], low, a);
    Decoder::Dot::add(sum[i][1], high, a);
  }
}

template <class Decoder, class Layout, size_t kRows>
void multiply_decoded(const ScaledKernel<Layout>& kernel, const char* weights, const Tile& t) {
  using Scales = typename Layout::Scales;
  constexpr size_t kLineActBytes = Decoder::kVectors * kActBytes;
  constexpr size_t kGroupBytes = Layout::kGroupBytes * Decoder::kVectors;
  // Two lines of operands are used at a time: what is fetched meanwhile, of codes and scales.
  Fetch fetch = t.fetch;
  fetch.step =
      ceil_div(2 * fetch.step * Layout::kStepBytes, Layout::kCodeBytes * Decoder::kVectors);
  RowPointers<kRows> act(kernel.template act<kLineActBytes / Layout::kLineDepth>(t), t.act_stride);
  ZmmScales<Scales> scales(kernel.scales(t));
  ZmmTotalsOf<Scales, kRows> totals(t.dst, t.dst_stride);
  const char* step = kernel.begin(t);
  const size_t steps = (kernel.end(t) - step) / Layout::kStepBytes;
  const char* const run_end = weights + steps * Layout::kCodeBytes * Decoder::kVectors;
  while (weights != run_end) {
    scales.begin(step);
    step += Layout::kStepBytes;
#pragma GCC unroll 1
    for (size_t group = 0; group < ZmmScales<Scales>::kGroups; ++group) {
      const char* end = weights + kGroupBytes;
      // The last group may be one step short.
      if (Layout::kGroupBytes > Layout::kCodeBytes && end > run_end) end = run_end;
      __m512 sum[kRows][2];
#pragma GCC unroll 12
      for (size_t i = 0; i < kRows; ++i) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
#pragma GCC unroll 1
      for (; weights != end; weights += 2 * kLine) {
        fetch.next_to_one();
        add_decoded<Decoder>(sum, weights, act);
        act.advance(kActBytes);
      }
      totals.add_scaled(sum, Decoder(), scales);
      scales.advance();
    }
  }
  totals.store();
}

template <class Decoder, class Layout>
class ZmmDecodedKernel : public ScaledKernel<Layout> {
  using Base = ScaledKernel<Layout>;

 public:
  static constexpr size_t kMr = kZmmRows<typename Layout::Scales>;
  static constexpr size_t kLineProducts = Decoder::kVectors;
  static constexpr size_t kRunSlabs = kRunBytes / kDecodedSlabBytes<Layout, Decoder>;
  static constexpr bool kFetchesNextRun = true;
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &multiply_decoded<Decoder, Layout, kRows>; });

  explicit ZmmDecodedKernel(const ktk_matmul* mm)
      : Base(mm), scratch_(static_cast<char*>(mm->scratch)) {}

  void prepare_run(const Run& run) const {
    const Decoder decoder;
    char* out = scratch_;
    for (const char *line = this->begin(run), *end = this->end(run); line != end;) {
      const char* step_end = line + Layout::kStepBytes;
      line += Layout::Scales::kLineBytes;
      for (; line != step_end; out += 2 * Decoder::kVectors * kLine) {
#pragma GCC unroll 2
        for (size_t half = 0; half < 2; ++half, line += kLine) {
          const typename Decoder::Line codes = decoder.load(line);
#pragma GCC unroll 8
          for (size_t v = 0; v < Decoder::kVectors; ++v) {
            _mm512_store_si512(out + (2 * v + half) * kLine, decoder.vector(codes, v));
          }
        }
      }
    }
  }

  void tile(const Tile& t) const { kTiles[t.rows](*this, scratch_, t); }

 private:
  char* scratch_;
};

inline size_t decoded_scratch_size(const ktk_matrix*, size_t) { return kRunBytes; }

}  // namespace
}  // namespace ktk

// The product of the layouts of layout.h on 512-bit registers.
//
// A tile of 12 rows x 32 columns has 24 sums in registers: those of one group of k, which are then
// scaled and added to dst; with groups of 16 k, 6 rows have 12, and 12 of all groups. Every tile
// decodes codes in registers too, beside the products; or tiles share what zmm_decoded.h decodes.
//
// Every output is one chain of additions over ascending k within a group, and one over groups, so a
// row gets the same bits in any batch.
#pragma once

#include <immintrin.h>

#include "codec/scaled/kernel.h"

namespace ktk {
namespace {

// --- products: sum += weights times an act value that is broadcast from memory -------------------
// asm because gcc 12 would load and broadcast early, and run out of registers.

// Pairs of bf16.
struct DotBf16 {
  static void add(__m512& sum, __m512i weights, const char* act) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0"
        : "+v"(sum)
        : "v"(weights), "m"(*reinterpret_cast<const int*>(act)));
  }
  static void add(__m512& sum, __m512i weights, __m512i act) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(act));
  }
};

struct DotF32 {
  static void add(__m512& sum, __m512i weights, const char* act) {
    asm("vfmadd231ps %2%{1to16%}, %1, %0"
        : "+v"(sum)
        : "v"(weights), "m"(*reinterpret_cast<const float*>(act)));
  }
  static void add(__m512& sum, __m512i weights, __m512i act) {
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(act));
  }
};

constexpr size_t kActBytes = 4;  // of what is broadcast: a pair of bf16 or one f32

// A decoder of pairs of bf16 as one of f32.
template <class Decoder>
struct DecodeHalves {
  using Dot = DotF32;
  using Line = typename Decoder::Line;
  static constexpr size_t kVectors = 2 * Decoder::kVectors;
  Decoder decoder;

  Line load(const char* line) const { return decoder.load(line); }
  __m512i vector(const Line& line, size_t i) const {
    const __m512i pairs = decoder.vector(line, i / 2);
    return i % 2 ? _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000)))
                 : (__m512i)((__v16su)pairs << 16);
  }
  __m512 value(__m512 sum) const { return decoder.value(sum); }
};

// --- scales: those of 16 columns, as kernels read them -------------------------------------------

template <class Scales>
struct ZmmScales;

template <>
struct ZmmScales<MxScales> {
  static constexpr size_t kGroups = 2;  // with one scale line
  const char* line;

  explicit ZmmScales(const char*) {}
  void begin(const char* scale_line) { line = scale_line; }
  void advance() { line += kNr; }
  __m512 load(size_t half) const {
    const __m128i* exponents = reinterpret_cast<const __m128i*>(line + half * kHalfCols);
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(exponents)), 23);
    // 0 means 2^-127. 255 means NaN, which is in `start` already.
    return _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(0x00400000)));
  }
};

template <>
struct ZmmScales<NvScales> {
  static constexpr size_t kGroups = 4;  // with two scale lines
  const char* line;

  explicit ZmmScales(const char*) {}
  void begin(const char* scale_lines) { line = scale_lines; }
  void advance() { line += kNr; }
  // Divided by kUnit. The conversion is exact, whatever MXCSR says of subnormals.
  __m512 load(size_t half) const {
    const __m128i* codes = reinterpret_cast<const __m128i*>(line + half * kHalfCols);
    // sign, a copy of it to remove, then the other seven bits
    const __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(codes)), 7);
    const __m256i mask = _mm256_set1_epi16(static_cast<short>(0xbf80));
    return _mm512_cvtph_ps(_mm256_and_si256(bits, mask));
  }
};

template <>
struct ZmmScales<BlockScales> {
  static constexpr size_t kGroups = 1;
  const float* scale;

  explicit ZmmScales(const char* scales) : scale(reinterpret_cast<const float*>(scales)) {}
  void begin(const char*) {}
  void advance() { ++scale; }
  __m512 load(size_t) const { return _mm512_set1_ps(*scale); }
};

template <>
struct ZmmScales<RowScales> {
  static constexpr size_t kGroups = 1;
  const float* scales;

  explicit ZmmScales(const char* from) : scales(reinterpret_cast<const float*>(from)) {}
  void begin(const char*) {}
  void advance() {}
  __m512 load(size_t half) const { return _mm512_loadu_ps(scales + half * kHalfCols); }
};

// --- the tile ------------------------------------------------------------------------------------

template <size_t kRows>
using ZmmRows = RowPointers<kRows, kRows <= 6 ? 1 : 3>;

// Decoder makes kVectors registers of 16 columns of a line, one for each kActBytes of act.
template <class Decoder, size_t kRows>
inline void add_lines(__m512 (&sum)[kRows][2], const Decoder& decoder, const char* line,
                      ZmmRows<kRows>& act) {
#pragma GCC unroll 2
  for (size_t half = 0; half < 2; ++half, line += kLine) {
    const typename Decoder::Line codes = decoder.load(line);
#pragma GCC unroll 8
    for (size_t v = 0; v < Decoder::kVectors; ++v) {
      const __m512i weights = decoder.vector(codes, v);
      act.forget_rows();
#pragma GCC unroll 12
      for (size_t i = 0; i < kRows; ++i) {
        Decoder::Dot::add(sum[i][half], weights, act.row(i) + v * kActBytes);
      }
    }
  }
}

// Rows of a tile. Groups of 16 k end so often that storing what they are added to would bind: half
// as many rows leave registers for that.
template <class Scales>
constexpr size_t kZmmRows = Scales::kGroupDepth == 16 ? 6 : 12;

// What the sums of groups are added to, dst, or registers meanwhile.
template <size_t kRows, bool kInRegisters>
class ZmmTotals {
 public:
  ZmmTotals(float* dst, size_t dst_stride) : dst_(dst), dst_stride_(dst_stride) {
    if constexpr (kInRegisters) {
#pragma GCC unroll 12
      for (size_t i = 0; i < 2 * kRows; ++i) total_[i / 2][i % 2] = _mm512_loadu_ps(at(i));
    }
  }

  // dst += scale * sum, of a group.
  template <class Decoder, class Scales>
  void add_scaled(const __m512 (&sum)[kRows][2], const Decoder& decoder,
                  const ZmmScales<Scales>& scales) {
    const __m512 scale[2] = {scales.load(0), scales.load(1)};
#pragma GCC unroll 24
    for (size_t i = 0; i < 2 * kRows; ++i) {
      const __m512 value = decoder.value(sum[i / 2][i % 2]);
      if constexpr (kInRegisters) {
        __m512& total = total_[i / 2][i % 2];
        total = _mm512_fmadd_ps(value, scale[i % 2], total);
      } else {
        float* const to = at(i);
        _mm512_storeu_ps(to, _mm512_fmadd_ps(value, scale[i % 2], _mm512_loadu_ps(to)));
      }
    }
  }

  void store() {
    if constexpr (kInRegisters) {
#pragma GCC unroll 12
      for (size_t i = 0; i < 2 * kRows; ++i) _mm512_storeu_ps(at(i), total_[i / 2][i % 2]);
    }
  }

 private:
  float* at(size_t i) const { return dst_ + i / 2 * dst_stride_ + i % 2 * kHalfCols; }

  float* dst_;
  size_t dst_stride_;
  __m512 total_[kInRegisters ? kRows : 1][2];
};
template <class Scales, size_t kRows>
using ZmmTotalsOf = ZmmTotals<kRows, kZmmRows<Scales> == 6>;

template <class Decoder, class Layout, size_t kRows>
void multiply_tile(const ScaledKernel<Layout>& kernel, const Tile& t) {
  using Scales = typename Layout::Scales;
  constexpr size_t kMostUnroll = kRows <= 2 ? 4 : kRows <= 6 ? 2 : 1;
  constexpr size_t kUnroll = smaller(kMostUnroll, Layout::kGroupBytes / (2 * kLine));
  constexpr size_t kLineActBytes = Decoder::kVectors * kActBytes;
  const Decoder decoder;
  ZmmRows<kRows> act(kernel.template act<kLineActBytes / Layout::kLineDepth>(t), t.act_stride);
  Fetch fetch = t.fetch;
  ZmmScales<Scales> scales(kernel.scales(t));
  ZmmTotalsOf<Scales, kRows> totals(t.dst, t.dst_stride);
  const char* const run_end = kernel.end(t);
  for (const char* line = kernel.begin(t); line != run_end;) {
    scales.begin(line);
    if constexpr (Scales::kLineBytes) {
      fetch.template next_unseen_of<Scales::kLineBytes / kLine>();
      line += Scales::kLineBytes;
    }
#pragma GCC unroll 1
    for (size_t group = 0; group < ZmmScales<Scales>::kGroups; ++group) {
      const char* end = line + Layout::kGroupBytes;
      // The last group may be one step short.
      if (Layout::kGroupBytes > Layout::kCodeBytes && end > run_end) end = run_end;
      __m512 sum[kRows][2];
#pragma GCC unroll 12
      for (size_t i = 0; i < kRows; ++i) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
      do {
#pragma GCC unroll 4
        for (size_t u = 0; u < kUnroll; ++u, line += 2 * kLine) {
          fetch.template next_unseen_of<2>();
          add_lines(sum, decoder, line, act);
          act.advance(kLineActBytes);
        }
      } while (line != end);
      totals.add_scaled(sum, decoder, scales);
      scales.advance();
    }
  }
  totals.store();
}

template <class Decoder, class Layout>
struct ZmmKernel : ScaledKernel<Layout> {
  using ScaledKernel<Layout>::ScaledKernel;
  static constexpr size_t kMr = kZmmRows<typename Layout::Scales>;
  // Decoding a line takes about as long as one product.
  static constexpr size_t kLineProducts = Decoder::kVectors + 1;
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &multiply_tile<Decoder, Layout, kRows>; });

  void tile(const Tile& t) const { kTiles[t.rows](*this, t); }
};

}  // namespace
}  // namespace ktk

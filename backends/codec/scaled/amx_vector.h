// The product of the layouts of layout.h for few rows beside AMX, on 512-bit registers: codes that
// are decoded there need not be stored for tiles, and nothing waits for tiles.
//
// Sums have the bits that tdpbf16ps gives them, so a row has the same in any batch: over 32 k, even
// and odd ones are two chains of fused multiply-adds that begin at zero, and their sum is added to
// what was before. The instruction takes subnormal numbers for zero, and so does this product.
#pragma once

#include "codec/scaled/amx.h"

namespace ktk {
namespace {

// How the scales of 16 columns come in: sums of a group of 128 k are scaled later;
struct Unscaled {
  template <class Scales>
  static Unscaled of(const Scales&, size_t) {
    return {};
  }
  __m512i times(__m512i values) const { return values; }
};

// values are multiplied by them;
struct TimesScale {
  __m512 scale;

  template <class Scales>
  static TimesScale of(const Scales& scales, size_t half) {
    return {scales.load(half)};
  }
  __m512i times(__m512i values) const {
    return _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(values), scale));
  }
};

// by the two factors of one that may be 2^-127, which would be taken for zero;
struct TimesFactors {
  TimesScale first, second;

  static TimesFactors of(const ZmmScales<MxScales>& scales, size_t half) {
    const __m512 scale = scales.load(half);
    const __mmask16 least =
        _mm512_cmpeq_epi32_mask(_mm512_castps_si512(scale), _mm512_set1_epi32(0x00400000));
    return {{_mm512_mask_mov_ps(scale, least, _mm512_set1_ps(0x1p-64f))},
            {_mm512_mask_mov_ps(_mm512_set1_ps(1), least, _mm512_set1_ps(0x1p-63f))}};
  }
  __m512i times(__m512i values) const { return second.times(first.times(values)); }
};

// or the sum of their products, 32 k, is. Powers of two change no bit of it, unless something is
// subnormal or overflows with or without them. Products of act in [2^-60, 2^60] and E4M3 or E2M1
// are multiples of 2^-76, and so are sums of 32 of them, below 2^75: scales in [2^-50, 2^50] lead
// to neither.
struct ScaledSum {
  TimesScale scale;

  static ScaledSum of(const ZmmScales<MxScales>& scales, size_t half) {
    return {TimesScale::of(scales, half)};
  }
  static __m512i times(__m512i values) { return values; }

  // Whether all scales of a line are in that range.
  static bool suits(const char* scale_line) {
    const __m512i least = _mm512_set1_epi8(127 - 50), range = _mm512_set1_epi8(2 * 50);
    return !_mm512_cmpgt_epu8_mask(_mm512_sub_epi8(_mm512_load_si512(scale_line), least), range);
  }
  // The same for 16 bf16 of act. Zero suits, too.
  static bool suits(__m256i bf16) {
    const __m256i least = _mm256_set1_epi16((127 - 60) << 7),
                  range = _mm256_set1_epi16(2 * 60 << 7);
    const __m256i size = _mm256_and_si256(bf16, _mm256_set1_epi16(0x7fff));
    const __mmask16 out = _mm256_cmpgt_epu16_mask(_mm256_sub_epi16(size, least), range);
    return !_mm256_mask_test_epi16_mask(out, size, size);
  }
};

// A sum and that of the products of the next 32 k.
template <class By>
inline __m512 add_to(__m512 sum, __m512 products, const By&) {
  return _mm512_add_ps(sum, products);
}
inline __m512 add_to(__m512 sum, __m512 products, const ScaledSum& by) {
  return _mm512_fmadd_ps(products, by.scale.scale, sum);
}

// Adds the products of one k, with the weights of either half. `act` is f32, `depth` values a row.
template <size_t kRows>
inline void add_products(__m512 (&chain)[kRows][2], __m512i low, __m512i high, const float* act,
                         size_t depth) {
#pragma GCC unroll 4
  for (size_t i = 0; i < kRows; ++i, act += depth) {
    // Several rows would wait for loads.
    if constexpr (kRows == 1) {
      DotF32::add(chain[i][0], low, reinterpret_cast<const char*>(act));
      DotF32::add(chain[i][1], high, reinterpret_cast<const char*>(act));
    } else {
      const __m512i both = _mm512_castps_si512(_mm512_set1_ps(*act));
      DotF32::add(chain[i][0], low, both);
      DotF32::add(chain[i][1], high, both);
    }
  }
}

// A line that another one follows, so that bytes behind it may be read, too.
template <class Decoder>
inline typename Decoder::Line load_followed(const Decoder& decoder, const char* line) {
  if constexpr (requires { decoder.load_followed(line); }) return decoder.load_followed(line);
  return decoder.load(line);
}

// Adds the products of the next line of either half.
template <class By, class Decoder, size_t kRows>
inline void add_lines(__m512 (&even)[kRows][2], __m512 (&odd)[kRows][2], const Decoder& decoder,
                      const By (&by)[2], const char* line, bool is_last, const float* act,
                      size_t depth, Fetch& fetch) {
  fetch.next_unseen();
  const typename Decoder::Line low = load_followed(decoder, line);
  fetch.next_unseen();
  const typename Decoder::Line high =
      is_last ? decoder.load(line + kLine) : load_followed(decoder, line + kLine);
#pragma GCC unroll 4
  for (size_t v = 0; v < Decoder::kVectors; v += 2) {
    add_products(even, by[0].times(decoder.vector(low, v)), by[1].times(decoder.vector(high, v)),
                 act + v, depth);
    add_products(odd, by[0].times(decoder.vector(low, v + 1)),
                 by[1].times(decoder.vector(high, v + 1)), act + v + 1, depth);
  }
}

// Adds the products of a step to `sum`.
template <class By, class Layout, class Decoder, size_t kRows>
inline void add_step(__m512 (&sum)[kRows][2], const Decoder& decoder, const char* line,
                     ZmmScales<typename Layout::Scales> scales, const float* act, size_t depth,
                     Fetch& fetch) {
  constexpr size_t kGroupDepth = smaller(Layout::Scales::kGroupDepth, kTileDepth);
#pragma GCC unroll 1
  for (const char* const end = line + Layout::kCodeBytes; line != end;) {
    __m512 even[kRows][2], odd[kRows][2];
#pragma GCC unroll 4
    for (size_t i = 0; i < kRows; ++i) {
      even[i][0] = even[i][1] = odd[i][0] = odd[i][1] = _mm512_setzero_ps();
    }
    By by[2];
#pragma GCC unroll 2
    for (size_t group = 0; group < kTileDepth / kGroupDepth; ++group) {
      by[0] = By::of(scales, 0);
      by[1] = By::of(scales, 1);
      scales.advance();
#pragma GCC unroll 8
      for (size_t k = 0; k < kGroupDepth; k += Layout::kLineDepth) {
        const bool is_last =
            group + 1 == kTileDepth / kGroupDepth && k + Layout::kLineDepth >= kGroupDepth;
        add_lines(even, odd, decoder, by, line, is_last, act, depth, fetch);
        line += 2 * kLine;
        act += Layout::kLineDepth;
      }
    }
#pragma GCC unroll 4
    for (size_t i = 0; i < kRows; ++i) {
      sum[i][0] = add_to(sum[i][0], _mm512_add_ps(even[i][0], odd[i][0]), by[0]);
      sum[i][1] = add_to(sum[i][1], _mm512_add_ps(even[i][1], odd[i][1]), by[1]);
    }
  }
}

// The same for scales and act of any size, which are rare: away from the registers of others.
template <class Layout, class Decoder, size_t kRows>
[[gnu::noinline]] void add_step_apart(__m512 (&sum)[kRows][2], const char* line,
                                      ZmmScales<typename Layout::Scales> scales, const float* act,
                                      size_t depth, Fetch fetch) {
  add_step<TimesFactors, Layout>(sum, Decoder(), line, scales, act, depth, fetch);
}

template <class Scales>
struct UsualScaling {
  using Type = Unscaled;
};
template <>
struct UsualScaling<NvScales> {
  using Type = TimesScale;
};
template <>
struct UsualScaling<MxScales> {
  using Type = ScaledSum;
};

// dst += act * weights, for all of a run.
template <class Decoder, class Layout, size_t kRows>
void multiply_as_tiles(const ScaledKernel<Layout>& kernel, const float* act, size_t depth,
                       bool act_suits, const Tile& t) {
  using Scales = typename Layout::Scales;
  constexpr size_t kGroupSteps = ScaledKernel<Layout>::kSlabSteps;
  const Decoder decoder;
  Fetch fetch = t.fetch;
  ZmmScales<Scales> scales(kernel.scales(t));
  const auto dst = [&](size_t row, size_t half) {
    return t.dst + row * t.dst_stride + half * kHalfCols;
  };
  __m512 sum[kRows][2];
  unroll<2 * kRows>([&]<size_t i>() __attribute__((always_inline)) {
    sum[i / 2][i % 2] =
        Scales::kLineBytes ? _mm512_loadu_ps(dst(i / 2, i % 2)) : _mm512_setzero_ps();
  });
  act += t.begin * ScaledKernel<Layout>::kSlabDepth;
  const char* step = kernel.begin(t);
  const char* const end = kernel.end(t);
#pragma GCC unroll 1
  for (size_t in_group = 1; step != end; ++in_group, act += kStepDepth) {
    scales.begin(step);
    const char* const line = step + Scales::kLineBytes;
    if constexpr (Scales::kLineBytes) fetch.template next_unseen_of<Scales::kLineBytes / kLine>();
    if (kArePowers<Scales> && !(act_suits && ScaledSum::suits(step))) {
      if constexpr (kArePowers<Scales>) {
        __m512 apart[kRows][2];
        memcpy(apart, sum, sizeof apart);
        add_step_apart<Layout, Decoder>(apart, line, scales, act, depth, fetch);
        fetch.skip(Layout::kCodeBytes / kLine);
        memcpy(sum, apart, sizeof apart);
      }
    } else {
      add_step<typename UsualScaling<Scales>::Type, Layout>(sum, decoder, line, scales, act, depth,
                                                            fetch);
    }
    step += Layout::kStepBytes;
    if (!Scales::kLineBytes && (in_group % kGroupSteps == 0 || step == end)) {
      unroll<2 * kRows>([&]<size_t i>() __attribute__((always_inline)) {
        float* const to = dst(i / 2, i % 2);
        __m512& one = sum[i / 2][i % 2];
        _mm512_storeu_ps(to, _mm512_fmadd_ps(one, scales.load(i % 2), _mm512_loadu_ps(to)));
        one = _mm512_setzero_ps();
      });
      scales.advance();
    }
  }
  if constexpr (Scales::kLineBytes) {
    unroll<2 * kRows>([&]<size_t i>() __attribute__((always_inline)) {
      _mm512_storeu_ps(dst(i / 2, i % 2), sum[i / 2][i % 2]);
    });
  }
}

inline size_t amx_vector_scratch_size(const ktk_matrix* matrix, size_t m) {
  return m * round_up(matrix->k, kStepDepth) * sizeof(float);
}

template <class Decoder, class Layout, size_t kMostRows>
class AmxVectorKernel : public ScaledKernel<Layout> {
  using Base = ScaledKernel<Layout>;

 public:
  static constexpr size_t kMr = kMostRows;
  static constexpr size_t kLineProducts = 1;
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &multiply_as_tiles<Decoder, Layout, kRows>; });

  // Act becomes f32 in scratch, once for all columns.
  explicit AmxVectorKernel(const ktk_matmul* mm)
      : Base(mm),
        depth_(Layout::num_steps(mm->matrix) * kStepDepth),
        act_(static_cast<float*>(mm->scratch)) {
    for (size_t row = 0; row < mm->m; ++row) {
      const auto* from = static_cast<const char*>(mm->act) + row * mm->act_stride;
      for (size_t k = 0; k < depth_; k += kHalfCols) {
        const __m256i bf16 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 2 * k));
        _mm512_store_si512(act_ + row * depth_ + k,
                           (__m512i)((__v16su)_mm512_cvtepu16_epi32(bf16) << 16));
        suits_ = suits_ && ScaledSum::suits(bf16);
      }
    }
  }

  void tile(const Tile& t) const { kTiles[t.rows](*this, act_, depth_, suits_, t); }

 private:
  FlushSubnormals flush_;
  size_t depth_;
  float* act_;
  bool suits_ = true;  // for ScaledSum
};

}  // namespace
}  // namespace ktk

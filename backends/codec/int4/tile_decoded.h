// The product for many rows on CPUs where splitting nibbles shares ports with products: a run is
// decoded into scratch, 16 KiB that stay in L1 while all tiles of rows pass them. An operand is a
// byte for each code:
//
//   step    low nibbles of 32 columns | high nibbles        four cache lines
//           k0 k2 k4 k6               | k1 k3 k5 k7
//
// Decoding a step takes 6 instructions and 4 stores, one a cycle: as long as the products of 2 to 3
// rows, where each tile of 12 rows would spend 6 instructions beside its 48 products.
//
// Sums are the same integers as in tile.h and meet dst in the same order, so a row gets the same
// bits.
#pragma once

#include "codec/int4/tile.h"

namespace ktk::int4 {
namespace {

// Up to here, two tiles, decoding saves nothing, by the count above: on two ports, two tiles split
// a step in 6 cycles, beside 48 of products, and decoding it takes 4 to 6. Three tiles save 9.
constexpr size_t kRowsNotDecoded = 24;

constexpr size_t kDecodedStepBytes = 2 * kStepBytes;
// A run in memory: 512 deep. Decoded it is less than twice as long, scales staying behind.
constexpr size_t kPackedRunBytes = 16 * (32 / kStepDepth * kStepBytes + kScaleBytes);

// One step: nibble by nibble, the products of each row.
template <class Dot, size_t kRows, size_t kVecs>
inline void add_decoded(typename Dot::Int (&acc)[kRows][kVecs], const char* operands,
                        const RowPointers<kRows>& act) {
#pragma GCC unroll 2
  for (size_t half = 0; half < 2; ++half) {
    typename Dot::Int weight[kVecs];
#pragma GCC unroll 4
    for (size_t v = 0; v < kVecs; ++v) {
      weight[v] = Dot::load_bytes(operands + half * kStepBytes + v * sizeof(weight[v]));
      pin(weight[v]);
    }
#pragma GCC unroll 16
    for (size_t i = 0; i < kRows; ++i) {
      const auto four =
          Dot::broadcast(reinterpret_cast<const uint8_t*>(act.row(i)) + half * kStepDepth / 2);
#pragma GCC unroll 4
      for (size_t v = 0; v < kVecs; ++v) Dot::dot(acc[i][v], weight[v], four);
    }
  }
}

template <class Dot, Zeros kZeros, size_t kRows, size_t kVecs>
void multiply_decoded(const Operands& operands, const char* decoded, const Tile& tile) {
  static_assert(kVecs * Dot::kLanes == kNr && Dot::kSums == Sums::kI32);
  // Copies that stores to dst cannot change.
  const Operands o = operands;
  const Tile t = tile;
  Fetch fetch = t.fetch;
  constexpr Correction kCorrection =
      kZeros == Zeros::kFixed ? Correction::kAtStart : Correction::kNow;
  if (t.is_first()) clear<Dot, kNr>(t.dst, t.dst_stride, kRows);
  RowPointers<kRows> act(t.act + t.begin * o.slab_depth, t.act_stride);
  const char* act_scales = t.act + o.act_scales + t.begin * sizeof(ActScale);
  for (size_t slab = t.begin; slab < t.end; ++slab) {
    typename Dot::Int acc[kRows][kVecs];
    const char* row_scales = hidden(act_scales);
#pragma GCC unroll 16
    for (size_t i = 0; i < kRows; ++i, row_scales += t.act_stride) {
      const auto* a = reinterpret_cast<const ActScale*>(row_scales);
#pragma GCC unroll 4
      for (size_t v = 0; v < kVecs; ++v) {
        acc[i][v] =
            kCorrection == Correction::kAtStart ? Dot::set1_int(a->correction) : Dot::set1_int(0);
        pin(acc[i][v]);
      }
    }
    const char* const end = decoded + o.slab_depth / kStepDepth * kDecodedStepBytes;
    do {
#pragma GCC unroll 2
      for (size_t i = 0; i < kStepBytes / kLine; ++i) fetch.next();
      add_decoded<Dot>(acc, decoded, act);
      act.advance(kStepDepth);
      act.forget_rows();
      decoded += kDecodedStepBytes;
    } while (decoded != end);
#pragma GCC unroll 16
    for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (size_t v = 0; v < kVecs; ++v) pin(acc[i][v]);
    }
    const auto* scales = reinterpret_cast<const uint16_t*>(t.block + o.header(slab));
    WeightScales<Dot, kZeros> kept[kVecs];
#pragma GCC unroll 4
    for (size_t v = 0; v < kVecs; ++v) kept[v].load(scales + v * Dot::kLanes, o.f16_scales);
    row_scales = hidden(act_scales);
    float* dst = hidden(t.dst);
#pragma GCC unroll 16
    for (size_t i = 0; i < kRows; ++i, row_scales += t.act_stride, dst += t.dst_stride) {
      const auto* a = reinterpret_cast<const ActScale*>(row_scales);
      const auto act_scale = Dot::set1(a->scale);
#pragma GCC unroll 4
      for (size_t v = 0; v < kVecs; ++v) {
        add_slab<Dot, kZeros, kCorrection>(dst + v * Dot::kLanes, Dot::finish(acc[i][v]), a,
                                           act_scale, kept[v]);
      }
    }
    act_scales += sizeof(ActScale);
  }
}

template <class Dot, class Act, size_t kMaxRows, size_t kVecs, Zeros kZeros>
class DecodedKernel : public KernelBase<Act> {
 public:
  static constexpr size_t kMr = kMaxRows;
  static constexpr size_t kLineProducts = 2 * 16 / Dot::kLanes;
  static constexpr size_t kRunBytes = kPackedRunBytes;
  static constexpr bool kFetchesNextRun = true;
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &multiply_decoded<Dot, kZeros, kRows, kVecs>; });

  explicit DecodedKernel(const ktk_matmul* mm)
      : KernelBase<Act>(mm), scratch_(static_cast<char*>(mm->scratch)) {}

  static size_t passes(size_t) { return 1; }

  void prepare_run(const Run& run) const {
    const Operands& o = this->operands_;
    char* out = scratch_;
    for (size_t slab = run.begin; slab < run.end; ++slab) {
      const char* weight = run.block + o.codes(slab);
      for (const char* end = weight + o.slab_bytes; weight != end; weight += kStepBytes) {
#pragma GCC unroll 4
        for (size_t v = 0; v < kVecs; ++v, out += sizeof(typename Dot::Int)) {
          const typename Dot::Int both = Dot::load_bytes(weight + v * sizeof(both));
          Dot::store_bytes(out, Dot::low_nibbles(both));
          Dot::store_bytes(out + kStepBytes, Dot::high_nibbles(both));
        }
        out += kStepBytes;
      }
    }
  }

  void tile(const Tile& t) const { kTiles[t.rows](this->operands_, scratch_, t); }

 private:
  char* scratch_;
};

template <class Dot, class Act, size_t kMaxRows, size_t kVecs>
void gemm_decoded(const ktk_matmul* mm) {
  if constexpr (Act::kZeroPoints == ZeroPoints::kPossibly) {
    if (has_zeros(mm->matrix)) {
      return gemm<DecodedKernel<Dot, Act, kMaxRows, kVecs, Zeros::kStored>>(mm);
    }
  }
  gemm<DecodedKernel<Dot, Act, kMaxRows, kVecs, Zeros::kFixed>>(mm);
}

inline size_t decoded_scratch_size(const ktk_matrix*, size_t) { return 2 * kPackedRunBytes; }

}  // namespace
}  // namespace ktk::int4

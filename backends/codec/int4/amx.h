// The product with AMX: 2 x 2 tiles of 16 x 16 sums (gemm/amx.h), up to 64 deep.
//
// B tiles hold bytes. The nibbles of 32 columns and a run of k are expanded to scratch, which stays
// in L1, before all rows pass them:
//
//   one slab     [slab / tile depth][2 halves of 16 columns][tile depth / 4 rows][64 bytes]
//
//   low nibbles of step s  -> row 2 s        k0 k2 k4 k6 of 16 columns
//   high nibbles           -> row 2 s + 1    k1 k3 k5 k7
//
// Without zero points they are made signed meanwhile, code - 8, and sums need no correction.
//
// Sums leave their tiles at the end of a slab, because the scales change there: for a slab of 32
// the tiles are 32 deep. C can only leave through memory. Sums of a few slabs rest in scratch and
// are then added to dst together, which moves dst once for all of them and waits once for stores of
// tiles. Not between the products that follow: while tiles multiply, vectors do one operation a
// cycle instead of two (Intel 6/167), so neither hides behind the other.
#pragma once

#include "codec/int4/tile.h"
#include "gemm/amx.h"

namespace ktk::int4 {
namespace {

constexpr size_t kTileCols = 16;
constexpr size_t kMostRows = 2 * kAmxRows;
constexpr size_t kMostRunBytes = 4608;  // two slabs of 128, or eight of 32
constexpr size_t kSlabsAtOnce = 4;

// In bytes, and so in codes.
constexpr uint8_t tile_depth(size_t slab_depth) {
  return static_cast<uint8_t>(smaller(slab_depth, 64));
}
// Where groups of weights are at least as deep as those of activations.
template <class Act>
constexpr uint8_t kTileDepth = tile_depth(Act::kMaxSlab);

using SlabSums = int32_t[kSlabsAtOnce][kMostRows][kNr];

// From slab to slab of the scales of `m` rows: an odd number of cache lines, so that those of many
// slabs do not meet in one set of L1.
constexpr size_t act_scale_stride(size_t m) {
  constexpr size_t kOfLine = kLine / sizeof(ActScale);
  return (ceil_div(m, kOfLine) | 1) * kOfLine;
}

// Expanded weights of a run; sums; scales of all rows by slab: in the rows themselves they are a
// cache line each, and every block would fetch 32 of them.
template <class Act>
size_t amx_scratch_size(const ktk_matrix* matrix, size_t m) {
  return 2 * kMostRunBytes + sizeof(SlabSums) +
         act_scale_stride(m) * Act::num_slabs(matrix) * sizeof(ActScale);
}

// Sums of some slabs on their way to dst.
template <Zeros kZeros>
struct StoredSums {
  const SlabSums& sums;
  size_t rows;
  const ActScale* act_scales;  // of the first slab and row
  size_t act_stride;           // from slab to slab
  float* dst;
  size_t dst_stride;
  const WeightScales<Vnni512, kZeros> (*weight)[2];  // by slab and half
  size_t slabs = 0;

  void add() const {
    if (slabs == kSlabsAtOnce) {
      add_slabs<kSlabsAtOnce>(slabs);
    } else {
      add_slabs<1>(slabs);
    }
  }

 private:
  // `count`, a multiple of kCount.
  template <size_t kCount>
  void add_slabs(size_t count) const {
    for (size_t row = 0; row < rows; ++row) {
#pragma GCC unroll 2
      for (size_t half = 0; half < 2; ++half) {
        float* const to = dst + row * dst_stride + half * kTileCols;
        __m512 total = _mm512_loadu_ps(to);
        for (size_t slab = 0; slab < count; slab += kCount) {
#pragma GCC unroll 4
          for (size_t i = slab; i < slab + kCount; ++i) {
            const ActScale& act = act_scales[i * act_stride + row];
            total = with_slab<Vnni512, kZeros, Correction::kAtStart>(
                total, _mm512_load_si512(sums[i][row] + half * kTileCols), &act,
                Vnni512::set1(act.scale), weight[i][half]);
          }
        }
        _mm512_storeu_ps(to, total);
      }
    }
  }
};

// Signed weights where the zero is 8 for all of them.
template <Zeros kZeros>
struct TilesOf : TilesInt8 {};
template <>
struct TilesOf<Zeros::kFixed> : TilesSigned {};

template <class Act, Zeros kZeros>
class AmxKernel : public KernelBase<Act> {
  using KernelBase<Act>::operands_;

 public:
  static constexpr size_t kMr = kMostRows;
  static constexpr size_t kRowStep = kAmxRows;
  static constexpr size_t kLineProducts = 2;
  static constexpr size_t kRunBytes = kMostRunBytes;

  explicit AmxKernel(const ktk_matmul* mm)
      : KernelBase<Act>(mm),
        mm_(mm),
        tile_depth_(tile_depth(operands_.slab_depth)),
        expanded_(static_cast<char*>(mm->scratch)),
        sums_(*reinterpret_cast<SlabSums*>(expanded_ + 2 * kMostRunBytes)),
        act_stride_(act_scale_stride(mm->m)) {
    ActScale* scales = reinterpret_cast<ActScale*>(&sums_ + 1);
    act_scales_ = scales;
    const char* row = static_cast<const char*>(mm->act) + operands_.act_scales;
    for (size_t i = 0; i < mm->m; ++i, row += mm->act_stride) {
      const ActScale* of_row = reinterpret_cast<const ActScale*>(row);
      for (size_t slab = 0; slab < operands_.slabs; ++slab) {
        scales[slab * act_stride_ + i] = of_row[slab];
      }
    }
  }
  AmxKernel(const AmxKernel&) = delete;
  AmxKernel& operator=(const AmxKernel&) = delete;

  static size_t passes(size_t) { return 1; }

  void begin_run(const Run& run, Fetch fetch) {
    char* to = expanded_;
    for (size_t slab = run.begin; slab < run.end; ++slab) {
      for (size_t at = operands_.offset(slab); at < operands_.codes(slab); at += kLine) {
        fetch.next_unseen();
      }
      to = expand(run.block + operands_.codes(slab), to, fetch);
    }
    tile_memory_barrier();
  }

  void tile(const Tile& t) {
    if (t.is_first()) clear<Vnni512, kNr>(t.dst, t.dst_stride, t.rows);
    if (t.rows > kAmxRows) {
      multiply_tile<true>(t);
    } else {
      multiply_tile<false>(t);
    }
  }

 private:
  // A half of a tile of depth, in bytes.
  size_t half() const { return tile_depth_ / 4 * kLine; }

  static __m512i weights(__m512i codes) {
    if constexpr (kZeros == Zeros::kStored) return codes;
    return _mm512_sub_epi8(codes, _mm512_set1_epi8(kFixedZero));
  }

  char* expand(const char* codes, char* to, Fetch& fetch) const {
    const char* const end = codes + operands_.slab_bytes;
    for (; codes != end; to += 2 * half()) {
      for (size_t row = 0; row < half(); row += 2 * kLine, codes += kStepBytes) {
        for (size_t i = 0; i < 2; ++i) {
          const __m512i pairs = Vnni512::load_bytes(codes + i * kLine);
          char* tile_row = to + i * half() + row;
          _mm512_store_si512(tile_row, weights(Vnni512::low_nibbles(pairs)));
          _mm512_store_si512(tile_row + kLine, weights(Vnni512::high_nibbles(pairs)));
          fetch.next_unseen();
        }
      }
    }
    return to;
  }

  template <bool kBothHalves>
  void multiply_tile(const Tile& t) {
    const char* weight = expanded_;
    const char* act = t.act + t.begin * operands_.slab_depth;
    const size_t row =
        static_cast<size_t>(t.act - static_cast<const char*>(mm_->act)) / t.act_stride;
    for (size_t slab = t.begin; slab < t.end;) {
      WeightScales<Vnni512, kZeros> scales[kSlabsAtOnce][2];
      StoredSums<kZeros> stored = {
          .sums = sums_,
          .rows = t.rows,
          .act_scales = act_scales_ + slab * act_stride_ + row,
          .act_stride = act_stride_,
          .dst = t.dst,
          .dst_stride = t.dst_stride,
          .weight = scales,
      };
      for (; stored.slabs < kSlabsAtOnce && slab < t.end; ++stored.slabs, ++slab) {
        zero_sums<kBothHalves>();
        const char* const end = act + operands_.slab_depth;
        for (; act != end; act += tile_depth_, weight += 2 * half()) {
          add_tiles<TilesOf<kZeros>, kBothHalves>(act, t.act_stride, weight, half());
        }
        store_sums<kBothHalves>(sums_[stored.slabs], kNr);
        const uint16_t* header =
            reinterpret_cast<const uint16_t*>(t.block + operands_.header(slab));
        scales[stored.slabs][0].load(header, operands_.f16_scales);
        scales[stored.slabs][1].load(header + kTileCols, operands_.f16_scales);
      }
      tile_memory_barrier();
      stored.add();
      tile_memory_barrier();
    }
  }

  const ktk_matmul* mm_;
  size_t tile_depth_;
  char* expanded_;
  SlabSums& sums_;
  size_t act_stride_;
  const ActScale* act_scales_;  // [slabs][act_stride_]
};

template <class Act>
void gemm_amx(const ktk_matmul* mm) {
  const TileRowsOfDepth<kTileDepth<Act>> rows(mm->m, tile_depth(Act::slab_depth(mm->matrix)));
  if constexpr (Act::kZeroPoints == ZeroPoints::kPossibly) {
    if (has_zeros(mm->matrix)) return gemm<AmxKernel<Act, Zeros::kStored>>(mm);
  }
  gemm<AmxKernel<Act, Zeros::kFixed>>(mm);
}

}  // namespace
}  // namespace ktk::int4

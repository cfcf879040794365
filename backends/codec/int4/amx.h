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
// Sums leave their tiles at the end of a slab, because the scales change there: for a slab of 32
// the tiles are 32 deep. C can only leave through memory. It is added to dst between the products
// of the next slab: done at once, that would wait for the stores and the tiles would wait for it,
// and done behind all products it would be all that the core looks at meanwhile. A slab of 128 with
// all operands in L1 takes 290 cycles so on Emerald Rapids, and 380 with its sums behind its
// products. A slab that is a single tile deep has its sums behind them: between is 0.9 to 1.1 times
// as fast, as other users of the machine let tiles be.
#pragma once

#include "codec/int4/tile.h"
#include "gemm/amx.h"

namespace ktk::int4 {
namespace {

constexpr size_t kTileCols = 16;
constexpr size_t kMostRows = 2 * kAmxRows;
constexpr size_t kMostSums = kMostRows * kBlockCols;
constexpr size_t kMostRunBytes = 10240;  // four slabs, whatever the groups

// Expanded weights of a run; C of the slab that is being multiplied, and of the one before it;
// scales of all rows by slab: in the rows themselves they are a cache line each, and every block
// would fetch 32 of them.
template <class Act>
size_t amx_scratch_size(const ktk_matrix* matrix, size_t m) {
  return 2 * kMostRunBytes + 2 * kMostSums * sizeof(int32_t) +
         round_up(m * Act::num_slabs(matrix) * sizeof(ActScale), kLine);
}

// Rows of sums that are yet to be added to dst.
template <Zeros kZeros>
struct StoredSums {
  const int32_t* sums;
  size_t rows = 0;
  const ActScale* act_scales;  // of the first row
  const char* header;
  bool f16_scales;
  float* dst;
  size_t dst_stride;

  // Of the slab.
  struct Scales {
    WeightScales<Vnni512, kZeros> left, right;
  };
  Scales scales() const {
    Scales found;
    if (rows > 0) {
      const uint16_t* from = reinterpret_cast<const uint16_t*>(header);
      found.left.load(from, f16_scales);
      found.right.load(from + kTileCols, f16_scales);
    }
    return found;
  }

  void add(const Scales& weight, size_t count) {
    count = smaller(count, rows);
    const ActScale* act = act_scales;
    for (size_t i = 0; i < count; ++i, ++act) {
      const __m512 scale = Vnni512::set1(act->scale);
      const auto add_half = [&](size_t column, const WeightScales<Vnni512, kZeros>& half) {
        add_slab<Vnni512, kZeros, Correction::kNow>(
            dst + i * dst_stride + column, _mm512_load_si512(sums + i * kBlockCols + column), act,
            scale, half);
      };
      add_half(0, weight.left);
      add_half(kTileCols, weight.right);
    }
    rows -= count;
    sums += count * kBlockCols;
    act_scales = act;
    dst += count * dst_stride;
  }
};

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
        tile_depth_(smaller(operands_.slab_depth, 64)),
        expanded_(static_cast<char*>(mm->scratch)),
        sums_(reinterpret_cast<int32_t*>(expanded_ + 2 * kMostRunBytes)),
        sums_before_(sums_ + kMostSums) {
    ActScale* scales = reinterpret_cast<ActScale*>(sums_before_ + kMostSums);
    act_scales_ = scales;
    const char* row = static_cast<const char*>(mm->act) + operands_.act_scales;
    for (size_t i = 0; i < mm->m; ++i, row += mm->act_stride) {
      const ActScale* of_row = reinterpret_cast<const ActScale*>(row);
      for (size_t slab = 0; slab < operands_.slabs; ++slab) scales[slab * mm->m + i] = of_row[slab];
    }
  }
  ~AmxKernel() { stored_.add(stored_.scales(), kMostRows); }
  AmxKernel(const AmxKernel&) = delete;
  AmxKernel& operator=(const AmxKernel&) = delete;

  static size_t passes(size_t) { return 1; }

  void begin_run(const Run& run, Fetch fetch) {
    char* to = expanded_;
    for (size_t slab = run.begin; slab < run.end; ++slab) {
      for (size_t at = operands_.offset(slab); at < operands_.codes(slab); at += kLine) {
        fetch.next();
      }
      to = expand(run.block + operands_.codes(slab), to, fetch);
    }
    tile_memory_barrier();
  }

  void tile(const Tile& t) {
    if (t.is_first()) clear<Vnni512, kBlockCols>(t.dst, t.dst_stride, t.rows);
    if (t.rows > kAmxRows) {
      multiply_tile<true>(t);
    } else {
      multiply_tile<false>(t);
    }
  }

 private:
  // A half of a tile of depth, in bytes.
  size_t half() const { return tile_depth_ / 4 * kLine; }

  char* expand(const char* codes, char* to, Fetch& fetch) const {
    const char* const end = codes + operands_.slab_bytes;
    for (; codes != end; to += 2 * half()) {
      for (size_t row = 0; row < half(); row += 2 * kLine, codes += kStepBytes) {
        for (size_t i = 0; i < 2; ++i) {
          const __m512i pairs = Vnni512::load_bytes(codes + i * kLine);
          char* tile_row = to + i * half() + row;
          _mm512_store_si512(tile_row, Vnni512::low_nibbles(pairs));
          _mm512_store_si512(tile_row + kLine, Vnni512::high_nibbles(pairs));
          fetch.next();
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
    const size_t depth_tiles = operands_.slab_depth / tile_depth_;
    const size_t rows_between =
        depth_tiles > 1 ? ceil_div(kMostRows, depth_tiles * kProductsOf<kBothHalves>) : 0;
    for (size_t slab = t.begin; slab < t.end; ++slab) {
      StoredSums<kZeros> before = stored_;
      const auto scales = before.scales();
      const auto add_some = [&] { before.add(scales, rows_between); };
      zero_sums<kBothHalves>();
      const char* const end = act + operands_.slab_depth;
      for (; act != end; act += tile_depth_, weight += 2 * half()) {
        add_tiles<TilesInt8, kBothHalves>(act, t.act_stride, weight, half(), kLine, add_some);
      }
      store_sums<kBothHalves>(sums_, kBlockCols);
      before.add(scales, kMostRows);
      stored_ = {
          .sums = sums_,
          .rows = t.rows,
          .act_scales = act_scales_ + slab * mm_->m + row,
          .header = t.block + operands_.header(slab),
          .f16_scales = operands_.f16_scales,
          .dst = t.dst,
          .dst_stride = t.dst_stride,
      };
      int32_t* const swap = sums_;
      sums_ = sums_before_;
      sums_before_ = swap;
    }
  }

  const ktk_matmul* mm_;
  size_t tile_depth_;
  char* expanded_;
  int32_t *sums_, *sums_before_;
  const ActScale* act_scales_;  // [slabs][m]
  StoredSums<kZeros> stored_ = {};
};

template <class Act>
void gemm_amx(const ktk_matmul* mm) {
  const TileRows rows(mm->m, static_cast<uint8_t>(smaller(Act::slab_depth(mm->matrix), 64)));
  if constexpr (Act::kZeroPoints == ZeroPoints::kPossibly) {
    if (has_zeros(mm->matrix)) return gemm<AmxKernel<Act, Zeros::kStored>>(mm);
  }
  gemm<AmxKernel<Act, Zeros::kFixed>>(mm);
}

// Few rows wait for memory, or for the expansion: the vector kernel does without. Sums of a slab
// are exact in both and meet the same roundings, so the bits are the same.
constexpr size_t kVectorRows = 4;

}  // namespace
}  // namespace ktk::int4

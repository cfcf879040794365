// AMX: 16 x 16 products, 64 deep, one instruction.
//
//   tiles        B 6: columns 0-15    B 7: columns 16-31
//   A 4: rows 0-15       C 0                C 1
//   A 5: rows 16-31      C 2                C 3
//
// The weights of 32 columns and one act group (a block, 16 KiB) stay in L1 while all rows pass,
// from L2. C tiles can only leave through memory: they are stored to scratch and turned into f32
// there. Each block prefetches the next one, evenly over its steps: with AMX most shapes wait for
// DRAM.
#include "amxint8/act.h"
#include "amxint8/matmul.h"
#include "amxint8/variant.h"
#include "amxint8/vnni512.h"
#include "gemm/amx.h"
#include "gemm/weight_stream.h"

namespace ktk::amxint8 {
namespace {

using TargetAct = Act<ByteCodes, 512>;

constexpr size_t kTileRows = 16;
constexpr size_t kBlockRows = 2 * kTileRows;
constexpr size_t kBlockValues = kBlockRows * kColumns;
constexpr size_t kStepLines = kStepBytes / 64;

// Scale and comp of one act row and group, gathered: in the rows themselves they are a cache line
// each, and every block would fetch 32 of them.
struct RowFactor {
  float scale;
  int32_t comp;
};

// C of the block that is being multiplied and of the one before it, then the row factors.
size_t scratch_size(const ktk_matrix* matrix, size_t m) {
  return 2 * kBlockValues * sizeof(int32_t) +
         round_up(m * TargetAct::num_groups(matrix) * sizeof(RowFactor), 64);
}

void gather_factors(const ktk_matmul* mm, RowFactor* factors) {
  const size_t groups = TargetAct::num_groups(mm->matrix);
  const uint8_t* row = static_cast<const uint8_t*>(mm->act) + TargetAct::scale_offset(mm->matrix);
  for (size_t i = 0; i < mm->m; ++i, row += mm->act_stride) {
    const float* scale = reinterpret_cast<const float*>(row);
    const int32_t* comp = reinterpret_cast<const int32_t*>(row) + groups;
    for (size_t g = 0; g < groups; ++g) factors[g * mm->m + i] = {scale[g], comp[g]};
  }
}

// Turns a stored C into f32: dst (+)= float(C + comp) * act scale, and times the weight scale after
// the last group. It goes row by row between the tile instructions of the block that follows: done
// at once, it would wait for the stores of C and the tiles would wait for it.
struct Flush {
  const int32_t* c;
  const RowFactor* factors;
  const float* weight_scale;
  float* dst;
  size_t dst_stride;
  bool first, last;  // group of the row
  size_t rows = 0;   // left

  void advance(size_t count) {
    count = smaller(count, rows);
    rows -= count;
    for (; count > 0; --count) {
      const __m512i comp = _mm512_set1_epi32(factors->comp);
      const __m512 scale = _mm512_set1_ps(factors->scale);
      __m512 lo = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_load_si512(c), comp));
      __m512 hi = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_load_si512(c + 16), comp));
      if (first) {
        lo = _mm512_fmadd_ps(lo, scale, _mm512_setzero_ps());
        hi = _mm512_fmadd_ps(hi, scale, _mm512_setzero_ps());
      } else {
        lo = _mm512_fmadd_ps(lo, scale, _mm512_loadu_ps(dst));
        hi = _mm512_fmadd_ps(hi, scale, _mm512_loadu_ps(dst + 16));
      }
      if (last) {
        lo = _mm512_mul_ps(lo, _mm512_loadu_ps(weight_scale));
        hi = _mm512_mul_ps(hi, _mm512_loadu_ps(weight_scale + 16));
      }
      _mm512_storeu_ps(dst, lo);
      _mm512_storeu_ps(dst + 16, hi);
      c += kColumns;
      ++factors;
      dst += dst_stride;
    }
  }
};

// C = A x B over `steps` steps for 32 (or 16) rows, stored as rows of 32 columns. In every step, a
// share of the stream is fetched and some rows of the block before are flushed.
template <bool kBothHalves, class Share>
inline void multiply_block(const uint8_t* weight, const uint8_t* act, size_t act_stride,
                           size_t steps, const Share& stream, Flush before, int32_t* c) {
  const size_t flush_rows = steps >= 8 ? 4 : steps >= 4 ? 8 : kBlockRows;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kBothHalves) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (size_t i = 0; i < steps; ++i, weight += kStepBytes, act += kDepth) {
    stream.template prefetch<kStepLines>(i, weight);
    _tile_loadd(6, weight, 64);
    _tile_loadd(4, act, act_stride);
    _tile_loadd(7, weight + kTileBytes, 64);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    if constexpr (kBothHalves) {
      _tile_loadd(5, act + kTileRows * act_stride, act_stride);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
    before.advance(flush_rows);
  }
  constexpr size_t kStride = kColumns * sizeof(int32_t);
  _tile_stored(0, c, kStride);
  _tile_stored(1, c + 16, kStride);
  if constexpr (kBothHalves) {
    _tile_stored(2, c + kTileRows * kColumns, kStride);
    _tile_stored(3, c + kTileRows * kColumns + 16, kStride);
  }
}

template <class Share>
void multiply_amx_blocks(const ktk_matmul* mm) {
  const ktk_matrix* matrix = mm->matrix;
  const size_t steps = num_steps(matrix);
  const size_t row_blocks = (mm->m + kBlockRows - 1) / kBlockRows;
  const uint8_t* packed = static_cast<const uint8_t*>(mm->weight);
  int32_t* c = static_cast<int32_t*>(mm->scratch);
  int32_t* c_before = c + kBlockValues;
  RowFactor* factors = reinterpret_cast<RowFactor*>(c_before + kBlockValues);
  gather_factors(mm, factors);
  const size_t columns = round_up(mm->n_end - mm->n_begin, kColumns);
  const WeightStream stream = {
      .begin = static_cast<const char*>(mm->weight) + block_offset(matrix, mm->n_begin),
      .lines = columns / kColumns * steps * kStepLines,
      .next = static_cast<const char*>(mm->next),
  };
  Flush flush = {};  // no rows yet
  tile_memory_barrier();
  for (size_t n = mm->n_begin; n < mm->n_end; n += kColumns) {
    const uint8_t* weight = packed + block_offset(matrix, n);
    if (row_blocks == 1 && n + kColumns >= mm->n_end) stream.begin_next();
    size_t block_steps;
    for (size_t step = 0; step < steps; step += block_steps, weight += block_steps * kStepBytes) {
      block_steps = smaller(TargetAct::kGroupSteps, steps - step);
      const bool last = step + block_steps == steps;
      const size_t line = ((n - mm->n_begin) / kColumns * steps + step) * kStepLines;
      const size_t group = step / TargetAct::kGroupSteps;
      for (size_t row = 0; row < mm->m; row += kBlockRows) {
        const size_t rows = smaller(kBlockRows, mm->m - row);
        const uint8_t* act =
            static_cast<const uint8_t*>(mm->act) + row * mm->act_stride + step * kDepth;
        const auto multiply_rows =
            rows > kTileRows ? multiply_block<true, Share> : multiply_block<false, Share>;
        const Share share(stream, row / kBlockRows, row_blocks, line, block_steps, kStepLines);
        multiply_rows(weight, act, mm->act_stride, block_steps, share, flush, c);
        flush = {
            .c = c,
            .factors = factors + group * mm->m + row,
            .weight_scale = weight_scale(matrix, packed) + n,
            .dst = mm->dst + row * mm->dst_stride + (n - mm->n_begin),
            .dst_stride = mm->dst_stride,
            .first = step == 0,
            .last = last,
            .rows = rows,
        };
        int32_t* const swap = c;
        c = c_before;
        c_before = swap;
      }
    }
  }
  flush.advance(kBlockRows);
}

void multiply_amx(const ktk_matmul* mm) {
  const TileRows rows(mm->m);
  if (mm->m <= kBlockRows) {
    multiply_amx_blocks<NearShare>(mm);
  } else {
    multiply_amx_blocks<FarShare>(mm);
  }
}

// For one or two rows the vector kernel reads memory a little faster. Group sums are exact in both
// and meet the same two roundings, so the bits are the same.
struct Variant : AmxVariant {
  using Weight = WeightCodec;
  using Act = TargetAct;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("vnni", 2, multiply_thin<Vnni512, TargetAct, 2>),
      ukernel("amx", SIZE_MAX, multiply_amx, scratch_size),
  };
};

}  // namespace
}  // namespace ktk::amxint8

KTK_EXPORT_VARIANT(amxint8, ktk::amxint8::Variant)

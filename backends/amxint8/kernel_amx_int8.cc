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
#include "amxint8/variant.h"
#include "amxint8/zmm.h"
#include "common/amx.h"

namespace ktk::amxint8 {
namespace {

#ifndef KTK_GROUP
#define KTK_GROUP 512
#endif
using TargetAct = Act<ByteCodes, KTK_GROUP>;

constexpr size_t kTileRows = 16;
constexpr size_t kBlockRows = 2 * kTileRows;
constexpr size_t kBlockValues = kBlockRows * kColumns;

// C of the block that is being multiplied and of the one before it.
size_t scratch_size(const ktk_matrix*, size_t) { return 2 * kBlockValues * sizeof(int32_t); }

// Fetches `lines` cache lines from `next` in `parts` equal parts, one per call of advance().
struct Prefetcher {
  const uint8_t* next;
  size_t lines, parts, debt = 0;

  void advance() {
    for (debt += lines; debt >= parts; debt -= parts, next += 64) {
      _mm_prefetch(next, _MM_HINT_T1);
    }
  }
};

// Turns a stored C into f32: dst (+)= float(C + comp) * act scale, and times the weight scale after
// the last group. It goes row by row between the tile instructions of the block that follows: done
// at once, it would wait for the stores of C and the tiles would wait for it.
struct Flush {
  const int32_t* c;
  const uint8_t* scale;  // of row 0
  size_t comp_offset;    // from scale
  size_t act_stride;
  const float* weight_scale;
  float* dst;
  size_t dst_stride;
  __mmask16 add_to_dst, scale_weight;
  size_t rows = 0;  // left

  void advance(size_t count) {
    for (count = smaller(count, rows), rows -= count; count > 0; --count) {
      const __m512i comp =
          _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(scale + comp_offset));
      const __m512 factor = _mm512_set1_ps(*reinterpret_cast<const float*>(scale));
      for (size_t v = 0; v < kColumns; v += 16) {
        const __m512i sum = _mm512_add_epi32(_mm512_load_si512(c + v), comp);
        const __m512 before = _mm512_maskz_loadu_ps(add_to_dst, dst + v);
        const __m512 x = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), factor, before);
        const __m512 w = _mm512_loadu_ps(weight_scale + v);
        _mm512_storeu_ps(dst + v, _mm512_mask_mul_ps(x, scale_weight, x, w));
      }
      c += kColumns;
      scale += act_stride;
      dst += dst_stride;
    }
  }
};

// C = A x B over `steps` steps for 32 (or 16) rows, stored as rows of 32 columns.
template <bool kBothHalves>
void multiply_block(const uint8_t* weight, const uint8_t* act, size_t act_stride, size_t steps,
                    Prefetcher& prefetcher, Flush& before, int32_t* c) {
  const size_t flush_rows = (kBlockRows + steps - 1) / steps;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kBothHalves) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (size_t i = 0; i < steps; ++i, weight += kStepBytes, act += kDepth) {
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
    prefetcher.advance();
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

void multiply_amx(const ktk_matmul* mm) {
  const ktk_matrix* matrix = mm->matrix;
  const size_t steps = num_steps(matrix), act_stride = mm->act_stride;
  const size_t row_blocks = (mm->m + kBlockRows - 1) / kBlockRows;
  const uint8_t* packed = static_cast<const uint8_t*>(mm->weight);
  int32_t* c = static_cast<int32_t*>(mm->scratch);
  int32_t* c_before = c + kBlockValues;
  Flush flush;
  tile_memory_barrier();
  for (size_t n = mm->n_begin; n < mm->n_end; n += kColumns) {
    const uint8_t* weight = packed + block_offset(matrix, n);
    size_t block_steps;
    for (size_t step = 0; step < steps; step += block_steps, weight += block_steps * kStepBytes) {
      block_steps = smaller(TargetAct::kGroupSteps, steps - step);
      const bool last = step + block_steps == steps;
      const uint8_t* next = weight + block_steps * kStepBytes;
      if (last && n + kColumns >= mm->n_end) {
        next = mm->next ? static_cast<const uint8_t*>(mm->next) : weight;
      }
      Prefetcher prefetcher{next, kStepBytes / 64, row_blocks};
      const size_t scale = TargetAct::scale_offset(matrix) + step / TargetAct::kGroupSteps * 4;
      const uint8_t* act = static_cast<const uint8_t*>(mm->act);
      float* dst = mm->dst + (n - mm->n_begin);
      for (size_t row = 0; row < mm->m; row += kBlockRows) {
        const size_t rows = smaller(kBlockRows, mm->m - row);
        const auto multiply_rows = rows > kTileRows ? multiply_block<true> : multiply_block<false>;
        multiply_rows(weight, act + step * kDepth, act_stride, block_steps, prefetcher, flush, c);
        flush = {
            .c = c,
            .scale = act + scale,
            .comp_offset = 4 * TargetAct::num_groups(matrix),
            .act_stride = act_stride,
            .weight_scale = weight_scale(matrix, packed) + n,
            .dst = dst,
            .dst_stride = mm->dst_stride,
            .add_to_dst = static_cast<__mmask16>(step == 0 ? 0 : -1),
            .scale_weight = static_cast<__mmask16>(last ? -1 : 0),
            .rows = rows,
        };
        int32_t* const swap = c;
        c = c_before;
        c_before = swap;
        act += kBlockRows * act_stride;
        dst += kBlockRows * mm->dst_stride;
      }
    }
  }
  flush.advance(kBlockRows);
}

// One micro-kernel for every m: a row meets the same instructions alone and in a crowd.
constexpr ktk_ukernel kUkernels[] = {
    {
        .struct_size = sizeof(ktk_ukernel),
        .name = "gemm",
        .m_max = SIZE_MAX,
        .scratch_size = scratch_size,
        .run = multiply_amx,
    },
};

}  // namespace
}  // namespace ktk::amxint8

extern "C" {
extern const ktk_variant KTK_VARIANT(amxint8);
constexpr ktk_variant KTK_VARIANT(amxint8) = ktk::amxint8::make_variant<ktk::amxint8::TargetAct>(
    ktk::amxint8::kUkernels, ktk::amxint8::kTileRows, ktk::enter_amx, ktk::leave_amx);
}

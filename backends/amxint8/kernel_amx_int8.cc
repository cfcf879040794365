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
constexpr size_t kScratchBytes = 2 * kTileRows * kColumns * sizeof(int32_t);

size_t scratch_size(const ktk_matrix*, size_t) { return kScratchBytes; }

// Fetches `lines` cache lines from `next` in as many equal parts as advance() is called.
struct Prefetcher {
  const uint8_t* next;
  size_t lines, parts, debt = 0;

  void advance() {
    for (debt += lines; debt >= parts; debt -= parts, next += 64) {
      _mm_prefetch(next, _MM_HINT_T1);
    }
  }
};

// C += A x B over `steps` steps for 32 (or 16) rows; stores C to scratch as rows of 32 columns.
template <bool kBothHalves>
void multiply_block(const uint8_t* weight, const uint8_t* act, size_t act_stride, size_t steps,
                    Prefetcher& prefetcher, int32_t* scratch) {
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
  }
  constexpr size_t kStride = kColumns * sizeof(int32_t);
  _tile_stored(0, scratch, kStride);
  _tile_stored(1, scratch + 16, kStride);
  if constexpr (kBothHalves) {
    _tile_stored(2, scratch + kTileRows * kColumns, kStride);
    _tile_stored(3, scratch + kTileRows * kColumns + 16, kStride);
  }
}

struct Flush {
  const uint8_t* act;  // row 0
  size_t act_stride;
  size_t scale_offset, comp_offset;  // of the group
  const float* weight_scale;
  float* dst;
  size_t dst_stride;
};

// dst (+)= float(C + comp) * act scale, for `rows` rows; after the last group times weight scale.
template <bool kFirst, bool kLast>
void flush_block(const Flush& f, const int32_t* scratch, size_t rows) {
  for (size_t r = 0; r < rows; ++r) {
    const uint8_t* act = f.act + r * f.act_stride;
    const __m512i comp = _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(act + f.comp_offset));
    const __m512 scale = _mm512_set1_ps(*reinterpret_cast<const float*>(act + f.scale_offset));
    for (size_t v = 0; v < kColumns; v += 16) {
      float* dst = f.dst + r * f.dst_stride + v;
      const __m512i sum = _mm512_add_epi32(_mm512_load_si512(scratch + r * kColumns + v), comp);
      const __m512 before = kFirst ? _mm512_setzero_ps() : _mm512_loadu_ps(dst);
      __m512 x = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, before);
      if (kLast) x = _mm512_mul_ps(x, _mm512_loadu_ps(f.weight_scale + v));
      _mm512_storeu_ps(dst, x);
    }
  }
}

void multiply_amx(const ktk_matmul* mm) {
  const ktk_matrix* matrix = mm->matrix;
  const size_t steps = num_steps(matrix);
  const size_t row_blocks = (mm->m + 2 * kTileRows - 1) / (2 * kTileRows);
  const uint8_t* packed = static_cast<const uint8_t*>(mm->weight);
  int32_t* scratch = static_cast<int32_t*>(mm->scratch);
  Flush flush;
  flush.act_stride = mm->act_stride;
  flush.dst_stride = mm->dst_stride;
  tile_memory_barrier();
  for (size_t n = mm->n_begin; n < mm->n_end; n += kColumns) {
    const uint8_t* weight = packed + block_offset(matrix, n);
    flush.weight_scale = weight_scale(matrix, packed) + n;
    size_t block_steps;
    for (size_t step = 0; step < steps; step += block_steps, weight += block_steps * kStepBytes) {
      block_steps = smaller(TargetAct::kGroupSteps, steps - step);
      const bool first = step == 0, last = step + block_steps == steps;
      const uint8_t* next = weight + block_steps * kStepBytes;
      if (last && n + kColumns >= mm->n_end) {
        next = mm->next ? static_cast<const uint8_t*>(mm->next) : weight;
      }
      Prefetcher prefetcher{next, kStepBytes / 64, row_blocks};
      const size_t group = step / TargetAct::kGroupSteps;
      flush.scale_offset = TargetAct::scale_offset(matrix) + 4 * group;
      flush.comp_offset = TargetAct::comp_offset(matrix) + 4 * group;
      for (size_t row = 0; row < mm->m; row += 2 * kTileRows) {
        const size_t rows = smaller(2 * kTileRows, mm->m - row);
        flush.act = static_cast<const uint8_t*>(mm->act) + row * mm->act_stride;
        flush.dst = mm->dst + row * mm->dst_stride + (n - mm->n_begin);
        const auto multiply_rows = rows > kTileRows ? multiply_block<true> : multiply_block<false>;
        multiply_rows(weight, flush.act + step * kDepth, mm->act_stride, block_steps, prefetcher,
                      scratch);
        const auto flush_rows = first
                                    ? (last ? flush_block<true, true> : flush_block<true, false>)
                                    : (last ? flush_block<false, true> : flush_block<false, false>);
        flush_rows(flush, scratch, rows);
      }
    }
  }
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

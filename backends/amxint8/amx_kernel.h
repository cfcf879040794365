// AMX: 2 x 2 tiles of 16 x 16 sums (gemm/amx.h), one group of activations at a time. C tiles can
// only leave through memory: they are stored to scratch and turned into f32 there.
#pragma once

#include "amxint8/act.h"
#include "amxint8/kernel.h"
#include "gemm/amx.h"
#include "simd/zmm.h"

namespace ktk::amxint8 {
namespace {

using AmxAct = ActBytes<512>;

constexpr size_t kTileRows = 2 * kAmxRows;
constexpr size_t kTileSums = kTileRows * kNr;

// Scale and comp of a row's group, gathered: in the rows themselves they are a cache line each, and
// every block would fetch 32 of them.
struct ActGroup {
  float scale;
  int32_t comp;
};

// Sums of the tile that is being multiplied and of the one before it, then groups of all rows.
size_t scratch_size(const ktk_matrix* matrix, size_t m) {
  return 2 * kTileSums * sizeof(int32_t) +
         round_up(m * AmxAct::num_groups(matrix) * sizeof(ActGroup), kLine);
}

// Stored sums on their way into dst. They go row by row, between the tile instructions of what is
// multiplied next: done at once, the rows would wait for the stores of C, and tiles for the rows.
struct StoredSums {
  const int32_t* sums;
  const ActGroup* act;
  GroupEnd end;
  size_t rows;  // left

  void finish(size_t count) {
    count = smaller(count, rows);
    rows -= count;
    for (; count > 0; --count, ++act, sums += kNr, end.next_row()) {
      const __m512i comp = _mm512_set1_epi32(act->comp);
      const __m512 scale = _mm512_set1_ps(act->scale);
#pragma GCC unroll 2
      for (size_t n = 0; n < kNr; n += kTileCols) {
        end.store<Zmm>(n, _mm512_add_epi32(_mm512_load_si512(sums + n), comp), scale);
      }
    }
  }
};

class AmxKernel : public KernelBase<AmxAct> {
 public:
  static constexpr size_t kMr = kTileRows;
  static constexpr size_t kRowStep = kAmxRows;
  static constexpr size_t kLineProducts = 1;

  explicit AmxKernel(const ktk_matmul* mm)
      : KernelBase(mm), mm_(mm), sums_(static_cast<int32_t*>(mm->scratch)) {
    ActGroup* act = reinterpret_cast<ActGroup*>(sums_ + 2 * kTileSums);
    act_ = act;
    const char* row = static_cast<const char*>(mm->act);
    for (size_t i = 0; i < mm->m; ++i, row += mm->act_stride) {
      const float* scale = reinterpret_cast<const float*>(row + AmxAct::scale_offset(matrix()));
      const int32_t* comp = reinterpret_cast<const int32_t*>(row + AmxAct::comp_offset(matrix()));
      for (size_t group = 0; group < slabs(); ++group) {
        act[group * mm->m + i] = {scale[group], comp[group]};
      }
    }
  }
  ~AmxKernel() { before_.finish(kTileRows); }
  AmxKernel(const AmxKernel&) = delete;
  AmxKernel& operator=(const AmxKernel&) = delete;

  static size_t passes(size_t) { return 1; }

  void tile(const Tile& t) {
    BulkFetch fetch = t.bulk_fetch;
    const size_t row =
        static_cast<size_t>(t.act - static_cast<const char*>(mm_->act)) / t.act_stride;
    for (size_t group = t.begin; group < t.end; ++group) {
      if (t.rows > kAmxRows) {
        multiply_group<true>(t, group, fetch);
      } else {
        multiply_group<false>(t, group, fetch);
      }
      before_ = {
          .sums = sums_,
          .act = act_ + group * mm_->m + row,
          .end = {t.dst, t.dst_stride, scales_of(t.block), group == 0, group + 1 == slabs()},
          .rows = t.rows,
      };
      sums_ = other_sums();
    }
  }

 private:
  template <bool kBothHalves>
  void multiply_group(const Tile& t, size_t group, BulkFetch& fetch) {
    const size_t steps = num_steps_of(group), rows_per_step = ceil_div(kTileRows, steps);
    const char* act = t.act + group * AmxAct::kGroup;
    const char* weight = t.block + offset(group);
    StoredSums before = before_;
    zero_sums<kBothHalves>();
    for (size_t step = 0; step < steps; ++step, act += kStepDepth, weight += kStepBytes) {
      fetch.next(kStepLines);
      add_tiles<TilesInt8, kBothHalves>(act, t.act_stride, weight, kTileBytes);
      before.finish(rows_per_step);
    }
    store_sums<kBothHalves>(sums_, kNr);
  }

  int32_t* other_sums() const {
    int32_t* const first = static_cast<int32_t*>(mm_->scratch);
    return sums_ == first ? first + kTileSums : first;
  }

  const ktk_matmul* mm_;
  const ActGroup* act_;  // [groups][m]
  int32_t* sums_;        // of the tile that is multiplied
  StoredSums before_ = {nullptr, nullptr, {nullptr, 0, nullptr, true, true}, 0};
};

}  // namespace
}  // namespace ktk::amxint8

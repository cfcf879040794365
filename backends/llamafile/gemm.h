// The product for any number of rows, with C in memory: tiles are as high as registers for sums
// allow. Weights are read in the order of memory if one tile is all there is; several pass over a
// super-block that stays in L1.
#pragma once

#include "llamafile/gemm_tile.h"
#include "llamafile/kernel.h"

namespace ktk::llamafile {
namespace {

template <Kind kKind>
class Gemm : public KernelBase {
  static constexpr int kBits = kKind.bits;
  static constexpr Scaling kScaling = kKind.scaling;

 public:
  static constexpr size_t kMr = num_groups(kScaling) == 2 ? Dot::kMaxHalfRows : Dot::kMaxRows;
  static constexpr size_t kLineProducts = line_products(kBits);
  static constexpr size_t kRunSlabs = 1;

  explicit Gemm(const ktk_matmul* mm)
      : KernelBase(mm), table_(type()), dst_stride_(mm->dst_stride), rows_(mm->m) {}

  static size_t passes(size_t) { return kNr / kTileNr; }
  void begin_block(const char*, float* dst) const { clear_rows(dst, dst_stride_, rows_); }
  void prepare_run(const Run& run) {
    const size_t count = sub_blocks(run.begin, run.end);
    const Header& at = layout_.header_of(count);
    const uint8_t* const super_block = this->super_block(run, run.begin);
    load_scales(type(), at, super_block, count, scales_);
    if constexpr (kKind.has_shifts) {
      write_shifts<kKind>(Shifts(table_, super_block, at), count, shifts_);
    }
  }

  void tile(const Tile& t) {
    const size_t count = sub_blocks(t.begin, t.end), at = t.begin * kSubBlocks;
    const uint8_t* const super_block = this->super_block(t, t.begin);
    const uint8_t* const codes = this->codes(super_block, count);
    Fetch fetch = t.fetch;
    for (const uint8_t* line = super_block; line < codes; line += kLine) fetch.next();
    constexpr bool kDefersD = defers_d(kScaling);
    if constexpr (kDefersD) clear_rows(sums_, kNr, t.rows);
    for (size_t n = 0; n < kNr; n += kTileNr) {
      const TileOperands operands = {
          .table = &table_,
          .codes = codes + 4 * n,
          .gap = 0,
          .scales = scales_ + n,
          .shifts = kKind.has_shifts ? shifts_ + 4 * n : nullptr,
          .d = nullptr,
          .sub_blocks = count,
          .lines_to_fetch = 0,
          .act = act(t, at),
          .act_groups = act_groups(t, at),
          .act_stride = t.act_stride,
      };
      kTiles[t.rows](operands, (kDefersD ? sums_ : t.dst) + n, kDefersD ? kNr : t.dst_stride, false,
                     fetch);
    }
    if constexpr (kDefersD) {
      add_deferred(type(), super_block, sums_, t.rows, t.dst, t.dst_stride);
    }
  }

 private:
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &gemm_tile<kKind, kRows>; });

  const CodeTable table_;
  const size_t dst_stride_, rows_;
  alignas(kLine) float scales_[kSubBlocks * num_scales(kScaling)];
  alignas(kLine) uint8_t shifts_[kKind.has_shifts ? kSubBlocks * shift_bytes(kScaling) : 1];
  alignas(kLine) float sums_[defers_d(kScaling) ? kMr * kNr : 1];
};

inline void multiply(const ktk_matmul* mm) {
  static constexpr auto kGemm =
      type_table([]<size_t kType> { return &gemm<Gemm<kind_of(kTypes[kType])>>; });
  kGemm[block_type(mm->matrix->format.element)](mm);
}

}  // namespace
}  // namespace ktk::llamafile

// The product for more than a dozen rows on CPUs where everything that vectors of 512 bits do
// shares two ports with vpdpbusd (Intel): each code is decoded once. A run is one super-block,
// whose operands stay in L1 while all tiles of rows pass them. Codes of eight bits are operands as
// they are.
//
//   instructions on these ports, for a register of sums and two sub-blocks (16 products)
//
//     k32           6   convert, act scale, scale; twice                       16 / 22 = 0.73
//     k32MinAct64   7   convert, scale; twice; act scale, two minima           16 / 23 = 0.70
//
//   scratch   | scales of a super-block | operands |
#pragma once

#include "llamafile/decoded_tile.h"
#include "llamafile/kernel.h"

namespace ktk::llamafile {
namespace {

template <Kind kKind>
class GemmDecoded : public KernelBase {
  static constexpr int kBits = kKind.bits;
  static constexpr Scaling kScaling = kKind.scaling;
  static constexpr bool kDecodes = kBits != 8;
  static_assert(kDecodes || !has_min(kScaling));
  // Whether a tile keeps a t for every sum.
  static constexpr bool kKeepsT = num_groups(kScaling) * act_span(kScaling) > 1;

 public:
  static constexpr size_t kMr = kKeepsT ? Dot::kMaxHalfRowsDecoded : Dot::kMaxRowsDecoded;
  static constexpr size_t kLineProducts = line_products(kBits);
  static constexpr size_t kRunSlabs = 1;
  static constexpr bool kFetchesNextRun = true;

  explicit GemmDecoded(const ktk_matmul* mm)
      : KernelBase(mm),
        table_(type(), kDecodedOffset<kScaling>),
        dst_stride_(mm->dst_stride),
        rows_(mm->m),
        scales_(static_cast<float*>(mm->scratch)),
        operands_(reinterpret_cast<uint8_t*>(scales_ + kScales)) {}

  static size_t scratch_size(const ktk_matrix*, size_t) {
    return kScales * sizeof(float) + (kDecodes ? kSubBlocks * kOperandBytes : 0);
  }

  static size_t passes(size_t) { return 1; }
  void begin_block(const char*, float* dst) const { clear_rows(dst, dst_stride_, rows_); }
  void prepare_run(const Run& run) const {
    const size_t count = sub_blocks(run.begin, run.end);
    const uint8_t* const super_block = this->super_block(run, run.begin);
    const Header& at = layout_.header_of(count);
    load_scales(type(), at, super_block, count, scales_);
    if constexpr (kDecodes) {
      write_operands<kKind, kDecodedOffset<kScaling>, has_min(kScaling)>(table_, super_block, at,
                                                                         count, operands_);
    }
  }

  void tile(const Tile& t) const {
    const size_t count = sub_blocks(t.begin, t.end), at = t.begin * kSubBlocks;
    const uint8_t* const super_block = this->super_block(t, t.begin);
    const DecodedOperands operands = {
        .operands = kDecodes ? operands_ : codes(super_block, count),
        .scales = scales_,
        .sub_blocks = count,
        .act = act(t, at),
        .act_groups = act_groups(t, at),
        .act_stride = t.act_stride,
        .lines_to_fetch = lines_to_fetch(t),
    };
    Fetch fetch = t.fetch.of_lines();
    if constexpr (defers_d(kScaling)) {
      alignas(kLine) float sums[kMr * kNr];
      clear_rows(sums, kNr, t.rows);
      kTiles[t.rows](operands, sums, kNr, fetch);
      add_deferred(type(), super_block, sums, t.rows, t.dst, t.dst_stride);
    } else {
      kTiles[t.rows](operands, t.dst, t.dst_stride, fetch);
    }
  }

 private:
  static constexpr size_t kScales = kSubBlocks * num_scales(kScaling);
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &decoded_tile<kScaling, kRows>; });

  const CodeTable table_;
  const size_t dst_stride_, rows_;
  float* const scales_;
  uint8_t* const operands_;
};

}  // namespace
}  // namespace ktk::llamafile

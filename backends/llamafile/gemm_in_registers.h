// The product for more than a dozen rows: tiles that keep C in registers for up to 2048 of k,
// because loads and stores of dst at the end of every sub-block take as long as its arithmetic.
// Such tiles are small, but types can still be decoded as they are read. Codes of types that defer
// d are expanded to int8 in scratch first.
//
//   scratch   | scales of up to eight super-blocks | deferred d | operands |
//             | the same                           | shifts of groups      |      where d is not
#pragma once

#include "llamafile/gemm_tile.h"
#include "llamafile/kernel.h"

namespace ktk::llamafile {
namespace {

template <Kind kKind>
class GemmInRegisters : public KernelBase {
  static constexpr Scaling kScaling = kKind.scaling;
  static constexpr bool kExpands = defers_d(kScaling);
  // What tiles read.
  static constexpr Kind kRead = kExpands ? Kind{8, kScaling, false, false} : kKind;
  static constexpr int kBits = kRead.bits;
  // Registers for each row: a span of two sub-blocks takes as many as two groups. But decoding five
  // bits is so much that it has to serve six rows, even if gcc then keeps the first t in memory.
  static constexpr bool kIsLarge =
      num_groups(kScaling) == 2 || (act_span(kScaling) == 2 && kBits <= 4);

 public:
  static constexpr size_t kMr = kIsLarge ? Dot::kMaxHalfRowsInRegisters : Dot::kMaxRowsInRegisters;
  static constexpr size_t kLineProducts = line_products(kKind.bits);
  // Every tile takes time to begin and to end, so runs are long: tiles read codes from L2 as fast
  // as from L1.
  static constexpr size_t kRunSlabs = 8;
  static constexpr bool kFetchesNextRun = true;

  explicit GemmInRegisters(const ktk_matmul* mm)
      : KernelBase(mm),
        table_(type()),
        scales_(static_cast<float*>(mm->scratch)),
        d_(scales_ + kScaleFloats),
        operands_(reinterpret_cast<uint8_t*>(d_ + (kExpands ? kRunSlabs * kNr : 0))) {}

  static size_t scratch_size(const ktk_matrix*, size_t) {
    constexpr size_t kOperands = kRunSlabs * (kNr * sizeof(float) + kSubBlocks * kOperandBytes);
    return kScaleFloats * sizeof(float) + (kExpands ? kOperands : kRead.has_shifts ? kShifts : 0);
  }

  static size_t passes(size_t) { return kNr / kTileNr; }
  void prepare_run(const Run& run) {
    for_each_super_block(run, [&](const uint8_t* super_block, size_t count, size_t done) {
      load_scales(type(), layout_.header_of(count), super_block, count,
                  scales_ + done * num_scales(kScaling));
      const Header& at = layout_.header_of(count);
      if constexpr (kExpands) {
        load_deferred_ds(type(), super_block, d_ + done / kSubBlocks * kNr);
        write_operands<kKind, kOffset>(table_, super_block, at, count,
                                       operands_ + done * kOperandBytes);
      } else if constexpr (kRead.has_shifts) {
        write_shifts<kKind>(Shifts(table_, super_block, at), count,
                            operands_ + done * shift_bytes(kScaling));
      }
    });
  }

  void tile(const Tile& t) const {
    const size_t count = sub_blocks(t.begin, t.end);
    const size_t lines = ceil_div(lines_to_fetch(t), passes(t.rows));
    Fetch fetch = t.fetch.of_lines();
    // The header of a shorter super-block is shorter, so that it is not read in one go with others.
    const size_t whole = count / kSubBlocks * kSubBlocks;
    if (whole > 0) add(t, 0, whole, lines, fetch);
    if (whole < count) add(t, whole, count - whole, lines, fetch);
  }

 private:
  // Sub-blocks from number `first` of the run on.
  void add(const Tile& t, size_t first, size_t count, size_t lines, Fetch& fetch) const {
    const size_t slab = t.begin + first / kSubBlocks, at = slab * kSubBlocks;
    const uint8_t* from = kExpands ? operands_ + first * kOperandBytes
                                   : codes(super_block(t, slab), smaller(count, kSubBlocks));
    for (size_t n = 0; n < kNr; n += kTileNr) {
      kTiles[t.rows](
          {
              .table = &table_,
              .codes = from + 4 * n,
              .gap = kExpands ? 0 : layout_.whole.end,
              .scales = scales_ + first * num_scales(kScaling) + n,
              .shifts = operands_ + first * shift_bytes(kScaling) + 4 * n,
              .d = d_ + first / kSubBlocks * kNr + n,
              .sub_blocks = count,
              .lines_to_fetch = lines,
              .act = act(t, at),
              .act_groups = act_groups(t, at),
              .act_stride = t.act_stride,
          },
          t.dst + n, t.dst_stride, at == 0, fetch);
    }
  }

  static constexpr size_t kShifts = kRunSlabs * kSubBlocks * shift_bytes(kScaling);
  static constexpr size_t kScaleFloats = kRunSlabs * kSubBlocks * num_scales(kScaling);
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &gemm_tile_in_registers<kRead, kRows>; });

  const CodeTable table_;
  float *const scales_, *const d_;
  uint8_t* const operands_;  // or shifts
};

}  // namespace
}  // namespace ktk::llamafile

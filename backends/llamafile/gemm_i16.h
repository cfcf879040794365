// The product of more than twenty rows for types with a sub for every 16 values, which defer d: the
// two sums of a sub-block lie in one 32-bit lane as a pair of int16.
//
//   why: instructions on the ports of vpdpbusd after the products of one sub-block
//
//     two int32 sums     convert, multiply with sub 0 | convert, multiply with sub 1 and add | ...
//     a pair of int16    vpmaddwd with (sub 0, sub 1):     sum 0 * sub 0 + sum 1 * sub 1
//
//   the second sub-block of a span adds its pair to that of the first (vpdpwssd), so that a span
//   takes three instructions where sums apart take five
//
//   how: a dword sums the second half of a sub-block, moves up by 16 bits, and sums the first half
//   below it
//
//     | sum 1        | sum 0 + 2^15 |     which is flipped to sum 0 in the end
//
// Sums must fit 16 bits. Whether they do is known for whole tiles from the norms of their weights
// and activations (i16_run.h); tiles that may not, which are few, keep sums apart (gemm_tile.h).
// Integers up to 2^24 are exact in f32 too, so results are the same bits.
//
//   scratch   | operands and scales of a run (i16_run.h) | norms of tiles of rows |
#pragma once

#include "llamafile/gemm_tile.h"
#include "llamafile/i16_run.h"
#include "llamafile/products.h"

namespace ktk::llamafile {
namespace {

struct I16Operands {
  const uint8_t* operands;  // first sub-block
  const int32_t* scales;    // the same
  size_t super_blocks;
  const char *act, *act_groups;  // first row, first sub-block
  size_t act_stride;
  size_t lines_to_fetch;  // for every sub-block
};

// Pairs of sums of a sub-block.
template <int kRows>
[[gnu::always_inline]] inline void sum_pairs(Dot::Int (&sums)[kRows][kVectors],
                                             const uint8_t* operands, const RowPointers<kRows>& act,
                                             const char* act_groups) {
  using E = Epilogue<Scaling::k16Act64>;
  const Dot::Int sign = Dot::set1_int(0x8000);
  for_each_row<kRows>(act_groups, act.stride,
                      [&](int r, const ActGroup& group) __attribute__((always_inline)) {
#pragma GCC unroll 2
                        for (int v = 0; v < kVectors; ++v) {
                          sums[r][v] = E::begin<kOffset>(group, 1);
                          pin(sums[r][v]);
                        }
                      });
  add_steps<kSteps / 2, kSteps / 2, kRows>(sums, operands, act);
  for_each_row<kRows>(act_groups, act.stride,
                      [&](int r, const ActGroup& group) __attribute__((always_inline)) {
                        const Dot::Int start = Dot::add(E::begin<kOffset>(group, 0), sign);
#pragma GCC unroll 2
                        for (int v = 0; v < kVectors; ++v) {
                          pin(sums[r][v]);
                          sums[r][v] = Dot::add(Dot::shift_left_int<16>(sums[r][v]), start);
                          pin(sums[r][v]);
                        }
                      });
  add_steps<0, kSteps / 2, kRows>(sums, operands, act);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      pin(sums[r][v]);
      sums[r][v] = _mm512_xor_si512(sums[r][v], sign);
    }
  }
}

// The sum of a super-block stays in registers, dst is read and written at its end.
template <int kRows>
void gemm_i16_tile(const I16Operands& from, float* dst, size_t dst_stride, bool is_first,
                   Fetch& fetches) {
  using Int = Dot::Int;
  using Float = Dot::Float;
  RowPointers<kRows> act(from.act, from.act_stride);
  const uint8_t* operands = from.operands;
  const char* act_groups = from.act_groups;
  const int32_t* scales = from.scales;
  const size_t super_blocks = from.super_blocks, lines = from.lines_to_fetch;
  Fetch fetch = fetches;
  for (size_t i = 0; i < super_blocks; ++i) {
    Float total[kRows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        total[r][v] = Dot::set1(0);
        pin(total[r][v]);
      }
    }
#pragma GCC unroll 1
    for (size_t span = 0; span < kSubBlocks / 2; ++span) {
      Int first[kRows][kVectors];
#pragma GCC unroll 2
      for (int of_span = 0; of_span < 2; ++of_span) {
        Int sums[kRows][kVectors];
        fetch.next_lines(lines);
        sum_pairs<kRows>(sums, operands, act, act_groups);
        act.advance(kSubBlock);
        act.forget_rows();
        operands += kOperandBytes;
        Int sub[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sub[v] = Dot::load_bytes(scales + v * Dot::kLanes);
        for_each_row<kRows>(act_groups, act.stride,
                            [&](int r, const ActGroup& group) __attribute__((always_inline)) {
#pragma GCC unroll 2
                              for (int v = 0; v < kVectors; ++v) {
                                if (of_span == 0) {
                                  first[r][v] = _mm512_madd_epi16(sums[r][v], sub[v]);
                                  pin(first[r][v]);
                                  continue;
                                }
                                pin(first[r][v]);
                                pin(total[r][v]);
                                const Int t = _mm512_dpwssd_epi32(first[r][v], sums[r][v], sub[v]);
                                Epilogue<Scaling::k16Act64>::finish(Dot::convert(t), group,
                                                                    total[r][v]);
                              }
                            });
        act_groups += sizeof(ActGroup);
        scales += kNr;
      }
    }
    add_deferred(total, reinterpret_cast<const float*>(scales), is_first && i == 0, dst,
                 dst_stride);
    scales += kNr;
  }
  fetches = fetch;
}

template <Kind kKind>
class GemmI16 : public KernelBase {
  static constexpr Kind kDecoded = {8, Scaling::k16Act64, false, false};

 public:
  static constexpr size_t kMr = Dot::kMaxHalfRowsInRegisters;
  static constexpr size_t kLineProducts = line_products(kKind.bits);
  static constexpr size_t kRunSlabs = kI16Slabs;
  static constexpr bool kFetchesNextRun = true;

  explicit GemmI16(const ktk_matmul* mm)
      : KernelBase(mm),
        table_(type()),
        operands_(static_cast<uint8_t*>(mm->scratch)),
        scales_(reinterpret_cast<int32_t*>(operands_ + kI16Operands)),
        norms_(reinterpret_cast<Norms*>(operands_ + kI16Scratch)) {
    write_tile_norms(mm, ceil_div(mm->m, kMr), slabs(), norms_);
  }

  static size_t scratch_size(const ktk_matrix* matrix, size_t m) {
    return kI16Scratch + tile_norms_size(matrix, ceil_div(m, kMr));
  }

  static size_t passes(size_t) { return 1; }

  // Super-blocks are whole: types with d per 256 values have no others.
  void prepare_run(const Run& run) {
    for_each_super_block(run, [&](const uint8_t* super_block, size_t count, size_t done) {
      const size_t i = done / kSubBlocks;
      limits_[i] = write_i16_operands<kKind>(table_, super_block, layout_.header_of(count),
                                             operands_ + done * kOperandBytes);
      write_i16_scales(type(), layout_.whole, super_block, scales_ + i * kI16Scales);
    });
    tile_norms_ = norms_ + run.begin;
  }

  // Called for all tiles of rows in their order.
  void tile(const Tile& t) {
    const size_t lines = lines_to_fetch(t);
    Fetch fetch = t.fetch.of_lines();
    for (size_t slab = t.begin, end; slab < t.end; slab = end) {
      for (end = slab;
           end < t.end && sums_fit_i16(tile_norms_[end - t.begin], limits_[end - t.begin]);) {
        ++end;
      }
      if (end > slab) {
        const size_t at = slab * kSubBlocks, i = slab - t.begin;
        kTiles[t.rows](
            {
                .operands = operands_ + i * kSubBlocks * kOperandBytes,
                .scales = scales_ + i * kI16Scales,
                .super_blocks = end - slab,
                .act = act(t, at),
                .act_groups = act_groups(t, at),
                .act_stride = t.act_stride,
                .lines_to_fetch = lines,
            },
            t.dst, t.dst_stride, slab == 0, fetch);
      } else {
        multiply_apart(t, slab);
        fetch.skip(lines * kSubBlocks);
        end = slab + 1;
      }
    }
    tile_norms_ += slabs();
  }

 private:
  // A super-block whose sums are too large, in a tile that keeps both sums of a sub-block apart.
  void multiply_apart(const Tile& t, size_t slab) const {
    static constexpr auto kApart =
        row_table<kMr>([]<size_t kRows> { return &gemm_tile_in_registers<kDecoded, kRows>; });
    alignas(kLine) float scales[kSubBlocks * num_scales(Scaling::k16Act64)], d[kNr];
    const uint8_t* const super_block = this->super_block(t, slab);
    load_scales(type(), layout_.whole, super_block, kSubBlocks, scales);
    load_deferred_ds(type(), super_block, d);
    Fetch none = {reinterpret_cast<const char*>(super_block), 0, Fetch::kL1};
    kApart[t.rows](
        {
            .table = &table_,
            .codes = operands_ + (slab - t.begin) * kSubBlocks * kOperandBytes,
            .gap = 0,
            .scales = scales,
            .shifts = nullptr,
            .d = d,
            .sub_blocks = kSubBlocks,
            .lines_to_fetch = 0,
            .act = act(t, slab * kSubBlocks),
            .act_groups = act_groups(t, slab * kSubBlocks),
            .act_stride = t.act_stride,
        },
        t.dst, t.dst_stride, slab == 0, none);
  }

  static_assert(kTileNr == llamafile::kNr);
  static_assert(TileCodes<kDecoded>::kOffset == kOffset);
  static constexpr auto kTiles = row_table<kMr>([]<size_t kRows> { return &gemm_i16_tile<kRows>; });

  const CodeTable table_;
  uint8_t* const operands_;
  int32_t* const scales_;
  Norms* const norms_;
  Norms limits_[kRunSlabs];
  const Norms* tile_norms_ = nullptr;  // of the next tile, first super-block of the run
};

}  // namespace
}  // namespace ktk::llamafile

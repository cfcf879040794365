// The same as gemm_decoded.h for types whose sums of 16 products fit 16 bits as a rule (i16_run.h).
//
//   a pair of int16 (gemm_i16.h)   shift, add, flip, multiply: four instructions for a sub-block
//   here                           each sum is multiplied by itself, vpdpwssd with (sub, 0): two
//
// and two more, convert and act scale, for a span of two sub-blocks: 16 / 22 = 0.73 are products.
// Integers up to 2^24 are exact in f32 too, so results are the bits of any other tile.
//
//   scratch   | operands | subs of a super-block | norms of tiles of rows |
#pragma once

#include "llamafile/gemm_decoded.h"
#include "llamafile/i16_run.h"

namespace ktk::llamafile {
namespace {

// Adds a super-block to C in memory, d left out. `subs`: 32 words for each group, in dwords.
template <int kRows>
void decoded_i16_tile(const DecodedOperands& from, const int32_t* subs, float* c, Fetch& fetches) {
  using E = Epilogue<Scaling::k16Act64>;
  using Int = Dot::Int;
  RowPointers<kRows> act(from.act, from.act_stride);
  const uint8_t* operands = from.operands;
  const char* act_groups = from.act_groups;
  Fetch fetch = fetches;
#pragma GCC unroll 1
  for (size_t left = kSubBlocks; left > 0; left -= E::kSpan) {
    Int t[kRows][kVectors];
    unroll<E::kSpan>([&]<size_t kOfSpan>() __attribute__((always_inline)) {
      fetch.next_lines(from.lines_to_fetch);
      unroll<E::kGroups>([&]<size_t kGroup>() __attribute__((always_inline)) {
        Int sums[kRows][kVectors];
        for_each_row<kRows>(act_groups, act.stride,
                            [&](int r, const ActGroup& group) __attribute__((always_inline)) {
#pragma GCC unroll 2
                              for (int v = 0; v < kVectors; ++v) {
                                sums[r][v] = E::begin<kOffset>(group, kGroup);
                                pin(sums[r][v]);
                              }
                            });
        add_steps<kGroup * kSteps / 2, kSteps / 2, kRows>(sums, operands, act);
        Int sub[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sub[v] = Dot::load_bytes(subs + v * Dot::kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) {
            pin(sums[r][v]);
            // Not the intrinsic of vpdpwssd: gcc 12 moves t to another register.
            if constexpr (kOfSpan == 0 && kGroup == 0) {
              t[r][v] = _mm512_madd_epi16(sums[r][v], sub[v]);
            } else {
              asm("vpdpwssd %2, %1, %0" : "+v"(t[r][v]) : "v"(sums[r][v]), "v"(sub[v]));
            }
          }
        }
        subs += kNr;
      });
      act.advance(kSubBlock);
      act.forget_rows();
      operands += kOperandBytes;
      act_groups += sizeof(ActGroup);
    });
    float* to = hidden(c);
    for_each_row<kRows>(act_groups - sizeof(ActGroup), act.stride,
                        [&](int r, const ActGroup& group) __attribute__((always_inline)) {
#pragma GCC unroll 2
                          for (int v = 0; v < kVectors; ++v, to += Dot::kLanes) {
                            Dot::Float sum = Dot::load(to);
                            E::finish(Dot::convert(t[r][v]), group, sum);
                            Dot::store(to, sum);
                          }
                        });
  }
  fetches = fetch;
}

template <Kind kKind>
class GemmDecodedI16 : public KernelBase {
  static constexpr Scaling kScaling = Scaling::k16Act64;
  static constexpr size_t kSubs = kSubBlocks * num_groups(kScaling) * kNr;

 public:
  static constexpr size_t kMr = Dot::kMaxHalfRowsDecoded;
  static constexpr size_t kLineProducts = line_products(kKind.bits);
  static constexpr size_t kRunSlabs = 1;
  static constexpr bool kFetchesNextRun = true;

  explicit GemmDecodedI16(const ktk_matmul* mm)
      : KernelBase(mm),
        table_(type()),
        dst_stride_(mm->dst_stride),
        rows_(mm->m),
        operands_(static_cast<uint8_t*>(mm->scratch)),
        subs_(reinterpret_cast<int32_t*>(operands_ + kSubBlocks * kOperandBytes)),
        norms_(reinterpret_cast<Norms*>(subs_ + kSubs)) {
    write_tile_norms(mm, ceil_div(mm->m, kMr), slabs(), norms_);
  }

  static size_t scratch_size(const ktk_matrix* matrix, size_t m) {
    return kSubBlocks * kOperandBytes + kSubs * sizeof(int32_t) +
           tile_norms_size(matrix, ceil_div(m, kMr));
  }

  static size_t passes(size_t) { return 1; }
  void begin_block(const char*, float* dst) const { clear_rows(dst, dst_stride_, rows_); }

  // Super-blocks are whole: types with d per 256 values have no others.
  void prepare_run(const Run& run) {
    const uint8_t* const super_block = this->super_block(run, run.begin);
    limits_ = write_i16_operands<kKind>(table_, super_block, layout_.whole, operands_);
    const uint8_t* const sub = super_block + layout_.whole.sub;
    for (size_t i = 0; i < kSubs; i += Dot::kLanes) {
      const Dot::Int words = _mm512_cvtepi8_epi32(load_bytes(sub + i));
      Dot::store_bytes(subs_ + i, Dot::bit_and(words, Dot::set1_int(0xffff)));
    }
    for (size_t n = 0; n < kNr; n += Dot::kLanes) {
      Dot::store(d_ + n, load_d(type(), super_block + n * d_bytes(type())));
    }
    tile_norms_ = norms_ + run.begin;
  }

  // Called for all tiles of rows in their order.
  void tile(const Tile& t) {
    const uint8_t* const super_block = this->super_block(t, t.begin);
    const size_t at = t.begin * kSubBlocks;
    DecodedOperands operands = {
        .operands = operands_,
        .scales = nullptr,
        .sub_blocks = kSubBlocks,
        .act = act(t, at),
        .act_groups = act_groups(t, at),
        .act_stride = t.act_stride,
        .lines_to_fetch = lines_to_fetch(t),
    };
    Fetch fetch = t.fetch.of_lines();
    alignas(kLine) float sums[kMr * kNr];
    clear_rows(sums, kNr, t.rows);
    if (sums_fit_i16(*tile_norms_, limits_)) {
      kTiles[t.rows](operands, subs_, sums, fetch);
      add_deferred(d_, sums, t.rows, t.dst, t.dst_stride);
    } else {
      alignas(kLine) float scales[kSubBlocks * num_scales(kScaling)];
      load_scales(type(), layout_.whole, super_block, kSubBlocks, scales);
      operands.scales = scales;
      kApart[t.rows](operands, sums, kNr, fetch);
      add_deferred(type(), super_block, sums, t.rows, t.dst, t.dst_stride);
    }
    tile_norms_ += slabs();
  }

 private:
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &decoded_i16_tile<kRows>; });
  static constexpr auto kApart =
      row_table<kMr>([]<size_t kRows> { return &decoded_tile<kScaling, kRows>; });

  const CodeTable table_;
  const size_t dst_stride_, rows_;
  uint8_t* const operands_;
  int32_t* const subs_;
  Norms* const norms_;
  alignas(kLine) float d_[kNr];
  Norms limits_;
  const Norms* tile_norms_ = nullptr;  // of the next tile, in this run
};

}  // namespace
}  // namespace ktk::llamafile

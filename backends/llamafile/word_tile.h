// A tile of the product with plain AVX2. vpmaddubsw multiplies unsigned weights by activations to
// words, of two products each.
//
//   small operands   table[code] - (the least entry). Words of a few steps are added before they
//                    are widened: little more than two instructions for 32 products. Sums are too
//                    large by -(the least entry) * (sum of the act codes), and start that much
//                    below zero.
//   larger ones      sizes of table[code], whose signs go to the activations: words of one step,
//                    and four instructions
//
// Where d is deferred, vpmaddwd widens words with (sub, sub), so that all of a span of two
// sub-blocks is one integer before it is rounded.
//
// A tile has 16 n: registers hold the words of three rows, and what two sub-blocks come to. It
// takes a span for all 32 n before the next span, which is the order of memory. A single row of
// four bits has all 32 n at once.
#pragma once

#include "llamafile/epilogue.h"
#include "llamafile/kernel.h"
#include "llamafile/word_steps.h"

namespace ktk::llamafile {
namespace {

// Operands of as many super-blocks are written before tiles multiply them. Those of half as many if
// they are signed: their sizes are so far behind them.
constexpr size_t kWordSlabs = 4;
constexpr size_t kWordOperands = kWordSlabs * kSubBlocks * kOperandBytes;
constexpr size_t kSizesAt = kWordOperands / 2;

struct WordOperands {
  const CodeTable* table;
  int offset;             // of the table
  const uint8_t* codes;   // first sub-block
  const void* scales;     // the same: floats of weight_scales.h, or words (below)
  const uint8_t* shifts;  // the same, of kinds that have them
  size_t sub_blocks;
  size_t lines_to_fetch;         // for every sub-block, where operands were decoded before
  const char *act, *act_groups;  // first row, first sub-block
  size_t act_stride;
};

// Scales of a sub-block where d is deferred, in dwords for each n:
//
//   | sub 0, sub 0 | sub 1, sub 1 | offset * sub 0, offset * sub 1 |
constexpr size_t kWordScales = 3 * kNr;

inline void load_word_scales(const uint8_t* sub, size_t sub_blocks, int offset, int32_t* scales) {
  const Dot::Int low = Dot::set1_int(0xffff),
                 factor = _mm256_set1_epi16(static_cast<short>(offset));
  for (size_t i = 0; i < sub_blocks; ++i, sub += 2 * kNr, scales += kWordScales) {
    for (size_t n = 0; n < kNr; n += Dot::kLanes) {
      Dot::Int of_group[2];
      for (size_t g = 0; g < 2; ++g) {
        const auto bytes = reinterpret_cast<const __m128i*>(sub + g * kNr + n);
        of_group[g] = _mm256_cvtepi8_epi32(_mm_loadl_epi64(bytes));
      }
      const Dot::Int high[2] = {Dot::shift_left_int<16>(of_group[0]),
                                Dot::shift_left_int<16>(of_group[1])};
      for (size_t g = 0; g < 2; ++g) of_group[g] = Dot::bit_and(of_group[g], low);
      Dot::store_bytes(scales + n, Dot::bit_or(of_group[0], high[0]));
      Dot::store_bytes(scales + kNr + n, Dot::bit_or(of_group[1], high[1]));
      const Dot::Int both = Dot::bit_or(of_group[0], high[1]);
      Dot::store_bytes(scales + 2 * kNr + n, _mm256_mullo_epi16(both, factor));
    }
  }
}

// kDecoded: of operands that were written before.
template <Kind kKind, int kStepsOrNone, bool kDecoded>
class WordTile {
  using Int = Dot::Int;
  using Float = Dot::Float;
  static constexpr int kBits = kKind.bits;
  static constexpr Scaling kScaling = kKind.scaling;
  using E = Epilogue<kScaling>;
  static constexpr int kGroups = E::kGroups, kSpan = E::kSpan;
  static constexpr int kGroupSteps = static_cast<int>(kSteps) / kGroups;
  static constexpr bool kSigned = kStepsOrNone == 0;
  static constexpr int kWordSteps = kSigned ? 1 : kStepsOrNone;
  static_assert(kWordSteps <= kGroupSteps);
  static constexpr bool kDefers = defers_d(kScaling);
  static constexpr bool kStarts = !E::kMins && !kSigned;
  using Operands = Codes<kBits, kKind.has_table, 0, are_words<kKind, kStepsOrNone>>;
  static constexpr int kPlanes = kDecoded ? static_cast<int>(kSteps) : kBits;  // of a sub-block

 public:
  static constexpr size_t kScaleDwords = kDefers ? kWordScales : num_scales(kScaling);

  // dst += act x weight, for sub-blocks of one super-block. Deferred d are left out.
  template <int kRows>
  static void add(const WordOperands& from, float* dst, size_t dst_stride, Fetch& fetches) {
    const Operands operands(*from.table);
    RowPointers<kRows> act(from.act, from.act_stride);
    const char* act_groups = from.act_groups;
    const uint8_t *codes = from.codes, *shifts = from.shifts;
    const int32_t* scales = static_cast<const int32_t*>(from.scales);
    const size_t lines = from.lines_to_fetch;
    Fetch fetch = fetches;
    for (size_t left = from.sub_blocks; left > 0; left -= kSpan) {
      Starts<kRows> starts;
      starts.set(act_groups, from.act_stride, from.offset);
      if constexpr (kDecoded) fetch.next_lines(kSpan * lines);
#pragma GCC unroll 1
      for (size_t n = 0; n < kNr; n += kVecs<kRows> * Dot::kLanes) {
        if constexpr (!kDecoded) {  // a line for two registers of a plane
          fetch.template next_unseen_of<kSpan * kBits * kVecs<kRows> / kVectors>();
        }
        const uint8_t* of_columns = kKind.has_shifts ? shifts + 4 * n : nullptr;
        add_span<kRows>(operands, codes + 4 * n, of_columns, scales + n, act, starts, act_groups,
                        dst + n, dst_stride);
      }
      act.advance(kSpan * kSubBlock);
      codes += kSpan * kPlanes * kPlaneBytes;
      act_groups += kSpan * sizeof(ActGroup);
      scales += kSpan * kScaleDwords;
      if constexpr (kKind.has_shifts) shifts += kSpan * shift_bytes(kScaling);
    }
    fetches = fetch;
  }

 private:
  // Registers of n that a tile of rows has. One row has all 32 n where decoding leaves registers
  // for that: what ends a span, a chain of sums, is then made of more at once.
  template <int kRows>
  static constexpr int kVecs = kRows == 1 && kBits == 4 && !kDecoded ? 2 * kVectors : kVectors;

  // Where sums of a span start, for each row: -offset * (sum of the act codes) of a group, or
  // minus the sums of both groups as words, which meet offset * sub.
  template <int kRows>
  struct Starts {
    static constexpr int kCount = kDefers ? 1 : kGroups;
    int32_t of[kSpan][kCount][kRows];

    [[gnu::always_inline]] void set(const char* act_groups, size_t act_stride, int offset) {
      if constexpr (kStarts) {
        for (int r = 0; r < kRows; ++r, act_groups += act_stride) {
          const ActGroup* group = reinterpret_cast<const ActGroup*>(act_groups);
          for (int i = 0; i < kSpan; ++i) {
            const int32_t sums[2] = {group[i].comp[0] / kOffset, group[i].comp[1] / kOffset};
            if constexpr (kDefers) {
              const uint32_t high = static_cast<uint32_t>(sums[1]) << 16;
              of[i][0][r] = static_cast<int32_t>(high | (static_cast<uint32_t>(sums[0]) & 0xffff));
            } else if constexpr (kGroups == 1) {
              of[i][0][r] = offset * (sums[0] + sums[1]);
            } else {
              for (int g = 0; g < kGroups; ++g) of[i][g][r] = offset * sums[g];
            }
          }
        }
      }
    }
  };

  // What a span comes to: `whole` where d is deferred, otherwise t.
  template <int kRows>
  struct Sums {
    Int whole[kRows][kVecs<kRows>];
    Float t[kRows][kVecs<kRows>];
  };

  // Calls visit(row, register of n).
  template <int kRows, class Visit>
  [[gnu::always_inline]] static void for_each_sum(Visit visit) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs<kRows>; ++v) visit(r, v);
    }
  }
  // The same with its ActGroup.
  template <int kRows, class Visit>
  [[gnu::always_inline]] static void for_each_sum(const char* act_groups, size_t act_stride,
                                                  Visit visit) {
    act_groups = hidden(act_groups);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r, act_groups += act_stride) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs<kRows>; ++v) {
        visit(r, v, reinterpret_cast<const ActGroup*>(act_groups));
      }
    }
  }
  // A register of each n, loaded once.
  template <class T, size_t kCount>
  [[gnu::always_inline]] static void load(T (&to)[kCount], const int32_t* from) {
#pragma GCC unroll 4
    for (size_t v = 0; v < kCount; ++v) {
      const int32_t* const at = from + v * Dot::kLanes;
      if constexpr (requires { Dot::convert(to[v]); }) {
        to[v] = Dot::load_bytes(at);
      } else {
        to[v] = Dot::load(reinterpret_cast<const float*>(at));
      }
      pin(to[v]);
    }
  }

  // A span of some n.
  template <int kRows>
  [[gnu::always_inline]] static void add_span(const Operands& operands, const uint8_t* codes,
                                              const uint8_t* shifts, const int32_t* scales,
                                              RowPointers<kRows>& act, const Starts<kRows>& starts,
                                              const char* act_groups, float* dst,
                                              size_t dst_stride) {
    Sums<kRows> s;
    Int ones = Dot::load_bytes(Dot::kOnes);
    pin(ones);
    unroll<kSpan>([&]<size_t kOfSpan>() __attribute__((always_inline)) {
      const int32_t* const of_sub_block = scales + kOfSpan * kScaleDwords;
      Int words[kRows][kVecs<kRows>], sums[kRows][kVecs<kRows>];
      unroll<kSteps>([&]<size_t kStep>() __attribute__((always_inline)) {
        constexpr int kGroup = kStep / kGroupSteps, kOfGroup = kStep % kGroupSteps;
        Int operand[kVecs<kRows>], size[kVecs<kRows>];
#pragma GCC unroll 4
        for (int v = 0; v < kVecs<kRows>; ++v) {
          const uint8_t* of_n = codes + kOfSpan * kPlanes * kPlaneBytes + v * sizeof(Int);
          if constexpr (kDecoded) {
            of_n += kStep * kPlaneBytes;
            operand[v] = Dot::load_bytes(of_n);
            if constexpr (kSigned) size[v] = Dot::load_bytes(of_n + kSizesAt);
          } else {
            operand[v] = operands.template operand<kStep>(of_n);
            if constexpr (kKind.has_shifts) {
              const size_t shift = kOfSpan * shift_bytes(kScaling) + kGroup * kPlaneBytes;
              operand[v] = Dot::add_from(operand[v], shifts + shift + v * sizeof(Int));
            }
            if constexpr (kSigned) size[v] = Dot::size_of_bytes(operand[v]);
          }
          pin(operand[v]);
          if constexpr (kSigned) pin(size[v]);
        }
        // Where words are of one step they are widened at once: none are kept.
        constexpr bool kAtOnce = kWordSteps == 1;
        Int sub[kVecs<kRows>];
        if constexpr (kDefers && kAtOnce && kDecoded) load(sub, of_sub_block + kGroup * kNr);
        const auto widen = [&](int r, int v) __attribute__((always_inline)) {
          if constexpr (kDefers) {
            if constexpr (kAtOnce && !kDecoded) {  // decoding takes registers
              sub[v] = Dot::load_bytes(of_sub_block + kGroup * kNr + v * Dot::kLanes);
            }
            const Int sum = Dot::multiply_words(words[r][v], sub[v]);
            if constexpr (kOfSpan == 0 && kStep < kWordSteps) {
              s.whole[r][v] = sum;
              pin(s.whole[r][v]);
            } else {
              Dot::add_dwords(s.whole[r][v], sum);
            }
          } else {
            const Int sum = kAtOnce && kDecoded ? Dot::multiply_words(words[r][v], ones)
                                                : Dot::add_pairs(words[r][v]);
            if constexpr (kOfGroup < kWordSteps) {
              sums[r][v] = sum;
            } else {
              Dot::add_dwords(sums[r][v], sum);
            }
          }
        };
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const Int four = Dot::broadcast_row<kOfSpan * kSubBlock + kKr * kStep>(
              act.pointers[r / 3], act.stride, r % 3);
#pragma GCC unroll 4
          for (int v = 0; v < kVecs<kRows>; ++v) {
            Int products;
            if constexpr (kSigned) {
              products = Dot::multiply_signed(size[v], operand[v], four);
            } else {
              products = Dot::multiply_unsigned(operand[v], four);
            }
            if constexpr (kStep % kWordSteps == 0) {
              words[r][v] = products;
              pin(words[r][v]);
            } else {
              Dot::add_words(words[r][v], products);
            }
            if constexpr (kAtOnce) widen(r, v);
          }
          if constexpr (kSigned && kDecoded) keep_order();  // few registers are left for a row
        }
        if constexpr (kDecoded) keep_order();
        if constexpr ((kStep + 1) % kWordSteps != 0) return;
        if constexpr (!kAtOnce) {
          if constexpr (kDefers) load(sub, of_sub_block + kGroup * kNr);
          for_each_sum<kRows>(widen);
        }
        if constexpr (!kDefers && kOfGroup + 1 == kGroupSteps) {
          Float scale[kVecs<kRows>];
          if constexpr (E::kScalesFirst) load(scale, of_sub_block + kGroup * kNr);
          for_each_sum<kRows>(
              act_groups, act.stride,
              [&](int r, int v, const ActGroup* group) __attribute__((always_inline)) {
                if constexpr (kStarts) {
                  Dot::add_dwords(sums[r][v], Dot::set1_int(starts.of[kOfSpan][kGroup][r]));
                }
                const Float sum = Dot::convert(sums[r][v]);
                Float& t = s.t[r][v];
                if constexpr (E::kScalesFirst) {
                  t = E::add_sum(kOfSpan == 0 && kGroup == 0, t, sum, scale[v]);
                } else {
                  t = Dot::mul(sum, Dot::set1(group->scale));
                }
                pin(t);
              });
        }
      });
      if constexpr (kDefers && kStarts) {
        Int both[kVecs<kRows>];
        load(both, of_sub_block + 2 * kNr);
        for_each_sum<kRows>([&](int r, int v) __attribute__((always_inline)) {
          const Int start = Dot::set1_int(starts.of[kOfSpan][0][r]);
          Dot::add_dwords(s.whole[r][v], Dot::multiply_words(start, both[v]));
        });
      }
    });
    const int32_t* const last = scales + (kSpan - 1) * kScaleDwords;
    dst = hidden(dst) - dst_stride;
    for_each_sum<kRows>(
        act_groups, act.stride,
        [&](int r, int v, const ActGroup* group) __attribute__((always_inline)) {
          const auto load_at = [&](const int32_t* from) __attribute__((always_inline)) {
            return Dot::load(reinterpret_cast<const float*>(from) + v * Dot::kLanes);
          };
          const auto scale = [&](int i)
                                 __attribute__((always_inline)) { return load_at(last + i * kNr); };
          const auto min = [&](int g) __attribute__((always_inline)) { return scale(kGroups + g); };
          const auto first_min = [&]() __attribute__((always_inline)) {
            return load_at(last + kNr - static_cast<ptrdiff_t>(kScaleDwords));
          };
          const ActGroup& act_group = group[kSpan - 1];
          Float t = s.t[r][v];
          if constexpr (kDefers) {
            t = Dot::mul(Dot::convert(s.whole[r][v]), Dot::set1(kDeferredFactor));
          }
          t = E::add_mins(t, act_group, min);
          if (v == 0) dst += dst_stride;
          float* const to = dst + v * Dot::kLanes;
          Dot::store(to, E::finish(t, act_group, Dot::load(to), scale, min, first_min));
        });
  }
};

}  // namespace
}  // namespace ktk::llamafile

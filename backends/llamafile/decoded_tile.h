// Tiles that multiply operands of a super-block in scratch (gemm_decoded.h): no codes, no tables,
// so that registers hold the sums of many rows, and the chains of their products hide latencies. C
// is in memory, and the sums of one group after the other meet their scales.
#pragma once

#include "gemm/prefetch.h"
#include "llamafile/epilogue.h"
#include "llamafile/products.h"

namespace ktk::llamafile {
namespace {

// Operands of types with minima are codes as they are, others are table[code] + kOffset.
template <Scaling kScaling>
constexpr int kDecodedOffset = has_min(kScaling) ? 0 : kOffset;

struct DecodedOperands {
  const uint8_t* operands;  // first sub-block
  const float* scales;      // the same (weight_scales.h)
  size_t sub_blocks;
  const char *act, *act_groups;  // first row, first sub-block
  size_t act_stride;
  size_t lines_to_fetch;  // for every sub-block
};

// dst += act x weight. Deferred d are left out.
template <Scaling kScaling, int kRows>
void decoded_tile(const DecodedOperands& from, float* dst, size_t dst_stride, Fetch& fetches) {
  using E = Epilogue<kScaling>;
  using Int = Dot::Int;
  using Float = Dot::Float;
  constexpr int kGroups = E::kGroups;
  RowPointers<kRows> act(from.act, from.act_stride);
  const uint8_t* operands = from.operands;
  const char* act_groups = from.act_groups;
  const float* scales = from.scales;
  Fetch fetch = fetches;
#pragma GCC unroll 1
  for (size_t left = from.sub_blocks; left > 0; left -= E::kSpan) {
    Float t[kRows][kVectors];
#pragma GCC unroll 2
    for (int i = 0; i < E::kSpan; ++i) {
      fetch.next_lines(from.lines_to_fetch);
      unroll<kGroups>([&]<size_t kGroup>() __attribute__((always_inline)) {
        Int sums[kRows][kVectors];
        for_each_row<kRows>(act_groups, act.stride,
                            [&](int r, const ActGroup& group) __attribute__((always_inline)) {
                              const Int start =
                                  E::template begin<kDecodedOffset<kScaling>>(group, kGroup);
#pragma GCC unroll 2
                              for (int v = 0; v < kVectors; ++v) {
                                sums[r][v] = start;
                                pin(sums[r][v]);
                              }
                            });
        add_steps<kGroup * kSteps / kGroups, kSteps / kGroups, kRows>(sums, operands, act);
        const auto scale_at = [&](size_t at, int v) __attribute__((always_inline)) {
          return Dot::load(scales + at * kNr + v * Dot::kLanes);
        };
        Float kept[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          kept[v] = scale_at(kGroup, v);
          pin(kept[v]);
        }
        const bool is_last = i + 1 == E::kSpan && kGroup + 1 == kGroups;
        float* c = hidden(dst);
        for_each_row<kRows>(
            act_groups, act.stride,
            [&](int r, const ActGroup& group) __attribute__((always_inline)) {
#pragma GCC unroll 2
              for (int v = 0; v < kVectors; ++v) {
                pin(sums[r][v]);
                const Float sum = Dot::convert(sums[r][v]);
                const auto scale = [&](int) __attribute__((always_inline)) { return kept[v]; };
                const auto min = [&](int g) __attribute__((always_inline)) {
                  return scale_at(kGroups + g, v);
                };
                const auto first_min = [&]() __attribute__((always_inline)) {
                  return Dot::load(scales + kNr - num_scales(kScaling) + v * Dot::kLanes);
                };
                if constexpr (E::kScalesFirst) {
                  t[r][v] = E::add_sum(i == 0 && kGroup == 0, t[r][v], sum, scale(kGroup));
                  if (kGroup + 1 == kGroups) t[r][v] = E::add_mins(t[r][v], group, min);
                } else {
                  t[r][v] = Dot::mul(sum, Dot::set1(group.scale));
                }
                if (!is_last) {
                  pin(t[r][v]);
                  continue;
                }
                float* to = c + v * Dot::kLanes;
                Dot::store(to, E::finish(t[r][v], group, Dot::load(to), scale, min, first_min));
              }
              c += dst_stride;
            });
      });
      act.advance(kSubBlock);
      act.forget_rows();
      operands += kOperandBytes;
      act_groups += sizeof(ActGroup);
      scales += num_scales(kScaling);
    }
  }
  fetches = fetch;
}

}  // namespace
}  // namespace ktk::llamafile

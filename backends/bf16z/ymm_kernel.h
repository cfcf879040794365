// The product of one row on 256-bit registers: weights are decoded in registers, and multiplied as
// in bf16/ymm_tile.h. To write them and to read them back takes longer than the products of a row;
// two rows leave no registers for it.
#pragma once

#include "bf16/ymm_tile.h"
#include "bf16z/decode_ymm.h"
#include "bf16z/group_patches.h"
#include "bf16z/kernel.h"

namespace ktk::bf16z {
namespace {

constexpr size_t kVectors = kNr / bf16::kVectorCols;
using RowSums = __m256[1][kVectors];

// Sums += products of a pair of k and all columns, two vectors of either tile.
inline void add_pairs(RowSums& acc, const __m256i (&pairs)[kVectors], const char* act) {
#pragma GCC unroll 2
  for (size_t odd = 0; odd < 2; ++odd) {
    keep_order();
    const __m256 a = bf16::broadcast(act + odd * sizeof(float));
#pragma GCC unroll 4
    for (size_t i = 0; i < kVectors; ++i) {
      const __m256 w = odd ? bf16::odd_k(pairs[i]) : bf16::even_k(pairs[i]);
      bf16::multiply_add(acc[0][i], a, w);
    }
  }
}

// The products of a group: of all columns in turn, since a sum waits for its last addition.
inline void add_group(RowSums& acc, const YmmDecoder& decoder, const char* group, const char* act) {
  const YmmDecoder::Exponents exponents[2] = {decoder.exponents(group, 0),
                                              decoder.exponents(group, 1)};
  __m256i pairs[kVectors];
#pragma GCC unroll 4
  for (size_t i = 0; i < kVectors; ++i) {
    pairs[i] = YmmDecoder::first_line(group, i % 2, exponents[i % 2], i / 2);
  }
  add_pairs(acc, pairs, act);
#pragma GCC unroll 4
  for (size_t i = 0; i < kVectors; ++i) {
    pairs[i] = YmmDecoder::second_line(group, i % 2, exponents[i % 2], i / 2);
  }
  add_pairs(acc, pairs, act + bf16::kPairBytes);
}

// The same for a group that has patches: away from the registers of others.
[[gnu::noinline]] void add_patched_group(RowSums& acc, const YmmDecoder& decoder, const char* group,
                                         const GroupPatches& patches, RowPointers<1> act) {
  alignas(kLine) char plain[kPlainStepBytes];
  const size_t number = group_of(*patches.begin());
  decoder.group(group, plain, number);
  for (const uint32_t patch : patches) write_patch(patch, plain);
  keep_order();
  for (size_t pair = 0; pair < 2; ++pair) {
    for (size_t tile = 0; tile < 2; ++tile) {
      bf16::add_line(acc, 2 * tile, plain_line(plain, number, 2 * pair + tile), act);
    }
    act.advance(bf16::kPairBytes);
  }
}

void multiply_row(const Tile& t, const BlockReader<YmmDecoder>& reader) {
  RowSums acc;
#pragma GCC unroll 4
  for (size_t i = 0; i < kVectors; ++i) {
    acc[0][i] = t.is_first() ? _mm256_setzero_ps() : _mm256_loadu_ps(t.dst + i * bf16::kVectorCols);
  }
  RowPointers<1> act(bf16::first_act<sizeof(float)>(t), t.act_stride);
  Fetch fetch = t.fetch;
  const YmmDecoder decoder = reader.decoder();
  const char* group = reader.step();
  const char* const end = group + (t.end - t.begin) * kStepBytes;
  GroupPatches patches(reader);
  const char* patched = patches.find(end);
#pragma GCC unroll 1
  for (; group != end; group += kGroupBytes) {
    fetch.next_unseen_of<kGroupBytes / kLine>();
    if (__builtin_expect(group == patched, 0)) {
      RowSums apart = {{acc[0][0], acc[0][1], acc[0][2], acc[0][3]}};
      add_patched_group(apart, decoder, group, patches, act);
#pragma GCC unroll 4
      for (size_t i = 0; i < kVectors; ++i) acc[0][i] = apart[0][i];
      patched = patches.next(end);
    } else {
      add_group(acc, decoder, group, act.row(0));
    }
    act.advance(2 * bf16::kPairBytes);
  }
#pragma GCC unroll 4
  for (size_t i = 0; i < kVectors; ++i) {
    _mm256_storeu_ps(t.dst + i * bf16::kVectorCols, acc[0][i]);
  }
}

class YmmKernel : public BlockKernel<YmmDecoder> {
 public:
  using BlockKernel<YmmDecoder>::BlockKernel;
  static constexpr size_t kMr = 1;
  static constexpr size_t kLineProducts = bf16::YmmKernel::kLineProducts;

  static size_t passes(size_t) { return 1; }
  void tile(const Tile& t) {
    multiply_row(t, reader_);
    reader_.pass_steps(t.end - t.begin);
  }
};

}  // namespace
}  // namespace ktk::bf16z

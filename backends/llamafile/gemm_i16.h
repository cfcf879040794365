// The product of more than a dozen rows for types that sum runs (run_sums.h). The two sums of a
// unit of 32 columns, one for each half, lie in one 32-bit lane as a pair of int16, so that one
// vpmaddwd multiplies both with their integer scales (subs) and adds them.
//
// A dword sums the second half of a unit, moves up by 16 bits, and sums the first half below:
//
//   | sum 1        | sum 0 + 2^15 |     which is flipped to sum 0 in the end
//
// The second unit of a pair adds its product to that of the first, so that a pair of units takes
// three instructions on the port of vpdpbusd, where sums apart take five. Sums must have 16 bits:
// by Cauchy and Schwarz none exceeds the length of its weights times that of its activations. Tiles
// where that is not enough, which are few, keep sums apart (gemm_tile.h).
//
//   scratch   | stretch of runs (i16_scratch.h) | norms of tiles of rows |
#pragma once

#include "llamafile/gemm.h"
#include "llamafile/i16_scratch.h"

namespace ktk::llamafile {
namespace {

// Whether sums of a type are words, as a rule. Values up to 43 (IQ2_XS, IQ2_S) make most of them
// too large for the bound.
constexpr bool fits_i16(const BlockType& type) {
  int largest = type.linear ? type.offset : 0;
  for (const int value : type.table) largest = largest < value ? value : largest;
  return sums_runs(type) && largest <= 32;
}

static_assert(TileCodes<8, PairsHalves>::kOffset == kOffset);

struct WordArgs {
  const uint8_t* operands;  // first unit, columns of the tile
  const int32_t* words;     // the same
  size_t runs;
  bool is_first;           // dst has nothing yet
  const uint8_t* act;      // first row of the tile, first unit
  const uint8_t* factors;  // the same
  size_t act_stride;
  float* dst;
  size_t dst_stride;
  const uint8_t* prefetch;
  size_t unit_lines;  // to fetch in every unit
};

// Adds products of four steps: half a unit.
template <size_t kStep, size_t kEnd, int kRows>
[[gnu::always_inline]] inline void add_half(Dot::Int (&acc)[kRows][kVectors],
                                            const uint8_t* operands, const uint8_t* const* act,
                                            size_t act_stride) {
  Dot::Int operand[kVectors];
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    operand[v] = Dot::load_bytes(operands + kStep * kPlaneBytes + v * sizeof(Dot::Int));
    pin(operand[v]);  // loaded once
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const Dot::Int four = Dot::broadcast_row<4 * kStep>(act[r / 3], act_stride, r % 3);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) acc[r][v] = Dot::dot(acc[r][v], operand[v], four);
  }
  if constexpr (kStep + 1 < kEnd) add_half<kStep + 1, kEnd>(acc, operands, act, act_stride);
}

// The sum of a run stays in registers, dst is read and written at its end.
template <int kRows>
void multiply_word_tile(const WordArgs& args) {
  using Int = Dot::Int;
  using Float = Dot::Float;
  constexpr int kPointers = (kRows + 2) / 3;
  const WordArgs t = args;  // a copy that stores to dst cannot change
  const uint8_t* act[kPointers];
#pragma GCC unroll 4
  for (int i = 0; i < kPointers; ++i) act[i] = t.act + 3 * i * t.act_stride;
  const uint8_t* operands = t.operands;
  const uint8_t* factors = t.factors;
  const uint8_t* prefetch = t.prefetch;
  const int32_t* words = t.words;
  const Int sign = Dot::set1_int(0x8000);
  for (size_t run = 0; run < t.runs; ++run) {
    Float sum[kRows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = Dot::set1(0);
        pin(sum[r][v]);
      }
    }
#pragma GCC unroll 1
    for (size_t pair = 0; pair < kSubBlocks / 2; ++pair) {
      Int first[kRows][kVectors];
#pragma GCC unroll 2
      for (int of_pair = 0; of_pair < 2; ++of_pair) {
        Int acc[kRows][kVectors];
        const uint8_t* factor = hidden(factors);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r, factor += t.act_stride) {
          const ActGroup* f = reinterpret_cast<const ActGroup*>(factor);
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) {
            acc[r][v] = Dot::set1_int(f->comp[1]);
            pin(acc[r][v]);
          }
        }
        for (size_t i = 0; i < t.unit_lines; ++i, prefetch += kLine) prefetch_l2(prefetch);
        add_half<kSteps / 2, kSteps>(acc, operands, act, t.act_stride);
        factor = hidden(factors);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r, factor += t.act_stride) {
          const ActGroup* f = reinterpret_cast<const ActGroup*>(factor);
          const Int start = Dot::add(Dot::set1_int(f->comp[0]), sign);
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) {
            pin(acc[r][v]);
            acc[r][v] = Dot::add(_mm512_slli_epi32(acc[r][v], 16), start);
            pin(acc[r][v]);
          }
        }
        add_half<0, kSteps / 2>(acc, operands, act, t.act_stride);
#pragma GCC unroll 4
        for (int i = 0; i < kPointers; ++i) act[i] = hidden(act[i] + kSubBlock);
        operands += kOperandBytes;
        Int sub[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sub[v] = Dot::load_bytes(words + v * Dot::kLanes);
        factor = hidden(factors);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r, factor += t.act_stride) {
          const ActGroup* f = reinterpret_cast<const ActGroup*>(factor);
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) {
            pin(acc[r][v]);
            const Int word = _mm512_xor_si512(acc[r][v], sign);
            if (of_pair == 0) {
              first[r][v] = _mm512_madd_epi16(word, sub[v]);
              pin(first[r][v]);
              continue;
            }
            pin(first[r][v]);
            pin(sum[r][v]);
            const Int product = _mm512_dpwssd_epi32(first[r][v], word, sub[v]);
            // The intrinsic is the same instruction, but gcc 12 moves sums to other registers.
            asm("vfmadd231ps %2%{1to16%}, %1, %0"
                : "+v"(sum[r][v])
                : "v"(Dot::convert(product)), "m"(f->scale));
          }
        }
        factors += sizeof(ActGroup);
        words += kNr;
      }
    }
    end_run(sum, reinterpret_cast<const float*>(words), t.is_first && run == 0, t.dst,
            t.dst_stride);
    words += kNr;
  }
}

using MultiplyWordTile = void (*)(const WordArgs&);

struct WordTiles {
  static constexpr int kMaxRows = Dot::kMaxHeldHalfRows;
  MultiplyWordTile of_rows[kMaxRows + 1];

  template <int kRows = 1>
  constexpr void fill() {
    of_rows[kRows] = multiply_word_tile<kRows>;
    if constexpr (kRows < kMaxRows) fill<kRows + 1>();
  }
  constexpr WordTiles() : of_rows{} { fill(); }
};
constexpr WordTiles kWordTiles;

// A run of a tile that has longer sums: in tiles that keep both sums of a unit apart.
inline void multiply_long_run(const BlockType& type, const Header& at, const CodeTable& table,
                              const uint8_t* packed, const WordArgs& w, size_t rows) {
  constexpr size_t kMaxRows = Dot::kMaxHeldHalfRows;
  alignas(kLine) float params[kSubBlocks * PairsHalves::kParams], d[kNr];
  load_params(type, at, packed, kSubBlocks, params);
  load_run_ds(type, packed, d);
  TileArgs t = {};
  t.table = &table;
  t.codes = w.operands;
  t.params = params;
  t.units = kSubBlocks;
  t.act_stride = w.act_stride;
  t.dst_stride = w.dst_stride;
  t.prefetch = w.prefetch;
  t.unit_lines = w.unit_lines;
  t.is_first = w.is_first;
  t.run_d = d;
  const size_t tiles = (rows + kMaxRows - 1) / kMaxRows;
  for (size_t i = 0, row = 0; i < tiles; ++i, t.unit_lines = 0) {
    const size_t row_end = rows * (i + 1) / tiles;
    t.act = w.act + row * w.act_stride;
    t.factors = w.factors + row * w.act_stride;
    t.dst = w.dst + row * w.dst_stride;
    kTiles<8, PairsHalves, kMaxRows, true>.of_rows[row_end - row](t);
    row = row_end;
  }
}

inline size_t word_scratch_size(const ktk_matrix* matrix, size_t m) {
  const size_t row_tiles = (m + WordTiles::kMaxRows - 1) / WordTiles::kMaxRows;
  return kWordStretchBytes + row_tiles * (num_sub_blocks(matrix) / kSubBlocks) * sizeof(Norms);
}

// Of every run of a tile of rows the greatest norms: asked for by all columns.
inline void longest_rows(const uint8_t* norms, size_t rows, size_t act_stride, size_t runs,
                         Norms* longest) {
  for (size_t run = 0; run < runs; ++run, norms += sizeof(Norms)) {
    __m128i of_run = load_lengths(norms);
    for (size_t r = 1; r < rows; ++r) {
      of_run = _mm_max_epu8(of_run, load_lengths(norms + r * act_stride));
    }
    store_lengths(longest + run, of_run);
  }
}

inline void multiply_words(const ktk_matmul* mm) {
  static_assert(kTileNr == kNr);
  const BlockLayout layout(mm->matrix);
  const CodeTable table(layout.type);
  const size_t row_tiles = (mm->m + WordTiles::kMaxRows - 1) / WordTiles::kMaxRows;
  const size_t bytes = super_block_bytes(layout.type, kSubBlocks);
  const WeightStream stream = weight_stream(mm);
  const size_t num_runs =
      layout.sub_blocks / kSubBlocks;  // whole ones, of types with d per 256 columns
  const uint8_t* packed = block_at(mm, mm->n_begin);
  WordStretch stretch(mm->scratch);
  Norms* const longest =
      reinterpret_cast<Norms*>(static_cast<char*>(mm->scratch) + kWordStretchBytes);
  const auto first_row = [&](size_t tile) { return mm->m * tile / row_tiles; };
  for (size_t i = 0; i < row_tiles; ++i) {
    const uint8_t* act = static_cast<const uint8_t*>(mm->act) + first_row(i) * mm->act_stride;
    longest_rows(act + norm_offset(mm->matrix), first_row(i + 1) - first_row(i), mm->act_stride,
                 num_runs, longest + i * num_runs);
  }
  WordArgs t = {};
  t.act_stride = mm->act_stride;
  t.dst_stride = mm->dst_stride;
  for (size_t n = mm->n_begin; n < mm->n_end; n += kNr) {
    float* dst = mm->dst + (n - mm->n_begin);
    for (size_t first = 0, count; first < num_runs; first += count) {
      count = smaller(kStretchRuns, num_runs - first);
      for (size_t i = 0; i < count; ++i) {
        stretch.write(layout.type, layout.whole, table, packed + i * bytes, i);
      }
      // All tiles together fetch the stretch that comes next, so many lines in every unit.
      const size_t lines = count * bytes / kLine;
      t.unit_lines = (lines - 1) / (row_tiles * count * kSubBlocks) + 1;
      const char* const end = reinterpret_cast<const char*>(packed + count * bytes);
      size_t line = static_cast<size_t>(end - stream.begin) / kLine;
      for (size_t i = 0; i < row_tiles; ++i) {
        const size_t row = first_row(i), rows = first_row(i + 1) - row;
        const uint8_t* act = static_cast<const uint8_t*>(mm->act) + row * mm->act_stride;
        const Norms* of_tile = longest + i * num_runs + first;
        t.dst = dst + row * mm->dst_stride;
        for (size_t run = 0; run < count; run += t.runs) {
          const size_t unit = (first + run) * kSubBlocks;
          t.operands = stretch.operands + run * kSubBlocks * kOperandBytes;
          t.words = stretch.words + run * kRunWords;
          t.act = act + unit * kSubBlock;
          t.factors = act + group_offset(mm->matrix) + unit * sizeof(ActGroup);
          t.prefetch = reinterpret_cast<const uint8_t*>(stream.at(line));
          size_t end_run = run;
          while (end_run < count && fits(of_tile[end_run], stretch.limits[end_run])) ++end_run;
          t.runs = end_run - run;
          t.is_first = first + run == 0;
          if (t.runs > 0) {
            kWordTiles.of_rows[rows](t);
          } else {
            t.runs = 1;
            multiply_long_run(layout.type, layout.whole, table, packed + run * bytes, t, rows);
          }
          line += t.runs * kSubBlocks * t.unit_lines;
        }
      }
      packed += count * bytes;
    }
  }
}

}  // namespace
}  // namespace ktk::llamafile

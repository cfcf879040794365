// The product with AMX: 16 x 16 sums, up to 64 deep, one instruction.
//
//   tiles        B 6: columns 0-15    B 7: columns 16-31
//   A 4: rows 0-15       C 0                C 1
//   A 5: rows 16-31      C 2                C 3
//
// B tiles hold bytes. The nibbles of 32 columns and a run of k are expanded to scratch, 16 KiB of
// L1, before all rows pass them:
//
//   one unit     [unit / tile depth][2 halves of 16 columns][tile depth / 4 rows][64 bytes]
//
//   low nibbles of turn t  -> row 2 t        k0 k2 k4 k6 of 16 columns
//   high nibbles           -> row 2 t + 1    k1 k3 k5 k7
//
// Sums leave their tiles at the end of a unit, because the scales change there: for a unit of 32
// the tiles are 32 deep. C can only leave through memory. It is added to dst while the next unit is
// multiplied: done at once, that would wait for the stores and the tiles would wait for it.
#pragma once

#include "codec/int4/matmul.h"
#include "codec/int4/vnni512.h"
#include "gemm/amx.h"

namespace ktk::int4 {
namespace {

constexpr size_t kTileRows = 16;
constexpr size_t kBlockRows = 2 * kTileRows;
constexpr size_t kBlockValues = kBlockRows * kColumns;
constexpr size_t kAmxRunDepth = 512;

// Expanded weights of a run; C of the unit that is being multiplied, and of the one before it.
inline size_t amx_scratch_size(const ktk_matrix*, size_t) {
  return kAmxRunDepth * kColumns + 2 * kBlockValues * sizeof(int32_t);
}

inline void expand(const uint8_t* turns, size_t depth, size_t tile_depth, uint8_t* tiles) {
  const size_t half = tile_depth / 4 * kLine;
  for (size_t k = 0; k < depth; k += tile_depth, tiles += 2 * half) {
    for (size_t row = 0; row < half; row += 2 * kLine, turns += kTurnBytes) {
      for (size_t i = 0; i < 2; ++i) {
        const __m512i codes = Vnni512::load_bytes(turns + i * kLine);
        uint8_t* to = tiles + i * half + row;
        _mm512_store_si512(to, Vnni512::low_nibbles(codes));
        _mm512_store_si512(to + kLine, Vnni512::high_nibbles(codes));
      }
    }
  }
}

// C = A x B over one unit for 32 (or 16) rows, stored as rows of 32 columns.
template <bool kBothHalves>
inline void multiply_unit(const uint8_t* tiles, const uint8_t* act, size_t act_stride, size_t depth,
                          size_t tile_depth, int32_t* c) {
  const size_t half = tile_depth / 4 * kLine;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kBothHalves) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (size_t k = 0; k < depth; k += tile_depth, tiles += 2 * half, act += tile_depth) {
    _tile_loadd(6, tiles, kLine);
    _tile_loadd(4, act, act_stride);
    _tile_loadd(7, tiles + half, kLine);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    if constexpr (kBothHalves) {
      _tile_loadd(5, act + kTileRows * act_stride, act_stride);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
  }
  constexpr size_t kStride = kColumns * sizeof(int32_t);
  _tile_stored(0, c, kStride);
  _tile_stored(1, c + 16, kStride);
  if constexpr (kBothHalves) {
    _tile_stored(2, c + kTileRows * kColumns, kStride);
    _tile_stored(3, c + kTileRows * kColumns + 16, kStride);
  }
}

// A stored C that is yet to be added to dst.
struct Pending {
  const int32_t* c;
  const uint8_t* factor;  // of the first row
  size_t act_stride;
  const uint16_t* params;
  bool f16_scales;
  float* dst;
  size_t dst_stride;
  size_t rows = 0;

  template <bool kZeros>
  void add() {
    if (rows == 0) return;
    Params<Vnni512, kZeros> low, high;
    low.load(params, f16_scales);
    high.load(params + 16, f16_scales);
    for (; rows > 0; --rows, c += kColumns, factor += act_stride, dst += dst_stride) {
      const __m512 act_scale = Vnni512::set1(*reinterpret_cast<const float*>(factor));
      add_unit<Vnni512, kZeros, false>(dst, _mm512_load_si512(c), factor, act_scale, low);
      add_unit<Vnni512, kZeros, false>(dst + 16, _mm512_load_si512(c + 16), factor, act_scale,
                                       high);
    }
  }
};

template <class Act, bool kZeros>
void multiply_amx_blocks(const ktk_matmul* mm) {
  const ktk_matrix* matrix = mm->matrix;
  const size_t units = Act::num_units(matrix), depth = Act::unit_depth(matrix);
  const size_t tile_depth = smaller(depth, 64);
  const size_t units_in_group = group_depth(matrix) / depth;
  const size_t unit_bytes = depth / kTurn * kTurnBytes;
  const size_t run = smaller(kAmxRunDepth / depth, units);
  const size_t row_blocks = (mm->m + kBlockRows - 1) / kBlockRows;
  const uint8_t* act = static_cast<const uint8_t*>(mm->act);
  uint8_t* tiles = static_cast<uint8_t*>(mm->scratch);
  int32_t* c = reinterpret_cast<int32_t*>(tiles + kAmxRunDepth * kColumns);
  int32_t* c_before = c + kBlockValues;
  const WeightStream stream = weight_stream(mm);
  const uint8_t* block = reinterpret_cast<const uint8_t*>(stream.begin);
  Pending pending = {};
  for (size_t n = mm->n_begin; n < mm->n_end; n += kColumns, block += block_bytes(matrix)) {
    clear_dst<Vnni512>(mm->dst + (n - mm->n_begin), mm->dst_stride, mm->m);
    for (size_t begin = 0; begin < units; begin += run) {
      const size_t end = smaller(begin + run, units);
      const auto group_of = [&](size_t unit) {
        return block + unit / units_in_group * group_bytes(matrix);
      };
      for (size_t unit = begin; unit < end; ++unit) {
        const uint8_t* turns =
            group_of(unit) + header_bytes(matrix) + unit % units_in_group * unit_bytes;
        expand(turns, depth, tile_depth, tiles + (unit - begin) * depth * kColumns);
      }
      tile_memory_barrier();
      // All units of all rows together fetch the run that comes next.
      const size_t run_bytes = run * unit_bytes + run / units_in_group * header_bytes(matrix);
      const size_t share = run_bytes / kLine / (row_blocks * (end - begin)) + 1;
      size_t line = (group_of(begin) - reinterpret_cast<const uint8_t*>(stream.begin) + run_bytes +
                     begin % units_in_group * unit_bytes) /
                    kLine;
      for (size_t row = 0; row < mm->m; row += kBlockRows) {
        const size_t rows = smaller(kBlockRows, mm->m - row);
        const uint8_t* first = act + row * mm->act_stride;
        for (size_t unit = begin; unit < end; ++unit) {
          for (size_t i = 0; i < share; ++i, ++line) prefetch_l2(stream.at(line));
          const auto multiply_rows = rows > kTileRows ? multiply_unit<true> : multiply_unit<false>;
          multiply_rows(tiles + (unit - begin) * depth * kColumns, first + unit * depth,
                        mm->act_stride, depth, tile_depth, c);
          pending.add<kZeros>();
          pending = {
              .c = c,
              .factor = first + padded_k(matrix) + unit * sizeof(Factor),
              .act_stride = mm->act_stride,
              .params = reinterpret_cast<const uint16_t*>(group_of(unit)),
              .f16_scales = matrix->format.scale == KTK_F16,
              .dst = mm->dst + row * mm->dst_stride + (n - mm->n_begin),
              .dst_stride = mm->dst_stride,
              .rows = rows,
          };
          int32_t* const swap = c;
          c = c_before;
          c_before = swap;
        }
      }
    }
  }
  pending.add<kZeros>();
}

template <class Act>
void multiply_amx(const ktk_matmul* mm) {
  const TileRows rows(mm->m, static_cast<uint8_t>(smaller(Act::unit_depth(mm->matrix), 64)));
  if constexpr (Act::kZeroPoints) {
    if (has_zeros(mm->matrix)) return multiply_amx_blocks<Act, true>(mm);
  }
  multiply_amx_blocks<Act, false>(mm);
}

// Few rows wait for memory, or for the expansion: the vector kernel does without. Sums of a unit
// are exact in both and meet the same roundings, so the bits are the same.
constexpr size_t kVectorRows = 4;

}  // namespace
}  // namespace ktk::int4

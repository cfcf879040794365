// The product with AMX, for many rows: 16 x 16 sums, 32 deep, one instruction.
//
//   tiles        B 6: columns 0-15    B 7: columns 16-31
//   A 4: rows 0-15       C 0                C 1
//   A 5: rows 16-31      C 2                C 3
//
// B tiles are operands (operands.h) with the sign of the weights; a row of 128 bytes is a row of B
// 6 and one of B 7. A stretch of two runs is written to scratch, 16 KiB, before all rows pass over
// it. A tile is as deep as a group of the type, 32 or 16, because the scales change there, and its
// sums can only leave through memory. They are scaled and added to dst while the next unit is
// multiplied: at once, that would wait for the stores and the tiles would wait for it.
//
// Sums are exact and meet the roundings that gemm_tile.h lists, so a row has the same bits here and
// in the micro-kernel for few rows.
#pragma once

#include "gemm/amx.h"
#include "llamafile/gemm.h"
#include "llamafile/operands.h"

namespace ktk::llamafile {
namespace {

constexpr size_t kTileRows = 16;
constexpr size_t kBlockRows = 2 * kTileRows;
constexpr size_t kBlockValues = kBlockRows * kNr;
constexpr size_t kStretchUnits = 2 * kSubBlocks;

// Operands and parameters of a stretch; C of the units that are being multiplied, and of those
// before them: one, or two that meet the same act scale, each of up to two groups; sums of a run.
constexpr size_t kMostGroups = 4;
inline size_t amx_scratch_size(const ktk_matrix*, size_t) {
  return stretch_bytes(kStretchUnits) + 2 * kMostGroups * kBlockValues * sizeof(int32_t) +
         kBlockValues * sizeof(float);
}

// C = A x B of one group of 32 (or 16) rows, stored as rows of 32 columns.
template <bool kBothHalves>
inline void multiply_group(const uint8_t* operands, const uint8_t* act, size_t act_stride,
                           int32_t* c) {
  constexpr size_t kStride = kNr * sizeof(int32_t);
  _tile_zero(0);
  _tile_zero(1);
  _tile_loadd(6, operands, kPlaneBytes);
  _tile_loadd(4, act, act_stride);
  _tile_loadd(7, operands + kLine, kPlaneBytes);
  _tile_dpbssd(0, 4, 6);
  _tile_dpbssd(1, 4, 7);
  _tile_stored(0, c, kStride);
  _tile_stored(1, c + 16, kStride);
  if constexpr (kBothHalves) {
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(5, act + kTileRows * act_stride, act_stride);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
    _tile_stored(2, c + kTileRows * kNr, kStride);
    _tile_stored(3, c + kTileRows * kNr + 16, kStride);
  }
}

// Where the sums of a run go that ends with a unit, if there are any.
struct RunEnd {
  const BlockType* type;
  const uint8_t* run = nullptr;
  float* dst;
  size_t dst_stride;
};

// A stored C that is yet to be added to dst, or to the sums of a run.
template <class Shape>
struct Pending {
  static constexpr size_t kSpan = Shape::kPairs ? 2 : 1;  // units

  const int32_t* c;       // of the groups of all units
  const uint8_t* factor;  // of the first row, first unit
  size_t act_stride;
  const float* params;
  float* dst;
  size_t dst_stride;
  RunEnd end;
  size_t rows = 0;

  void add() const {
    if (rows == 0) return;
    for (size_t column = 0; column < kNr; column += Dot::kLanes) add_columns(column);
    if (end.run) {
      add_run(*end.type, end.run, dst, rows, end.dst, end.dst_stride);
      clear_rows(dst, dst_stride, rows);
    }
  }

 private:
  void add_columns(size_t column) const {
    Dot::Float scale[kMostGroups], min[kMostGroups];
    for (size_t i = 0; i < kSpan * Shape::kScales; ++i) {
      const float* of_group =
          params + column + i / Shape::kScales * Shape::kParams + i % Shape::kScales * kNr;
      scale[i] = Dot::load(of_group);
      if constexpr (Shape::kMins) min[i] = Dot::load(of_group + Shape::kScales * kNr);
    }
    const uint8_t* of_row = factor;
    const int32_t* from = c + column;
    float* to = dst + column;
    for (size_t row = 0; row < rows; ++row) {
      const ActGroup* f = reinterpret_cast<const ActGroup*>(of_row);
      const Dot::Float act_scale = Dot::set1(f->scale);
      const auto sum = [&](size_t i) {
        return Dot::convert(_mm512_load_si512(from + i * kBlockValues));
      };
      Dot::Float value;
      if constexpr (Shape::kHalves || Shape::kPairs) {
        value = Dot::mul(sum(0), scale[0]);
        for (size_t i = 1; i < kSpan * Shape::kScales; ++i) {
          value = Dot::fma(sum(i), scale[i], value);
        }
        if constexpr (Shape::kHalves && Shape::kMins) {
          value = Dot::fma(Dot::convert(Dot::set1_int(f->comp[0])), min[0], value);
          value = Dot::fma(Dot::convert(Dot::set1_int(f->comp[1])), min[1], value);
        }
        value = Dot::fma(value, act_scale, Dot::load(to));
      } else {
        value = Dot::fma(Dot::mul(sum(0), act_scale), scale[0], Dot::load(to));
      }
      if constexpr (Shape::kMins && !Shape::kHalves) {
        for (size_t u = 0; u < kSpan; ++u) {
          value = Dot::fma(Dot::set1(f[u].sum), min[u], value);
        }
      }
      Dot::store(to, value);
      of_row += act_stride;
      from += kNr;
      to += dst_stride;
    }
  }
};

template <class Shape>
inline void multiply_amx_blocks(const ktk_matmul* mm, const BlockLayout& layout,
                                WriteOperands write_signed) {
  constexpr size_t kGroups = Shape::kScales;  // of a unit
  constexpr size_t kSpan = Pending<Shape>::kSpan;
  const CodeTable table(layout.type, 0);
  const TileRows tile_rows(mm->m, kSubBlock / kGroups);
  const size_t units = layout.sub_blocks;
  const size_t row_blocks = (mm->m + kBlockRows - 1) / kBlockRows;
  const uint8_t* act = static_cast<const uint8_t*>(mm->act);
  uint8_t* operands = static_cast<uint8_t*>(mm->scratch);
  float* params = reinterpret_cast<float*>(operands + kStretchUnits * kOperandBytes);
  int32_t* c = reinterpret_cast<int32_t*>(operands + stretch_bytes(kStretchUnits));
  int32_t* c_before = c + kMostGroups * kBlockValues;
  const bool is_summed = sums_runs(layout.type);
  float* sums = reinterpret_cast<float*>(c + 2 * kMostGroups * kBlockValues);
  clear_rows(sums, kNr, kBlockRows);
  const WeightStream stream = weight_stream(mm);
  const uint8_t* run = block_at(mm, mm->n_begin);
  Pending<Shape> pending = {};
  for (size_t n = mm->n_begin; n < mm->n_end; n += kNr) {
    float* dst = mm->dst + (n - mm->n_begin);
    clear_rows(dst, mm->dst_stride, mm->m);
    for (size_t unit = 0, count; unit < units; unit += count) {
      pending.add();  // its parameters are about to be overwritten
      pending.rows = 0;
      count = smaller(kStretchUnits, units - unit);
      const uint8_t* const end = load_stretch_params(layout, Shape::kParams, run, count, params);
      write_stretch(layout, table, write_signed, run, count, operands);
      tile_memory_barrier();
      // All units of all rows together fetch the stretch that comes next.
      const size_t lines = static_cast<size_t>(end - run) / kLine;
      const size_t share = lines / (row_blocks * count) + 1;
      const uint8_t* const first_run = run;
      run = end;
      size_t line = static_cast<size_t>(reinterpret_cast<const char*>(run) - stream.begin) / kLine;
      for (size_t row = 0; row < mm->m; row += kBlockRows) {
        const size_t rows = smaller(kBlockRows, mm->m - row);
        const uint8_t* first = act + row * mm->act_stride;
        const auto multiply_rows = rows > kTileRows ? multiply_group<true> : multiply_group<false>;
        for (size_t i = 0; i < count; i += kSpan) {
          for (size_t j = 0; j < kSpan * share; ++j, ++line) prefetch_l2(stream.at(line));
          for (size_t g = 0; g < kSpan * kGroups; ++g) {
            multiply_rows(operands + i * kOperandBytes + g * kOperandBytes / kGroups,
                          first + (unit + i) * kSubBlock + g * kSubBlock / kGroups, mm->act_stride,
                          c + g * kBlockValues);
          }
          pending.add();
          float* const to = dst + row * mm->dst_stride;
          // BlockLayout of these types are whole: others have no d per 256 columns.
          const bool ends_run = is_summed && (i + kSpan) % kSubBlocks == 0;
          const size_t of_run = i / kSubBlocks * super_block_bytes(layout.type, kSubBlocks);
          pending = {
              .c = c,
              .factor = first + group_offset(mm->matrix) + (unit + i) * sizeof(ActGroup),
              .act_stride = mm->act_stride,
              .params = params + i * Shape::kParams,
              .dst = is_summed ? sums : to,
              .dst_stride = is_summed ? kNr : mm->dst_stride,
              .end = {.type = &layout.type,
                      .run = ends_run ? first_run + of_run : nullptr,
                      .dst = to,
                      .dst_stride = mm->dst_stride},
              .rows = rows,
          };
          int32_t* const swap = c;
          c = c_before;
          c_before = swap;
        }
      }
    }
  }
  pending.add();
}

template <class Shape>
inline void multiply_amx_as(const ktk_matmul* mm, const BlockLayout& layout) {
  switch (layout.type.bits) {
    case 2:
      return multiply_amx_blocks<Shape>(mm, layout, write_operands<2, 0>);
    case 3:
      return multiply_amx_blocks<Shape>(mm, layout, write_operands<3, 0>);
    case 4:
      return multiply_amx_blocks<Shape>(mm, layout, write_operands<4, 0>);
    case 5:
      return multiply_amx_blocks<Shape>(mm, layout, write_operands<5, 0>);
    case 6:
      return multiply_amx_blocks<Shape>(mm, layout, write_operands<6, 0>);
    default:
      return multiply_amx_blocks<Shape>(mm, layout, write_operands<8, 0>);
  }
}

inline void multiply_amx(const ktk_matmul* mm) {
  const BlockLayout layout(mm->matrix);
  const BlockType& type = layout.type;
  const bool pairs = pairs_units(type);
  if (type.group == 16) {
    if (type.has_dmin) return multiply_amx_as<HalvesMins>(mm, layout);
    return pairs ? multiply_amx_as<PairsHalves>(mm, layout) : multiply_amx_as<Halves>(mm, layout);
  }
  if (!type.has_dmin) return multiply_amx_as<Plain>(mm, layout);
  return pairs ? multiply_amx_as<PairsMins>(mm, layout) : multiply_amx_as<Mins>(mm, layout);
}

}  // namespace
}  // namespace ktk::llamafile

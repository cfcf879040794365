// Types with a float scale d per run of 256 columns, and an integer scale (sub) per 16 of them, sum
// a whole run before they multiply with d:
//
//   sum of a run = sum over pairs of units of  act scale * (sum 0 * sub 0 + sum 1 * sub 1 + ...)
//   dst          = fma(sum of a run, d, dst)
//
// What is in brackets is an integer. Where the four sums are words it is at most 2^24, and any way
// to compute it is right: with floats (gemm_tile.h, gemv.h) or with words (gemm_i16.h). With d in
// it, it would have to be rounded.
#pragma once

#include "llamafile/scaling.h"

namespace ktk::llamafile {
namespace {

// kRunFactor is in the sums.
inline Dot::Float load_run_d(const BlockType& type, const uint8_t* d) {
  return Dot::mul(load_d(type, d), Dot::set1(1 / kRunFactor));
}

// d of a run, 32 floats.
inline void load_run_ds(const BlockType& type, const uint8_t* run, float* to) {
  for (size_t c = 0; c < kNr; c += Dot::kLanes) {
    Dot::store(to + c, load_run_d(type, run + c * d_bytes(type)));
  }
}

// Sums of a run, rows of 32 columns, to dst.
inline void add_run(const BlockType& type, const uint8_t* run, const float* sums, size_t rows,
                    float* dst, size_t dst_stride) {
  for (size_t c = 0; c < kNr; c += Dot::kLanes) {
    const Dot::Float d = load_run_d(type, run + c * d_bytes(type));
    for (size_t r = 0; r < rows; ++r) {
      float* to = dst + r * dst_stride + c;
      Dot::store(to, Dot::fma(Dot::load(sums + r * kNr + c), d, Dot::load(to)));
    }
  }
}

}  // namespace
}  // namespace ktk::llamafile

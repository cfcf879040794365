// An expert's weights as its checkpoint has them, cut for the GPUs that share the layer.
#pragma once

#include <memory>
#include <vector>

#include "moe/layer.h"

namespace ktk {

// Where one of `ranks.size()` GPUs wants its part of an expert. It has I_r = I / ranks intermediate
// columns, and all arrays are row-major and dense:
//
//   w13        [2 I_r, H]   its rows of gate, then the same rows of up
//   w13_scale  a row for each group of these rows
//   w2         [H, I_r]     its columns of down
//   w2_scale   a row for each group of rows of down; those of the columns, or of the whole row
//
// Scales are NULL where the format has none.
struct RankTarget {
  void *w13 = nullptr, *w13_scale = nullptr, *w2 = nullptr, *w2_scale = nullptr;
};

// Throws std::invalid_argument unless the backend can write what it stores, the expert is loaded,
// and each rank gets whole groups and bytes. A factor beside a matrix has to have a place.
void check_write(const Layer& layer, size_t expert, const std::vector<RankTarget>& ranks,
                 bool wide_scales);

// Writes the stored bytes, with the workers of the layer. `wide_scales`: scales of one byte are
// written as bf16, those of E4M3 times the factor of their matrix. Throws as check_write().
void write_expert(Layer& layer, size_t expert, const std::vector<RankTarget>& ranks,
                  bool wide_scales);

}  // namespace ktk

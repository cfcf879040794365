// Rows of a packed weight. Columns of a layout that are packed together can only be decoded
// together, so rows are looked up in their order in the weight, and such a block is decoded once.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

#include "core/size.h"
#include "dense/pipeline.h"
#include "moe/nodes.h"
#include "ops/select.h"

namespace ktk {

void look_up(Engine& engine, const Variant& variant, const DenseWeights& weights,
             std::span<const int64_t> ids, const Rows& out) {
  const size_t step = variant.tile.n_step, k = weights.k();
  std::vector<size_t> order(ids.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return ids[a] < ids[b]; });

  struct Block {
    const DenseSlice* slice;
    size_t begin;        // row of the slice
    size_t first, last;  // of `order`
  };
  std::vector<Block> blocks;
  for (size_t i = 0; i < order.size(); ++i) {
    const size_t row = static_cast<size_t>(ids[order[i]]);
    const DenseSlice& slice = weights.slice_of(row);
    const size_t begin = (row - slice.begin) / step * step;
    if (blocks.empty() || blocks.back().slice != &slice || blocks.back().begin != begin) {
      blocks.push_back({&slice, begin, i, i});
    }
    ++blocks.back().last;
  }

  std::atomic<size_t> next{0};
  engine.pool.run([&](int worker) {
    float* const rows = reinterpret_cast<float*>(engine.scratch.own(
        worker, product(step, k, sizeof(float)), node_id(engine.pool.node_of(worker))));
    for (size_t b = next.fetch_add(1); b < blocks.size(); b = next.fetch_add(1)) {
      const auto& [slice, begin, first, last] = blocks[b];
      const size_t end = std::min(begin + step, slice->matrix.n);
      variant.unpack_weight(&slice->matrix, slice->packed, begin, end, rows, k);
      if (slice->factor != 1) ops().scale(slice->factor, end - begin, k, rows, k);
      for (size_t i = first; i < last; ++i) {
        const size_t row = static_cast<size_t>(ids[order[i]]) - slice->begin - begin;
        ops().from_f32(rows + row * k, out.type, k, out.at(order[i]));
      }
    }
  });
}

}  // namespace ktk

#include "dense/plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/size.h"

namespace ktk {
namespace {

// f32 results that a worker keeps in its L2.
constexpr size_t kPanelFloats = 64 * 1024;
// A chunk of tokens reads all weights once, so it should be large, and what it encodes should stay
// in the last cache, or at least not grow without bounds.
constexpr size_t kChunkTokens = 4096;
constexpr size_t kChunkBytes = size_t{192} << 20;
constexpr size_t kLeastTokens = 256;
// Shortest and longest stream of weights. A stream takes a microsecond to get going. Workers that
// go through a matrix side by side get 29 to 31 GB/s of 33 (Emerald Rapids, 2 threads, one row of
// bf16 or int4); with a half of it each, 21.
constexpr size_t kLeastBytes = 32 * 1024, kLongestBytes = 512 * 1024;
// Rows are divided only where columns do not make this many tasks for each worker, into blocks of
// no fewer rows than these, which read the weights once each.
constexpr size_t kLeastTasks = 4, kLeastRows = 32;

// Bytes of a column of packed weights, at least 1.
size_t column_bytes(const DenseSlice& slice) {
  return std::max<size_t>(slice.bytes / slice.matrix.n, 1);
}

// Columns of the shortest task.
size_t least_columns(const DenseSlice& slice, size_t step) {
  return round_up(std::max<size_t>(kLeastBytes / column_bytes(slice), 1), step);
}

}  // namespace

DensePlan::DensePlan(const Variant& variant, const DenseWeights& weights, int workers)
    : tasks(weights.shards().size()),
      variant_(variant),
      weights_(weights),
      workers_(static_cast<size_t>(workers)) {
  for (const DenseAct& act : weights.acts()) x_strides.push_back(variant.act_bytes(act.matrix));
}

size_t DensePlan::pad(size_t rows) const { return round_up(rows, variant_.tile.m_step); }

size_t DensePlan::max_tokens() const {
  const size_t bytes = std::accumulate(x_strides.begin(), x_strides.end(), size_t{0});
  return std::clamp(kChunkBytes / bytes, kLeastTokens, kChunkTokens);
}

void DensePlan::make(size_t count) {
  if (made_ && tokens == count) return;
  made_ = false;  // should the rest throw
  private_x = count <= kPrivateTokens;
  const size_t step = variant_.tile.n_step;
  const size_t block_rows = pad(std::min(count, kMaxRows));
  panel_columns = std::max(kPanelFloats / block_rows / step * step, step);
  tokens = count;
  cut();
  place();
  made_ = true;
}

void DensePlan::cut() {
  const size_t step = variant_.tile.n_step;
  size_t pieces = 0;
  for (const DenseShard& shard : weights_.shards()) {
    for (const DenseSlice& slice : shard.slices) {
      pieces += groups_of(slice.matrix.n, least_columns(slice, step));
    }
  }
  const size_t wanted = groups_of(kLeastTasks * workers_, pieces);
  const size_t row_blocks = std::clamp<size_t>(tokens / kLeastRows, 1, wanted);
  for (size_t s = 0; s < tasks.size(); ++s) cut_shard(weights_.shards()[s], row_blocks, tasks[s]);
}

// Tasks get shorter towards the end, so that workers end together: each is what is left, divided
// by the workers.
void DensePlan::cut_shard(const DenseShard& shard, size_t row_blocks,
                          std::vector<DenseTask>& out) const {
  out.clear();
  const size_t step = variant_.tile.n_step;
  size_t left = 0;
  for (const DenseSlice& slice : shard.slices) left += slice.matrix.n * column_bytes(slice);
  for (const DenseSlice& slice : shard.slices) {
    const size_t each = column_bytes(slice), least = least_columns(slice, step);
    for (size_t begin = 0; begin < slice.matrix.n;) {
      const size_t share = left * row_blocks / workers_ / each;
      const size_t most = std::max(kLongestBytes / each / step * step, least);
      size_t columns = std::clamp(round_up(share, step), least, most);
      // No crumbs.
      if (begin + columns + least > slice.matrix.n) columns = slice.matrix.n - begin;
      for (size_t b = 0; b < row_blocks; ++b) {
        const size_t first = tokens * b / row_blocks, last = tokens * (b + 1) / row_blocks;
        out.push_back({&slice, begin, begin + columns, first, last - first});
      }
      left -= columns * each;
      begin += columns;
    }
  }
}

void DensePlan::place() {
  size_t widest = 0;
  for (const std::vector<DenseTask>& all : tasks) {
    for (const DenseTask& task : all) widest = std::max(widest, task.end - task.begin);
  }
  panel_columns = std::min(panel_columns, round_up(widest, variant_.tile.n_step));
  panel_stride = odd_stride(panel_columns);
  const size_t block_rows = std::min(tokens, kMaxRows);
  Carver carver;
  shared = {};
  Carver& encoded = private_x ? carver : shared;
  x.clear();
  // Micro-kernels may read whole steps of rows, from any row on.
  for (const size_t stride : x_strides) {
    x.push_back(encoded.add(tokens + variant_.tile.m_step, stride));
  }
  own.row = carver.add(weights_.k(), sizeof(float));
  own.sorted = carver.add(weights_.has_orders() ? weights_.k() : 0, sizeof(float));
  own.panel = carver.add(pad(block_rows), product(panel_stride, sizeof(float)));
  own.scratch = carver.add(kernel_scratch(block_rows));
  own.pieces = std::move(carver);
}

size_t DensePlan::kernel_scratch(size_t rows) const {
  size_t bytes = 0;
  for (const ktk_ukernel& kernel : variant_.kernels) {
    for (const DenseShard& shard : weights_.shards()) {
      for (const DenseSlice& slice : shard.slices) {
        bytes = std::max(bytes, variant_.scratch_bytes(kernel, slice.matrix, rows));
      }
    }
  }
  return bytes;
}

}  // namespace ktk

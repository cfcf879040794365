#include "moe/plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/size.h"

namespace ktk {
namespace {

// f32 results of gate (and as much of up) that a worker keeps in its L2.
constexpr size_t kPanelFloats = 64 * 1024;
// f32 sums of a task in the second half, likewise; but no fewer columns than kLeastColumns, because
// each task reads all encoded intermediates.
constexpr size_t kSumBytes = 2 << 20;
constexpr size_t kLeastColumns = 256;
constexpr size_t kPrivateTokens = 4;
// A chunk of tokens reads all weights once, so it should be large; what it keeps between the two
// halves should stay in the last cache, or at least not grow without bounds.
constexpr size_t kChunkTokens = 4096;
constexpr size_t kChunkBytes = size_t{192} << 20;
constexpr size_t kLeastTokens = 256;
// Rows of a chunk, one per token and expert that it names: Route counts them in 32 bits.
constexpr size_t kMostRows = size_t{1} << 31;

}  // namespace

Plan::Plan(const Config& config, const Variant& variant, const Weights& weights)
    : config_(config),
      variant_(variant),
      slices_(weights.slices()),
      num_shards_(weights.shards().size()),
      has_orders_(weights.has_orders()) {
  const Parts<ktk_matrix>& matrix = slices_[0].matrix;
  const bool alike = variant.share_acts(matrix.gate, matrix.up);
  num_acts = alike && !weights.gate_up_orders_differ() ? 1 : 2;
  by_row = weights.expert_orders_differ();
  x_strides[0] = variant.act_bytes(matrix.gate);
  x_strides[1] = variant.act_bytes(matrix.up);
  for (const Slice& slice : slices_) h_strides.push_back(variant.act_bytes(slice.matrix.down));
}

size_t Plan::pad(size_t rows) const { return round_up(rows, variant_.tile.m_step); }

size_t Plan::max_tokens(size_t top_k) const {
  size_t bytes = std::accumulate(x_strides, x_strides + num_acts, size_t{0});
  if (by_row) bytes = product(bytes, top_k);
  for (const size_t stride : h_strides) bytes = sum(bytes, product(top_k, stride));
  if (num_shards_ > 1) bytes = sum(bytes, product(num_shards_, config_.hidden, sizeof(float)));
  const size_t tokens_that_fit = std::clamp(kChunkBytes / bytes, kLeastTokens, kChunkTokens);
  return std::min(tokens_that_fit, std::max<size_t>(kMostRows / top_k, 1));
}

void Plan::make(const Route& route, size_t count, int workers) {
  tokens = count;
  encoded = by_row ? route.tokens.size() : tokens;
  private_x = encoded <= kPrivateTokens;
  size_t most = 0;
  for (const Route::Active& active : route.active) most = std::max<size_t>(most, active.count);
  const size_t block_rows = std::min(most, kMaxRows);

  // Gate and up are cut where the down projection's activations can be cut, too.
  const size_t step = common_multiple(variant_.tile.n_step, variant_.tile.k_step);
  panel_columns = std::max(kPanelFloats / pad(block_rows) / step * step, step);
  gate_up.resize(slices_.size());
  for (size_t s = 0; s < slices_.size(); ++s) {
    cut_gate_up(route, slices_[s].width(), step, workers, gate_up[s]);
  }
  const size_t cap = std::max(kSumBytes / (tokens * sizeof(float)), kLeastColumns);
  cut_down(config_.hidden, variant_.tile.n_step, cap, workers, down);

  place_shared(route.tokens.size());
  place_own(block_rows);
}

void Plan::place_shared(size_t rows) {
  shared = {};
  h.clear();
  partial.clear();
  // Micro-kernels may read whole steps of rows, from any row on.
  const size_t padding = variant_.tile.m_step;
  for (size_t i = 0; i < num_acts; ++i) {
    x[i] = shared.add(private_x ? 0 : encoded + padding, x_strides[i]);
  }
  for (const size_t stride : h_strides) h.push_back(shared.add(rows + padding, stride));
  for (size_t s = 0; num_shards_ > 1 && s < num_shards_; ++s) {
    partial.push_back(shared.add(tokens, product(config_.hidden, sizeof(float))));
  }
}

void Plan::place_own(size_t block_rows) {
  size_t columns = 0;
  for (const DownTask& task : down) columns = std::max<size_t>(columns, task.end - task.begin);
  down_stride = odd_stride(round_up(columns, variant_.tile.n_step));
  panel_stride = odd_stride(panel_columns);
  const size_t rows = pad(block_rows);
  Carver carver;
  own.row = carver.add(config_.hidden, sizeof(float));
  own.sorted = carver.add(has_orders_ ? config_.hidden : 0, sizeof(float));
  for (size_t i = 0; i < num_acts; ++i) {
    own.x[i] = carver.add(private_x ? encoded + variant_.tile.m_step : 0, x_strides[i]);
    own.gather[i] = carver.add(by_row ? 0 : rows, x_strides[i]);
  }
  own.gate = carver.add(config_.gated ? rows : 0, product(panel_stride, sizeof(float)));
  own.up = carver.add(rows, product(panel_stride, sizeof(float)));
  own.product = carver.add(rows, product(down_stride, sizeof(float)));
  own.sums = carver.add(tokens, product(down_stride, sizeof(float)));
  own.scratch = carver.add(kernel_scratch(block_rows));
  own.pieces = std::move(carver);
}

size_t Plan::kernel_scratch(size_t rows) const {
  size_t bytes = 0;
  for (const ktk_ukernel& kernel : variant_.kernels) {
    for (const Slice& slice : slices_) {
      const Parts<ktk_matrix>& matrix = slice.matrix;
      if (config_.gated) bytes = std::max(bytes, variant_.scratch_bytes(kernel, matrix.gate, rows));
      bytes = std::max({bytes, variant_.scratch_bytes(kernel, matrix.up, rows),
                        variant_.scratch_bytes(kernel, matrix.down, rows)});
    }
  }
  return bytes;
}

}  // namespace ktk

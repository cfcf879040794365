#include "train/plan.h"

#include <algorithm>
#include <utility>

#include "core/size.h"
#include "train/gradients.h"

namespace ktk {
namespace {

constexpr size_t kMostColumns = 512;  // of a task that owns columns of dx
// A group of experts: its blocks, and the rows between the halves, should stay in the last cache.
constexpr size_t kGroupBytes = size_t{48} << 20, kGroupBytesPerWorker = size_t{16} << 20;
// A chunk of tokens decodes all weights once, so it should be large.
constexpr size_t kChunkTokens = 4096, kLeastTokens = 256;
constexpr size_t kChunkBytes = size_t{256} << 20;

}  // namespace

BackwardPlan::BackwardPlan(const Config& config, const Weights& weights,
                           const Transposing& transposing, const BackwardLora* lora,
                           bool keeps_rows, bool keeps_dy)
    : config_(config),
      weights_(weights),
      slices_(weights.slices()),
      transposing_(transposing),
      lora_width_(lora ? lora->width() : 0),
      lora_own_(lora ? lora->own() : Carver()),
      keeps_rows_(keeps_rows),
      keeps_dy_(keeps_dy) {
  for (size_t i = 0; i < transposing.count(config.hidden); ++i) {
    of_down.push_back(transposing.block(slices_[0].matrix.down, i));
  }
  for (const Slice& slice : slices_) {
    for (size_t i = 0; i < transposing.count(slice.width()); ++i) {
      of_gate_up.push_back(transposing.block(slice.matrix.up, i));
    }
  }
}

size_t BackwardPlan::max_tokens(size_t top_k, bool kept) const {
  size_t bytes = product(config_.hidden, sizeof(float));
  for (const TransposedBlock& block : of_down) bytes = sum(bytes, block.act_bytes);
  const size_t again = kept ? 0 : product(4, config_.intermediate);
  bytes = sum(bytes, product(top_k, sum(again, product(lora_width_, sizeof(float)))));
  return std::clamp(kChunkBytes / bytes, kLeastTokens, kChunkTokens);
}

void BackwardPlan::add_blocks(size_t expert, Carver& memory,
                              std::vector<TransposedBlock>& to) const {
  const Parts<float>& factor = weights_.factor(expert);
  for (const Slice& s : slices_) {
    transposing_.add(s.matrix.down, s.down_at(expert), factor.down, memory, to);
  }
  for (const Slice& s : slices_) {
    if (config_.gated) transposing_.add(s.matrix.gate, s.gate_at(expert), factor.gate, memory, to);
  }
  for (const Slice& s : slices_) {
    transposing_.add(s.matrix.up, s.up_at(expert), factor.up, memory, to);
  }
}

BackwardPlan::Most BackwardPlan::cut_groups(const Route& route, size_t block_bytes, int workers) {
  const size_t group_bytes =
      std::max(kGroupBytes, kGroupBytesPerWorker * static_cast<size_t>(workers));
  size_t row_bytes = keeps_rows_ ? 3 * config_.intermediate * sizeof(float) : 0;
  for (const TransposedBlock& block : of_gate_up) row_bytes += 2 * block.act_bytes;
  groups.clear();
  Most most;
  for (size_t i = 0, bytes = 0, in_group = 0; i < route.active.size(); ++i) {
    const size_t more = sum(block_bytes, product(route.active[i].count, row_bytes));
    if (groups.empty() || sum(bytes, more) > group_bytes) {
      groups.push_back(i);
      bytes = in_group = 0;
    }
    bytes += more;
    in_group += route.active[i].count;
    most.rows = std::max(most.rows, in_group);
    most.experts = std::max(most.experts, i + 1 - groups.back());
  }
  groups.push_back(route.active.size());
  return most;
}

void BackwardPlan::make(const Route& route, size_t begin, size_t end, int workers,
                        BackwardLora* lora) {
  tokens = end - begin;
  cut_down(config_.hidden, transposing_.variant().tile.n_step, kMostColumns, workers, columns);
  Carver expert;
  std::vector<TransposedBlock> expert_blocks;
  add_blocks(route.active[0].expert, expert, expert_blocks);
  const Most most = cut_groups(route, expert.size(), workers);

  // Micro-kernels may read whole steps of rows, from any row on.
  const size_t padding = transposing_.variant().tile.m_step;
  shared = {};
  dx = shared.add(tokens, product(config_.hidden, sizeof(float)));
  dy.clear();
  for (const TransposedBlock& block : of_down) dy.push_back(shared.add(tokens, block.act_bytes));
  for (std::vector<size_t>& part : dz) {
    part.clear();
    for (const TransposedBlock& block : of_gate_up) {
      part.push_back(shared.add(most.rows + padding, block.act_bytes));
    }
  }
  for (size_t& at : rows) {
    at = shared.add(keeps_rows_ ? most.rows : 0, product(config_.intermediate, sizeof(float)));
  }
  blocks = shared.add(most.experts, expert.size());
  if (lora) lora->place(route, begin, shared);
  place_own(expert_blocks);
}

void BackwardPlan::place_own(const std::vector<TransposedBlock>& expert) {
  const size_t most_rows = transposing_.pad(kMaxRows);
  size_t columns_of_task = 0;
  for (const DownTask& task : columns) {
    columns_of_task = std::max<size_t>(columns_of_task, task.end - task.begin);
  }
  panel_stride = odd_stride(transposing_.depth());
  sum_stride = odd_stride(round_up(columns_of_task, transposing_.variant().tile.n_step));
  Carver carver;
  own.low_rank = carver.add(lora_own_);
  own.row = carver.add(config_.hidden, sizeof(float));
  own.dots = carver.add(2 * most_rows, sizeof(float));
  for (size_t& at : own.panels) at = carver.add(most_rows, product(panel_stride, sizeof(float)));
  for (size_t& at : own.sums) at = carver.add(most_rows, product(sum_stride, sizeof(float)));
  own.gather.clear();
  for (const TransposedBlock& block : of_down) {
    own.gather.push_back(carver.add(most_rows, block.act_bytes));
  }
  own.dy = carver.add(keeps_dy_ ? most_rows : 0, product(config_.hidden, sizeof(float)));
  own.gradients = carver.add(keeps_rows_ ? Gradients::own_bytes() : 0);
  own.scratch = carver.add(transposing_.scratch_bytes(expert, kMaxRows));
  own.pack = carver.add(transposing_.own());
  own.pieces = std::move(carver);
}

}  // namespace ktk

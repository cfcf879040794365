#include "train/plan.h"

#include <algorithm>
#include <utility>

#include "core/size.h"
#include "train/inner_sums.h"

namespace ktk {
namespace {

constexpr size_t kMostColumns = 512;  // of a task that owns columns of dx
// f32 of a panel of kMaxRows rows: four of them stay in L2.
constexpr size_t kPanelFloats = 32 * 1024;
// Rows of a weight that a task packs.
constexpr size_t kPackedRows = 256;
// A group of experts: its matrices, and the rows between the halves, should stay in the last cache.
constexpr size_t kGroupBytes = size_t{16} << 20, kGroupBytesPerWorker = size_t{8} << 20;
// A chunk of tokens decodes all weights once, so it should be large.
constexpr size_t kChunkTokens = 4096, kLeastTokens = 256;
constexpr size_t kChunkBytes = size_t{512} << 20;

}  // namespace

BackwardPlan::BackwardPlan(const Config& config, const Weights& weights,
                           const Transposing& transposing, const BackwardLora* lora,
                           const Sums& sums)
    : config_(config),
      slices_(weights.slices()),
      transposing_(transposing),
      lora_width_(lora ? lora->width() : 0),
      lora_own_(lora ? lora->own() : Carver()),
      sums_(sums) {
  row_stride = odd_stride(config.intermediate);
  make_matrices(lora);
  cut_pieces(lora != nullptr);
}

void BackwardPlan::make_matrices(const BackwardLora* lora) {
  const size_t q_down_width = lora ? lora->width(lora->down()) : 0;
  const size_t q_gate_up_width = lora ? lora->width(lora->gate_up()) : 0;
  // Without q, a matrix ends where its weights do.
  const auto end = [](size_t depth, size_t padded, size_t q) { return q ? padded + q : depth; };
  down_tail = Transposing::pad_depth(config_.hidden);
  const size_t down_depth = end(config_.hidden, down_tail, q_down_width);
  for (const Slice& slice : slices_) {
    down.push_back(transposing_.matrix(slice.width(), down_depth));
    expert.down.push_back(expert.pieces.add(down.back().bytes));
  }
  size_t used = 0;
  for (size_t part = config_.gated ? 0 : 1; part < 2; ++part) {
    for (const Slice& slice : slices_) {
      depth[part].push_back(gate_up_tail);
      used = gate_up_tail + slice.width();
      gate_up_tail = Transposing::pad_depth(used);
    }
  }
  gate_up = transposing_.matrix(config_.hidden, end(used, gate_up_tail, q_gate_up_width));
  expert.gate_up = expert.pieces.add(gate_up.bytes);
  widest_q_ = std::max(q_down_width, q_gate_up_width);
  if (lora) make_factors(*lora);
}

void BackwardPlan::make_factors(const BackwardLora& lora) {
  const auto add = [&](LoraRows::Part part, size_t begin, size_t end, std::vector<FactorB>& to) {
    FactorB one{part, transposing_.matrix(lora.rank(), end - begin), begin, 0, 0};
    one.column = to.size() * lora.rank();
    one.at = expert.pieces.add(one.matrix.bytes);
    to.push_back(one);
  };
  for (const auto part : lora.down()) add(part, 0, down_tail, b_down);
  for (const auto part : lora.gate_up()) {
    const bool is_up = part == LoraRows::kUp;
    add(part, depth[is_up][0], is_up ? gate_up_tail : depth[1][0], b_gate_up);
  }
}

void BackwardPlan::cut_pieces(bool has_lora) {
  const size_t step = round_up(kPackedRows, transposing_.rows());
  const auto cut = [&](Piece::Of of, size_t slice, size_t rows) {
    for (size_t begin = 0; begin < rows; begin += step) {
      pieces.push_back({of, slice, begin, std::min(begin + step, rows)});
    }
  };
  for (size_t s = 0; s < slices_.size(); ++s) {
    cut(Piece::kDown, s, config_.hidden);
    if (config_.gated) cut(Piece::kGate, s, slices_[s].width());
    cut(Piece::kUp, s, slices_[s].width());
    if (!b_down.empty()) pieces.push_back({Piece::kTailOfDown, s, 0, 0});
  }
  if (!b_gate_up.empty()) pieces.push_back({Piece::kTailOfGateUp, 0, 0, 0});
  if (has_lora) pieces.push_back({Piece::kFactorsB, 0, 0, 0});
}

size_t BackwardPlan::max_tokens(size_t top_k) const {
  size_t bytes = sum(product(config_.hidden, sizeof(float)), down[0].act_bytes);
  const size_t again = product(4, sum(config_.intermediate, lora_width_));
  bytes = sum(bytes, product(top_k, sum(again, product(lora_width_, sizeof(float)))));
  return std::clamp(kChunkBytes / bytes, kLeastTokens, kChunkTokens);
}

BackwardPlan::Most BackwardPlan::cut_groups(const Route& route, int workers) {
  const size_t group_bytes =
      std::max(kGroupBytes, kGroupBytesPerWorker * static_cast<size_t>(workers));
  const size_t row_bytes =
      sum(gate_up.act_bytes, sums_.keeps_rows ? product(3, row_stride, sizeof(float)) : 0);
  groups.clear();
  Most most;
  for (size_t i = 0, bytes = 0, in_group = 0; i < route.active.size(); ++i) {
    const size_t count = route.active[i].count;
    const size_t sums = product(InnerSums::units(count, 1), sums_.unit_bytes);
    const size_t more = sum(expert.pieces.size(), sum(product(count, row_bytes), sums));
    if (groups.empty() || sum(bytes, more) > group_bytes) {
      groups.push_back(i);
      bytes = in_group = 0;
    }
    bytes += more;
    in_group += count;
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
  const Most most = cut_groups(route, workers);

  // Micro-kernels may read whole steps of rows, from any row on.
  const size_t padding = transposing_.variant().tile.m_step;
  shared = {};
  dx = shared.add(tokens, product(config_.hidden, sizeof(float)));
  dy = shared.add(tokens, down[0].act_bytes);
  dz = shared.add(most.rows + padding, gate_up.act_bytes);
  for (size_t& at : rows) {
    at = shared.add(sums_.keeps_rows ? most.rows : 0, product(row_stride, sizeof(float)));
  }
  units = shared.add(InnerSums::units(most.rows, most.experts), sums_.unit_bytes);
  matrices = shared.add(most.experts, expert.pieces.size());
  if (lora) lora->place(route, begin, shared);
  place_own();
}

void BackwardPlan::place_own() {
  const size_t most_rows = transposing_.pad(kMaxRows);
  const size_t step = common_multiple(transposing_.variant().tile.n_step, KTK_PAIR_DEPTH);
  size_t columns_of_task = 0;
  for (const DownTask& task : columns) {
    columns_of_task = std::max<size_t>(columns_of_task, task.end - task.begin);
  }
  panel_columns = round_up(kPanelFloats / kMaxRows, step);
  panel_stride = odd_stride(std::max(panel_columns, round_up(widest_q_, step)));
  sum_stride = odd_stride(round_up(columns_of_task, step));
  size_t scratch = transposing_.scratch_bytes(gate_up, kMaxRows);
  for (const TransposedMatrix& one : down) {
    scratch = std::max(scratch, transposing_.scratch_bytes(one, kMaxRows));
  }
  for (const auto* const factors : {&b_down, &b_gate_up}) {
    for (const FactorB& one : *factors) {
      scratch = std::max(scratch, transposing_.scratch_bytes(one.matrix, kMaxRows));
    }
  }
  Carver carver;
  own.low_rank = carver.add(lora_own_);
  own.row = carver.add(Transposing::pad_depth(config_.hidden), sizeof(float));
  own.dots = carver.add(2 * most_rows, sizeof(float));
  for (size_t& at : own.panels) at = carver.add(most_rows, product(panel_stride, sizeof(float)));
  own.sums = carver.add(most_rows, product(sum_stride, sizeof(float)));
  own.gather = carver.add(most_rows, down[0].act_bytes);
  own.dy = carver.add(sums_.keeps_dy ? most_rows : 0, product(config_.hidden, sizeof(float)));
  own.gradients = carver.add(sums_.own_bytes);
  own.scratch = carver.add(scratch);
  own.pack = carver.add(transposing_.own());
  own.pieces = std::move(carver);
}

}  // namespace ktk

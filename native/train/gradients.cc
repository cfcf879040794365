#include "train/gradients.h"

#include <algorithm>

#include "ops/select.h"

namespace ktk {
namespace {

// to[columns of a][n] += a^T x b over `rows`, where `to` may be NULL.
void add_product(size_t m, size_t n, size_t rows, const float* a, size_t a_row, const float* b,
                 size_t b_row, float* to, size_t to_row) {
  if (to) products().gemm(m, n, rows, a, 1, a_row, b, b_row, to, to_row);
}

void add_rows(size_t rows, size_t columns, const float* from, size_t stride, float* to) {
  for (size_t i = 0; to && i < rows; ++i) ops().add(from + i * stride, columns, to);
}

float* moved(float* base, size_t by) { return base ? base + by : nullptr; }

}  // namespace

bool Gradients::wanted() const {
  const LoraGradients& l = request_.lora;
  const WeightGradients& w = request_.weights;
  return l.a.gate || l.a.up || l.a.down || l.b.gate || l.b.up || l.b.down ||
         (w.count && (w.weight.gate || w.weight.up || w.weight.down || w.bias.gate || w.bias.up ||
                      w.bias.down));
}

bool Gradients::has_weights(size_t expert) const {
  const WeightGradients& w = request_.weights;
  return expert >= w.first && expert - w.first < w.count;
}

void Gradients::cut(const Route& route, size_t first, size_t last, std::vector<Task>& tasks) const {
  tasks.clear();
  for (size_t i = first; i < last; ++i) {
    if (!request_.forward.lora && !has_weights(route.active[i].expert)) continue;
    const auto active = static_cast<uint32_t>(i);
    for (size_t at = 0; at < config_.hidden; at += kColumns) {
      const auto begin = static_cast<uint32_t>(at);
      const auto end = static_cast<uint32_t>(std::min(at + kColumns, config_.hidden));
      tasks.push_back({active, Task::kOfHidden, begin, end});
      tasks.push_back({active, Task::kOfOutput, begin, end});
    }
    tasks.push_back({active, Task::kWithin, 0, 0});
  }
}

void Gradients::run(const Task& task, const Route& route, size_t begin, const GradientRows& rows,
                    float* own) const {
  switch (task.kind) {
    case Task::kOfHidden:
      return of_hidden(task, route, begin, rows, own);
    case Task::kOfOutput:
      return of_output(task, route, begin, rows, own);
    case Task::kWithin:
      return within(task, route, rows);
  }
}

// A of gate and up, and their weights: columns of both are those of the hidden states.
void Gradients::of_hidden(const Task& task, const Route& route, size_t begin,
                          const GradientRows& rows, float* x) const {
  const Route::Active active = route.active[task.active];
  const size_t h = config_.hidden, i = config_.intermediate, columns = task.end - task.begin;
  const LoraGradients& lora = request_.lora;
  const WeightGradients& w = request_.weights;
  for (size_t done = 0; done < active.count; done += kRows) {
    const size_t m = std::min<size_t>(active.count - done, kRows), first = active.first + done;
    for (size_t row = 0; row < m; ++row) {
      const Rows& hidden = request_.forward.hidden;
      float* const to = x + row * kColumns;
      ops().to_f32(hidden.at(begin + route.tokens[first + row], task.begin), hidden.type, columns,
                   to);
      ops().scale(route.input_weight(first + row), 1, columns, to, columns);
    }
    if (rows.backward) {
      const size_t rank = request_.forward.lora->adapters[0].rank, q = rows.backward->width();
      const size_t at = active.expert * rank * h + task.begin;
      add_product(rank, columns, m, rows.backward->row(LoraRows::kGate, first), q, x, kColumns,
                  moved(lora.a.gate, at), h);
      add_product(rank, columns, m, rows.backward->row(LoraRows::kUp, first), q, x, kColumns,
                  moved(lora.a.up, at), h);
    }
    if (!has_weights(active.expert)) continue;
    const size_t at = (active.expert - w.first) * i * h + task.begin;
    add_product(i, columns, m, rows.gate + first * i, i, x, kColumns, moved(w.weight.gate, at), h);
    add_product(i, columns, m, rows.up + first * i, i, x, kColumns, moved(w.weight.up, at), h);
  }
}

// B of down, its weights and its bias: rows of these are columns of the output.
void Gradients::of_output(const Task& task, const Route& route, size_t begin,
                          const GradientRows& rows, float* dy) const {
  const Route::Active active = route.active[task.active];
  const size_t h = config_.hidden, i = config_.intermediate, columns = task.end - task.begin;
  const WeightGradients& w = request_.weights;
  for (size_t done = 0; done < active.count; done += kRows) {
    const size_t m = std::min<size_t>(active.count - done, kRows), first = active.first + done;
    for (size_t row = 0; row < m; ++row) {
      const Rows& gradient = request_.forward.out;
      float* const to = dy + row * kColumns;
      ops().to_f32(gradient.at(begin + route.tokens[first + row], task.begin), gradient.type,
                   columns, to);
      ops().scale(route.weights[first + row], 1, columns, to, columns);
    }
    if (rows.forward) {
      const size_t rank = request_.forward.lora->adapters[0].rank;
      const size_t at = (active.expert * h + task.begin) * rank;
      add_product(columns, rank, m, dy, kColumns, rows.forward->row(LoraRows::kDown, first),
                  rows.forward->width(), moved(request_.lora.b.down, at), rank);
    }
    if (!has_weights(active.expert)) continue;
    const size_t at = (active.expert - w.first) * h + task.begin;
    add_product(columns, i, m, dy, kColumns, rows.h + first * i, i, moved(w.weight.down, at * i),
                i);
    add_rows(m, columns, dy, kColumns, moved(w.bias.down, at));
  }
}

// What has the intermediate size: B of gate and up, A of down, biases.
void Gradients::within(const Task& task, const Route& route, const GradientRows& rows) const {
  const Route::Active active = route.active[task.active];
  const size_t i = config_.intermediate, m = active.count, first = active.first;
  if (rows.forward) {
    const LoraGradients& lora = request_.lora;
    const size_t rank = request_.forward.lora->adapters[0].rank, p = rows.forward->width();
    const size_t at = active.expert * rank * i;
    add_product(i, rank, m, rows.gate + first * i, i, rows.forward->row(LoraRows::kGate, first), p,
                moved(lora.b.gate, at), rank);
    add_product(i, rank, m, rows.up + first * i, i, rows.forward->row(LoraRows::kUp, first), p,
                moved(lora.b.up, at), rank);
    add_product(rank, i, m, rows.backward->row(LoraRows::kDown, first), p, rows.h + first * i, i,
                moved(lora.a.down, at), i);
  }
  if (!has_weights(active.expert)) return;
  const WeightGradients& w = request_.weights;
  const size_t at = (active.expert - w.first) * i;
  add_rows(m, i, rows.gate + first * i, i, moved(w.bias.gate, at));
  add_rows(m, i, rows.up + first * i, i, moved(w.bias.up, at));
}

}  // namespace ktk

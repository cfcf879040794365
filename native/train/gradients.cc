#include "train/gradients.h"

#include <algorithm>

#include "ops/select.h"
#include "train/factor_sums.h"

namespace ktk {
namespace {

// Between rows of Gradients::kColumns columns: an odd number of cache lines, see odd_stride().
constexpr size_t kStride = Gradients::kColumns + 16;
// Rows of tokens, which lie anywhere, between the one that is fetched and the one that is decoded.
constexpr size_t kAhead = 6;

// to[columns of a][n] += a^T x b over `rows`, where `to` may be NULL.
void add_product(size_t m, size_t n, size_t rows, const float* a, size_t a_row, const float* b,
                 size_t b_row, float* to, size_t to_row) {
  if (to) products().gemm(m, n, rows, a, 1, a_row, b, b_row, to, to_row);
}

void add_rows(size_t rows, size_t columns, const float* from, size_t stride, float* to) {
  for (size_t i = 0; to && i < rows; ++i) ops().add(from + i * stride, columns, to);
}

// Has a task's columns of `m` rows of an active expert, which are tokens anywhere, as f32. No
// processor expects the next of them.
void decode(const Rows& from, const Route& route, size_t begin, const Gradients::Task& task,
            size_t done, size_t m, float* to) {
  const Route::Active& active = route.active[task.active];
  const size_t columns = task.end - task.begin, bytes = from.bytes_of(columns);
  const size_t row_bytes = from.bytes_of(from.stride);
  const char* const first = from.at(begin, task.begin);
  const auto at = [&](size_t row) { return first + route.tokens[active.first + row] * row_bytes; };
  for (size_t row = done; row < done + m; ++row, to += kStride) {
    if (row + kAhead < active.count) {
      const char* const next = at(row + kAhead);
      for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(next + i);
    }
    ops().to_f32(at(row), from.type, columns, to);
  }
}

float* moved(float* base, size_t by) { return base ? base + by : nullptr; }

}  // namespace

bool Gradients::of_factors() const {
  const LoraGradients& l = request_.lora;
  return l.a.gate || l.a.up || l.a.down || l.b.gate || l.b.up || l.b.down;
}

bool Gradients::of_weights() const {
  const WeightGradients& w = request_.weights;
  return w.count &&
         (w.weight.gate || w.weight.up || w.weight.down || w.bias.gate || w.bias.up || w.bias.down);
}

size_t Gradients::rank() const {
  const Lora* const lora = request_.forward.lora;
  return lora ? lora->adapters[0].rank : 0;
}

size_t Gradients::own_bytes() const {
  const size_t sums = FactorSums::floats(kColumns, rank());
  return product(sum(product(kRows, kStride), product(2, sums)), sizeof(float));
}

bool Gradients::of_weights(size_t expert) const {
  const WeightGradients& w = request_.weights;
  return of_weights() && expert >= w.first && expert - w.first < w.count;
}

void Gradients::cut(const Route& route, size_t first, size_t last, std::vector<Task>& tasks) const {
  tasks.clear();
  for (size_t i = first; i < last; ++i) {
    if (!request_.forward.lora && !of_weights(route.active[i].expert)) continue;
    const auto active = static_cast<uint32_t>(i);
    for (size_t at = 0; at < config_.hidden; at += kColumns) {
      const auto begin = static_cast<uint32_t>(at);
      const auto end = static_cast<uint32_t>(std::min(at + kColumns, config_.hidden));
      tasks.push_back({active, Task::kOfHidden, begin, end});
      tasks.push_back({active, Task::kOfOutput, begin, end});
    }
    for (size_t at = 0; at < config_.intermediate; at += kColumns) {
      const size_t end = std::min(at + kColumns, config_.intermediate);
      tasks.push_back(
          {active, Task::kWithin, static_cast<uint32_t>(at), static_cast<uint32_t>(end)});
    }
  }
}

void Gradients::run(const Task& task, const Route& route, size_t begin, const GradientRows& rows,
                    char* own) const {
  const Memory memory = {reinterpret_cast<float*>(own),
                         reinterpret_cast<float*>(own) + kRows * kStride};
  switch (task.kind) {
    case Task::kOfHidden:
      return of_hidden(task, route, begin, rows, memory);
    case Task::kOfOutput:
      return of_output(task, route, begin, rows, memory);
    case Task::kWithin:
      return within(task, route, begin, rows, memory);
  }
}

// A of gate and up, and their weights: columns of both are those of the hidden states.
void Gradients::of_hidden(const Task& task, const Route& route, size_t begin,
                          const GradientRows& rows, const Memory& own) const {
  const Route::Active active = route.active[task.active];
  const size_t h = config_.hidden, i = config_.intermediate, columns = task.end - task.begin;
  const LoraGradients& lora = request_.lora;
  const WeightGradients& w = request_.weights;
  const size_t at = active.expert * rank() * h + task.begin;
  const bool zero = begin == 0;
  const auto gate = FactorSums::of_a(moved(lora.a.gate, at), columns, rank(), h, zero, own.sums);
  const auto up = FactorSums::of_a(moved(lora.a.up, at), columns, rank(), h, zero,
                                   own.sums + FactorSums::floats(kColumns, rank()));
  for (size_t done = 0; done < active.count; done += kRows) {
    const size_t m = std::min<size_t>(active.count - done, kRows), first = active.first + done;
    decode(request_.forward.hidden, route, begin, task, done, m, own.rows);
    for (size_t row = 0; route.weighs_input() && row < m; ++row) {
      ops().scale(route.input_weight(first + row), 1, columns, own.rows + row * kStride, columns);
    }
    if (const LoraRows* const q = rows.backward) {
      gate.add(m, q->row(LoraRows::kGate, first), q->width(), own.rows, kStride);
      up.add(m, q->row(LoraRows::kUp, first), q->width(), own.rows, kStride);
    }
    if (!of_weights(active.expert)) continue;
    const size_t weight = (active.expert - w.first) * i * h + task.begin;
    const size_t before = first * rows.stride;
    add_product(i, columns, m, rows.gate + before, rows.stride, own.rows, kStride,
                moved(w.weight.gate, weight), h);
    add_product(i, columns, m, rows.up + before, rows.stride, own.rows, kStride,
                moved(w.weight.up, weight), h);
  }
  gate.finish();
  up.finish();
}

// B of down, its weights and its bias: rows of these are columns of the output.
void Gradients::of_output(const Task& task, const Route& route, size_t begin,
                          const GradientRows& rows, const Memory& own) const {
  const Route::Active active = route.active[task.active];
  const size_t h = config_.hidden, i = config_.intermediate, columns = task.end - task.begin;
  const WeightGradients& w = request_.weights;
  const size_t at = (active.expert * h + task.begin) * rank();
  const auto factor =
      FactorSums::of_b(moved(request_.lora.b.down, at), columns, rank(), begin == 0, own.sums);
  for (size_t done = 0; done < active.count; done += kRows) {
    const size_t m = std::min<size_t>(active.count - done, kRows), first = active.first + done;
    decode(request_.forward.out, route, begin, task, done, m, own.rows);
    if (const LoraRows* const p = rows.forward) {
      factor.add(m, p->row(LoraRows::kDown, first), p->width(), own.rows, kStride);
    }
    if (!of_weights(active.expert)) continue;
    for (size_t row = 0; row < m; ++row) {
      ops().scale(route.weights[first + row], 1, columns, own.rows + row * kStride, columns);
    }
    const size_t row = (active.expert - w.first) * h + task.begin;
    add_product(columns, i, m, own.rows, kStride, rows.h + first * rows.stride, rows.stride,
                moved(w.weight.down, row * i), i);
    add_rows(m, columns, own.rows, kStride, moved(w.bias.down, row));
  }
  factor.finish();
}

// What has the intermediate size: B of gate and up, A of down, biases.
void Gradients::within(const Task& task, const Route& route, size_t begin, const GradientRows& rows,
                       const Memory& own) const {
  const Route::Active active = route.active[task.active];
  const size_t i = config_.intermediate, columns = task.end - task.begin;
  inner_.finish(task.active, task.begin, task.end, begin == 0, own.sums);
  if (!of_weights(active.expert)) return;
  const WeightGradients& w = request_.weights;
  const size_t at = (active.expert - w.first) * i + task.begin;
  const size_t from = active.first * rows.stride + task.begin;
  add_rows(active.count, columns, rows.gate + from, rows.stride, moved(w.bias.gate, at));
  add_rows(active.count, columns, rows.up + from, rows.stride, moved(w.bias.up, at));
}

}  // namespace ktk

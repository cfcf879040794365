// The backward pass of one chunk of tokens, group by group of experts:
//
//   weights --decode--> transposed matrices --+
//   dy --encode--> x down --> dh -------------+-- slopes --> d gate, d up --encode--> x gate, up
//                     tasks: rows of one expert                         tasks: columns of dx
//   ----------------|--------------------------------------------------|------------------------
//                barrier                                            barrier
//
// A group is as many experts as matrices of them fit a part of the last cache. A task of the second
// half owns columns of dx, to which experts add in their order, so that any number of workers gives
// the same bits. With an adapter, matrices and rows are deeper by its rank (train/low_rank.h). Sums
// over rows, which are gradients of factors and of weights, come beside, but for those of factors
// that have the intermediate size (train/inner_sums.h).
#include "train/backward.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "core/size.h"
#include "moe/pipeline.h"
#include "moe/zero_experts.h"
#include "ops/select.h"
#include "train/gradients.h"
#include "train/inner_sums.h"
#include "train/low_rank.h"
#include "train/plan.h"
#include "train/workers.h"

namespace ktk {
namespace {

constexpr size_t kMaxRows = BackwardPlan::kMaxRows;

// Of the matrices of an expert, and of its factors.
size_t most_columns(const Config& config, const std::vector<Slice>& slices, const Lora* lora) {
  size_t most = config.hidden;
  for (const Slice& slice : slices) most = std::max(most, slice.width());
  return lora ? std::max(most, product(2, lora->adapters[0].rank)) : most;
}

class BackwardRun {
 public:
  BackwardRun(Engine& engine, const Config& config, const Variant& variant, const Weights& weights,
              const FloatBackend& floats, const BackwardRequest& request, const Request& forward)
      : engine_(engine),
        config_(config),
        weights_(weights),
        request_(request),
        forward_(forward),
        ops_(ops()),
        slices_(weights.slices()),
        transposing_(variant, floats, most_columns(config, slices_, forward.lora)),
        inner_(config, request, weights),
        gradients_(config, request, inner_),
        lora_(forward.lora
                  ? std::optional<BackwardLora>(std::in_place, *forward.lora, config, weights)
                  : std::nullopt),
        plan_(config, weights, transposing_, lora(),
              {gradients_.wanted() ? gradients_.own_bytes() : 0, gradients_.of_weights(),
               inner_.unit_bytes(), weights.down_bias(0) != nullptr}) {}

  size_t max_tokens() const { return plan_.max_tokens(forward_.choice.top_k); }

  // `kept` has the products of the chunk's tokens.
  void run(size_t begin, size_t end, const Rows& kept) {
    begin_ = begin;
    kept_ = kept;
    route_.build(forward_.choice, begin, end, config_, forward_.skip);
    std::memset(request_.weights_gradient + begin * forward_.choice.top_k, 0,
                product(end - begin, forward_.choice.top_k, sizeof(float)));
    if (!route_.passed.empty()) {
      pass_gradients(engine_, config_, route_, forward_.hidden, forward_.out, begin,
                     forward_.choice.top_k, request_.weights_gradient);
    }
    if (route_.active.empty()) {
      return pass_through(engine_, config_, route_, forward_.out, request_.hidden_gradient, begin,
                          end);
    }
    plan_.make(route_, begin, end, engine_.pool.size(), lora());
    shared_ = engine_.scratch.shared(plan_.shared);
    if (lora_) lora_->use(shared_);
    std::memset(dx(0), 0, product(plan_.tokens, config_.hidden, sizeof(float)));
    each(plan_.tokens, [&](size_t token, char* own) { encode(token, own); });
    for (size_t group = 0; group + 1 < plan_.groups.size(); ++group) {
      run_group(plan_.groups[group], plan_.groups[group + 1]);
    }
    each(plan_.tokens, [&](size_t token, char* own) {
      add_passed(route_, token, forward_.out, begin_ + token, 0, config_.hidden,
                 reinterpret_cast<float*>(own + plan_.own.row), dx(token));
      const Rows& out = request_.hidden_gradient;
      ops_.from_f32(dx(token), out.type, config_.hidden, out.at(begin_ + token));
    });
  }

 private:
  // Of gate and up, the first that experts have.
  size_t first_part() const { return config_.gated ? 0 : 1; }
  BackwardLora* lora() { return lora_ ? &*lora_ : nullptr; }

  template <typename Task>
  void each(size_t count, Task task) {
    ktk::each(engine_, transposing_.variant(), plan_.own.pieces, count, task);
  }

  float* dx(size_t token) const {
    return reinterpret_cast<float*>(shared_ + plan_.dx) + token * config_.hidden;
  }
  char* dy(size_t token) const { return shared_ + plan_.dy + token * plan_.down[0].act_bytes; }
  char* dz(size_t row) const {
    return shared_ + plan_.dz + (row - first_row_) * plan_.gate_up.act_bytes;
  }
  // A matrix of an active expert, by its place.
  char* matrix_at(size_t active, size_t place) const {
    return shared_ + plan_.matrices + (active - first_active_) * plan_.expert.pieces.size() + place;
  }
  float* kept_row(size_t which, size_t row) const {
    return reinterpret_cast<float*>(shared_ + plan_.rows[which]) +
           (row - first_row_) * plan_.row_stride;
  }

  // Active experts [first, last).
  void run_group(size_t first, size_t last) {
    first_active_ = first;
    first_row_ = route_.active[first].first;
    const Route::Active& end = route_.active[last - 1];
    const size_t rows = end.first + end.count - first_row_;
    Carver memory;
    for (size_t i = first; i < last; ++i) memory.add(plan_.expert.pieces);
    memory.guard(shared_ + plan_.matrices);
    inner_.begin(route_, first, shared_ + plan_.units);
    const size_t pieces = plan_.pieces.size();
    each((last - first) * pieces, [&](size_t i, char* own) {
      pack(plan_.pieces[i % pieces], first + i / pieces, own + plan_.own.pack);
    });

    const size_t share = rows / (4 * static_cast<size_t>(engine_.pool.size())) + 1;
    std::vector<RowBlock> tasks;
    for (size_t i = first; i < last; ++i) {
      const Route::Active& one = route_.active[i];
      const size_t unit = InnerSums::unit(one.count);
      const size_t step = std::clamp(share / unit, size_t{1}, kMaxRows / unit) * unit;
      for (size_t done = 0; done < one.count; done += step) {
        tasks.push_back({i, one.first + done, std::min<size_t>(step, one.count - done)});
      }
    }
    each(tasks.size(), [&](size_t i, char* own) { rows_of(tasks[i], own); });

    const std::vector<DownTask>& columns = plan_.columns;
    gradients_.cut(route_, first, last, gradient_tasks_);
    const size_t sums = gradients_.wanted() ? gradient_tasks_.size() : 0;
    each(sums + columns.size(), [&](size_t i, char* own) {
      if (i < columns.size()) return columns_of(columns[i], last, own);
      gradients_.run(gradient_tasks_[i - columns.size()], route_, begin_, gradient_rows(),
                     own + plan_.own.gradients);
    });
  }

  GradientRows gradient_rows() const {
    const size_t before = first_row_ * plan_.row_stride;
    return {kept_row(0, first_row_) - before,    kept_row(1, first_row_) - before,
            kept_row(2, first_row_) - before,    plan_.row_stride,
            lora_ ? &lora_->forward() : nullptr, lora_ ? &lora_->backward() : nullptr};
  }

  void pack(const BackwardPlan::Piece& piece, size_t active, char* own) const {
    using Piece = BackwardPlan::Piece;
    const size_t expert = route_.active[active].expert, s = piece.slice;
    const Slice& slice = slices_[s];
    const Parts<float>& factor = weights_.factor(expert);
    // dh stays in the order of down's columns, which rows of gate and up are in, too.
    const Parts<Order>& order = weights_.order(expert);
    char* const gate_up = matrix_at(active, plan_.expert.gate_up);
    switch (piece.of) {
      case Piece::kDown:
        return transposing_.pack({&slice.matrix.down, slice.down_at(expert), factor.down, nullptr,
                                  piece.begin, piece.end},
                                 plan_.down[s], piece.begin,
                                 matrix_at(active, plan_.expert.down[s]), own);
      case Piece::kGate:
        return transposing_.pack({&slice.matrix.gate, slice.gate_at(expert), factor.gate,
                                  order.gate, piece.begin, piece.end},
                                 plan_.gate_up, plan_.depth[0][s] + piece.begin, gate_up, own);
      case Piece::kUp:
        return transposing_.pack(
            {&slice.matrix.up, slice.up_at(expert), factor.up, order.up, piece.begin, piece.end},
            plan_.gate_up, plan_.depth[1][s] + piece.begin, gate_up, own);
      case Piece::kTailOfDown:
        return lora_->pack_a(lora_->down(), active, slice.begin, transposing_, plan_.down[s],
                             plan_.down_tail, matrix_at(active, plan_.expert.down[s]), own);
      case Piece::kTailOfGateUp:
        return lora_->pack_a(lora_->gate_up(), active, 0, transposing_, plan_.gate_up,
                             plan_.gate_up_tail, gate_up, own);
      case Piece::kFactorsB:
        return pack_b(active, own);
    }
  }

  void pack_b(size_t active, char* own) const {
    const auto pack = [&](const BackwardPlan::FactorB& factor, size_t first, size_t at,
                          size_t rows) {
      lora_->pack_b(active, {factor.part, first, at, rows}, transposing_, factor.matrix,
                    matrix_at(active, factor.at), own);
    };
    for (const auto& factor : plan_.b_down) pack(factor, 0, 0, config_.hidden);
    for (const auto& factor : plan_.b_gate_up) {
      const std::vector<size_t>& depth = plan_.depth[factor.part == LoraRows::kUp];
      for (size_t s = 0; s < slices_.size(); ++s) {
        pack(factor, slices_[s].begin, depth[s] - factor.depth, slices_[s].width());
      }
    }
  }

  void encode(size_t token, char* own) const {
    float* const row = reinterpret_cast<float*>(own + plan_.own.row);
    const TransposedMatrix& down = plan_.down[0];
    const Rows& gradient = forward_.out;
    ops_.to_f32(gradient.at(begin_ + token), gradient.type, config_.hidden, row);
    std::fill(row + config_.hidden, row + plan_.down_tail, 0.0f);
    transposing_.encode(down, 1, 0, std::min(plan_.down_tail, down.matrix.k), row, plan_.down_tail,
                        dy(token));
  }

  float* panel(size_t which, char* own) const {
    return reinterpret_cast<float*>(own + plan_.own.panels[which]);
  }

  // Columns [begin, end) of a matrix's product with encoded rows.
  void multiply(const TransposedMatrix& matrix, const char* memory, size_t m, const char* act,
                size_t begin, size_t end, float* dst, size_t stride, char* own) const {
    transposing_.multiply(matrix, memory, m, act, begin, end, dst, stride, own + plan_.own.scratch);
  }

  // Encodes q behind rows of gradients, which are encoded for `matrix`.
  void add_q(const RowBlock& task, const std::vector<BackwardPlan::FactorB>& factors,
             const TransposedMatrix& matrix, size_t tail, char* acts, char* own) const {
    if (factors.empty()) return;
    const size_t m = task.count, stride = plan_.panel_stride;
    float *const q = panel(0, own), *const product = panel(1, own);
    for (const BackwardPlan::FactorB& b : factors) {
      transposing_.multiply_part(b.matrix, matrix_at(task.active, b.at), m, acts, matrix.act_bytes,
                                 b.depth, 0, b.matrix.matrix.n, product, stride,
                                 own + plan_.own.scratch);
      lora_->keep(b.part, task, product, q + b.column, stride);
    }
    transposing_.encode(matrix, m, tail, matrix.matrix.k, q, stride, acts);
  }

  // Rows of low rank that do not come from h.
  void load_low_rank(const RowBlock& task) const {
    lora_->weigh(task, route_);
    for (size_t row = task.first; row < task.first + task.count; ++row) {
      for (const auto part : lora_->gate_up()) {
        const size_t which = part == LoraRows::kUp;
        lora_->load(part, row, kept_.at(kept_place(which, row), config_.intermediate),
                    route_.input_weight(row));
      }
    }
  }

  // Gradients of the products of gate and up for rows of one expert, and of the routing weights.
  void rows_of(const RowBlock& task, char* own) const {
    const Route::Active active = route_.active[task.active];
    const size_t expert = active.expert, first = task.first, m = task.count;
    const size_t stride = plan_.panel_stride;
    char* const low_rank = own + plan_.own.low_rank;
    // By the factor of what an expert returns, and by that of what goes in: one is the routing
    // weight.
    float* const dots = reinterpret_cast<float*>(own + plan_.own.dots);
    float* const input_dots = dots + kMaxRows;
    std::fill_n(dots, 2 * kMaxRows, 0.0f);
    const TransposedMatrix &down = plan_.down[0], &gate_up = plan_.gate_up;
    char* const gather = own + plan_.own.gather;
    for (size_t r = 0; r < m; ++r) {
      std::memcpy(gather + r * down.act_bytes, dy(route_.tokens[first + r]), down.act_bytes);
    }
    if (lora_) {
      lora_->clear_down(task);
      add_q(task, plan_.b_down, plan_.down[0], plan_.down_tail, gather, own);
      load_low_rank(task);
    }
    for (size_t s = 0; s < slices_.size(); ++s) {
      const Slice& slice = slices_[s];
      for (size_t n = 0; n < slice.width(); n += plan_.panel_columns) {
        const size_t end = std::min(n + plan_.panel_columns, slice.width()), columns = end - n;
        const size_t column = slice.begin + n;
        float* const gate = config_.gated ? panel(0, own) : nullptr;
        float *const up = panel(1, own), *const dh = panel(2, own), *const h = panel(3, own);
        multiply(plan_.down[s], matrix_at(task.active, plan_.expert.down[s]), m, gather, n, end, dh,
                 stride, own);
        for (size_t part = first_part(); part < 2; ++part) {
          load(part, task, column, columns, panel(part, own));
          weigh(task, columns, panel(part, own));
        }
        const float *const gate_bias = weights_.gate_bias(expert), *const up_bias =
                                                                       weights_.up_bias(expert);
        ops_.glu_backward(&config_.glu, m, columns, gate, up, dh, h, stride,
                          gate_bias ? gate_bias + column : nullptr,
                          up_bias ? up_bias + column : nullptr, &route_.weights[first], dots);
        for (size_t part = first_part(); route_.weighs_input() && part < 2; ++part) {
          load(part, task, column, columns, dh);  // which nobody reads any more
          add_dots(m, columns, panel(part, own), dh, input_dots);
        }
        if (gradients_.of_weights(expert)) keep(task, column, columns, own);
        if (lora_) {
          inner_.add(task, column, column + columns, {gate, up, h, stride}, lora_->forward(),
                     lora_->backward());
          lora_->reduce_down(task, column, column + columns, h, stride, low_rank);
        }
        for (size_t part = first_part(); part < 2; ++part) {
          const size_t from = plan_.depth[part][s] + n;
          const size_t to = std::min(from + Transposing::pad_depth(columns), gate_up.matrix.k);
          float* const rows = panel(part, own);
          for (size_t r = 0; r < m; ++r) {
            std::fill(rows + r * stride + columns, rows + r * stride + (to - from), 0.0f);
          }
          transposing_.encode(gate_up, m, from, to, rows, stride, dz(first));
        }
      }
    }
    if (lora_) {
      add_q(task, plan_.b_gate_up, gate_up, plan_.gate_up_tail, dz(first), own);
      lora_->finish(task, route_);
    }
    if (const float* const bias = weights_.down_bias(expert)) {
      products().gemm(m, 1, config_.hidden, gather_dy(first, m, own), config_.hidden, 1, bias, 1,
                      dots, 1);
    }
    for (size_t r = 0; r < m; ++r) {
      const size_t token = begin_ + route_.tokens[first + r];
      request_.weights_gradient[token * forward_.choice.top_k + route_.slots[first + r]] =
          route_.weighs_input() ? input_dots[r] : dots[r];
    }
  }

  // dots[m] += the sums of a * b over each row.
  void add_dots(size_t m, size_t columns, const float* a, const float* b, float* dots) const {
    for (size_t r = 0; r < m; ++r) {
      const size_t at = r * plan_.panel_stride;
      dots[r] += ops_.dot(a + at, b + at, columns);
    }
  }

  const float* gather_dy(size_t first, size_t m, char* own) const {
    float* const rows = reinterpret_cast<float*>(own + plan_.own.dy);
    for (size_t r = 0; r < m; ++r) {
      const Rows& gradient = forward_.out;
      ops_.to_f32(gradient.at(begin_ + route_.tokens[first + r]), gradient.type, config_.hidden,
                  rows + r * config_.hidden);
    }
    return rows;
  }

  // The products of gate (0) or up (1) that the forward pass kept.
  void load(size_t part, const RowBlock& task, size_t column, size_t columns, float* to) const {
    for (size_t r = 0; r < task.count; ++r) {
      ops_.to_f32(kept_.at(kept_place(part, task.first + r), column), kept_.type, columns,
                  to + r * plan_.panel_stride);
    }
  }
  // The row of kept_ that has the product of gate (0) or up (1) for a row.
  size_t kept_place(size_t part, size_t row) const {
    const size_t choice = route_.tokens[row] * forward_.choice.top_k + route_.slots[row];
    return config_.first_products() * choice + part - first_part();
  }

  void weigh(const RowBlock& task, size_t columns, float* products) const {
    for (size_t r = 0; route_.weighs_input() && r < task.count; ++r) {
      ops_.scale(route_.input_weights[task.first + r], 1, columns,
                 products + r * plan_.panel_stride, columns);
    }
  }

  // Gradients are those of the checkpoint's rows and columns, in whatever order these are packed.
  void keep(const RowBlock& task, size_t column, size_t columns, char* own) const {
    constexpr size_t kWhich[] = {0, 1, 3};  // gate, up, h
    const Order& order = weights_.order(route_.active[task.active].expert).down;
    for (size_t which = first_part(); which < 3; ++which) {
      const float* const from = panel(kWhich[which], own);
      for (size_t r = 0; r < task.count; ++r) {
        const float* const row = from + r * plan_.panel_stride;
        float* const to = kept_row(which, task.first + r);
        if (!order) std::copy_n(row, columns, to + column);
        for (size_t i = 0; order && i < columns; ++i) to[(*order)[column + i]] = row[i];
      }
    }
  }

  // Adds what the experts of a group make of columns of dx.
  void columns_of(const DownTask& task, size_t last, char* own) const {
    const size_t columns = task.end - task.begin, stride = plan_.sum_stride;
    float* const sums = reinterpret_cast<float*>(own + plan_.own.sums);
    for (size_t i = first_active_; i < last; ++i) {
      const Route::Active active = route_.active[i];
      for (size_t done = 0; done < active.count; done += kMaxRows) {
        const size_t m = std::min<size_t>(active.count - done, kMaxRows);
        const size_t first = active.first + done;
        multiply(plan_.gate_up, matrix_at(i, plan_.expert.gate_up), m, dz(first), task.begin,
                 task.end, sums, stride, own);
        for (size_t r = 0; r < m; ++r) {
          ops_.add_weighted(sums + r * stride, nullptr, route_.input_weight(first + r), columns,
                            dx(route_.tokens[first + r]) + task.begin);
        }
      }
    }
  }

  Engine& engine_;
  const Config& config_;
  const Weights& weights_;
  const BackwardRequest& request_;
  const Request& forward_;
  const ktk_ops& ops_;
  const std::vector<Slice>& slices_;
  Transposing transposing_;
  InnerSums inner_;
  Gradients gradients_;
  std::optional<BackwardLora> lora_;
  BackwardPlan plan_;

  Route route_;
  size_t begin_ = 0;  // first token of the chunk
  Rows kept_;
  char* shared_ = nullptr;                   // see BackwardPlan
  size_t first_active_ = 0, first_row_ = 0;  // of the group
  std::vector<Gradients::Task> gradient_tasks_;
};

// Where nothing is loaded and no expert is wanted.
void backward_of_zero_experts(Engine& engine, const Config& config, const BackwardRequest& request,
                              const Request& forward) {
  constexpr size_t kTokens = 4096;
  const size_t tokens = forward.choice.tokens, top_k = forward.choice.top_k;
  std::memset(request.weights_gradient, 0, product(tokens, top_k, sizeof(float)));
  Route route;
  for (size_t begin = 0; begin < tokens; begin += kTokens) {
    const size_t end = std::min(begin + kTokens, tokens);
    route.build(forward.choice, begin, end, config, forward.skip);
    pass_gradients(engine, config, route, forward.hidden, forward.out, begin, top_k,
                   request.weights_gradient);
    pass_through(engine, config, route, forward.out, request.hidden_gradient, begin, end);
  }
}

}  // namespace

void backward(Layer& layer, const FloatBackend& floats, const BackwardRequest& request) {
  layer.compute(request.forward, [&](const Weights* weights, const Request& forward) {
    const Config& config = layer.config();
    const size_t tokens = forward.choice.tokens, top_k = forward.choice.top_k;
    Engine& engine = *layer.engine();
    if (!weights) return backward_of_zero_experts(engine, config, request, forward);
    BackwardRun run(engine, config, layer.variant(), *weights, floats, request, forward);
    const size_t step = run.max_tokens();
    Memory again;
    for (size_t begin = 0; begin < tokens; begin += step) {
      const size_t end = std::min(begin + step, tokens);
      Rows kept = forward.kept;
      if (kept.data) {
        kept.data = kept.at(config.first_products() * begin * top_k);
      } else {
        kept = {nullptr, KTK_BF16, kept_columns(config, forward.lora)};
        const size_t rows = product(config.first_products() * step, top_k);
        Carver products;
        const size_t at = products.add(rows, kept.bytes_of(kept.stride));
        if (!again) again = Memory(products.size());
        products.guard(again.data());
        kept.data = again.data() + at;
        forward_products(engine, config, layer.variant(), *weights, forward, begin, end, kept);
      }
      run.run(begin, end, kept);
    }
  });
}

}  // namespace ktk

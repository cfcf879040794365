// The backward pass of one chunk of tokens, group by group of experts:
//
//   weights --transpose--> blocks --+
//   dy --encode--> x down --> dh ---+-- slopes --> d gate, d up --encode--> x gate, x up --> dx
//                     tasks: rows of one expert                    tasks: columns of dx
//   ----------------|---------------------------------------|---------------------------|------
//                barrier                                 barrier                     barrier
//
// A group is as many experts as blocks of them fit a part of the last cache. A task of the second
// half owns columns of dx, to which experts add in their order, so that any number of workers gives
// the same bits. Rows of low rank, and sums over rows, which are gradients of factors and of
// weights, come beside.
#include "train/backward.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "core/size.h"
#include "moe/pipeline.h"
#include "moe/zero_experts.h"
#include "ops/select.h"
#include "train/gradients.h"
#include "train/low_rank.h"
#include "train/plan.h"
#include "train/workers.h"

namespace ktk {
namespace {

constexpr size_t kLeastRows = 32;  // of a task
constexpr size_t kMaxRows = BackwardPlan::kMaxRows;

// Of the matrices of an expert.
size_t most_columns(const Config& config, const std::vector<Slice>& slices) {
  size_t most = config.hidden;
  for (const Slice& slice : slices) most = std::max(most, slice.width());
  return most;
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
        transposing_(variant, floats, most_columns(config, slices_)),
        gradients_(config, request),
        wants_gradients_(gradients_.wanted()),
        lora_(forward.lora ? std::optional<BackwardLora>(std::in_place, *forward.lora, config)
                           : std::nullopt),
        plan_(config, weights, transposing_, lora(), wants_gradients_, wants_dy_rows()) {}

  size_t max_tokens() const {
    return plan_.max_tokens(forward_.choice.top_k, forward_.kept.data != nullptr);
  }

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
    if (lora_) {
      each(lora_->blocks().size(), [&](size_t i, char* own) {
        lora_->reduce_hidden(lora_->blocks()[i], forward_.hidden, own + plan_.own.low_rank);
      });
    }
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
  bool wants_dy_rows() const { return (lora_ && lora_->wants_dy()) || weights_.down_bias(0); }

  template <typename Task>
  void each(size_t count, Task task) {
    ktk::each(engine_, transposing_.variant(), plan_.own.pieces, count, task);
  }

  float* dx(size_t token) const {
    return reinterpret_cast<float*>(shared_ + plan_.dx) + token * config_.hidden;
  }
  char* dy(size_t block, size_t token) const {
    return shared_ + plan_.dy[block] + token * plan_.of_down[block].act_bytes;
  }
  char* dz(size_t part, size_t block, size_t row) const {
    return shared_ + plan_.dz[part][block] + (row - first_row_) * plan_.of_gate_up[block].act_bytes;
  }
  float* kept_row(size_t which, size_t row) const {
    return reinterpret_cast<float*>(shared_ + plan_.rows[which]) +
           (row - first_row_) * config_.intermediate;
  }

  // Active experts [first, last).
  void run_group(size_t first, size_t last) {
    first_active_ = first;
    first_row_ = route_.active[first].first;
    const Route::Active& end = route_.active[last - 1];
    const size_t rows = end.first + end.count - first_row_;
    blocks_.clear();
    Carver memory;
    for (size_t i = first; i < last; ++i) {
      plan_.add_blocks(route_.active[i].expert, memory, blocks_);
    }
    char* const packed = shared_ + plan_.blocks;
    memory.guard(packed);
    each(blocks_.size(),
         [&](size_t i, char* own) { transposing_.pack(blocks_[i], packed, own + plan_.own.pack); });

    const size_t share = rows / (4 * static_cast<size_t>(engine_.pool.size())) + 1;
    const size_t most = std::clamp(round_up(share, kLeastRows), kLeastRows, kMaxRows);
    std::vector<RowBlock> tasks;
    for (const RowBlock& block : row_blocks(route_, most)) {
      if (block.active >= first && block.active < last) tasks.push_back(block);
    }
    each(tasks.size(), [&](size_t i, char* own) { rows_of(tasks[i], own); });

    const std::vector<DownTask>& columns = plan_.columns;
    gradients_.cut(route_, first, last, gradient_tasks_);
    const size_t sums = wants_gradients_ ? gradient_tasks_.size() : 0;
    each(sums + columns.size(), [&](size_t i, char* own) {
      if (i < columns.size()) return columns_of(columns[i], last, own);
      gradients_.run(gradient_tasks_[i - columns.size()], route_, begin_, gradient_rows(),
                     reinterpret_cast<float*>(own + plan_.own.gradients));
    });
  }

  GradientRows gradient_rows() const {
    const size_t before = first_row_ * config_.intermediate;
    return {kept_row(0, first_row_) - before, kept_row(1, first_row_) - before,
            kept_row(2, first_row_) - before, lora_ ? &lora_->forward() : nullptr,
            lora_ ? &lora_->backward() : nullptr};
  }

  void encode(size_t token, char* own) const {
    float* const row = reinterpret_cast<float*>(own + plan_.own.row);
    const Rows& gradient = forward_.out;
    ops_.to_f32(gradient.at(begin_ + token), gradient.type, config_.hidden, row);
    for (size_t i = 0; i < plan_.of_down.size(); ++i) {
      const TransposedBlock& block = plan_.of_down[i];
      transposing_.variant().pack_act(&block.matrix, 1, 0, block.matrix.k, row + block.begin,
                                      config_.hidden, dy(i, token), block.act_bytes);
    }
  }

  float* panel(size_t which, char* own) const {
    return reinterpret_cast<float*>(own + plan_.own.panels[which]);
  }

  // dst (+)= the product of a block with encoded rows.
  void multiply(const TransposedBlock& block, size_t m, const char* act, size_t n_begin,
                size_t n_end, bool is_first, float* dst, float* more, size_t stride,
                char* own) const {
    float* const to = is_first ? dst : more;
    transposing_.multiply(block, shared_ + plan_.blocks, m, act, n_begin, n_end, to, stride,
                          own + plan_.own.scratch);
    if (is_first) return;
    for (size_t r = 0; r < m; ++r) {
      ops_.add(more + r * stride, n_end - n_begin, dst + r * stride);
    }
  }

  // Gradients of the products of gate and up for rows of one expert, and of the routing weights.
  void rows_of(const RowBlock& task, char* own) const {
    const Route::Active active = route_.active[task.active];
    const size_t expert = active.expert, first = task.first, m = task.count;
    const size_t stride = plan_.panel_stride;
    const TransposedBlock* down =
        &blocks_[(task.active - first_active_) * plan_.blocks_per_expert()];
    char* const low_rank = own + plan_.own.low_rank;
    // By the factor of what an expert returns, and by that of what goes in: one is the routing
    // weight.
    float* const dots = reinterpret_cast<float*>(own + plan_.own.dots);
    float* const input_dots = dots + kMaxRows;
    std::fill_n(dots, 2 * kMaxRows, 0.0f);
    for (size_t b = 0; b < plan_.of_down.size(); ++b) {
      const size_t bytes = plan_.of_down[b].act_bytes;
      char* const to = own + plan_.own.gather[b];
      for (size_t r = 0; r < m; ++r) {
        std::memcpy(to + r * bytes, dy(b, route_.tokens[first + r]), bytes);
      }
    }
    const float* const dy_rows = wants_dy_rows() ? gather_dy(first, m, own) : nullptr;
    if (lora_) lora_->start(task, dy_rows, low_rank);
    size_t at = 0;  // of plan_.of_gate_up
    for (const Slice& slice : slices_) {
      for (size_t n = 0; n < slice.width(); n += transposing_.depth(), ++at) {
        const size_t end = std::min(n + transposing_.depth(), slice.width()), columns = end - n;
        const size_t column = slice.begin + n;
        float* const gate = config_.gated ? panel(0, own) : nullptr;
        float *const up = panel(1, own), *const dh = panel(2, own), *const h = panel(3, own);
        for (size_t b = 0; b < plan_.of_down.size(); ++b) {
          multiply(down[b], m, own + plan_.own.gather[b], n, end, b == 0, dh, h, stride, own);
        }
        if (lora_) lora_->add_down(task, column, column + columns, dh, stride, low_rank);
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
        const TransposedBlock& block = plan_.of_gate_up[at];
        const Variant& variant = transposing_.variant();
        for (size_t part = first_part(); part < 2; ++part) {
          variant.pack_act(&block.matrix, m, 0, columns, panel(part, own), stride,
                           dz(part, at, first), block.act_bytes);
        }
        if (wants_gradients_) keep(first, m, column, columns, own);
        if (lora_) lora_->reduce(task, column, column + columns, gate, up, h, stride, low_rank);
      }
      down += plan_.of_down.size();
    }
    if (lora_) lora_->finish(task, route_);
    if (const float* const bias = weights_.down_bias(expert)) {
      products().gemm(m, 1, config_.hidden, dy_rows, config_.hidden, 1, bias, 1, dots, 1);
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
      const size_t at = task.first + r;
      const size_t choice = route_.tokens[at] * forward_.choice.top_k + route_.slots[at];
      const size_t row = config_.first_products() * choice + part - first_part();
      ops_.to_f32(kept_.at(row, column), kept_.type, columns, to + r * plan_.panel_stride);
    }
  }

  void weigh(const RowBlock& task, size_t columns, float* products) const {
    for (size_t r = 0; route_.weighs_input() && r < task.count; ++r) {
      ops_.scale(route_.input_weights[task.first + r], 1, columns,
                 products + r * plan_.panel_stride, columns);
    }
  }

  void keep(size_t first, size_t m, size_t column, size_t columns, char* own) const {
    constexpr size_t kWhich[] = {0, 1, 3};  // gate, up, h
    for (size_t which = first_part(); which < 3; ++which) {
      const float* const from = panel(kWhich[which], own);
      for (size_t r = 0; r < m; ++r) {
        std::memcpy(kept_row(which, first + r) + column, from + r * plan_.panel_stride,
                    columns * sizeof(float));
      }
    }
  }

  // Adds what the experts of a group make of columns of dx.
  void columns_of(const DownTask& task, size_t last, char* own) const {
    const size_t columns = task.end - task.begin, stride = plan_.sum_stride;
    float* const sums = reinterpret_cast<float*>(own + plan_.own.sums[0]);
    float* const more = reinterpret_cast<float*>(own + plan_.own.sums[1]);
    for (size_t i = first_active_; i < last; ++i) {
      const Route::Active active = route_.active[i];
      const TransposedBlock* const blocks =
          &blocks_[(i - first_active_) * plan_.blocks_per_expert() + plan_.blocks_of_down()];
      for (size_t done = 0; done < active.count; done += kMaxRows) {
        const size_t m = std::min<size_t>(active.count - done, kMaxRows);
        const size_t first = active.first + done;
        const size_t count = plan_.of_gate_up.size();
        for (size_t b = 0; b < config_.first_products() * count; ++b) {
          const size_t part = first_part() + b / count, at = b % count;
          multiply(blocks[b], m, dz(part, at, first), task.begin, task.end, b == 0, sums, more,
                   stride, own);
        }
        if (lora_) {
          lora_->add_hidden({i, first, m}, task.begin, task.end, sums, stride,
                            own + plan_.own.low_rank);
        }
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
  Gradients gradients_;
  const bool wants_gradients_;
  std::optional<BackwardLora> lora_;
  BackwardPlan plan_;

  Route route_;
  size_t begin_ = 0;  // first token of the chunk
  Rows kept_;
  char* shared_ = nullptr;                   // see BackwardPlan
  size_t first_active_ = 0, first_row_ = 0;  // of the group
  std::vector<TransposedBlock> blocks_;      // of the group
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
        kept = {nullptr, KTK_BF16, config.intermediate};
        const size_t rows = product(config.first_products() * step, top_k);
        Carver products;
        const size_t at = products.add(rows, kept.bytes_of(config.intermediate));
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

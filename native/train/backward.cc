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
#include <atomic>
#include <cstring>
#include <optional>

#include "core/size.h"
#include "moe/nodes.h"
#include "moe/pipeline.h"
#include "moe/schedule.h"
#include "ops/select.h"
#include "train/gradients.h"

namespace ktk {
namespace {

constexpr size_t kMaxRows = 256;
constexpr size_t kLeastRows = 32;     // of a task
constexpr size_t kMostColumns = 512;  // of a task that owns columns of dx
constexpr size_t kGroupBytes = size_t{48} << 20, kGroupBytesPerWorker = size_t{16} << 20;
constexpr size_t kChunkTokens = 4096, kLeastTokens = 256;
constexpr size_t kChunkBytes = size_t{256} << 20;

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
        transposing_(variant, floats),
        gradients_(config, request),
        wants_gradients_(gradients_.wanted()) {
    for (const Slice& slice : slices_) widest_ = std::max(widest_, slice.width());
    for (size_t i = 0; i < transposing_.count(config.hidden); ++i) {
      of_down_.push_back(transposing_.block(slices_[0].matrix.down, i));
    }
    for (const Slice& slice : slices_) {
      for (size_t i = 0; i < transposing_.count(slice.width()); ++i) {
        of_gate_.push_back(transposing_.block(slice.matrix.gate, i));
      }
    }
    if (forward.lora) {
      lora_.emplace(*forward.lora, config);
      lora_back_.emplace(*forward.lora, config);
    }
  }

  size_t max_tokens() const {
    const Choice& choice = forward_.choice;
    size_t bytes = product(config_.hidden, sizeof(float));
    for (const TransposedBlock& block : of_down_) bytes = sum(bytes, block.act_bytes);
    const size_t kept = forward_.kept.data ? 0 : product(4, config_.intermediate);
    const size_t low_rank = lora_ ? product(6 * sizeof(float), lora_->width()) : 0;
    bytes = sum(bytes, product(choice.top_k, sum(kept, low_rank)));
    return std::clamp(kChunkBytes / bytes, kLeastTokens, kChunkTokens);
  }

  // `kept` has the products of the chunk's tokens.
  void run(size_t begin, size_t end, const Rows& kept) {
    begin_ = begin;
    tokens_ = end - begin;
    kept_ = kept;
    route_.build(forward_.choice, begin, end, config_.num_experts, forward_.skip);
    std::memset(request_.weights_gradient + begin * forward_.choice.top_k, 0,
                product(tokens_, forward_.choice.top_k, sizeof(float)));
    if (route_.active.empty()) return request_.hidden_gradient.clear(begin, end, config_.hidden);
    cut_down(config_.hidden, transposing_.variant().tile.n_step, kMostColumns, workers(), columns_);
    place();
    each(tokens_, [&](size_t token, char* own) { encode(token, own); });
    if (lora_) {
      each(lora_->blocks().size(), [&](size_t i, char* own) {
        lora_->reduce_hidden(lora_->blocks()[i], forward_.hidden, own + own_.low_rank);
      });
    }
    for (size_t first = 0; first < route_.active.size();) first = run_group(first);
    each(tokens_, [&](size_t token, char*) {
      const Rows& out = request_.hidden_gradient;
      ops_.from_f32(dx(token), out.type, config_.hidden, out.at(begin_ + token));
    });
  }

 private:
  int workers() const { return engine_.pool.size(); }

  // Calls task(i, own) for all i below `count`, on all workers.
  template <typename Task>
  void each(size_t count, Task task) {
    std::atomic<size_t> next{0};
    engine_.pool.run([&](int worker) {
      char* const own =
          engine_.scratch.own(worker, own_.bytes, node_id(engine_.pool.node_of(worker)));
      const Variant& variant = transposing_.variant();
      if (variant.enter) variant.enter();
      for (size_t i = next++; i < count; i = next++) task(i, own);
      if (variant.leave) variant.leave();
    });
  }

  // --- memory -----------------------------------------------------------------------------------

  float* dx(size_t token) const {
    return reinterpret_cast<float*>(shared_ + at_.dx) + token * config_.hidden;
  }
  char* dy(size_t block, size_t token) const {
    return shared_ + at_.dy[block] + token * of_down_[block].act_bytes;
  }
  // Rows of a group count from its first; those of pointers to f32 as those of the route.
  char* dz(size_t part, size_t block, size_t row) const {
    return shared_ + at_.dz[part][block] + (row - first_row_) * of_gate_[block].act_bytes;
  }
  float* kept_row(size_t which, size_t row) const {
    return reinterpret_cast<float*>(shared_ + at_.rows[which]) +
           (row - first_row_) * config_.intermediate;
  }

  // Decides which experts make a group, and where all of it is.
  void place() {
    groups_.clear();
    size_t most_rows = 0, block_bytes = 0;
    Carver blocks;
    blocks_.clear();
    add_blocks(route_.active[0].expert, blocks, blocks_);
    block_bytes = blocks.size();
    const size_t group_bytes =
        std::max(kGroupBytes, kGroupBytesPerWorker * static_cast<size_t>(workers()));
    size_t row_bytes = wants_gradients_ ? 3 * config_.intermediate * sizeof(float) : 0;
    for (const TransposedBlock& block : of_gate_) row_bytes += 2 * block.act_bytes;
    for (size_t i = 0, bytes = 0, rows = 0; i < route_.active.size(); ++i) {
      const size_t more = sum(block_bytes, product(route_.active[i].count, row_bytes));
      if (groups_.empty() || sum(bytes, more) > group_bytes) {
        groups_.push_back(i);
        bytes = rows = 0;
      }
      bytes += more;
      rows += route_.active[i].count;
      most_rows = std::max(most_rows, rows);
    }
    groups_.push_back(route_.active.size());
    size_t most_experts = 0;
    for (size_t i = 0; i + 1 < groups_.size(); ++i) {
      most_experts = std::max(most_experts, groups_[i + 1] - groups_[i]);
    }

    const size_t padding = transposing_.variant().tile.m_step;
    Carver shared;
    at_ = {};
    at_.dx = shared.add(tokens_, product(config_.hidden, sizeof(float)));
    for (const TransposedBlock& block : of_down_) {
      at_.dy.push_back(shared.add(tokens_, block.act_bytes));
    }
    for (std::vector<size_t>& part : at_.dz) {
      for (const TransposedBlock& block : of_gate_) {
        part.push_back(shared.add(most_rows + padding, block.act_bytes));
      }
    }
    for (size_t& at : at_.rows) {
      at = shared.add(wants_gradients_ ? most_rows : 0,
                      product(config_.intermediate, sizeof(float)));
    }
    at_.blocks = shared.add(most_experts, block_bytes);
    Carver low_rank, low_rank_back;
    if (lora_) {
      lora_->place(route_, begin_, low_rank);
      lora_back_->place(route_, begin_, low_rank_back);
    }
    const size_t low = shared.add(low_rank.size()), back = shared.add(low_rank_back.size());
    shared_ = engine_.scratch.shared(shared.size());
    if (lora_) {
      lora_->use(shared_ + low);
      lora_back_->use(shared_ + back);
    }
    std::memset(dx(0), 0, tokens_ * config_.hidden * sizeof(float));
    place_own();
  }

  void place_own() {
    const size_t rows = transposing_.pad(kMaxRows);
    size_t wide = 0;
    for (const DownTask& task : columns_) wide = std::max<size_t>(wide, task.end - task.begin);
    own_ = {};
    Carver own;
    own_.low_rank = own.add(lora_ ? lora_->own_bytes() : 0);
    own_.row = own.add(config_.hidden, sizeof(float));
    own_.dots = own.add(rows, sizeof(float));
    own_.panel_stride = odd_stride(transposing_.depth());
    for (size_t& panel : own_.panels) panel = own.add(rows, own_.panel_stride * sizeof(float));
    own_.sum_stride = odd_stride(round_up(wide, transposing_.variant().tile.n_step));
    for (size_t& sum : own_.sums) sum = own.add(rows, own_.sum_stride * sizeof(float));
    for (const TransposedBlock& block : of_down_) {
      own_.gather.push_back(own.add(rows, block.act_bytes));
    }
    own_.dy = own.add(wants_dy_rows() ? rows : 0, product(config_.hidden, sizeof(float)));
    own_.gradients = own.add(wants_gradients_ ? Gradients::own_bytes() : 0);
    own_.scratch = own.add(transposing_.scratch_bytes(blocks_, kMaxRows));
    own_.pack = own.add(transposing_.own_bytes(std::max(config_.hidden, widest_)));
    own_.bytes = own.size();
  }

  // The blocks of an expert: those of down slice by slice, then gate's, then up's.
  void add_blocks(size_t expert, Carver& memory, std::vector<TransposedBlock>& blocks) const {
    const Parts<float>& factor = weights_.factor(expert);
    for (const Slice& s : slices_) {
      transposing_.add(s.matrix.down, s.down_at(expert), factor.down, memory, blocks);
    }
    for (const Slice& s : slices_) {
      transposing_.add(s.matrix.gate, s.gate_at(expert), factor.gate, memory, blocks);
    }
    for (const Slice& s : slices_) {
      transposing_.add(s.matrix.up, s.up_at(expert), factor.up, memory, blocks);
    }
  }
  size_t blocks_per_expert() const {
    return slices_.size() * of_down_.size() + 2 * of_gate_.size();
  }

  // --- a group ----------------------------------------------------------------------------------

  // Returns where the next one begins.
  size_t run_group(size_t first) {
    const size_t last = *std::upper_bound(groups_.begin(), groups_.end(), first);
    first_active_ = first;
    first_row_ = route_.active[first].first;
    const Route::Active& end = route_.active[last - 1];
    const size_t rows = end.first + end.count - first_row_;
    blocks_.clear();
    Carver memory;
    for (size_t i = first; i < last; ++i) add_blocks(route_.active[i].expert, memory, blocks_);
    char* const packed = shared_ + at_.blocks;
    each(blocks_.size(),
         [&](size_t i, char* own) { transposing_.pack(blocks_[i], packed, own + own_.pack); });

    const size_t share = rows / (4 * static_cast<size_t>(workers())) + 1;
    const size_t most = std::clamp(round_up(share, kLeastRows), kLeastRows, kMaxRows);
    std::vector<RowBlock> tasks;
    for (const RowBlock& block : row_blocks(route_, most)) {
      if (block.active >= first && block.active < last) tasks.push_back(block);
    }
    each(tasks.size(), [&](size_t i, char* own) { rows_of(tasks[i], own); });

    gradients_.cut(route_, first, last, gradient_tasks_);
    const size_t sums = wants_gradients_ ? gradient_tasks_.size() : 0;
    each(sums + columns_.size(), [&](size_t i, char* own) {
      if (i < columns_.size()) return columns_of(columns_[i], last, own);
      gradients_.run(gradient_tasks_[i - columns_.size()], route_, begin_, gradient_rows(),
                     reinterpret_cast<float*>(own + own_.gradients));
    });
    return last;
  }

  GradientRows gradient_rows() const {
    const size_t before = first_row_ * config_.intermediate;
    return {kept_row(0, first_row_) - before, kept_row(1, first_row_) - before,
            kept_row(2, first_row_) - before, lora_ ? &*lora_ : nullptr,
            lora_back_ ? &*lora_back_ : nullptr};
  }

  void encode(size_t token, char* own) const {
    float* const row = reinterpret_cast<float*>(own + own_.row);
    const Rows& gradient = forward_.out;
    ops_.to_f32(gradient.at(begin_ + token), gradient.type, config_.hidden, row);
    for (size_t i = 0; i < of_down_.size(); ++i) {
      const TransposedBlock& block = of_down_[i];
      transposing_.variant().pack_act(&block.matrix, 1, 0, block.matrix.k, row + block.begin,
                                      config_.hidden, dy(i, token), block.act_bytes);
    }
  }

  bool wants_dy_rows() const {
    return (forward_.lora && forward_.lora->adapters[0].b.down) || weights_.down_bias(0);
  }

  float* panel(size_t which, char* own) const {
    return reinterpret_cast<float*>(own + own_.panels[which]);
  }

  // dst (+)= the product of a block with encoded rows.
  void multiply(const TransposedBlock& block, size_t m, const char* act, size_t n_begin,
                size_t n_end, bool is_first, float* dst, float* more, size_t stride,
                char* own) const {
    float* const to = is_first ? dst : more;
    transposing_.multiply(block, shared_ + at_.blocks, m, act, n_begin, n_end, to, stride,
                          own + own_.scratch);
    if (is_first) return;
    for (size_t r = 0; r < m; ++r) {
      ops_.add(more + r * stride, n_end - n_begin, dst + r * stride);
    }
  }

  LowRank factors(LoraRows::Part part, size_t expert) const {
    const Adapter& adapter = forward_.lora->adapters[0];
    const size_t h = config_.hidden, i = config_.intermediate;
    if (part == LoraRows::kDown)
      return {adapter.rank, adapter.a.down, adapter.b.down, expert, h, i};
    const bool gate = part == LoraRows::kGate;
    return {adapter.rank,
            gate ? adapter.a.gate : adapter.a.up,
            gate ? adapter.b.gate : adapter.b.up,
            expert,
            i,
            h};
  }
  bool adapts(LoraRows::Part part) const {
    if (!lora_) return false;
    const Parts<LoraFactor>& a = forward_.lora->adapters[0].a;
    return bool(part == LoraRows::kGate ? a.gate : part == LoraRows::kUp ? a.up : a.down);
  }

  // Gradients of the products of gate and up for rows of one expert, and of the routing weights.
  void rows_of(const RowBlock& task, char* own) const {
    const Route::Active active = route_.active[task.active];
    const size_t expert = active.expert, first = task.first, m = task.count;
    const size_t stride = own_.panel_stride, low = lora_ ? lora_->width() : 0;
    const TransposedBlock* down = &blocks_[(task.active - first_active_) * blocks_per_expert()];
    char* const low_rank = own + own_.low_rank;
    float* const dots = reinterpret_cast<float*>(own + own_.dots);
    std::fill_n(dots, m, 0.0f);
    for (size_t b = 0; b < of_down_.size(); ++b) {
      const size_t bytes = of_down_[b].act_bytes;
      char* const to = own + own_.gather[b];
      for (size_t r = 0; r < m; ++r) {
        std::memcpy(to + r * bytes, dy(b, route_.tokens[first + r]), bytes);
      }
    }
    const float* const dy_rows = wants_dy_rows() ? gather_dy(first, m, own) : nullptr;
    if (lora_) start_low_rank(task, expert, dy_rows, low_rank);
    size_t at = 0;  // of of_gate_
    for (const Slice& slice : slices_) {
      for (size_t n = 0; n < slice.width(); n += transposing_.depth(), ++at) {
        const size_t end = std::min(n + transposing_.depth(), slice.width()), columns = end - n;
        const size_t column = slice.begin + n;
        float *const gate = panel(0, own), *const up = panel(1, own), *const dh = panel(2, own);
        float* const h = panel(3, own);
        for (size_t b = 0; b < of_down_.size(); ++b) {
          multiply(down[b], m, own + own_.gather[b], n, end, b == 0, dh, h, stride, own);
        }
        if (adapts(LoraRows::kDown)) {
          factors(LoraRows::kDown, expert)
              .expand_back(column, column + columns, m, lora_back_->row(LoraRows::kDown, first),
                           low, dh, stride, low_rank);
        }
        load(first, m, column, columns, gate, up, stride);
        const float *const gate_bias = weights_.gate_bias(expert), *const up_bias =
                                                                       weights_.up_bias(expert);
        ops_.glu_backward(&config_.glu, m, columns, gate, up, dh, h, stride,
                          gate_bias ? gate_bias + column : nullptr,
                          up_bias ? up_bias + column : nullptr, &route_.weights[first], dots);
        const TransposedBlock& block = of_gate_[at];
        const Variant& variant = transposing_.variant();
        for (size_t part = 0; part < 2; ++part) {
          variant.pack_act(&block.matrix, m, 0, columns, panel(part, own), stride,
                           dz(part, at, first), block.act_bytes);
        }
        if (wants_gradients_) keep(first, m, column, columns, own);
        if (lora_) add_low_rank(task, expert, column, columns, own);
      }
      down += of_down_.size();
    }
    if (lora_) finish_low_rank(task);
    if (const float* const bias = weights_.down_bias(expert)) {
      products().gemm(m, 1, config_.hidden, dy_rows, config_.hidden, 1, bias, 1, dots, 1);
    }
    for (size_t r = 0; r < m; ++r) {
      const size_t token = begin_ + route_.tokens[first + r];
      request_.weights_gradient[token * forward_.choice.top_k + route_.slots[first + r]] = dots[r];
    }
  }

  const float* gather_dy(size_t first, size_t m, char* own) const {
    float* const rows = reinterpret_cast<float*>(own + own_.dy);
    for (size_t r = 0; r < m; ++r) {
      const Rows& gradient = forward_.out;
      ops_.to_f32(gradient.at(begin_ + route_.tokens[first + r]), gradient.type, config_.hidden,
                  rows + r * config_.hidden);
    }
    return rows;
  }

  // The products that the forward pass kept.
  void load(size_t first, size_t m, size_t column, size_t columns, float* gate, float* up,
            size_t stride) const {
    for (size_t r = 0; r < m; ++r) {
      const size_t row =
          2 * (route_.tokens[first + r] * forward_.choice.top_k + route_.slots[first + r]);
      ops_.to_f32(kept_.at(row, column), kept_.type, columns, gate + r * stride);
      ops_.to_f32(kept_.at(row + 1, column), kept_.type, columns, up + r * stride);
    }
  }

  void keep(size_t first, size_t m, size_t column, size_t columns, char* own) const {
    constexpr size_t kWhich[] = {0, 1, 3};  // gate, up, h
    for (size_t which = 0; which < 3; ++which) {
      const float* const from = panel(kWhich[which], own);
      for (size_t r = 0; r < m; ++r) {
        std::memcpy(kept_row(which, first + r) + column, from + r * own_.panel_stride,
                    columns * sizeof(float));
      }
    }
  }

  // Rows of low rank of the backward pass, dz B, times the adapter's scale.
  void start_low_rank(const RowBlock& task, size_t expert, const float* dy_rows,
                      char* scratch) const {
    const size_t low = lora_back_->width(), m = task.count;
    for (const auto part : {LoraRows::kGate, LoraRows::kUp, LoraRows::kDown}) {
      std::fill_n(lora_back_->row(part, task.first), m * low, 0.0f);
    }
    lora_->clear_down(task);
    if (!adapts(LoraRows::kDown)) return;
    float* const q = lora_back_->row(LoraRows::kDown, task.first);
    factors(LoraRows::kDown, expert)
        .reduce_back(0, config_.hidden, m, dy_rows, config_.hidden, q, low, scratch);
    ops_.scale(forward_.lora->adapters[0].scale, m, low, q, low);
  }

  void add_low_rank(const RowBlock& task, size_t expert, size_t column, size_t columns,
                    char* own) const {
    const size_t low = lora_back_->width(), m = task.count, stride = own_.panel_stride;
    char* const scratch = own + own_.low_rank;
    for (const auto part : {LoraRows::kGate, LoraRows::kUp}) {
      if (!adapts(part)) continue;
      factors(part, expert)
          .reduce_back(column, column + columns, m, panel(part, own), stride,
                       lora_back_->row(part, task.first), low, scratch);
    }
    lora_->reduce_down(task, column, column + columns, panel(3, own), stride, scratch);
  }

  void finish_low_rank(const RowBlock& task) const {
    const size_t low = lora_back_->width(), m = task.count;
    const float scale = forward_.lora->adapters[0].scale;
    for (const auto part : {LoraRows::kGate, LoraRows::kUp}) {
      ops_.scale(scale, m, low, lora_back_->row(part, task.first), low);
    }
    for (size_t r = task.first; r < task.first + m; ++r) {
      ops_.scale(route_.weights[r], 1, low, lora_back_->row(LoraRows::kDown, r), low);
    }
    lora_->finish_down(task);
  }

  // Adds what the experts of a group make of columns of dx.
  void columns_of(const DownTask& task, size_t last, char* own) const {
    const size_t columns = task.end - task.begin, stride = own_.sum_stride;
    float* const sums = reinterpret_cast<float*>(own + own_.sums[0]);
    float* const more = reinterpret_cast<float*>(own + own_.sums[1]);
    for (size_t i = first_active_; i < last; ++i) {
      const Route::Active active = route_.active[i];
      const TransposedBlock* const blocks =
          &blocks_[(i - first_active_) * blocks_per_expert() + slices_.size() * of_down_.size()];
      for (size_t done = 0; done < active.count; done += kMaxRows) {
        const size_t m = std::min<size_t>(active.count - done, kMaxRows);
        const size_t first = active.first + done;
        for (size_t b = 0; b < 2 * of_gate_.size(); ++b) {
          const size_t part = b / of_gate_.size(), at = b % of_gate_.size();
          multiply(blocks[b], m, dz(part, at, first), task.begin, task.end, b == 0, sums, more,
                   stride, own);
        }
        for (const auto part : {LoraRows::kGate, LoraRows::kUp}) {
          if (!adapts(part)) continue;
          factors(part, active.expert)
              .expand_back(task.begin, task.end, m, lora_back_->row(part, first),
                           lora_back_->width(), sums, stride, own + own_.low_rank);
        }
        for (size_t r = 0; r < m; ++r) {
          ops_.add(sums + r * stride, columns, dx(route_.tokens[first + r]) + task.begin);
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
  size_t widest_ = 0;
  std::vector<TransposedBlock> of_down_, of_gate_;  // shapes: of any slice's down, and of all gates
  std::optional<LoraRows> lora_, lora_back_;

  Route route_;
  size_t begin_ = 0, tokens_ = 0;  // of the chunk
  Rows kept_;
  std::vector<DownTask> columns_;
  std::vector<size_t> groups_;           // the first active expert of each, and the end
  std::vector<TransposedBlock> blocks_;  // of the group
  std::vector<Gradients::Task> gradient_tasks_;
  size_t first_active_ = 0, first_row_ = 0;  // of the group
  char* shared_ = nullptr;
  struct {
    size_t dx = 0, blocks = 0;
    std::vector<size_t> dy;     // per block of rows of down
    std::vector<size_t> dz[2];  // of gate and up, per block of their rows
    size_t rows[3] = {};        // f32: gradients of gate and of up, h
  } at_;
  struct {
    size_t low_rank = 0, row = 0, dots = 0, dy = 0, gradients = 0, scratch = 0, pack = 0;
    size_t panels[4] = {}, sums[2] = {};
    size_t panel_stride = 0, sum_stride = 0;
    std::vector<size_t> gather;
    size_t bytes = 0;
  } own_;
};

}  // namespace

void backward(Layer& layer, const FloatBackend& floats, const BackwardRequest& request) {
  layer.compute(request.forward, [&](const Weights* weights, const Request& forward) {
    const Config& config = layer.config();
    const size_t tokens = forward.choice.tokens, top_k = forward.choice.top_k;
    if (!weights) {
      std::memset(request.weights_gradient, 0, product(tokens, top_k, sizeof(float)));
      return request.hidden_gradient.clear(0, tokens, config.hidden);
    }
    Engine& engine = *layer.engine();
    BackwardRun run(engine, config, layer.variant(), *weights, floats, request, forward);
    const size_t step = run.max_tokens();
    Memory again;
    for (size_t begin = 0; begin < tokens; begin += step) {
      const size_t end = std::min(begin + step, tokens);
      Rows kept = forward.kept;
      if (kept.data) {
        kept.data = kept.at(2 * begin * top_k);
      } else {
        kept = {nullptr, KTK_BF16, config.intermediate};
        if (!again) again = Memory(product(2 * step, top_k, kept.bytes_of(config.intermediate)));
        kept.data = again.data();
        forward_products(engine, config, layer.variant(), *weights, forward, begin, end, kept);
      }
      run.run(begin, end, kept);
    }
  });
}

}  // namespace ktk

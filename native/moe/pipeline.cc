// The pipeline of one chunk of tokens, as a region of the worker pool:
//
//   tokens --encode--> x --+--> gate --+
//                        (x)--> up   --+-- activation, encode --> h --> down --> weighted sums
//          each token once     tasks: columns of one expert            tasks: columns of the output
//   ----------------------|------------------------------------------|--------------------------
//                      barrier                                    barrier
//
// With adapters, rows of low rank are computed ahead of each half by blocks of an expert's rows,
// and tasks add what they mean to their columns.
//
// Gate and up read the same x, unless they want different activations; experts may have no gate.
// Where experts want columns of x in orders of their own, each (token, expert) is encoded instead.
// Routing weights are factors of the sums, or of the products of gate and up: x itself has none.
// Zero experts add x as the caller gave it, behind all experts, to the sums of the first shard.
// The first barrier is left out when there are so few tokens that every worker encodes them all. A
// task of the second half owns its output columns for all experts, so the weighted sums need no
// atomics and no merge pass, and they add up in the same order for any number of workers.
#include "moe/pipeline.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>

#include "core/prefetch.h"
#include "core/size.h"
#include "moe/lora_rows.h"
#include "moe/nodes.h"
#include "moe/plan.h"
#include "moe/zero_experts.h"
#include "ops/select.h"

namespace ktk {
namespace {

class ChunkRun {
 public:
  ChunkRun(Engine& engine, const Config& config, const Variant& variant, const Weights& weights,
           const Request& request)
      : engine_(engine),
        config_(config),
        variant_(variant),
        weights_(weights),
        request_(request),
        ops_(ops()),
        prefetch_(prefetch()),
        slices_(weights.slices()),
        shards_(weights.shards()),
        plan_(config, variant, weights),
        next_gate_up_(slices_.size()),
        next_down_(shards_.size()) {
    if (request.lora) lora_.emplace(*request.lora, config, weights);
  }

  size_t max_tokens(size_t top_k) const { return plan_.max_tokens(top_k); }

  void run(size_t begin, size_t end) {
    begin_ = begin;
    route_.build(request_.choice, begin, end, config_, request_.skip);
    if (route_.active.empty()) {
      if (computes_down()) {
        pass_through(engine_, config_, route_, request_.hidden, request_.out, begin, end);
      }
      return;
    }
    plan_.make(route_, end - begin, engine_.pool.size());
    if (lora_) place_lora(begin);
    shared_ = engine_.scratch.shared(plan_.shared);
    if (lora_) lora_->use(shared_);
    for (std::atomic<size_t>& next : next_gate_up_) next = 0;
    for (std::atomic<size_t>& next : next_down_) next = 0;
    next_token_ = 0;
    next_sum_ = 0;
    next_hidden_ = 0;
    next_h_ = 0;
    engine_.pool.run([this](int worker) { body(worker); });
  }

 private:
  bool computes_down() const { return request_.out.data != nullptr; }
  // Encoded tokens, for gate (0) or up (1).
  char* x(size_t act, char* own) const {
    return plan_.private_x ? own + plan_.own.x[act] : shared_ + plan_.x[act];
  }
  float* partial(size_t s) const { return reinterpret_cast<float*>(shared_ + plan_.partial[s]); }
  char* h_row(size_t slice, size_t row) const {
    return shared_ + plan_.h[slice] + row * plan_.h_strides[slice];
  }

  void body(int worker) {
    const int node = node_id(engine_.pool.node_of(worker));
    char* own = engine_.scratch.own(worker, plan_.own.pieces, node);
    if (lora_) reduce_hidden(own);
    if (variant_.enter) variant_.enter();
    if (plan_.private_x) {
      encode(own, 0, plan_.encoded);
    } else {
      encode_shared(own);
    }
    if (lora_ || !plan_.private_x) engine_.pool.barrier();
    const size_t shards = shards_.size();
    const size_t home = home_shard(engine_.pool, worker, shards);
    for (size_t i = 0; i < slices_.size(); ++i) {
      const size_t s = (shards_[home].first + i) % slices_.size();
      while (const GateUpTask* task = take(plan_.gate_up[s], next_gate_up_[s]))
        gate_up(s, *task, own);
    }
    if (computes_down()) {
      engine_.pool.barrier();
      if (lora_) {
        reduce_h(own);
        engine_.pool.barrier();
      }
      for (size_t i = 0; i < shards; ++i) {
        const size_t s = (home + i) % shards;
        while (const DownTask* task = take(plan_.down, next_down_[s])) down(s, *task, own);
      }
    }
    if (variant_.leave) variant_.leave();
    if (computes_down() && shards > 1) {
      engine_.pool.barrier();
      sum_shards(own);
    }
  }

  template <typename Task>
  static const Task* take(const std::vector<Task>& tasks, std::atomic<size_t>& next) {
    const size_t i = next.fetch_add(1, std::memory_order_relaxed);
    return i < tasks.size() ? &tasks[i] : nullptr;
  }

  // Adds memory for adapters to the plan's: a worker has LoraRows' own, and some rows of
  // intermediate activations.
  void place_lora(size_t begin) {
    lora_->place(route_, begin, plan_.shared);
    Carver& own = plan_.own.pieces;
    own_lora_ = own.add(lora_->own());
    own_h_ = own.add(LoraRows::kDecodedRows, ktk::product(config_.intermediate, sizeof(float)));
  }
  char* lora_own(char* own) const { return own + own_lora_; }

  void reduce_hidden(char* own) {
    while (const RowBlock* block = take(lora_->blocks(), next_hidden_)) {
      lora_->reduce_hidden(*block, request_.hidden, lora_own(own));
      if (request_.kept.data) keep_low_rank(*block);
    }
  }

  // As the down projection sees them: encoded.
  void reduce_h(char* own) {
    char* const scratch = lora_own(own);
    float* const h = reinterpret_cast<float*>(own + own_h_);
    while (const RowBlock* block = take(lora_->blocks(), next_h_)) {
      lora_->clear_down(*block);
      for (size_t s = 0; s < slices_.size(); ++s) {
        const Slice& slice = slices_[s];
        for (size_t done = 0; done < block->count; done += LoraRows::kDecodedRows) {
          const size_t m = std::min(LoraRows::kDecodedRows, block->count - done);
          const RowBlock some = {block->active, block->first + done, m};
          variant_.unpack_act(&slice.matrix.down, m, h_row(s, some.first), plan_.h_strides[s], h,
                              slice.width());
          lora_->reduce_down(some, slice.begin, slice.end, h, slice.width(), scratch);
        }
      }
      lora_->finish_down(*block);
    }
  }

  void encode_shared(char* own) {
    constexpr size_t kBlock = 16;
    for (;;) {
      const size_t first = next_token_.fetch_add(kBlock, std::memory_order_relaxed);
      if (first >= plan_.encoded) return;
      encode(own, first, std::min(first + kBlock, plan_.encoded));
    }
  }

  // Tokens, or rows of the route where plan_.by_row.
  void encode(char* own, size_t first, size_t last) {
    const Parts<ktk_matrix>& matrix = slices_[0].matrix;
    float* const row = reinterpret_cast<float*>(own + plan_.own.row);
    for (size_t at = first; at < last; ++at) {
      const size_t token = begin_ + (plan_.by_row ? route_.tokens[at] : at);
      ops_.to_f32(request_.hidden.at(token), request_.hidden.type, config_.hidden, row);
      for (size_t i = 0; i < plan_.num_acts; ++i) {
        const size_t stride = plan_.x_strides[i];
        variant_.pack_act(i == 0 ? &matrix.gate : &matrix.up, 1, 0, config_.hidden,
                          weights_.has_orders() ? sorted(row, i, at, own) : row, config_.hidden,
                          x(i, own) + at * stride, stride);
      }
    }
  }

  // A row as gate (0) or up (1) want its columns: all experts the same, or the expert of the row.
  const float* sorted(const float* row, size_t act, size_t at, char* own) const {
    const uint32_t expert = plan_.by_row ? route_.expert_of(at) : route_.active[0].expert;
    const Parts<Order>& orders = weights_.order(expert);
    const Order& order = act == 0 ? orders.gate : orders.up;
    if (!order) return row;
    float* const to = reinterpret_cast<float*>(own + plan_.own.sorted);
    sort_columns(order, row, to);
    return to;
  }

  // The encoded rows [first, first + m) of the route, one behind the other.
  const char* gather(size_t act, size_t first, size_t m, char* own) const {
    const char* from = x(act, own);
    if (plan_.by_row) return from + first * plan_.x_strides[act];
    char* buffer = own + plan_.own.gather[act];
    const size_t stride = plan_.x_strides[act];
    const uint32_t* tokens = &route_.tokens[first];
    // Usually they are scattered, and the first comparison says so.
    bool neighbours = true;
    for (size_t i = 1; neighbours && i < m; ++i) neighbours = tokens[i] == tokens[i - 1] + 1;
    if (neighbours) return from + tokens[0] * stride;
    for (size_t i = 0; i < m; ++i) {
      std::memcpy(buffer + i * stride, from + tokens[i] * stride, stride);
    }
    return buffer;
  }

  const char* weights_from(const ktk_matrix& matrix, const char* packed, size_t n) const {
    return variant_.weight_offset ? packed + variant_.weight_offset(&matrix, n) : nullptr;
  }

  void gate_up(size_t s, const GateUpTask& task, char* own) {
    const Slice& slice = slices_[s];
    const Parts<ktk_matrix>& matrix = slice.matrix;
    const Route::Active active = route_.active[task.active];
    const size_t expert = active.expert;
    float* const up = reinterpret_cast<float*>(own + plan_.own.up);
    float* const gate = config_.gated ? reinterpret_cast<float*>(own + plan_.own.gate) : nullptr;
    const float* gate_bias = weights_.gate_bias(expert);
    const float* up_bias = weights_.up_bias(expert);
    const Parts<float>& factor = weights_.factor(expert);
    for (size_t done = 0; done < active.count; done += Plan::kMaxRows) {
      const size_t m = std::min<size_t>(active.count - done, Plan::kMaxRows);
      const size_t first = active.first + done;
      const size_t of_up = plan_.num_acts - 1;
      const char* const gate_x = gather(0, first, m, own);
      const char* const up_x = of_up == 0 ? gate_x : gather(of_up, first, m, own);
      ktk_matmul mm = product(matrix.up, m, up_x, plan_.x_strides[0], own);
      mm.dst_stride = plan_.panel_stride;
      for (size_t n = task.begin; n < task.end; n += plan_.panel_columns) {
        mm.n_begin = n;
        mm.n_end = std::min<size_t>(n + plan_.panel_columns, task.end);
        if (gate) {
          mm.matrix = &matrix.gate;
          mm.act = gate_x;
          mm.act_stride = plan_.x_strides[0];
          mm.weight = slice.gate_at(expert);
          mm.dst = gate;
          mm.next = weights_from(matrix.up, slice.up_at(expert), n);
          run(mm, factor.gate);
        }
        mm.matrix = &matrix.up;
        mm.act = up_x;
        mm.act_stride = plan_.x_strides[of_up];
        mm.weight = slice.up_at(expert);
        mm.dst = up;
        const ktk_matrix& following = gate ? matrix.gate : matrix.up;
        mm.next = mm.n_end < matrix.up.n ? weights_from(following, slice.gate_at(expert), mm.n_end)
                                         : nullptr;
        run(mm, factor.up);
        if (lora_) {
          const RowBlock block = {task.active, first, m};
          const size_t from = slice.begin + n, to = slice.begin + mm.n_end;
          for (const auto& [part, panel] :
               {std::pair{LoraRows::kGate, gate}, std::pair{LoraRows::kUp, up}}) {
            if (panel) lora_->add(part, block, from, to, panel, plan_.panel_stride, lora_own(own));
          }
        }
        if (request_.kept.data) keep(first, m, slice.begin + n, mm.n_end - n, gate, up);
        if (!computes_down()) continue;
        if (route_.weighs_input()) weigh(first, m, mm.n_end - n, gate, up);
        ops_.glu(&config_.glu, m, mm.n_end - n, gate, up, plan_.panel_stride,
                 gate_bias ? gate_bias + slice.begin + n : nullptr,
                 up_bias ? up_bias + slice.begin + n : nullptr);
        variant_.pack_act(&matrix.down, m, n, mm.n_end, gate ? gate : up, plan_.panel_stride,
                          h_row(s, first), plan_.h_strides[s]);
      }
    }
  }

  // Multiplies the products by the factors of what went into the experts: products are linear.
  void weigh(size_t first, size_t m, size_t columns, float* gate, float* up) const {
    for (float* const panel : {gate, up}) {
      for (size_t i = 0; panel && i < m; ++i) {
        const size_t at = i * plan_.panel_stride;
        ops_.scale(route_.input_weights[first + i], 1, columns, panel + at, columns);
      }
    }
  }

  // Writes columns of the products of gate, where there is one, and up for a backward pass.
  void keep(size_t first, size_t m, size_t column, size_t columns, const float* gate,
            const float* up) const {
    for (size_t i = 0; i < m; ++i) {
      const size_t token = begin_ + route_.tokens[first + i];
      size_t row =
          config_.first_products() * (token * request_.choice.top_k + route_.slots[first + i]);
      const Rows& kept = request_.kept;
      for (const float* const panel : {gate, up}) {
        if (!panel) continue;
        ops_.from_f32(panel + i * plan_.panel_stride, kept.type, columns, kept.at(row++, column));
      }
    }
  }

  // Writes rows of low rank behind where these go.
  void keep_low_rank(const RowBlock& block) const {
    const Rows& kept = request_.kept;
    const size_t bytes = kept.bytes_of(kept.stride - config_.intermediate);
    for (size_t at = block.first; at < block.first + block.count; ++at) {
      const size_t token = begin_ + route_.tokens[at];
      size_t row = config_.first_products() * (token * request_.choice.top_k + route_.slots[at]);
      for (const auto part : {LoraRows::kGate, LoraRows::kUp}) {
        if (part == LoraRows::kGate && !config_.gated) continue;
        std::memcpy(kept.at(row++, config_.intermediate), lora_->row(part, at), bytes);
      }
    }
  }

  void down(size_t s, const DownTask& task, char* own) {
    const size_t columns = task.end - task.begin;
    float* sums = reinterpret_cast<float*>(own + plan_.own.sums);
    std::memset(sums, 0, plan_.tokens * plan_.down_stride * sizeof(float));
    for (size_t i = shards_[s].first; i < shards_[s].last; ++i) add_down(i, task, own, sums);
    if (s == 0) add_zero_experts(task, own, sums);
    for (size_t token = 0; token < plan_.tokens; ++token) {
      const float* from = sums + token * plan_.down_stride;
      if (shards_.size() > 1) {
        std::memcpy(partial(s) + token * config_.hidden + task.begin, from,
                    columns * sizeof(float));
      } else {
        ops_.from_f32(from, request_.out.type, columns,
                      request_.out.at(begin_ + token, task.begin));
      }
    }
  }

  // Shards add up to the whole sums; this must come once. `hidden` may be `out`, whose columns
  // nobody but this task writes.
  void add_zero_experts(const DownTask& task, char* own, float* sums) const {
    float* const row = reinterpret_cast<float*>(own + plan_.own.row);
    const size_t columns = task.end - task.begin;
    for (size_t token = 0; !route_.passed.empty() && token < plan_.tokens; ++token) {
      add_passed(route_, token, request_.hidden, begin_ + token, task.begin, columns, row,
                 sums + token * plan_.down_stride);
    }
  }

  // Adds what the intermediate columns of a slice contribute.
  void add_down(size_t s, const DownTask& task, char* own, float* sums) {
    const Slice& slice = slices_[s];
    const size_t columns = task.end - task.begin;
    float* panel = reinterpret_cast<float*>(own + plan_.own.product);
    for (size_t i = 0; i < route_.active.size(); ++i) {
      const Route::Active active = route_.active[i];
      const bool last = i + 1 == route_.active.size();
      const char* following = last ? nullptr : h_row(s, route_.active[i + 1].first);
      const size_t following_bytes = last ? 0 : route_.active[i + 1].count * plan_.h_strides[s];
      // Slices add up to the whole product; the bias must come once.
      const float* bias = s == 0 ? weights_.down_bias(active.expert) : nullptr;
      for (size_t done = 0; done < active.count; done += Plan::kMaxRows) {
        const size_t m = std::min<size_t>(active.count - done, Plan::kMaxRows);
        const size_t first = active.first + done;
        ktk_matmul mm = product(slice.matrix.down, m, h_row(s, first), plan_.h_strides[s], own);
        mm.weight = slice.down_at(active.expert);
        mm.n_begin = task.begin;
        mm.n_end = task.end;
        mm.dst = panel;
        mm.dst_stride = plan_.down_stride;
        if (!last) {
          mm.next = weights_from(slice.matrix.down, slice.down_at(route_.active[i + 1].expert),
                                 task.begin);
        }
        run(mm, weights_.factor(active.expert).down);
        if (lora_ && s == 0) {
          lora_->add(LoraRows::kDown, {i, first, m}, task.begin, task.end, panel, plan_.down_stride,
                     lora_own(own));
        }
        // The next expert's rows were encoded long ago, perhaps by another core. Their tiles are 16
        // rows high, which no prefetcher recognises; in order, one does.
        const size_t share = following ? following_bytes / active.count + 1 : 0;
        for (size_t r = 0; r < m; ++r) {
          const size_t fetched = (done + r) * share;
          for (size_t at = fetched; at < fetched + share; at += 64) {
            __builtin_prefetch(following + at, 0, 2);
          }
          ops_.add_weighted(panel + r * plan_.down_stride, bias ? bias + task.begin : nullptr,
                            route_.weights[first + r], columns,
                            sums + route_.tokens[first + r] * plan_.down_stride);
        }
      }
    }
  }

  void sum_shards(char* own) {
    float* row = reinterpret_cast<float*>(own + plan_.own.row);
    const size_t width = config_.hidden;
    for (;;) {
      const size_t token = next_sum_.fetch_add(1, std::memory_order_relaxed);
      if (token >= plan_.tokens) return;
      std::memcpy(row, partial(0) + token * width, width * sizeof(float));
      for (size_t s = 1; s < shards_.size(); ++s) ops_.add(partial(s) + token * width, width, row);
      ops_.from_f32(row, request_.out.type, width, request_.out.at(begin_ + token));
    }
  }

  ktk_matmul product(const ktk_matrix& matrix, size_t m, const char* act, size_t act_stride,
                     char* own) const {
    ktk_matmul mm{};
    mm.struct_size = sizeof mm;
    mm.matrix = &matrix;
    mm.m = m;
    mm.act = act;
    mm.act_stride = act_stride;
    mm.scratch = own + plan_.own.scratch;
    mm.prefetch = &prefetch_;
    return mm;
  }

  void run(const ktk_matmul& mm, float factor) const {
    variant_.kernel_for(mm.m).run(&mm);
    if (factor != 1) ops_.scale(factor, mm.m, mm.n_end - mm.n_begin, mm.dst, mm.dst_stride);
  }

  Engine& engine_;
  const Config& config_;
  const Variant& variant_;
  const Weights& weights_;
  const Request& request_;
  const ktk_ops& ops_;
  const ktk_prefetch& prefetch_;
  const std::vector<Slice>& slices_;
  const std::vector<Shard>& shards_;

  Plan plan_;
  Route route_;
  size_t begin_ = 0;        // first token of the chunk
  char* shared_ = nullptr;  // see Plan
  std::vector<std::atomic<size_t>> next_gate_up_, next_down_;
  std::atomic<size_t> next_token_{0}, next_sum_{0}, next_hidden_{0}, next_h_{0};
  std::optional<LoraRows> lora_;
  size_t own_lora_ = 0, own_h_ = 0;  // offsets in a worker's memory
};

}  // namespace

void forward(Engine& engine, const Config& config, const Variant& variant, const Weights& weights,
             const Request& request) {
  ChunkRun chunk(engine, config, variant, weights, request);
  const size_t step = chunk.max_tokens(request.choice.top_k);
  for (size_t begin = 0; begin < request.choice.tokens; begin += step) {
    chunk.run(begin, std::min(begin + step, request.choice.tokens));
  }
}

void forward_products(Engine& engine, const Config& config, const Variant& variant,
                      const Weights& weights, const Request& request, size_t begin, size_t end,
                      const Rows& kept) {
  Request part = request;
  Lora lora;
  const Choice& choice = request.choice;
  const size_t id_bytes = choice.ids_64 ? sizeof(int64_t) : sizeof(int32_t);
  part.choice.tokens = end - begin;
  part.choice.ids = static_cast<const char*>(choice.ids) + begin * choice.ids_stride * id_bytes;
  part.choice.weights = choice.weights + begin * choice.weights_stride;
  part.hidden.data = request.hidden.at(begin);
  if (request.lora && request.lora->of_tokens) {
    lora = *request.lora;
    lora.of_tokens += begin;
    part.lora = &lora;
  }
  part.out = {};
  part.kept = kept;
  forward(engine, config, variant, weights, part);
}

}  // namespace ktk

// The pipeline of one chunk of tokens, as a region of the worker pool:
//
//   tokens --encode--> x --+--> gate --+
//                          +--> up   --+-- activation, encode --> h --> down --> weighted sums
//          each token once     tasks: columns of one expert            tasks: columns of the output
//   ----------------------|------------------------------------------|--------------------------
//                      barrier                                    barrier
//
// The first barrier is left out when there are so few tokens that every worker encodes them all.
// A task of the second half owns its output columns for all experts, so the weighted sums need no
// atomics and no merge pass, and they add up in the same order for any number of workers.
#include "moe/pipeline.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>

#include "moe/schedule.h"

namespace ktk {
namespace {

// Rows of an expert that are multiplied at once: bounds the worker's panels.
constexpr size_t kMaxRows = 512;
// f32 results of gate (and as much of up) that a worker keeps in its cache.
constexpr size_t kPanelFloats = 32 * 1024;
// f32 sums of a task in the second half.
constexpr size_t kSumBytes = 2 << 20;
// Up to so many tokens are encoded by every worker for itself.
constexpr size_t kPrivateTokens = 4;
// Tokens are taken in chunks whose encoded rows fit in this; their number has no other limit.
constexpr size_t kChunkBytes = size_t{192} << 20;
constexpr size_t kMinChunk = 256;

size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

// Floats between the rows of a panel: whole cache lines, and an odd number of them, because rows a
// power of two apart would share a few sets of the L1 cache.
size_t panel_stride(size_t columns) {
  const size_t lines = round_up(columns, 16) / 16;
  return (lines | 1) * 16;
}

// Cuts one allocation into aligned pieces.
class Carver {
 public:
  size_t add(size_t bytes) {
    const size_t at = size_;
    size_ += round_up(bytes, KTK_ALIGNMENT);
    return at;
  }
  size_t size() const { return size_; }

 private:
  size_t size_ = 0;
};

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
        shards_(weights.shards()),
        next_gate_up_(shards_.size()),
        next_down_(shards_.size()) {
    x_stride_ = variant.act_size(&shards_[0].gate);
    for (const Shard& shard : shards_) h_strides_.push_back(variant.act_size(&shard.down));
  }

  // Tokens whose encoded rows stay within kChunkBytes.
  size_t chunk_tokens() const {
    size_t bytes = x_stride_ + (shards_.size() > 1 ? shards_.size() * config_.hidden * 4 : 0);
    for (const size_t stride : h_strides_) bytes += request_.choice.top_k * stride;
    return std::max(kChunkBytes / bytes, kMinChunk);
  }

  void run(size_t begin, size_t end) {
    begin_ = begin;
    tokens_ = end - begin;
    route_.build(request_.choice, begin, end, config_.num_experts, request_.skip);
    if (route_.active.empty()) return write_zeros();
    plan();
    engine_.pool.run([this](int worker) { body(worker); });
  }

 private:
  const char* hidden_row(size_t token) const {
    const Rows& rows = request_.hidden;
    return static_cast<const char*>(rows.data) +
           (begin_ + token) * rows.stride * element_bytes(rows);
  }
  char* out_row(size_t token) const {
    const Rows& rows = request_.out;
    return static_cast<char*>(rows.data) + (begin_ + token) * rows.stride * element_bytes(rows);
  }
  static size_t element_bytes(const Rows& rows) { return element_bits(rows.type) / 8; }
  size_t pad(size_t rows) const { return round_up(rows, variant_.tile.m_step); }

  void write_zeros() {
    for (size_t token = 0; token < tokens_; ++token) {
      std::memset(out_row(token), 0, config_.hidden * element_bytes(request_.out));
    }
  }

  // Sizes and tasks; everything that workers share and do not change.
  void plan() {
    size_t most = 0;
    for (const Route::Active& active : route_.active) most = std::max<size_t>(most, active.count);
    block_rows_ = std::min(most, kMaxRows);
    private_x_ = tokens_ <= kPrivateTokens;
    h_step_ = std::lcm(variant_.tile.n_step, variant_.tile.k_step);
    panel_columns_ = std::max(kPanelFloats / pad(block_rows_) / h_step_ * h_step_, h_step_);

    const int workers = engine_.pool.size();
    const size_t cap = std::max<size_t>(kSumBytes / (tokens_ * sizeof(float)), 1);
    gate_up_.resize(shards_.size());
    size_t scratch = 0;
    for (size_t s = 0; s < shards_.size(); ++s) {
      cut_gate_up(route_, shards_[s].width(), h_step_, workers, gate_up_[s]);
      next_gate_up_[s] = 0;
      next_down_[s] = 0;
      scratch =
          std::max({scratch, kernel_scratch(shards_[s].gate), kernel_scratch(shards_[s].down)});
    }
    cut_down(config_.hidden, variant_.tile.n_step, cap, workers, down_);
    next_token_ = 0;
    next_sum_ = 0;

    Carver shared;
    const size_t x_at = shared.add(private_x_ ? 0 : pad(tokens_) * x_stride_);
    const size_t rows = pad(route_.tokens.size()) + variant_.tile.m_step;
    std::vector<size_t> h_at, partial_at;
    for (const size_t stride : h_strides_) h_at.push_back(shared.add(rows * stride));
    for (size_t s = 0; shards_.size() > 1 && s < shards_.size(); ++s) {
      partial_at.push_back(shared.add(tokens_ * config_.hidden * sizeof(float)));
    }
    char* base = engine_.scratch.shared(shared.size());
    x_ = base + x_at;
    h_.clear();
    partial_.clear();
    for (const size_t at : h_at) h_.push_back(base + at);
    for (const size_t at : partial_at) partial_.push_back(reinterpret_cast<float*>(base + at));

    Carver own;
    size_t down_columns = 0;
    for (const DownTask& task : down_)
      down_columns = std::max<size_t>(down_columns, task.end - task.begin);
    down_stride_ = panel_stride(round_up(down_columns, variant_.tile.n_step));
    panel_stride_ = panel_stride(panel_columns_);
    own_.row = own.add(config_.hidden * sizeof(float));
    own_.x = own.add(private_x_ ? pad(tokens_) * x_stride_ : 0);
    own_.gather = own.add(pad(block_rows_) * x_stride_);
    own_.gate = own.add(pad(block_rows_) * panel_stride_ * sizeof(float));
    own_.up = own.add(pad(block_rows_) * panel_stride_ * sizeof(float));
    own_.product = own.add(pad(block_rows_) * down_stride_ * sizeof(float));
    own_.sums = own.add(tokens_ * down_stride_ * sizeof(float));
    own_.scratch = own.add(scratch);
    own_.size = own.size();
  }

  size_t kernel_scratch(const ktk_matrix& matrix) const {
    size_t bytes = 0;
    for (const ktk_ukernel& kernel : variant_.kernels) {
      if (kernel.scratch_size) bytes = std::max(bytes, kernel.scratch_size(&matrix, block_rows_));
    }
    return bytes;
  }

  void body(int worker) {
    const int node = engine_.pool.node_of(worker);
    char* own = engine_.scratch.own(worker, own_.size, topology_node(node));
    if (variant_.enter) variant_.enter();
    char* x = private_x_ ? own + own_.x : x_;
    if (private_x_) {
      encode(own, x, 0, tokens_);
    } else {
      encode_shared(own);
      engine_.pool.barrier();
    }
    const size_t shards = shards_.size();
    const size_t home =
        static_cast<size_t>(worker) * shards / static_cast<size_t>(engine_.pool.size());
    for (size_t i = 0; i < shards; ++i) {
      const size_t s = (home + i) % shards;
      while (const GateUpTask* task = take(gate_up_[s], next_gate_up_[s]))
        gate_up(s, *task, x, own);
    }
    engine_.pool.barrier();
    for (size_t i = 0; i < shards; ++i) {
      const size_t s = (home + i) % shards;
      while (const DownTask* task = take(down_, next_down_[s])) down(s, *task, own);
    }
    if (variant_.leave) variant_.leave();
    if (shards > 1) {
      engine_.pool.barrier();
      sum_shards(own);
    }
  }

  static int topology_node(int index) {
    const auto& nodes = topology().nodes;
    return index >= 0 && static_cast<size_t>(index) < nodes.size()
               ? nodes[static_cast<size_t>(index)].id
               : -1;
  }

  template <typename Task>
  static const Task* take(const std::vector<Task>& tasks, std::atomic<size_t>& next) {
    const size_t i = next.fetch_add(1, std::memory_order_relaxed);
    return i < tasks.size() ? &tasks[i] : nullptr;
  }

  void encode_shared(char* own) {
    constexpr size_t kBlock = 16;
    for (;;) {
      const size_t first = next_token_.fetch_add(kBlock, std::memory_order_relaxed);
      if (first >= tokens_) return;
      encode(own, x_, first, std::min(first + kBlock, tokens_));
    }
  }

  void encode(char* own, char* x, size_t first, size_t last) {
    float* row = reinterpret_cast<float*>(own + own_.row);
    for (size_t token = first; token < last; ++token) {
      ops_.to_f32(hidden_row(token), request_.hidden.type, config_.hidden, row);
      variant_.pack_act(&shards_[0].gate, 1, 0, config_.hidden, row, config_.hidden,
                        x + token * x_stride_, x_stride_);
    }
  }

  // The encoded rows [first, first + m) of the route, one behind the other.
  const char* gather(const char* x, size_t first, size_t m, char* buffer) const {
    const uint32_t* tokens = &route_.tokens[first];
    if (tokens[m - 1] - tokens[0] == m - 1 && tokens[0] + pad(m) <= pad(tokens_)) {
      // Tokens ascend within an expert, so these are neighbours already (unless one is named
      // twice).
      bool neighbours = true;
      for (size_t i = 1; i < m; ++i) neighbours = neighbours && tokens[i] == tokens[i - 1] + 1;
      if (neighbours) return x + tokens[0] * x_stride_;
    }
    for (size_t i = 0; i < m; ++i) {
      std::memcpy(buffer + i * x_stride_, x + tokens[i] * x_stride_, x_stride_);
    }
    return buffer;
  }

  const char* weights_from(const ktk_matrix& matrix, const char* packed, size_t n) const {
    return variant_.weight_offset ? packed + variant_.weight_offset(&matrix, n) : nullptr;
  }

  void gate_up(size_t s, const GateUpTask& task, const char* x, char* own) {
    const Shard& shard = shards_[s];
    const Route::Active active = route_.active[task.active];
    const size_t expert = active.expert;
    float* gate = reinterpret_cast<float*>(own + own_.gate);
    float* up = reinterpret_cast<float*>(own + own_.up);
    const float* gate_bias = weights_.gate_bias(expert);
    const float* up_bias = weights_.up_bias(expert);
    for (size_t done = 0; done < active.count; done += kMaxRows) {
      const size_t m = std::min<size_t>(active.count - done, kMaxRows);
      const size_t first = active.first + done;
      ktk_matmul mm =
          product(shard.gate, m, gather(x, first, m, own + own_.gather), x_stride_, own);
      mm.dst_stride = panel_stride_;
      for (size_t n = task.begin; n < task.end; n += panel_columns_) {
        mm.n_begin = n;
        mm.n_end = std::min<size_t>(n + panel_columns_, task.end);
        mm.weight = shard.gate_at(expert);
        mm.dst = gate;
        mm.next = weights_from(shard.gate, shard.up_at(expert), n);
        run(mm);
        mm.weight = shard.up_at(expert);
        mm.dst = up;
        mm.next = mm.n_end < shard.gate.n
                      ? weights_from(shard.gate, shard.gate_at(expert), mm.n_end)
                      : nullptr;
        run(mm);
        ops_.glu(&config_.glu, m, mm.n_end - n, gate, up, panel_stride_,
                 gate_bias ? gate_bias + shard.begin + n : nullptr,
                 up_bias ? up_bias + shard.begin + n : nullptr);
        variant_.pack_act(&shard.down, m, n, mm.n_end, gate, panel_stride_,
                          h_[s] + first * h_strides_[s], h_strides_[s]);
      }
    }
  }

  void down(size_t s, const DownTask& task, char* own) {
    const Shard& shard = shards_[s];
    const size_t columns = task.end - task.begin;
    float* panel = reinterpret_cast<float*>(own + own_.product);
    float* sums = reinterpret_cast<float*>(own + own_.sums);
    std::memset(sums, 0, tokens_ * down_stride_ * sizeof(float));
    for (size_t i = 0; i < route_.active.size(); ++i) {
      const Route::Active active = route_.active[i];
      // Shards add up to the whole product; the bias must come once.
      const float* bias = s == 0 ? weights_.down_bias(active.expert) : nullptr;
      for (size_t done = 0; done < active.count; done += kMaxRows) {
        const size_t m = std::min<size_t>(active.count - done, kMaxRows);
        const size_t first = active.first + done;
        ktk_matmul mm = product(shard.down, m, h_[s] + first * h_strides_[s], h_strides_[s], own);
        mm.weight = shard.down_at(active.expert);
        mm.n_begin = task.begin;
        mm.n_end = task.end;
        mm.dst = panel;
        mm.dst_stride = down_stride_;
        if (i + 1 < route_.active.size()) {
          mm.next =
              weights_from(shard.down, shard.down_at(route_.active[i + 1].expert), task.begin);
        }
        run(mm);
        for (size_t r = 0; r < m; ++r) {
          ops_.add_weighted(panel + r * down_stride_, bias ? bias + task.begin : nullptr,
                            route_.weights[first + r], columns,
                            sums + route_.tokens[first + r] * down_stride_);
        }
      }
    }
    for (size_t token = 0; token < tokens_; ++token) {
      const float* from = sums + token * down_stride_;
      if (shards_.size() > 1) {
        std::memcpy(partial_[s] + token * config_.hidden + task.begin, from,
                    columns * sizeof(float));
      } else {
        ops_.from_f32(from, request_.out.type, columns,
                      out_row(token) + task.begin * element_bytes(request_.out));
      }
    }
  }

  void sum_shards(char* own) {
    float* row = reinterpret_cast<float*>(own + own_.row);
    const size_t width = config_.hidden;
    for (;;) {
      const size_t token = next_sum_.fetch_add(1, std::memory_order_relaxed);
      if (token >= tokens_) return;
      std::memcpy(row, partial_[0] + token * width, width * sizeof(float));
      for (size_t s = 1; s < shards_.size(); ++s) ops_.add(partial_[s] + token * width, width, row);
      ops_.from_f32(row, request_.out.type, width, out_row(token));
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
    mm.scratch = own + own_.scratch;
    return mm;
  }

  void run(const ktk_matmul& mm) const { variant_.kernel_for(mm.m).run(&mm); }

  Engine& engine_;
  const Config& config_;
  const Variant& variant_;
  const Weights& weights_;
  const Request& request_;
  const ktk_ops& ops_;
  const std::vector<Shard>& shards_;

  // Of the chunk.
  size_t begin_ = 0, tokens_ = 0;
  Route route_;
  std::vector<std::vector<GateUpTask>> gate_up_;  // per shard
  std::vector<DownTask> down_;                    // the same for every shard
  size_t block_rows_ = 0, h_step_ = 0, panel_columns_ = 0, panel_stride_ = 0, down_stride_ = 0;
  bool private_x_ = false;
  size_t x_stride_ = 0;
  std::vector<size_t> h_strides_;
  char* x_ = nullptr;            // encoded tokens
  std::vector<char*> h_;         // per shard: encoded intermediates, a row per row of the route
  std::vector<float*> partial_;  // per shard: its part of the output, when there are several
  struct {
    size_t row, x, gather, gate, up, product, sums, scratch, size;
  } own_{};  // offsets into a worker's scratch

  std::vector<std::atomic<size_t>> next_gate_up_, next_down_;
  std::atomic<size_t> next_token_{0}, next_sum_{0};
};

}  // namespace

void forward(Engine& engine, const Config& config, const Variant& variant, const Weights& weights,
             const Request& request) {
  std::lock_guard lock(engine.busy);
  ChunkRun chunk(engine, config, variant, weights, request);
  const size_t step = chunk.chunk_tokens();
  for (size_t begin = 0; begin < request.choice.tokens; begin += step) {
    chunk.run(begin, std::min(begin + step, request.choice.tokens));
  }
}

}  // namespace ktk

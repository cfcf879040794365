// One chunk of tokens, as a region of the worker pool:
//
//   tokens --encode--> x --product, bias--> out
//          each token once   tasks: columns of the output
//   ----------------------|----------------------------
//                      barrier
//
// The barrier is left out when there are so few tokens that every worker encodes them all. A task
// owns columns of the output, so nothing is merged, and any number of workers gives the same bits.
#include "dense/pipeline.h"

#include <algorithm>
#include <atomic>
#include <deque>

#include "core/prefetch.h"
#include "moe/nodes.h"
#include "ops/select.h"

namespace ktk {
namespace {

class DenseRun {
 public:
  DenseRun(Engine& engine, const Variant& variant, const DenseWeights& weights, DensePlan& plan,
           const Rows& x, const Rows& out)
      : engine_(engine),
        variant_(variant),
        weights_(weights),
        plan_(plan),
        x_(x),
        out_(out),
        ops_(ops()),
        prefetch_(prefetch()),
        next_task_(weights.shards().size()) {}

  void run(size_t begin, size_t end) {
    prepare(begin, end);
    engine_.pool.run([this](int worker) { body(worker); });
  }

  void prepare(size_t begin, size_t end) {
    begin_ = begin;
    plan_.make(end - begin);
    shared_ = engine_.scratch.shared(plan_.shared);
    for (std::atomic<size_t>& next : next_task_) next = 0;
    next_token_ = 0;
  }

  // A worker's part, which has no barrier where the plan says private_x.
  void body(int worker) {
    const int node = node_id(engine_.pool.node_of(worker));
    char* own = engine_.scratch.own(worker, plan_.own.pieces, node);
    if (variant_.enter) variant_.enter();
    if (plan_.private_x) {
      encode(own, 0, plan_.tokens);
    } else {
      encode_shared(own);
      engine_.pool.barrier();
    }
    // Those of the worker's own node first, then the others'.
    const size_t shards = next_task_.size();
    const size_t workers = static_cast<size_t>(engine_.pool.size());
    const size_t home = home_shard(engine_.pool, worker, shards);
    const size_t at_once = std::max<size_t>(workers / shards, 1);
    for (size_t i = 0; i < shards; ++i) {
      const size_t s = (home + i) % shards;
      const std::vector<DenseTask>& tasks = plan_.tasks[s];
      for (size_t at = take(s); at < tasks.size(); at = take(s)) {
        // With workers that take turns, the next one here is as many tasks on as there are of them.
        const size_t then = at + at_once;
        multiply(tasks[at], then < tasks.size() ? &tasks[then] : nullptr, own);
      }
    }
    if (variant_.leave) variant_.leave();
  }

 private:
  size_t take(size_t shard) { return next_task_[shard].fetch_add(1, std::memory_order_relaxed); }

  // Encoded tokens for products of one kind.
  char* encoded(size_t act, char* own) const {
    return (plan_.private_x ? own : shared_) + plan_.x[act];
  }

  void encode_shared(char* own) {
    constexpr size_t kBlock = 16;
    for (;;) {
      const size_t first = next_token_.fetch_add(kBlock, std::memory_order_relaxed);
      if (first >= plan_.tokens) return;
      encode(own, first, std::min(first + kBlock, plan_.tokens));
    }
  }

  void encode(char* own, size_t first, size_t last) {
    const size_t k = weights_.k();
    float* const row = reinterpret_cast<float*>(own + plan_.own.row);
    float* const sorted = reinterpret_cast<float*>(own + plan_.own.sorted);
    for (size_t token = first; token < last; ++token) {
      ops_.to_f32(x_.at(begin_ + token), x_.type, k, row);
      for (size_t act = 0; act < weights_.acts().size(); ++act) {
        const DenseAct& wanted = weights_.acts()[act];
        const size_t stride = plan_.x_strides[act];
        if (wanted.order) sort_columns(wanted.order, row, sorted);
        variant_.pack_act(&wanted.matrix, 1, 0, k, wanted.order ? sorted : row, k,
                          encoded(act, own) + token * stride, stride);
      }
    }
  }

  const char* weights_from(const DenseSlice& slice, size_t n) const {
    return variant_.weight_offset ? slice.packed + variant_.weight_offset(&slice.matrix, n)
                                  : nullptr;
  }

  void multiply(const DenseTask& task, const DenseTask* following, char* own) {
    const DenseSlice& slice = *task.slice;
    float* const panel = reinterpret_cast<float*>(own + plan_.own.panel);
    const float* const bias = weights_.bias();
    ktk_matmul mm{};
    mm.struct_size = sizeof mm;
    mm.matrix = &slice.matrix;
    mm.weight = slice.packed;
    mm.act_stride = plan_.x_strides[slice.act];
    mm.dst = panel;
    mm.dst_stride = plan_.panel_stride;
    mm.scratch = own + plan_.own.scratch;
    mm.prefetch = &prefetch_;
    for (size_t done = 0; done < task.rows; done += DensePlan::kMaxRows) {
      const size_t first = task.first + done;
      mm.m = std::min(task.rows - done, DensePlan::kMaxRows);
      mm.act = encoded(slice.act, own) + first * mm.act_stride;
      for (size_t n = task.begin; n < task.end; n += plan_.panel_columns) {
        mm.n_begin = n;
        mm.n_end = std::min(n + plan_.panel_columns, task.end);
        if (mm.n_end < task.end) {
          mm.next = weights_from(slice, mm.n_end);
        } else if (done + mm.m < task.rows) {
          mm.next = weights_from(slice, task.begin);
        } else {
          mm.next = following ? weights_from(*following->slice, following->begin) : nullptr;
        }
        variant_.kernel_for(mm.m).run(&mm);
        write(mm, slice, bias, begin_ + first);
      }
    }
  }

  // The panel of a product to rows of the output from `row` on.
  void write(const ktk_matmul& mm, const DenseSlice& slice, const float* bias, size_t row) const {
    const size_t columns = mm.n_end - mm.n_begin, column = slice.begin + mm.n_begin;
    if (slice.factor != 1) ops_.scale(slice.factor, mm.m, columns, mm.dst, mm.dst_stride);
    for (size_t r = 0; r < mm.m; ++r) {
      float* const sums = mm.dst + r * mm.dst_stride;
      if (bias) ops_.add(bias + column, columns, sums);
      ops_.from_f32(sums, out_.type, columns, out_.at(row + r, column));
    }
  }

  Engine& engine_;
  const Variant& variant_;
  const DenseWeights& weights_;
  DensePlan& plan_;
  const Rows& x_;
  const Rows& out_;
  const ktk_ops& ops_;
  const ktk_prefetch& prefetch_;

  size_t begin_ = 0;  // first token of the chunk
  char* shared_ = nullptr;
  std::vector<std::atomic<size_t>> next_task_;  // per shard
  std::atomic<size_t> next_token_{0};
};

}  // namespace

void forward(Engine& engine, const Variant& variant, const DenseWeights& weights, DensePlan& plan,
             const Rows& x, const Rows& out, size_t tokens) {
  DenseRun chunk(engine, variant, weights, plan, x, out);
  const size_t step = plan.max_tokens();
  for (size_t begin = 0; begin < tokens; begin += step) {
    chunk.run(begin, std::min(begin + step, tokens));
  }
}

void forward_few(Engine& engine, std::span<const DenseCall> calls, const Rows& x, size_t tokens) {
  std::deque<DenseRun> runs;  // which cannot be moved
  for (const DenseCall& call : calls) {
    runs.emplace_back(engine, call.variant, call.weights, call.plan, x, call.out);
    runs.back().prepare(0, tokens);
  }
  engine.pool.run([&](int worker) {
    for (DenseRun& one : runs) one.body(worker);
  });
}

}  // namespace ktk

// A region of the worker pool:
//
//   tasks: a shared head, a span of tokens          merge, in the caller's thread
//   scores = queries x keys^T                       of each head, spans in their order:
//   largest, e^(score - largest), their sum         the largest of all, sums and
//   mean   = these x values                         means scaled by how far each is below it
//
// The queries that share a head are the rows of both products, so that keys and values are read and
// converted once for all of them. Spans depend on the number of tokens alone.
#include "step/attention.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <utility>
#include <vector>

#include "moe/carver.h"
#include "moe/nodes.h"
#include "ops/select.h"

namespace ktk {
namespace {

// Tokens whose keys, or values, are converted at once: 16 KiB of f32 with a depth of 128.
constexpr size_t kBlock = 32;
// Rows between the one that is fetched from memory and the one that is converted. A span is too
// short for the processor to see that it is read in order.
constexpr size_t kAhead = 2 * kBlock;
// Spans are whole blocks, and no more than this: merging them is one worker's work.
constexpr size_t kMostSpans = 16;

size_t span_of(size_t tokens) {
  return std::max(2 * kBlock, round_up((tokens + kMostSpans - 1) / kMostSpans, kBlock));
}

// The largest of some numbers. With a NaN it is anything, and the sum of exponentials NaN, as all
// that is computed from it.
float largest(const float* row, size_t count) {
  constexpr size_t kChains = 16;  // compared by turns, or each would wait for the one before
  float most[kChains];
  std::fill_n(most, kChains, row[0]);
  size_t t = 0;
  for (; t + kChains <= count; t += kChains) {
    for (size_t i = 0; i < kChains; ++i) most[i] = row[t + i] > most[i] ? row[t + i] : most[i];
  }
  for (; t < count; ++t) most[0] = std::max(most[0], row[t]);
  return *std::max_element(most, most + kChains);
}

class AttentionRun {
 public:
  AttentionRun(Engine& engine, const Heads& heads, const float* query, const Past& keys,
               const Past& values, size_t tokens)
      : engine_(engine),
        heads_(heads),
        query_(query),
        keys_(keys),
        values_(values),
        element_(block_of(keys.type).bytes_of(1)),
        tokens_(tokens),
        span_(span_of(tokens)),
        spans_((tokens + span_ - 1) / span_),
        most_(spans_ * heads.queries),
        sums_(spans_ * heads.queries),
        means_(spans_ * heads.queries * heads.depth) {
    rows_ = own_.add(kBlock, heads_.depth * sizeof(float));
    turned_ = own_.add(heads_.depth, kBlock * sizeof(float));
    scores_ = own_.add(heads_.together(), span_ * sizeof(float));
  }

  void run(float* out) {
    engine_.pool.run([this](int worker) { body(worker); });
    for (size_t h = 0; h < heads_.queries; ++h) merge(h, out + h * heads_.depth);
  }

 private:
  struct Task {
    size_t head, begin, count;  // tokens [begin, begin + count); none behind the last task
  };

  // Tasks are taken one ahead, so that memory is read across them.
  void body(int worker) {
    char* const own = engine_.scratch.own(worker, own_, node_id(engine_.pool.node_of(worker)));
    Task task = take();
    Ahead(*this, task, {}, 0).fetch(kAhead);
    while (task.count > 0) {
      const Task following = take();
      compute(task, following, own);
      task = following;
    }
  }

  Task take() {
    const size_t number = next_.fetch_add(1, std::memory_order_relaxed);
    if (number >= spans_ * heads_.shared) return {};
    const size_t begin = number / heads_.shared * span_;
    return {number % heads_.shared, begin, std::min(span_, tokens_ - begin)};
  }

  // Where results of a head and a span are.
  size_t at(size_t span, size_t query) const { return span * heads_.queries + query; }

  const char* row_of(const Past& past, size_t head, size_t token) const {
    return static_cast<const char*>(past.data) + element_ * (head * past.head + token * past.row);
  }

  // What a worker reads: all keys of a task, row by row, then all its values, then those of the
  // next task. A row is fetched with each that is converted, since many at once are waited for.
  class Ahead {
   public:
    Ahead(const AttentionRun& run, const Task& task, const Task& next, size_t row)
        : run_(run), task_(task), next_(next), row_(row) {}

    void fetch(size_t rows) {
      for (; rows > 0; --rows, ++row_) {
        while (task_.count > 0 && row_ >= 2 * task_.count) {
          row_ -= 2 * task_.count;
          task_ = std::exchange(next_, {});
        }
        if (task_.count == 0) return;
        const bool keys = row_ < task_.count;
        const Past& past = keys ? run_.keys_ : run_.values_;
        const size_t token = task_.begin + row_ - (keys ? 0 : task_.count);
        const char* const line = run_.row_of(past, task_.head, token);
        const size_t bytes = run_.element_ * run_.heads_.depth;
        for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(line + i);
      }
    }

   private:
    const AttentionRun& run_;
    Task task_, next_;
    size_t row_;
  };

  void convert(const Past& past, size_t head, size_t first, size_t count, float* rows,
               Ahead& ahead) const {
    for (size_t t = 0; t < count; ++t) {
      ahead.fetch(1);
      ops_.to_f32(row_of(past, head, first + t), past.type, heads_.depth, rows + t * heads_.depth);
    }
  }

  void compute(const Task& task, const Task& following, char* own) {
    float* const rows = reinterpret_cast<float*>(own + rows_);
    float* const turned = reinterpret_cast<float*>(own + turned_);
    float* const scores = reinterpret_cast<float*>(own + scores_);
    const auto [head, begin, count] = task;
    const size_t span = begin / span_;
    const size_t together = heads_.together(), depth = heads_.depth, query = head * together;
    Ahead ahead(*this, task, following, kAhead);
    for (size_t t = 0; t < count; t += kBlock) {
      const size_t n = std::min(kBlock, count - t);
      convert(keys_, head, begin + t, n, rows, ahead);
      products_.transpose(n, depth, rows, depth, turned, kBlock);
      products_.gemm_of_zeros(together, n, depth, query_ + query * depth, depth, 1, turned, kBlock,
                              scores + t, span_);
    }
    ops_.scale(heads_.scaling, together, count, scores, span_);
    for (size_t q = 0; q < together; ++q) {
      float* const row = scores + q * span_;
      const float most = largest(row, count);
      most_[at(span, query + q)] = most;
      sums_[at(span, query + q)] = ops_.exponentials(most, count, row);
    }
    float* const means = &means_[at(span, query) * depth];
    for (size_t t = 0; t < count; t += kBlock) {
      const size_t n = std::min(kBlock, count - t);
      convert(values_, head, begin + t, n, rows, ahead);
      products_.gemm(together, depth, n, scores + t, span_, 1, rows, depth, means, depth);
    }
  }

  void merge(size_t query, float* out) const {
    const size_t depth = heads_.depth;
    float most = -std::numeric_limits<float>::infinity(), sum = 0;
    for (size_t s = 0; s < spans_; ++s) most = std::max(most, most_[at(s, query)]);
    std::fill_n(out, depth, 0.0f);
    for (size_t s = 0; s < spans_; ++s) {
      float below = most_[at(s, query)];
      ops_.exponentials(most, 1, &below);
      sum += below * sums_[at(s, query)];
      ops_.add_weighted(&means_[at(s, query) * depth], nullptr, below, depth, out);
    }
    ops_.scale(1 / sum, 1, depth, out, depth);
  }

  Engine& engine_;
  const ktk_ops& ops_ = ops();
  const ktk_products& products_ = products();
  const Heads heads_;
  const float* const query_;
  const Past keys_, values_;
  const size_t element_;  // bytes of one; keys and values have one type
  const size_t tokens_, span_, spans_;
  std::vector<float> most_, sums_, means_;  // of each span and query
  Carver own_;
  size_t rows_ = 0, turned_ = 0, scores_ = 0;
  std::atomic<size_t> next_{0};
};

}  // namespace

void attend(Engine& engine, const Heads& heads, const float* query, const Past& keys,
            const Past& values, size_t tokens, float* out) {
  AttentionRun(engine, heads, query, keys, values, tokens).run(out);
}

}  // namespace ktk

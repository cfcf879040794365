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
#include <vector>

#include "moe/carver.h"
#include "moe/nodes.h"
#include "ops/select.h"

namespace ktk {
namespace {

// Tokens whose keys, or values, are converted at once: 16 KiB of f32 with a depth of 128.
constexpr size_t kBlock = 32;
// Blocks between the one that is fetched from memory and the one that is converted. A span is too
// short for the processor to see that it is read in order.
constexpr size_t kAhead = 2;
// Spans are whole blocks, and no more than this: merging them is one worker's work.
constexpr size_t kMostSpans = 16;

size_t span_of(size_t tokens) {
  return std::max(2 * kBlock, round_up((tokens + kMostSpans - 1) / kMostSpans, kBlock));
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

    size_t blocks() const { return (count + kBlock - 1) / kBlock; }
  };

  // Tasks are taken one ahead, so that memory is read across them.
  void body(int worker) {
    char* const own = engine_.scratch.own(worker, own_, node_id(engine_.pool.node_of(worker)));
    Task task = take();
    for (size_t block = 0; block < kAhead; ++block) fetch(task, {}, block);
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

  static const char* row_of(const Past& past, size_t head, size_t token) {
    return static_cast<const char*>(past.data) +
           block_of(past.type).bytes_of(head * past.head + token * past.row);
  }

  void convert(const Past& past, size_t head, size_t first, size_t count, float* rows) const {
    for (size_t t = 0; t < count; ++t) {
      ops_.to_f32(row_of(past, head, first + t), past.type, heads_.depth, rows + t * heads_.depth);
    }
  }

  // Has a block of what a task reads, first all keys and then all values, or of the next task, come
  // to the cache.
  void fetch(const Task& task, const Task& next, size_t block) const {
    const size_t blocks = task.blocks();
    if (block >= 2 * blocks) {
      if (next.count > 0) fetch(next, {}, block - 2 * blocks);
      return;
    }
    const Past& past = block < blocks ? keys_ : values_;
    const size_t first = block % blocks * kBlock, end = std::min(first + kBlock, task.count);
    const size_t bytes = block_of(past.type).bytes_of(heads_.depth);
    for (size_t t = first; t < end; ++t) {
      const char* const row = row_of(past, task.head, task.begin + t);
      for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
    }
  }

  void compute(const Task& task, const Task& following, char* own) {
    float* const rows = reinterpret_cast<float*>(own + rows_);
    float* const turned = reinterpret_cast<float*>(own + turned_);
    float* const scores = reinterpret_cast<float*>(own + scores_);
    const auto [head, begin, count] = task;
    const size_t span = begin / span_;
    const size_t together = heads_.together(), depth = heads_.depth, query = head * together;
    std::fill_n(scores, together * span_, 0.0f);
    size_t fetched = kAhead;
    for (size_t t = 0; t < count; t += kBlock) {
      const size_t n = std::min(kBlock, count - t);
      fetch(task, following, fetched++);
      convert(keys_, head, begin + t, n, rows);
      products_.transpose(n, depth, rows, depth, turned, kBlock);
      products_.gemm(together, n, depth, query_ + query * depth, depth, 1, turned, kBlock,
                     scores + t, span_);
    }
    ops_.scale(heads_.scaling, together, count, scores, span_);
    for (size_t q = 0; q < together; ++q) {
      float* const row = scores + q * span_;
      // With a NaN it is anything, and the sum NaN, as all that is computed from it.
      const float most = *std::max_element(row, row + count);
      most_[at(span, query + q)] = most;
      sums_[at(span, query + q)] = ops_.exponentials(most, count, row);
    }
    float* const means = &means_[at(span, query) * depth];
    for (size_t t = 0; t < count; t += kBlock) {
      const size_t n = std::min(kBlock, count - t);
      fetch(task, following, fetched++);
      convert(values_, head, begin + t, n, rows);
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

#include "moe/packing.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <vector>

#include "core/size.h"
#include "format/elements.h"
#include "moe/nodes.h"

namespace ktk {

ktk_source view(const ktk_source& source, size_t row, size_t col) {
  ktk_source part = source;
  const auto move = [](const void*& data, size_t stride, size_t rows, ktk_element element,
                       size_t columns) {
    if (!data) return;
    const size_t offset = rows * stride + block_of(element).bytes_of(columns);
    data = static_cast<const char*>(data) + offset;
  };
  const ktk_format& f = source.format;
  const size_t group_row = f.group_n ? row / f.group_n : 0;
  const size_t group_col = f.group_k ? col / f.group_k : 0;
  move(part.data, source.data_stride, row, f.element, col);
  move(part.scale, source.scale_stride, group_row, f.scale, group_col);
  move(part.zero, source.zero_stride, group_row, f.zero, group_col);
  return part;
}

namespace {

// Bytes of rows that a worker reads before it packs them, which stay in the L2 cache of a core; or
// n_step rows, if those are more.
constexpr size_t kReadAtOnce = 128 << 10;

// Rows of a matrix: a few ranges per worker and matrix, enough to balance, large enough to stream.
struct Range {
  size_t job, begin, end;
};

// Ranges that workers of one node share, those of all nodes if it is -1.
struct Share {
  int node;
  std::vector<Range> ranges = {};
  std::atomic<size_t> next{0};
};

// Calls body(worker, range) for ranges of all matrices, by all workers or those of a matrix' node.
template <class Body>
void for_ranges(const Variant& variant, WorkerPool& pool, std::span<const PackJob> jobs,
                const Body& body) {
  const size_t n_step = variant.tile.n_step, pieces = static_cast<size_t>(pool.size()) * 4;
  std::deque<Share> shares;  // which cannot be moved
  const auto share_of = [&](int node) -> Share& {
    for (Share& share : shares) {
      if (share.node == node) return share;
    }
    return shares.emplace_back(node);
  };
  for (size_t job = 0; job < jobs.size(); ++job) {
    std::vector<Range>& ranges = share_of(jobs[job].node).ranges;
    const size_t all = jobs[job].matrix->n;
    const size_t rows = std::max(round_up(all / pieces + 1, n_step), n_step);
    for (size_t n = 0; n < all; n += rows) ranges.push_back({job, n, std::min(n + rows, all)});
  }
  pool.run([&](int worker) {
    const int node = node_id(pool.node_of(worker));
    for (Share& share : shares) {
      if (share.node != -1 && share.node != node) continue;
      for (size_t i = share.next++; i < share.ranges.size(); i = share.next++) {
        body(worker, share.ranges[i]);
      }
    }
  });
}

}  // namespace

void find_sizes(const Variant& variant, WorkerPool& pool, std::span<PackJob> jobs) {
  std::vector<std::atomic<size_t>> largest(jobs.size());
  if (variant.source_size) {
    for_ranges(variant, pool, jobs, [&](int, const Range& range) {
      const PackJob& job = jobs[range.job];
      const size_t bytes = variant.source_bytes(*job.matrix, job.source, range.begin, range.end);
      std::atomic<size_t>& most = largest[range.job];
      for (size_t seen = most; seen < bytes && !most.compare_exchange_weak(seen, bytes);) continue;
    });
  }
  for (size_t i = 0; i < jobs.size(); ++i) {
    const ktk_matrix& matrix = *jobs[i].matrix;
    jobs[i].bytes = matrix.n ? variant.weight_bytes(matrix, largest[i]) : 0;
  }
}

void pack(const Variant& variant, WorkerPool& pool, std::span<const PackJob> jobs,
          std::span<const Unread> unread) {
  std::vector<std::vector<char>> rows_of(static_cast<size_t>(pool.size()));
  for_ranges(variant, pool, jobs, [&](int worker, const Range& range) {
    const PackJob& job = jobs[range.job];
    const char* const data = static_cast<const char*>(job.source.data);
    const size_t stride = job.source.data_stride, n_step = variant.tile.n_step;
    if (!is_unread(data + range.begin * stride, unread)) {
      variant.pack(*job.matrix, job.source, range.begin, range.end, job.packed, job.bytes);
      return;
    }
    std::vector<char>& some = rows_of[static_cast<size_t>(worker)];
    const size_t rows = std::max(kReadAtOnce / stride / n_step, size_t{1}) * n_step;
    some.resize(std::max(some.size(), rows * stride));
    for (size_t n = range.begin; n < range.end; n += rows) {
      const size_t end = std::min(n + rows, range.end);
      read(data + n * stride, (end - n) * stride, unread, some.data());
      ktk_source source = job.source;
      source.data = some.data() - n * stride;  // of row 0, which is not read
      variant.pack(*job.matrix, source, n, end, job.packed, job.bytes);
    }
  });
}

}  // namespace ktk

#include "moe/packing.h"

#include <algorithm>
#include <atomic>

#include "core/size.h"
#include "format/elements.h"

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

void Packing::add(const ktk_matrix& matrix, const ktk_source& source, char* packed) {
  // A few jobs per worker and matrix: enough to balance, large enough to stream.
  const size_t n_step = variant_.tile.n_step;
  const size_t pieces = static_cast<size_t>(pool_.size()) * 4;
  const size_t rows = std::max(round_up(matrix.n / pieces + 1, n_step), n_step);
  for (size_t n = 0; n < matrix.n; n += rows) {
    jobs_.push_back({&matrix, source, packed, n, std::min(n + rows, matrix.n)});
  }
}

void Packing::run() {
  std::atomic<size_t> next{0};
  pool_.run([&](int) {
    for (size_t i = next.fetch_add(1); i < jobs_.size(); i = next.fetch_add(1)) {
      const Job& job = jobs_[i];
      variant_.pack_weight(job.matrix, &job.source, job.begin, job.end, job.packed);
    }
  });
}

}  // namespace ktk

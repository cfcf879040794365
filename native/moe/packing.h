// Packing matrices with all workers of a pool.
#pragma once

#include <cstddef>
#include <span>

#include "core/worker_pool.h"
#include "moe/table.h"
#include "moe/unread.h"

namespace ktk {

// Rows [row, ...) and columns [col, ...) of a source; both are multiples of its block, and either
// of its group, or what is looked at does not leave the group that they lie in.
ktk_source view(const ktk_source& source, size_t row, size_t col);

// A matrix to pack. The matrix, and what the source points at, must live until it is packed.
struct PackJob {
  const ktk_matrix* matrix;
  ktk_source source;
  int node = -1;  // that `packed` is on, -1: any
  char* packed = nullptr;
  size_t bytes = 0;  // of `packed`
};

// Fills in `bytes` with what each takes.
void find_sizes(const Variant& variant, WorkerPool& pool, std::span<PackJob> jobs);
// What is on a node is packed by that node's workers, of which there must be some: where mbind is
// refused, as in containers, pages lie where they are first touched. Of what is unread, a worker
// reads the rows that it packs next; rows of a source must then follow each other without gaps.
void pack(const Variant& variant, WorkerPool& pool, std::span<const PackJob> jobs,
          std::span<const Unread> unread = {});

}  // namespace ktk

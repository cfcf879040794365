// Packing matrices with all workers of a pool.
#pragma once

#include <cstddef>
#include <vector>

#include "core/worker_pool.h"
#include "moe/table.h"

namespace ktk {

// Rows [row, ...) and columns [col, ...) of a source; both are multiples of its block, and either
// of its group, or what is looked at does not leave the group that they lie in.
ktk_source view(const ktk_source& source, size_t row, size_t col);

class Packing {
 public:
  Packing(const Variant& variant, WorkerPool& pool) : variant_(variant), pool_(pool) {}

  // A matrix to pack; it and what the source points at must live until run() has returned.
  void add(const ktk_matrix& matrix, const ktk_source& source, char* packed);
  void run();

 private:
  struct Job {
    const ktk_matrix* matrix;
    ktk_source source;
    char* packed;
    size_t begin, end;  // rows
  };

  const Variant& variant_;
  WorkerPool& pool_;
  std::vector<Job> jobs_;
};

}  // namespace ktk

// Gradients of the factors that have the intermediate size: B of gate and up, A of down.
#pragma once

#include <cstddef>

#include "core/size.h"
#include "moe/lora_rows.h"
#include "train/backward.h"

namespace ktk {

// Sums over rows that are in a worker's panels only while it computes them. Each unit of rows
// leaves sums of its own, in memory that workers share, which are added up once all rows of a group
// of experts are there:
//
//   sums of a unit                      rank x I, transposed for B: vectors are parts of rows
//   B of gate  [rank][I]   +=   (x A^T of gate)^T    x   gradients of gate   [rows][I]
//   B of up    [rank][I]   +=   (x A^T of up)^T      x   gradients of up
//   A of down  [rank][I]   +=   (B^T dy)^T           x   h
//
// Without that, rows would go to the last cache and come back: of 64 rows and rank 16, four times
// the bytes.
class InnerSums {
 public:
  // Rows of a unit of an expert that has `count`: these in an even number of equal parts, so that
  // two workers who are left with one expert share it. Tasks of rows begin with a unit: so their
  // number, and that of workers, changes no bit.
  static constexpr size_t kLeast = 8, kMost = 64;
  static size_t unit(size_t count) {
    return count < 2 * kLeast ? count : groups_of(count, 2 * groups_of(count, 2 * kMost));
  }

  InnerSums(const Config& config, const BackwardRequest& request, const Weights& weights);

  // Whether there are any.
  bool wanted() const { return count_ > 0; }
  // Memory for groups of so many rows and experts: an expert of n rows has n / kMost + 2 units or
  // less.
  size_t unit_bytes() const { return product(count_, factor_floats_, sizeof(float)); }
  static size_t units(size_t rows, size_t experts) {
    return sum(rows / kMost, product(2, experts));
  }

  // For the group that begins with an active expert, and its memory.
  void begin(const Route& route, size_t first_active, char* memory);
  // Sums columns [begin, end) over a block of rows. Panels begin with the block's first row and
  // with `begin`, and have rows `stride` floats apart; `forward` and `backward` are as in
  // GradientRows.
  struct Panels {
    const float *gate, *up, *h;
    size_t stride;
  };
  void add(const RowBlock& block, size_t begin, size_t end, const Panels& panels,
           const LoraRows& forward, const LoraRows& backward) const;
  // Adds all units of an active expert to columns [begin, end) of its gradients, which hold zeros
  // if `zero` says so and are not read then (see FactorSums). `own` is scratch memory for rank x
  // columns.
  void finish(size_t active, size_t begin, size_t end, bool zero, float* own) const;

 private:
  // A gradient that is asked for: of A for down, of B for gate and up.
  struct Factor {
    LoraRows::Part part;
    float* to;
  };
  // Those of the unit that begins with a row.
  float* sums(size_t factor, size_t active, size_t row) const;
  // Adds sums to an expert's gradient, where columns are in the order of the checkpoint.
  void write(const Factor& factor, size_t expert, size_t begin, size_t end, const float* sums,
             bool zero, float* own) const;

  const Config& config_;
  const Weights& weights_;
  Factor factors_[3] = {};
  size_t count_ = 0, rank_ = 0, stride_ = 0, factor_floats_ = 0;

  const Route* route_ = nullptr;
  size_t first_active_ = 0;
  float* memory_ = nullptr;
};

}  // namespace ktk

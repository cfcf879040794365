// Gradients of factors of low rank and of weights, for a group of experts: sums over rows.
#pragma once

#include <cstddef>
#include <vector>

#include "moe/lora_rows.h"
#include "train/backward.h"
#include "train/inner_sums.h"

namespace ktk {

// What the rows of a group leave for sums over them. Pointers are to row 0 of the route.
struct GradientRows {
  // For gradients of weights: gradients of the products of gate and up, and the activations
  // between, rows of I that are `stride` floats apart.
  const float *gate = nullptr, *up = nullptr, *h = nullptr;
  size_t stride = 0;
  // x A^T and dy B, times the adapter's scale; those of down times the routing weights, too.
  const LoraRows* forward = nullptr;
  const LoraRows* backward = nullptr;
};

class Gradients {
 public:
  // Columns of a task, and rows of the hidden states that are converted at once: these columns of
  // them stay in L2, beside sums.
  static constexpr size_t kRows = 64, kColumns = 512;

  Gradients(const Config& config, const BackwardRequest& request, const InnerSums& inner)
      : config_(config), request_(request), inner_(inner) {}

  // Whether there are any, and any of weights; those of one expert.
  bool wanted() const { return of_factors() || of_weights(); }
  bool of_weights() const;
  bool of_weights(size_t expert) const;
  // Memory that run() wants.
  size_t own_bytes() const;

  struct Task {
    uint32_t active;
    enum Kind : uint32_t { kOfHidden, kOfOutput, kWithin } kind;
    uint32_t begin, end;  // columns of the hidden size, or of the intermediate size
  };
  // The tasks of active experts [first, last); no two write the same memory.
  void cut(const Route& route, size_t first, size_t last, std::vector<Task>& tasks) const;
  // Tokens of `route` are counted from `begin`: with 0, gradients of factors hold zeros.
  void run(const Task& task, const Route& route, size_t begin, const GradientRows& rows,
           char* own) const;

 private:
  // A worker's: some rows as f32, and the sums of two factors.
  struct Memory {
    float *rows, *sums;
  };
  size_t rank() const;
  bool of_factors() const;
  void of_hidden(const Task& task, const Route& route, size_t begin, const GradientRows& rows,
                 const Memory& own) const;
  void of_output(const Task& task, const Route& route, size_t begin, const GradientRows& rows,
                 const Memory& own) const;
  void within(const Task& task, const Route& route, size_t begin, const GradientRows& rows,
              const Memory& own) const;

  const Config& config_;
  const BackwardRequest& request_;
  const InnerSums& inner_;
};

}  // namespace ktk

// Gradients of factors of low rank and of weights, for a group of experts: sums over rows.
#pragma once

#include <cstddef>
#include <vector>

#include "moe/lora_rows.h"
#include "train/backward.h"

namespace ktk {

// What the rows of a group leave for sums over them. Pointers are to row 0 of the route.
struct GradientRows {
  // Gradients of the products of gate and up, and the activations between, [row][I].
  const float *gate = nullptr, *up = nullptr, *h = nullptr;
  // x A^T and dy B, times the adapter's scale; those of down times the routing weights, too.
  const LoraRows* forward = nullptr;
  const LoraRows* backward = nullptr;
};

class Gradients {
 public:
  // Rows of the hidden states, and columns of them, that are converted at once.
  static constexpr size_t kRows = 256, kColumns = 512;
  static constexpr size_t own_bytes() { return kRows * kColumns * sizeof(float); }

  Gradients(const Config& config, const BackwardRequest& request)
      : config_(config), request_(request) {}

  // Whether there are any.
  bool wanted() const;

  struct Task {
    uint32_t active;
    enum Kind : uint32_t { kOfHidden, kOfOutput, kWithin } kind;
    uint32_t begin, end;  // columns of the hidden size
  };
  // The tasks of active experts [first, last); no two write the same memory.
  void cut(const Route& route, size_t first, size_t last, std::vector<Task>& tasks) const;
  // Tokens of `route` are counted from `begin`.
  void run(const Task& task, const Route& route, size_t begin, const GradientRows& rows,
           float* own) const;

 private:
  bool has_weights(size_t expert) const;
  void of_hidden(const Task& task, const Route& route, size_t begin, const GradientRows& rows,
                 float* x) const;
  void of_output(const Task& task, const Route& route, size_t begin, const GradientRows& rows,
                 float* dy) const;
  void within(const Task& task, const Route& route, const GradientRows& rows) const;

  const Config& config_;
  const BackwardRequest& request_;
};

}  // namespace ktk

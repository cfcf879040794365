// Dense layers of one input: q, k and v, or gate and up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/process.h"
#include "dense/linear.h"
#include "moe/rows.h"

namespace ktk {

// Layers that a model calls one after the other with the same input. With few rows of it, the first
// call computes all of them as one region of the worker pool, and keeps the others' results until
// they are asked for with an input of the same bytes. So every call gives what the layer alone
// would, bit by bit, whatever it is called with.
class LinearGroup {
 public:
  // Throws std::invalid_argument where there are fewer than two, or their inputs or pools differ.
  explicit LinearGroup(std::vector<std::shared_ptr<Linear>> members);

  // As members[index]->forward(x, out, tokens), errors in a forked child included.
  void forward(size_t index, const Rows& x, const Rows& out, size_t tokens);

  // Whether so many results were not asked for that none are kept any more.
  bool gave_up();

  const std::vector<std::shared_ptr<Linear>>& members() const { return members_; }

 private:
  struct Kept {
    bool there = false;
    uint64_t loads = 0;  // of the member, when these were computed
    std::vector<char> bytes;
  };

  bool take(size_t index, const Rows& out);
  bool same_input(const Rows& x, size_t tokens) const;
  void compute(size_t index, const Rows& x, const Rows& out, size_t tokens);

  const std::vector<std::shared_ptr<Linear>> members_;
  const Process process_;
  std::mutex mutex_;
  std::vector<char> input_;
  ktk_element type_ = KTK_F32;
  size_t tokens_ = 0;
  std::vector<Kept> kept_;
  // Inputs in a row of which some result was not asked for.
  int wasted_ = 0;
};

}  // namespace ktk

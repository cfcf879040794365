// Attention of one new token, from the hidden state to what its module returns.
#pragma once

#include <cstddef>
#include <memory>

#include "dense/linear.h"
#include "step/attention.h"
#include "step/norm.h"
#include "step/rotary.h"

namespace ktk {

//   x --+-- q --norm, rotary------------------------> query --+
//       +-- k --norm, rotary--> keys[position]   --> keys ----+-- attend -- out
//       +-- v ----------------> values[position] --> values --+
//
// Products are rounded to the type of x, as are norms and rotary embeddings; what is attended to is
// computed in f32 and rounded once.
class AttentionStep {
 public:
  // Throws std::invalid_argument where sizes do not fit, or layers have several pools.
  AttentionStep(std::shared_ptr<Linear> q, std::shared_ptr<Linear> k, std::shared_ptr<Linear> v,
                std::shared_ptr<Linear> out, const Heads& heads);

  struct Call {
    Rows x;
    // Of a head, or of all heads at once; may be NULL.
    Norm* q_norm = nullptr;
    Norm* k_norm = nullptr;
    Rotary* rotary = nullptr;  // may be NULL
    // Of the type of x, with room for the row of `position`, which is written.
    Past keys, values;
    size_t position = 0;
  };

  // Writes what is attended to, which is what the last product is of.
  void attend(const Call& call, const Rows& out);
  void forward(const Call& call, const Rows& out);

  const Heads& heads() const { return heads_; }
  size_t width() const { return q_->k(); }
  size_t out_width() const { return out_->n(); }

 private:
  const std::shared_ptr<Linear> q_, k_, v_, out_;
  const Heads heads_;
};

}  // namespace ktk

// The patches of a run of steps, group by group, in the order in which they are stored: for kernels
// that decode in registers.
#pragma once

#include "bf16z/decode.h"

namespace ktk::bf16z {
namespace {

class GroupPatches {
 public:
  // From the next step of `reader` on.
  template <class Decoder>
  explicit GroupPatches(const BlockReader<Decoder>& reader)
      : step_(reader.step()), count_(reader.counts()), patch_(reader.patches()), left_(*count_) {}

  // The next group up to `end` that has patches; `end` if there is none.
  const char* find(const char* end) {
    while (left_ == 0) {
      step_ += kStepBytes;
      if (step_ == end) return end;
      left_ = *++count_;
    }
    const size_t group = group_of(*patch_);
    for (in_group_ = 1; in_group_ < left_ && group_of(patch_[in_group_]) == group;) ++in_group_;
    return step_ + group * kGroupBytes;
  }

  // Those of that group.
  const uint32_t* begin() const { return patch_; }
  const uint32_t* end() const { return patch_ + in_group_; }

  // The one after that group: not inline, for it takes registers that loops need.
  [[gnu::noinline]] const char* next(const char* end) {
    patch_ += in_group_;
    left_ -= in_group_;
    return find(end);
  }

 private:
  const char* step_;
  const uint16_t* count_;
  const uint32_t* patch_;
  size_t left_, in_group_ = 0;  // in the step, and in the group that was found
};

}  // namespace
}  // namespace ktk::bf16z

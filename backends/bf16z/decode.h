// From 12 bits to the plain steps of BF16.
//
// A `Decoder(table)` offers group(in, out, number): the four lines of a group of a plain step.
#pragma once

#include <string.h>

#include "bf16z/layout.h"
#include "gemm/prefetch.h"

namespace ktk::bf16z {
namespace {

// Writes a patch to where it is in a plain step.
inline void write_patch(uint32_t patch, char* step) {
  const uint16_t weight = static_cast<uint16_t>(patch);
  memcpy(step + 2 * (patch >> 16), &weight, sizeof weight);
}

// Decodes steps of a block one after the other.
template <class Decoder>
class BlockReader {
 public:
  BlockReader(const char* header, const char* side, size_t steps)
      : decoder_(reinterpret_cast<const Header*>(header)->table),
        in_(header + header_bytes(steps)),
        count_(patches_of_steps(header)),
        patch_(reinterpret_cast<const uint32_t*>(side)) {}

  explicit BlockReader(const BlockParts<const char>& block)
      : BlockReader(block.header, block.side, block.steps) {}

  // What the next step is made of; pass_steps() goes on to one after.
  const Decoder& decoder() const { return decoder_; }
  const char* step() const { return in_; }
  const uint16_t* counts() const { return count_; }  // of patches, of this step and those behind
  const uint32_t* patches() const { return patch_; }
  bool has_patches() const { return *count_ != 0; }
  void pass_steps(size_t steps) {
    in_ += steps * kStepBytes;
    for (; steps > 0; --steps) patch_ += *count_++;
  }

  // Makes it a plain step, and goes on.
  void read_step(char* out) {
    for (size_t group = 0; group < kGroups; ++group, in_ += kGroupBytes) {
      decoder_.group(in_, out, group);
    }
    for (const uint32_t* end = patch_ + *count_; patch_ != end; ++patch_) {
      write_patch(*patch_, out);
    }
    ++count_;
  }

 private:
  Decoder decoder_;
  const char* in_;
  const uint16_t* count_;
  const uint32_t* patch_;
};

}  // namespace
}  // namespace ktk::bf16z

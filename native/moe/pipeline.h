// One call of a layer: route, encode, gate and up, activation, down, combine.
#pragma once

#include <span>

#include "moe/config.h"
#include "moe/engine.h"
#include "moe/route.h"
#include "moe/table.h"
#include "moe/weights.h"

namespace ktk {

// Rows of `type` in memory, `stride` elements apart.
struct Rows {
  void* data = nullptr;
  ktk_element type = KTK_F32;
  size_t stride = 0;
};

struct Request {
  Rows hidden;  // [tokens, H], read only
  Choice choice;
  Rows out;                       // [tokens, H]
  std::span<const uint8_t> skip;  // one byte per expert, != 0: contributes nothing
};

// Computes `request` with the workers of `engine`, one chunk of tokens after the other. The caller
// holds engine.turn(). The same bits come out for any number of workers.
void forward(Engine& engine, const Config& config, const Variant& variant, const Weights& weights,
             const Request& request);

// The element-wise operations for this CPU; throws std::runtime_error below AVX2.
const ktk_ops& ops();

}  // namespace ktk

// What a call of a layer reads and writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "moe/route.h"
#include "moe/rows.h"

namespace ktk {

struct Request {
  Rows hidden;  // [tokens, H], read only
  Choice choice;
  Rows out;                       // [tokens, H]
  std::span<const uint8_t> skip;  // one byte per expert, != 0: contributes nothing
};

}  // namespace ktk

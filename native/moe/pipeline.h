// One call of a layer: route, encode, gate and up, activation, down, combine.
#pragma once

#include "moe/config.h"
#include "moe/engine.h"
#include "moe/request.h"
#include "moe/table.h"
#include "moe/weights.h"

namespace ktk {

// Computes `request` with the workers of `engine`, one chunk of tokens after the other. The caller
// holds engine.turn(). The same bits come out for any number of workers.
void forward(Engine& engine, const Config& config, const Variant& variant, const Weights& weights,
             const Request& request);

// Writes the products of gate and up of tokens [begin, end), as Request::kept has them, to `kept`,
// whose first token is `begin`.
void forward_products(Engine& engine, const Config& config, const Variant& variant,
                      const Weights& weights, const Request& request, size_t begin, size_t end,
                      const Rows& kept);

}  // namespace ktk

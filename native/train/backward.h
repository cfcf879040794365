// The backward pass of a layer of experts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moe/layer.h"
#include "moe/request.h"
#include "train/transposed.h"

namespace ktk {

// Gradients of one adapter's factors, of their shapes, in f32. They hold zeros before a call; those
// that are NULL are not computed.
struct LoraGradients {
  Parts<float*> a{}, b{};
};

// Gradients of the weights of experts [first, first + count): [count, I, H] for gate and up,
// [count, H, I] for down, and of their biases [count, I], [count, I] and [count, H]. They grow by
// what a call finds; those that are NULL are not computed.
struct WeightGradients {
  size_t first = 0, count = 0;
  Parts<float*> weight{}, bias{};
};

struct BackwardRequest {
  // As in the forward pass, whose `out` and `kept` it is: `out` is the gradient of the output,
  // which is read; without `kept`, gate and up are computed again. An adapter is the only one, for
  // all tokens.
  Request forward;
  Rows hidden_gradient;               // [tokens, H]
  float* weights_gradient = nullptr;  // [tokens, top_k]: of the routing weights
  LoraGradients lora;
  WeightGradients weights;
};

// Computes the gradients of `request` with the workers of the layer's pool. The same bits come out
// for any number of them, and whether products are kept or computed again. Throws what
// Layer::forward throws.
void backward(Layer& layer, const FloatBackend& floats, const BackwardRequest& request);

}  // namespace ktk

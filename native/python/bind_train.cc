#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <vector>

#include "core/size.h"
#include "dense/linear.h"
#include "moe/layer.h"
#include "python/bind.h"
#include "python/call.h"
#include "python/flat.h"
#include "python/gil.h"
#include "train/backward.h"
#include "train/linear.h"

namespace ktk {
namespace {

// A, then B, of gate, up and down; None for both of a matrix without them.
using Factors = std::vector<nb::object>;
// Rank, scale and factors.
using GivenAdapter = std::tuple<size_t, float, Factors>;

constexpr const char* kFactors[] = {"gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b"};
constexpr const char* kWeights[] = {"gate", "up", "down", "gate_bias", "up_bias", "down_bias"};

template <typename Array>
void check_compact(const char* name, const Array& array, const std::vector<int64_t>& shape) {
  check_array(name, array, shape);
  if (array.size() == 0) return;
  int64_t stride = 1;
  for (size_t i = array.ndim(); i-- > 0;) {
    if (array.shape(i) > 1 && array.stride(i) != stride) {
      throw nb::value_error((std::string(name) + " must be contiguous").c_str());
    }
    stride *= static_cast<int64_t>(array.shape(i));
  }
}

std::vector<int64_t> factor_shape(const Config& config, size_t rank, size_t which) {
  const auto e = static_cast<int64_t>(config.num_experts), r = static_cast<int64_t>(rank);
  const auto h = static_cast<int64_t>(config.hidden), i = static_cast<int64_t>(config.intermediate);
  const bool down = which >= 4, b = which % 2;
  if (b) return {e, down ? h : i, r};
  return {e, r, down ? i : h};
}

// f32 memory that grows, or nothing for None.
class F32Sums {
 public:
  float* take(const char* name, nb::handle given, const std::vector<int64_t>& shape) {
    if (given.is_none()) return nullptr;
    kept_.push_back(output_from(name, given));
    check_compact(name, kept_.back(), shape);
    if (float_of(name, kept_.back().dtype()) != KTK_F32) {
      throw nb::type_error((std::string(name) + " must be float32").c_str());
    }
    return static_cast<float*>(kept_.back().data());
  }

 private:
  std::vector<AnyOutput> kept_;
};

// Adapters as they come from Python, which stay alive with it.
class GivenLora {
 public:
  GivenLora(const Config& config, const std::vector<GivenAdapter>& given, nb::handle of_tokens,
            size_t tokens) {
    for (const auto& [rank, scale, factors] : given) {
      if (rank < 1 || factors.size() != 6) throw nb::value_error("an adapter needs a rank");
      Adapter adapter{.rank = rank, .scale = scale, .a = {}, .b = {}};
      LoraFactor* const to[] = {&adapter.a.gate, &adapter.b.gate, &adapter.a.up,
                                &adapter.b.up,   &adapter.a.down, &adapter.b.down};
      for (size_t i = 0; i < 6; ++i) {
        if (factors[i].is_none()) continue;
        if (i < 2 && !config.gated)
          throw nb::value_error("experts without a gate have no factors of one");
        arrays_.push_back(input_from(kFactors[i], factors[i]));
        check_compact(kFactors[i], arrays_.back(), factor_shape(config, rank, i));
        *to[i] = {arrays_.back().data(), float_of(kFactors[i], arrays_.back().dtype())};
      }
      lora.adapters.push_back(adapter);
    }
    if (of_tokens.is_none()) return;
    const Ids ids("adapter_ids", of_tokens);
    check_array("adapter_ids", ids.array, {static_cast<int64_t>(tokens)});
    // Any number that is none is as good as -1.
    const auto count = static_cast<int64_t>(given.size());
    for (const int64_t id : ids.all)
      ids_.push_back(id >= 0 && id < count ? static_cast<int32_t>(id) : -1);
    lora.of_tokens = ids_.data();
  }
  GivenLora(const GivenLora&) = delete;
  GivenLora& operator=(const GivenLora&) = delete;

  const Lora* get() const { return lora.adapters.empty() ? nullptr : &lora; }

  Lora lora;

 private:
  std::vector<AnyArray> arrays_;
  std::vector<int32_t> ids_;
};

std::vector<int64_t> kept_shape(const Layer& layer, const Request& request) {
  const Choice& choice = request.choice;
  return {static_cast<int64_t>(choice.tokens), static_cast<int64_t>(choice.top_k),
          static_cast<int64_t>(layer.config().first_products()),
          static_cast<int64_t>(kept_columns(layer.config(), request.lora))};
}

// Memory for the products of gate and up, which are bf16, and what an adapter leaves beside them.
template <typename Array>
Rows kept_in(const Array& array, const Layer& layer, const Request& request) {
  check_compact("kept", array, kept_shape(layer, request));
  const ktk_element type = float_of("kept", array.dtype());
  if (type != KTK_BF16) throw nb::type_error("kept must be bfloat16");
  void* const data = const_cast<void*>(static_cast<const void*>(array.data()));
  return {data, type, kept_columns(layer.config(), request.lora)};
}

void forward_with(Layer& layer, nb::handle hidden, nb::handle ids, nb::handle weights,
                  nb::handle mask, nb::handle out, const std::vector<GivenAdapter>& adapters,
                  nb::handle of_tokens, nb::handle kept_) {
  Call call(layer, hidden, ids, weights, mask, out);
  call.separate();
  const GivenLora lora(layer.config(), adapters, of_tokens, call.request.choice.tokens);
  call.request.lora = lora.get();
  AnyOutput kept;
  if (!kept_.is_none()) {
    kept = output_from("kept", kept_);
    call.request.kept = kept_in(kept, layer, call.request);
  }
  const Unlocked unlocked;
  layer.forward(call.request);
}

void backward_moe(Layer& layer, const FloatBackend& floats, nb::handle hidden, nb::handle ids,
                  nb::handle weights, nb::handle mask, nb::handle gradient, nb::handle kept_,
                  const std::vector<GivenAdapter>& adapters, nb::handle hidden_gradient,
                  nb::handle weights_gradient, const Factors& factor_gradients, size_t first,
                  size_t count, const std::vector<nb::object>& weight_gradients) {
  const Config& config = layer.config();
  CallInputs call(layer, hidden, ids, weights, mask);
  const Choice& choice = call.request.choice;
  const InputRows grad("grad", gradient, config.hidden);
  if (grad.array.ndim() != 2 || grad.count != choice.tokens) {
    throw nb::value_error(("grad must have a row for each of " + std::to_string(choice.tokens) +
                           " tokens, got " + describe_array(grad.array))
                              .c_str());
  }
  call.request.out = grad.rows;
  const GivenLora lora(config, adapters, nb::none(), choice.tokens);
  if (lora.lora.adapters.size() > 1) throw nb::value_error("one adapter is trained at a time");
  call.request.lora = lora.get();
  AnyArray kept;
  if (!kept_.is_none()) {
    kept = input_from("kept", kept_);
    call.request.kept = kept_in(kept, layer, call.request);
  }
  const auto tokens = static_cast<int64_t>(choice.tokens);
  const AnyOutput dx = output_from("hidden_gradient", hidden_gradient);
  check_array("hidden_gradient", dx, {tokens, static_cast<int64_t>(config.hidden)});
  F32Sums sums;
  BackwardRequest request;
  request.forward = call.request;
  request.hidden_gradient = {dx.data(), float_of("hidden_gradient", dx.dtype()), row_stride(dx)};
  // Of no tokens it has no memory, but is there.
  if (weights_gradient.is_none()) throw nb::type_error("weights_gradient is missing");
  request.weights_gradient =
      sums.take("weights_gradient", weights_gradient, {tokens, static_cast<int64_t>(choice.top_k)});
  if (lora.get() && factor_gradients.size() == 6) {
    LoraGradients& g = request.lora;
    float** const to[] = {&g.a.gate, &g.b.gate, &g.a.up, &g.b.up, &g.a.down, &g.b.down};
    for (size_t i = 0; i < 6; ++i) {
      *to[i] = sums.take(kFactors[i], factor_gradients[i],
                         factor_shape(config, lora.lora.adapters[0].rank, i));
    }
  }
  if (weight_gradients.size() == 6) {
    if (first > config.num_experts || count > config.num_experts - first) {
      throw nb::index_error("weight gradients of experts that are not there");
    }
    WeightGradients& w = request.weights;
    const auto e = static_cast<int64_t>(count), h = static_cast<int64_t>(config.hidden),
               i = static_cast<int64_t>(config.intermediate);
    float** const to[] = {&w.weight.gate, &w.weight.up, &w.weight.down,
                          &w.bias.gate,   &w.bias.up,   &w.bias.down};
    const std::vector<int64_t> shapes[] = {{e, i, h}, {e, i, h}, {e, h, i}, {e, i}, {e, i}, {e, h}};
    for (size_t at = 0; at < 6; ++at) {
      *to[at] = sums.take(kWeights[at], weight_gradients[at], shapes[at]);
    }
    w.first = first;
    w.count = count;
  }
  const Unlocked unlocked;
  backward(layer, floats, request);
}

void backward_linear(Linear& linear, const FloatBackend& floats, nb::handle dy_, nb::handle dx_) {
  const InputRows dy("grad", dy_, linear.n());
  const OutputRows dx("x_gradient", dx_, dy.shape_with(linear.k()));
  const Unlocked unlocked;
  backward(linear, floats, dy.rows, dx.rows, dy.count);
}

}  // namespace

void bind_train(nb::module_& m) {
  nb::class_<FloatBackend>(m, "FloatBackend",
                           "What gradients are multiplied with: a backend that stores floats.")
      .def(
          nb::new_([](nb::handle backend) {
            return std::make_shared<FloatBackend>(nb::cast<std::shared_ptr<BackendTable>>(backend));
          }),
          "backend"_a);
  m.def("forward_with", &forward_with, "layer"_a, "hidden"_a.none(), "topk_ids"_a.none(),
        "topk_weights"_a.none(), "mask"_a.none(), "out"_a.none(), "adapters"_a,
        "adapter_ids"_a.none(), "kept"_a.none(),
        "MoE.forward with adapters, or with products of gate and up kept in bf16.");
  m.def("backward", &backward_moe, "layer"_a, "floats"_a, "hidden"_a.none(), "topk_ids"_a.none(),
        "topk_weights"_a.none(), "mask"_a.none(), "grad"_a.none(), "kept"_a.none(), "adapters"_a,
        "hidden_gradient"_a.none(), "weights_gradient"_a.none(), "factor_gradients"_a,
        "first_expert"_a, "num_experts"_a, "weight_gradients"_a,
        "Gradients of a layer of experts; those of factors and of weights are added up.");
  m.def("linear_backward", &backward_linear, "linear"_a, "floats"_a, "grad"_a.none(),
        "x_gradient"_a.none(), "The gradient of a dense layer's input.");
}

}  // namespace ktk

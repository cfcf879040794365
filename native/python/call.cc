#include "python/call.h"

#include "core/size.h"

namespace ktk {

void check_call(const Layer& layer, const AnyArray& hidden, const AnyArray& ids,
                const AnyArray& weights, const OptArray& mask, const AnyOutput& out, Call& call) {
  const Config& config = layer.config();
  const auto h = static_cast<int64_t>(config.hidden), k = static_cast<int64_t>(config.top_k);
  check_array("hidden", hidden, {-1, h});
  const auto tokens = static_cast<int64_t>(hidden.shape(0));
  check_array("topk_ids", ids, {tokens, k});
  check_array("topk_weights", weights, {tokens, k});
  check_array("out", out, {tokens, h});
  Request& r = call.request;
  const auto float_type = [](const char* name, const nb::dlpack::dtype& dtype) {
    const ktk_element type = element_of(name, dtype);
    if (type == KTK_F32 || type == KTK_F16 || type == KTK_BF16) return type;
    throw nb::type_error((std::string(name) + " must be float32, float16 or bfloat16").c_str());
  };
  r.hidden = {const_cast<void*>(hidden.data()), float_type("hidden", hidden.dtype()),
              row_stride(hidden)};
  r.out = {out.data(), float_type("out", out.dtype()), row_stride(out)};
  if (tokens > 1 && r.out.stride < config.hidden) {
    throw nb::value_error("out must not overlap itself");
  }
  const auto code = static_cast<nb::dlpack::dtype_code>(ids.dtype().code);
  if (code != nb::dlpack::dtype_code::Int || (ids.dtype().bits != 32 && ids.dtype().bits != 64)) {
    throw nb::type_error(("topk_ids must be int32 or int64, got " + describe_array(ids)).c_str());
  }
  Choice& c = r.choice;
  c.ids = ids.data();
  c.ids_64 = ids.dtype().bits == 64;
  c.ids_stride = row_stride(ids);
  c.tokens = static_cast<size_t>(tokens);
  c.top_k = config.top_k;
  const ktk_element type = float_type("topk_weights", weights.dtype());
  if (type == KTK_F32) {
    c.weights = static_cast<const float*>(weights.data());
    c.weights_stride = row_stride(weights);
  } else {
    call.weights.resize(product(c.tokens, c.top_k));
    const char* row = static_cast<const char*>(weights.data());
    for (size_t t = 0; t < c.tokens; ++t, row += row_stride(weights) * weights.itemsize()) {
      ops().to_f32(row, type, c.top_k, &call.weights[t * c.top_k]);
    }
    c.weights = call.weights.data();
    c.weights_stride = c.top_k;
  }
  if (mask) {
    check_array("mask", *mask, {static_cast<int64_t>(config.num_experts)});
    if (mask->itemsize() != 1) {
      throw nb::type_error(("mask must be bool, got " + describe_array(*mask)).c_str());
    }
    r.skip = {static_cast<const uint8_t*>(mask->data()), config.num_experts};
  }
}

}  // namespace ktk

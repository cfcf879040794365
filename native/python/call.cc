#include "python/call.h"

#include <cstring>

#include "core/size.h"
#include "ops/select.h"

namespace ktk {

CallInputs::CallInputs(const Layer& layer, nb::handle hidden_, nb::handle ids_, nb::handle weights_,
                       nb::handle mask_)
    : hidden(input_from("hidden", hidden_)),
      ids(input_from("topk_ids", ids_)),
      weights(input_from("topk_weights", weights_)),
      mask(optional_input_from("mask", mask_)) {
  const Config& config = layer.config();
  const auto h = static_cast<int64_t>(config.hidden);
  check_array("hidden", hidden, {-1, h});
  const auto tokens = static_cast<int64_t>(hidden.shape(0));
  check_array("topk_ids", ids, {tokens, -1});
  const auto k = static_cast<int64_t>(ids.shape(1));  // the caller's: the configured one is usual
  if (k < 1) throw nb::value_error("topk_ids must name at least one expert for each token");
  check_array("topk_weights", weights, {tokens, k});
  Request& r = request;
  r.hidden = {const_cast<void*>(hidden.data()), float_of("hidden", hidden.dtype()),
              row_stride(hidden)};
  const auto code = static_cast<nb::dlpack::dtype_code>(ids.dtype().code);
  if (code != nb::dlpack::dtype_code::Int || (ids.dtype().bits != 32 && ids.dtype().bits != 64)) {
    throw nb::type_error(("topk_ids must be int32 or int64, got " + describe_array(ids)).c_str());
  }
  Choice& c = r.choice;
  c.ids = ids.data();
  c.ids_64 = ids.dtype().bits == 64;
  c.ids_stride = row_stride(ids);
  c.tokens = static_cast<size_t>(tokens);
  c.top_k = static_cast<size_t>(k);
  const ktk_element type = float_of("topk_weights", weights.dtype());
  if (type == KTK_F32) {
    c.weights = static_cast<const float*>(weights.data());
    c.weights_stride = row_stride(weights);
  } else {
    converted.resize(product(c.tokens, c.top_k));
    const char* row = static_cast<const char*>(weights.data());
    for (size_t t = 0; t < c.tokens; ++t, row += row_stride(weights) * weights.itemsize()) {
      ops().to_f32(row, type, c.top_k, &converted[t * c.top_k]);
    }
    c.weights = converted.data();
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

Call::Call(const Layer& layer, nb::handle hidden_, nb::handle ids_, nb::handle weights_,
           nb::handle mask_, nb::handle out_)
    : CallInputs(layer, hidden_, ids_, weights_, mask_), out(output_from("out", out_)) {
  const size_t tokens = request.choice.tokens, h = layer.config().hidden;
  check_array("out", out, {static_cast<int64_t>(tokens), static_cast<int64_t>(h)});
  request.out = {out.data(), float_of("out", out.dtype()), row_stride(out)};
  if (tokens > 1 && request.out.stride < h) throw nb::value_error("out must not overlap itself");
}

void Call::separate() {
  Rows& in = request.hidden;
  const Rows& to = request.out;
  if (in.data == to.data && in.type == to.type && in.stride == to.stride) return;
  const size_t rows = hidden.shape(0), columns = hidden.shape(1);
  if (!overlap(in, columns, to, columns, rows)) return;
  const size_t bytes = in.bytes_of(columns);
  copied.resize(product(rows, bytes));
  for (size_t row = 0; row < rows; ++row) {
    std::memcpy(copied.data() + row * bytes, in.at(row), bytes);
  }
  in = {copied.data(), in.type, columns};
}

}  // namespace ktk

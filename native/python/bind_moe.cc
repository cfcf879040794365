#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "moe/layer.h"
#include "ops/select.h"
#include "python/bind.h"
#include "python/call.h"
#include "python/config.h"
#include "python/gil.h"
#include "python/source.h"

namespace ktk {

namespace {

std::shared_ptr<Layer> make_layer(nb::handle backend, std::shared_ptr<Engine> pool,
                                  nb::handle config, const std::string& variant, bool force,
                                  int shards, const std::optional<PartFormats>& stored) {
  return std::make_shared<Layer>(nb::cast<std::shared_ptr<BackendTable>>(backend), variant, force,
                                 config_from(config), std::move(pool), shards, parts_from(stored));
}

size_t check_expert(const Layer& layer, int64_t expert) {
  if (expert < 0 || expert >= static_cast<int64_t>(layer.config().num_experts)) {
    throw nb::index_error(("expert " + std::to_string(expert) + " is not one of " +
                           std::to_string(layer.config().num_experts))
                              .c_str());
  }
  return static_cast<size_t>(expert);
}

void load_expert(Layer& layer, int64_t expert, nb::handle gate, nb::handle up, nb::handle down,
                 nb::handle gate_scale, nb::handle up_scale, nb::handle down_scale,
                 nb::handle gate_zero, nb::handle up_zero, nb::handle down_zero,
                 nb::handle gate_bias, nb::handle up_bias, nb::handle down_bias,
                 nb::handle gate_factor, nb::handle up_factor, nb::handle down_factor,
                 nb::handle gate_order, nb::handle up_order, nb::handle down_order,
                 const std::optional<PartFormats>& given, const FileReads& unread) {
  const auto h = static_cast<int64_t>(layer.config().hidden);
  const auto i = static_cast<int64_t>(layer.config().intermediate);
  const bool gated = layer.config().gated;
  for (const nb::handle of_gate :
       {gate, gate_scale, gate_zero, gate_bias, gate_factor, gate_order}) {
    if (gated || of_gate.is_none()) continue;
    throw nb::value_error("the experts of this layer have no gate: gate must be None");
  }
  const Parts<OptFormat> formats = parts_from(given);
  ExpertSource source{};
  // They hold what the source points at.
  const Parts<AnyArray> data = {gated ? input_from("gate", gate) : AnyArray(), input_from("up", up),
                                input_from("down", down)};
  Parts<OptArray> scale = {optional_input_from("gate_scale", gate_scale),
                           optional_input_from("up_scale", up_scale),
                           optional_input_from("down_scale", down_scale)};
  const Parts<OptArray> zero = {optional_input_from("gate_zero", gate_zero),
                                optional_input_from("up_zero", up_zero),
                                optional_input_from("down_zero", down_zero)};
  source.factor = {
      take_factor("gate_scale", formats.gate, scale.gate) * factor_from("gate_factor", gate_factor),
      take_factor("up_scale", formats.up, scale.up) * factor_from("up_factor", up_factor),
      take_factor("down_scale", formats.down, scale.down) *
          factor_from("down_factor", down_factor)};
  if (gated) {
    source.gate = source_from("gate", data.gate, scale.gate, zero.gate, formats.gate, i, h);
  }
  source.up = source_from("up", data.up, scale.up, zero.up, formats.up, i, h);
  if (!gated) source.gate = source.up;  // none of its rows are read
  source.down = source_from("down", data.down, scale.down, zero.down, formats.down, h, i);
  Parts<std::vector<float>> bias;
  source.gate_bias = bias_from("gate_bias", gate_bias, layer.config().intermediate, bias.gate);
  source.up_bias = bias_from("up_bias", up_bias, layer.config().intermediate, bias.up);
  source.down_bias = bias_from("down_bias", down_bias, layer.config().hidden, bias.down);
  source.order = {order_from("gate_order", gate_order, layer.config().hidden),
                  order_from("up_order", up_order, layer.config().hidden),
                  order_from("down_order", down_order, layer.config().intermediate)};
  const std::vector<Unread> reads = unread_from(unread, source, h, i);
  source.unread = reads;
  const size_t at = check_expert(layer, expert);
  try {
    const Unlocked unlocked;
    layer.load(at, source);
  } catch (const ReadFailure& failure) {
    raise_read_failure(failure);
  }
}

void call_layer(Layer& layer, nb::handle hidden, nb::handle ids, nb::handle weights,
                nb::handle mask, nb::handle out) {
  Call call(layer, hidden, ids, weights, mask, out);
  call.separate();
  const Unlocked unlocked;
  layer.forward(call.request);
}

nb::tuple unpack_expert(const Layer& layer, int64_t expert) {
  const size_t at = check_expert(layer, expert);
  const size_t h = layer.config().hidden, i = layer.config().intermediate;
  const bool gated = layer.config().gated;
  F32Matrix gate = new_matrix(gated ? i : 0, h), up = new_matrix(i, h), down = new_matrix(h, i);
  {
    const Unlocked unlocked;
    const Layer::Loaded weights = layer.weights();
    if (!weights || weights->state(at) != Weights::State::kLoaded) {
      throw std::invalid_argument("expert " + std::to_string(at) + " is not loaded");
    }
    weights->unpack(at, gate.data(), up.data(), down.data());
  }
  return nb::make_tuple(gated ? nb::cast(gate) : nb::none(), up, down);
}

// A property that asks what is loaded; `none` until something is. Another thread that loads an
// expert meanwhile is waited for, and must be able to take the GIL.
template <class Result, class Ask>
auto of_weights(Result none, Ask ask) {
  return [none, ask](const Layer& layer) -> Result {
    const Unlocked unlocked;
    const Layer::Loaded weights = layer.weights();
    return weights ? Result(ask(*weights)) : none;
  };
}

std::vector<size_t> loaded_experts(const Weights& weights, size_t experts) {
  std::vector<size_t> loaded;
  for (size_t e = 0; e < experts; ++e) {
    if (weights.state(e) == Weights::State::kLoaded) loaded.push_back(e);
  }
  return loaded;
}

std::vector<std::vector<size_t>> slice_widths(const Weights& weights) {
  std::vector<std::vector<size_t>> widths;
  for (const Shard& shard : weights.shards()) {
    std::vector<size_t>& own = widths.emplace_back();
    for (size_t s = shard.first; s < shard.last; ++s) own.push_back(weights.slices()[s].width());
  }
  return widths;
}

}  // namespace

void bind_moe(nb::module_& m) {
  m.def("activation_names", &activation_names,
        "Names of the activation functions that layers compute.");

  nb::class_<Layer>(m, "MoE", "The experts of one layer; ktk.MoE is its public face.")
      .def(nb::new_(&make_layer), "backend"_a, "pool"_a, "config"_a, "variant"_a, "force"_a,
           "shards"_a, "stored"_a.none())
      .def("load_expert", &load_expert, "expert"_a, "gate"_a.none(), "up"_a.none(), "down"_a.none(),
           "gate_scale"_a = nb::none(), "up_scale"_a = nb::none(), "down_scale"_a = nb::none(),
           "gate_zero"_a = nb::none(), "up_zero"_a = nb::none(), "down_zero"_a = nb::none(),
           "gate_bias"_a = nb::none(), "up_bias"_a = nb::none(), "down_bias"_a = nb::none(),
           "gate_factor"_a = nb::none(), "up_factor"_a = nb::none(), "down_factor"_a = nb::none(),
           "gate_order"_a = nb::none(), "up_order"_a = nb::none(), "down_order"_a = nb::none(),
           "given"_a = nb::none(), "unread"_a = FileReads(),
           "An order is int32 [columns]: column i of what is given is column order[i] of the\n"
           "matrix. Rows of gate and up, and their biases, are given in the order of down.\n"
           "Unread are bytes of gate, up and down that are still in files, for the workers to\n"
           "read: descriptor, first byte, the memory, uint8 [bytes], which is that of whole\n"
           "matrices, and the size and time of change (ns) that the file has to have at the\n"
           "end. Raises OSError, whose filename is an index of unread, or EOFError, whose\n"
           "argument it is, where the file has ended or was changed.")
      .def(
          "leave_out",
          [](Layer& layer, int64_t expert) {
            const size_t at = check_expert(layer, expert);
            const Unlocked unlocked;
            layer.leave_out(at);
          },
          "expert"_a)
      .def(
          "unload_expert",
          [](Layer& layer, int64_t expert) {
            const size_t at = check_expert(layer, expert);
            const Unlocked unlocked;
            layer.unload(at);
          },
          "expert"_a)
      .def_prop_ro("counts", &Layer::counts, "How often each expert was chosen.")
      .def("reset_counts", &Layer::reset_counts, nb::call_guard<Unlocked>())
      .def("forward", &call_layer, "hidden"_a.none(), "topk_ids"_a.none(), "topk_weights"_a.none(),
           "mask"_a.none(), "out"_a.none())
      .def("unpack_expert", &unpack_expert, "expert"_a)
      .def_prop_ro("variant", [](const Layer& l) { return l.variant().name; })
      .def_prop_ro("pool", [](const Layer& l) { return l.engine(); })
      .def_prop_ro("shards", &Layer::shards, nb::call_guard<Unlocked>())
      .def_prop_ro("slices", of_weights(std::vector<std::vector<size_t>>(), slice_widths),
                   "Widths of the slices of each shard; none until an expert is loaded.")
      .def_prop_ro(
          "loaded",
          [](const Layer& layer) {
            const size_t experts = layer.config().num_experts;
            return of_weights(std::vector<size_t>(), [experts](const Weights& w) {
              return loaded_experts(w, experts);
            })(layer);
          },
          "Experts that are loaded.")
      .def_prop_ro("expert_nbytes",
                   of_weights(size_t{0}, [](const Weights& w) { return w.expert_bytes(); }))
      .def_prop_ro("nbytes", of_weights(size_t{0}, [](const Weights& w) { return w.bytes(); }))
      .def_prop_ro("format",
                   of_weights(OptFormat(), [](const Weights& w) { return w.formats().gate; }))
      .def_prop_ro("up_format",
                   of_weights(OptFormat(), [](const Weights& w) { return w.formats().up; }))
      .def_prop_ro("down_format",
                   of_weights(OptFormat(), [](const Weights& w) { return w.formats().down; }));
}

}  // namespace ktk

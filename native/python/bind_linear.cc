#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <functional>
#include <memory>
#include <optional>

#include "core/size.h"
#include "dense/group.h"
#include "dense/linear.h"
#include "format/format.h"
#include "python/bind.h"
#include "python/flat.h"
#include "python/gil.h"
#include "python/job_handle.h"
#include "python/source.h"

namespace ktk {
namespace {

using OptArray = std::optional<AnyArray>;
using OptFormat = std::optional<ktk_format>;

std::shared_ptr<Linear> make_linear(nb::handle backend, std::shared_ptr<Engine> pool, size_t k,
                                    size_t n, const std::string& variant, bool force, int shards) {
  return std::make_shared<Linear>(nb::cast<std::shared_ptr<BackendTable>>(backend), variant, force,
                                  k, n, std::move(pool), shards);
}

// Rows of a weight as they come from Python, which stay alive with it.
struct GivenPart {
  GivenPart(const std::string& name, nb::handle data_, nb::handle scale_, nb::handle zero_,
            nb::handle bias_, nb::handle factor, nb::handle order, const OptFormat& given,
            const OptFormat& stored, size_t k)
      : data(input_from(name.c_str(), data_)),
        scale(optional_input_from((name + "_scale").c_str(), scale_)),
        zero(optional_input_from((name + "_zero").c_str(), zero_)) {
    part.factor = take_factor((name + "_scale").c_str(), given, scale) *
                  factor_from((name + "_factor").c_str(), factor);
    part.source = source_from(name.c_str(), data, scale, zero, given, -1, static_cast<int64_t>(k));
    part.order = order_from((name + "_order").c_str(), order, k);
    part.n = data.shape(0);
    part.stored = stored;
    part.bias = bias_from((name + "_bias").c_str(), bias_, part.n, bias);
  }

  AnyArray data;
  OptArray scale, zero;
  std::vector<float> bias;
  DensePart part;
};

void load(Linear& linear, const std::vector<std::string>& names,
          const std::vector<nb::object>& data, const std::vector<nb::object>& scales,
          const std::vector<nb::object>& zeros, const std::vector<nb::object>& biases,
          const std::vector<nb::object>& factors, const std::vector<nb::object>& orders,
          const std::vector<OptFormat>& given, const std::vector<OptFormat>& stored) {
  std::vector<std::unique_ptr<GivenPart>> kept;
  std::vector<DensePart> parts;
  size_t n = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    kept.push_back(std::make_unique<GivenPart>(names.at(i), data.at(i), scales.at(i), zeros.at(i),
                                               biases.at(i), factors.at(i), orders.at(i),
                                               given.at(i), stored.at(i), linear.k()));
    const DensePart& part = kept.back()->part;
    if (part.n == 0) throw nb::value_error((names[i] + " has no rows").c_str());
    parts.push_back(part);
    n += part.n;
  }
  if (n != linear.n()) {
    throw nb::value_error(((parts.size() == 1 ? "weight has " : "the parts of weight have ") +
                           std::to_string(n) + " rows, expected " + std::to_string(linear.n()))
                              .c_str());
  }
  const Unlocked unlocked;
  linear.load(std::move(parts));
}

void call(Linear& linear, nb::handle x_, nb::handle out_) {
  const InputRows x("x", x_, linear.k());
  const OutputRows out("out", out_, x.shape_with(linear.n()));
  const Unlocked unlocked;
  linear.forward(x.rows, out.rows, x.count);
}

void call_in_group(LinearGroup& group, size_t index, nb::handle x_, nb::handle out_) {
  if (index >= group.members().size()) throw nb::index_error("the group has no such layer");
  const Linear& linear = *group.members()[index];
  const InputRows x("x", x_, linear.k());
  const OutputRows out("out", out_, x.shape_with(linear.n()));
  const Unlocked unlocked;
  group.forward(index, x.rows, out.rows, x.count);
}

void look_up(Linear& linear, nb::handle ids_, nb::handle out_) {
  const Ids ids("ids", ids_);
  const OutputRows out("out", out_, ids.shape_with(linear.k()));
  const Unlocked unlocked;
  linear.look_up(ids.all, out.rows);
}

// A call that runs later. Its input is copied when it is made; after an error the output is zeros.
class LinearCall {
 public:
  LinearCall(std::shared_ptr<Linear> linear, nb::handle x_, nb::handle out)
      : LinearCall(linear, InputRows("x", x_, linear->k()), out) {}

  bool done() const { return job_.done(); }
  void wait() const { job_.wait(); }

 private:
  LinearCall(const std::shared_ptr<Linear>& linear, const InputRows& x, nb::handle out)
      : out_("out", out, x.shape_with(linear->n())),
        job_(*linear->engine(), work(linear, x, out_.rows)) {}

  static std::function<void()> work(std::shared_ptr<Linear> linear, const InputRows& x, Rows out) {
    const size_t count = x.count, k = linear->k(), bytes = x.rows.bytes_of(k);
    std::vector<char> copy(product(count, bytes));
    for (size_t r = 0; r < count; ++r) std::memcpy(copy.data() + r * bytes, x.rows.at(r), bytes);
    return [linear = std::move(linear), copy = std::move(copy), type = x.rows.type, k, count,
            out]() mutable {
      try {
        linear->forward({copy.data(), type, k}, out, count);
      } catch (...) {
        out.clear(0, count, linear->n());
        throw;
      }
    };
  }

  OutputRows out_;  // goes after the job, which waits
  JobHandle job_;
};

F32Matrix unpack(const Linear& linear) {
  F32Matrix all = new_matrix(linear.n(), linear.k());
  {
    const Unlocked unlocked;
    const Linear::Loaded weights = linear.weights();
    if (!weights) throw std::invalid_argument("no weight is loaded");
    weights->unpack(all.data());
  }
  return all;
}

// Of each part: data, scales and zero points as bytes, the factor of its products, and the order of
// its columns.
//
// Arrays are made when nothing is held any more: whatever Python runs meanwhile, finalizers of
// others among it, may ask for the same weight.
std::vector<nb::tuple> exported(const Linear& linear) {
  struct Part {
    size_t rows = 0;
    std::vector<ByteRows> bytes;
    float factor = 1;
    Order order;
  };
  if (!linear.variant().export_weight) {
    throw nb::value_error((linear.variant().where + " cannot export weights").c_str());
  }
  std::vector<Part> parts;
  {
    const Unlocked unlocked;
    const Linear::Loaded weights = linear.weights();
    if (!weights) throw std::invalid_argument("no weight is loaded");
    parts.resize(weights->formats().size());
    for (const DenseShard& shard : weights->shards()) {
      for (const DenseSlice& slice : shard.slices) {
        Part& part = parts[slice.part];
        part.rows += slice.matrix.n;
        part.factor = slice.factor;
        part.order = weights->order_of(slice);
      }
    }
    for (size_t p = 0; p < parts.size(); ++p) {
      const SourceShape shape = source_shape(weights->formats()[p], parts[p].rows, linear.k());
      std::vector<ByteRows>& bytes = parts[p].bytes;
      bytes.emplace_back(parts[p].rows, shape.data_bytes);
      bytes.emplace_back(shape.groups_n, shape.scale_bytes);
      bytes.emplace_back(shape.groups_n, shape.zero_bytes);
      weights->write_part(p, {bytes[0].data(), bytes[1].data(), bytes[2].data(), bytes[0].columns(),
                              bytes[1].columns(), bytes[2].columns()});
    }
  }
  std::vector<nb::tuple> found;
  for (Part& part : parts) {
    auto data = std::move(part.bytes[0]).array(), scale = std::move(part.bytes[1]).array(),
         zero = std::move(part.bytes[2]).array();
    found.push_back(nb::make_tuple(data, scale, zero, part.factor, order_array(part.order)));
  }
  return found;
}

// The bias, f32; empty where there is none.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>> bias(const Linear& linear) {
  std::vector<float> values;
  {
    const Unlocked unlocked;
    const Linear::Loaded weights = linear.weights();
    if (weights && weights->bias()) values.assign(weights->bias(), weights->bias() + linear.n());
  }
  auto found = new_bytes(1, product(values.size(), sizeof(float)));
  if (!values.empty()) std::memcpy(found.data(), values.data(), found.nbytes());
  return found;
}

// A property that asks what is loaded, as of_weights of bind_moe.cc.
template <class Result, class Ask>
auto of_weights(Result none, Ask ask) {
  return [none, ask](const Linear& linear) -> Result {
    const Unlocked unlocked;
    const Linear::Loaded weights = linear.weights();
    return weights ? Result(ask(*weights)) : none;
  };
}

std::vector<std::vector<std::pair<size_t, size_t>>> slices(const DenseWeights& weights) {
  std::vector<std::vector<std::pair<size_t, size_t>>> all;
  for (const DenseShard& shard : weights.shards()) {
    auto& own = all.emplace_back();
    for (const DenseSlice& slice : shard.slices) own.push_back({slice.begin, slice.end});
  }
  return all;
}

}  // namespace

void bind_linear(nb::module_& m) {
  const auto unlocked = nb::call_guard<Unlocked>();
  nb::class_<Linear>(m, "Linear", "A dense layer; ktk.Linear is its public face.")
      .def(nb::new_(&make_linear), "backend"_a, "pool"_a, "in_features"_a, "out_features"_a,
           "variant"_a, "force"_a, "shards"_a)
      .def("load", &load, "names"_a, "data"_a, "scales"_a, "zeros"_a, "biases"_a, "factors"_a,
           "orders"_a, "given"_a, "stored"_a,
           "Packs parts of a weight, whose rows lie one behind the other: an entry of each list\n"
           "for each part.")
      .def("forward", &call, "x"_a.none(), "out"_a.none())
      .def("look_up", &look_up, "ids"_a.none(), "out"_a.none())
      .def("unpack", &unpack)
      .def("exported", &exported,
           "For each part its data, scales and zero points as bytes of rows, its factor, and the\n"
           "order of its columns, int32 or None.\n"
           "ValueError if the backend cannot.")
      .def("bias", &bias, "The bytes of the bias, f32; none without one.")
      .def_prop_ro("variant", [](const Linear& l) { return l.variant().name; })
      .def_prop_ro("pool", [](const Linear& l) { return l.engine(); })
      .def_prop_ro("shards", &Linear::shards, unlocked)
      .def_prop_ro("slices",
                   of_weights(std::vector<std::vector<std::pair<size_t, size_t>>>(), slices),
                   "First row and end of the slices of each shard; none until a weight is loaded.")
      .def_prop_ro("nbytes", of_weights(size_t{0}, [](const DenseWeights& w) { return w.bytes(); }))
      .def_prop_ro("formats", of_weights(std::vector<ktk_format>(),
                                         [](const DenseWeights& w) { return w.formats(); }));

  nb::class_<LinearGroup>(m, "LinearGroup",
                          "Dense layers that are called one after the other with the same input.")
      .def(nb::init<std::vector<std::shared_ptr<Linear>>>(), "members"_a)
      .def("forward", &call_in_group, "index"_a, "x"_a.none(), "out"_a.none(),
           "What the layer alone would write, bit by bit.")
      .def_prop_ro("gave_up", &LinearGroup::gave_up,
                   "Whether results that nobody asked for are not computed any more.");

  nb::class_<LinearCall>(m, "LinearCall", "A call of a dense layer that runs later.")
      .def(nb::init<std::shared_ptr<Linear>, nb::handle, nb::handle>(), "linear"_a, "x"_a.none(),
           "out"_a.none())
      .def("wait", &LinearCall::wait, unlocked,
           "Waits until the output is written; raises what went wrong.")
      .def_prop_ro("done", &LinearCall::done, "Whether it has ended.");
}

}  // namespace ktk

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/floats.h"
#include "core/size.h"
#include "moe/layer.h"
#include "moe/router.h"
#include "ops/select.h"
#include "python/bind.h"
#include "python/flat.h"
#include "python/gil.h"
#include "step/attention_step.h"

namespace ktk {
namespace {

// Of an RMS norm: epsilon, offset, early.
using NormKind = std::tuple<float, float, bool>;
using OptNormKind = std::optional<NormKind>;

struct BoundAttention {
  AttentionStep step;
  OptNormKind q_norm, k_norm;
};

std::shared_ptr<BoundAttention> make_attention(std::shared_ptr<Linear> q, std::shared_ptr<Linear> k,
                                               std::shared_ptr<Linear> v,
                                               std::shared_ptr<Linear> out, size_t heads,
                                               size_t shared_heads, size_t depth, float scaling,
                                               const OptNormKind& q_norm,
                                               const OptNormKind& k_norm) {
  return std::make_shared<BoundAttention>(
      BoundAttention{{std::move(q), std::move(k), std::move(v), std::move(out),
                      Heads{heads, shared_heads, depth, scaling}},
                     q_norm,
                     k_norm});
}

// n floats side by side; n -1: any number.
AnyArray vector_from(const char* name, nb::handle given, int64_t n) {
  AnyArray array = input_from(name, given);
  check_array(name, array, {n});
  if (array.shape(0) > 1 && array.stride(0) != 1) {
    throw nb::value_error((std::string(name) + " must be contiguous").c_str());
  }
  return array;
}

std::optional<Norm> norm_from(const char* name, nb::handle weight, const OptNormKind& kind,
                              size_t one, size_t all) {
  if (weight.is_none() != !kind) {
    throw nb::value_error(
        (std::string(name) + " must be given where the step has that norm, and nowhere else")
            .c_str());
  }
  if (!kind) return std::nullopt;
  const AnyArray array = vector_from(name, weight, -1);
  const size_t n = array.shape(0);
  if (n != one && n != all) {
    throw nb::value_error((std::string(name) + " must have as many values as a head, " +
                           std::to_string(one) + ", or as all, " + std::to_string(all) + ", got " +
                           describe_array(array))
                              .c_str());
  }
  const auto& [epsilon, offset, early] = *kind;
  return Norm(array.data(), float_of(name, array.dtype()), n, epsilon, offset, early);
}

std::optional<Rotary> rotary_from(nb::handle cosine_, nb::handle sine_, size_t depth) {
  if (cosine_.is_none() != sine_.is_none()) {
    throw nb::value_error("cosine and sine must both be given, or neither");
  }
  if (cosine_.is_none()) return std::nullopt;
  const AnyArray cosine = vector_from("cosine", cosine_, -1);
  const size_t n = cosine.shape(0);
  const AnyArray sine = vector_from("sine", sine_, static_cast<int64_t>(n));
  if (n == 0 || n % 2 != 0 || n > depth) {
    throw nb::value_error(
        "cosine must have an even number of values, and no more than a head has columns");
  }
  return Rotary(cosine.data(), float_of("cosine", cosine.dtype()), sine.data(),
                float_of("sine", sine.dtype()), n);
}

// Memory of a layer's keys or values, [1, shared heads, room, depth].
struct Room {
  Room(const char* name, nb::handle given, const Heads& heads, ktk_element type, size_t position)
      : array(output_from(name, given)) {
    check_array(name, array,
                {1, static_cast<int64_t>(heads.shared), -1, static_cast<int64_t>(heads.depth)});
    if (float_of(name, array.dtype()) != type) {
      throw nb::type_error((std::string(name) + " must have the dtype of x").c_str());
    }
    if (position >= array.shape(2)) {
      throw nb::value_error((std::string(name) + " has no row " + std::to_string(position) + ", " +
                             describe_array(array))
                                .c_str());
    }
    past = {array.data(), type, static_cast<size_t>(array.stride(1)),
            static_cast<size_t>(array.stride(2))};
    const bool apart = array.shape(2) == 1 || past.row >= heads.depth;
    if (!apart || (heads.shared > 1 && past.head < heads.depth)) {
      throw nb::value_error((std::string(name) + " must not overlap itself").c_str());
    }
  }

  AnyOutput array;
  Past past;
};

void step_of_attention(BoundAttention& bound, nb::handle x_, nb::handle cosine, nb::handle sine,
                       nb::handle q_norm_, nb::handle k_norm_, nb::handle keys_, nb::handle values_,
                       size_t position, nb::handle out_, bool project) {
  AttentionStep& step = bound.step;
  const Heads& heads = step.heads();
  const size_t queries = heads.queries * heads.depth;
  const InputRows x("x", x_, step.width());
  if (x.count != 1) throw nb::value_error("x must be one row");
  const OutputRows out("out", out_, x.shape_with(project ? step.out_width() : queries));
  AttentionStep::Call call;
  const Room keys("keys", keys_, heads, x.rows.type, position);
  const Room values("values", values_, heads, x.rows.type, position);
  const DefaultFloats floats;
  std::optional<Norm> q_norm = norm_from("q_norm", q_norm_, bound.q_norm, heads.depth, queries);
  std::optional<Norm> k_norm =
      norm_from("k_norm", k_norm_, bound.k_norm, heads.depth, heads.shared * heads.depth);
  std::optional<Rotary> rotary = rotary_from(cosine, sine, heads.depth);
  call.x = x.rows;
  call.q_norm = q_norm ? &*q_norm : nullptr;
  call.k_norm = k_norm ? &*k_norm : nullptr;
  call.rotary = rotary ? &*rotary : nullptr;
  call.keys = keys.past;
  call.values = values.past;
  call.position = position;
  const Unlocked unlocked;
  if (project) return step.forward(call, out.rows);
  step.attend(call, out.rows);
}

// Writes what a router and its experts make of few rows.
void route_and_compute(Layer& layer, nb::handle x_, nb::handle weight_, nb::handle bias_,
                       nb::handle out_, size_t top_k, bool chosen_only, bool scores_in_f32) {
  const Config& config = layer.config();
  const InputRows x("x", x_, config.hidden);
  const OutputRows out("out", out_, x.shape_with(config.hidden));
  AnyArray given = input_from("weight", weight_);
  check_array("weight", given, {-1, static_cast<int64_t>(config.hidden)});
  const size_t experts = given.shape(0), tokens = x.count;
  const InputRows weight("weight", std::move(given), config.hidden);
  std::optional<AnyArray> bias;
  if (!bias_.is_none()) {
    bias = vector_from("bias", bias_, static_cast<int64_t>(experts));
    if (float_of("bias", bias->dtype()) != weight.rows.type) {
      throw nb::type_error("bias must have the dtype of weight");
    }
  }
  if (top_k == 0 || top_k > experts) {
    throw nb::value_error(("top_k must be between 1 and " + std::to_string(experts)).c_str());
  }
  const Router router{weight.rows, bias ? static_cast<const char*>(bias->data()) : nullptr, experts,
                      config.hidden, chosen_only};
  std::vector<char> logits(product(tokens, x.rows.bytes_of(experts)));
  std::vector<float> rounded(product(tokens, top_k)), weights(rounded.size());
  std::vector<int64_t> ids(weights.size());
  ktk_element type = x.rows.type;
  if (scores_in_f32) type = KTK_F32;
  const Unlocked unlocked;
  {
    const DefaultFloats floats;
    const auto turn = layer.engine()->turn();
    choose_experts(router, x.rows, tokens, top_k, {logits.data(), x.rows.type, experts},
                   {rounded.data(), type, top_k}, ids.data(), layer.engine().get());
    ops().to_f32(rounded.data(), type, weights.size(), weights.data());
  }
  Request request;
  request.hidden = x.rows;
  request.out = out.rows;
  request.choice = {ids.data(), true, top_k, weights.data(), top_k, tokens, top_k};
  layer.forward(request);
}

// Writes the sum of two rows of each, and its RMS norm.
void add_rms_norm(nb::handle a_, nb::handle b_, nb::handle weight_, nb::handle sum_,
                  nb::handle out_, float epsilon, float offset, bool early) {
  const AnyArray weight = vector_from("weight", weight_, -1);
  const size_t n = weight.shape(0);
  const InputRows a("a", a_, n), b("b", b_, n);
  const OutputRows sum("sum", sum_, a.shape_with(n)), out("out", out_, a.shape_with(n));
  if (b.shape_with(n) != a.shape_with(n)) throw nb::value_error("a and b must have one shape");
  for (const ktk_element type : {b.rows.type, sum.rows.type, out.rows.type}) {
    if (type != a.rows.type) throw nb::type_error("a, b, sum and out must have one dtype");
  }
  const DefaultFloats floats;
  Norm norm(weight.data(), float_of("weight", weight.dtype()), n, epsilon, offset, early);
  for (size_t r = 0; r < a.count; ++r) {
    norm.of_sum(a.rows.at(r), b.rows.at(r), a.rows.type, sum.rows.at(r), out.rows.at(r));
  }
}

}  // namespace

void bind_step(nb::module_& m) {
  nb::class_<BoundAttention>(m, "AttentionStep", "Attention of one new token, as one call.")
      .def(nb::new_(&make_attention), "q"_a, "k"_a, "v"_a, "out"_a, "heads"_a, "shared_heads"_a,
           "depth"_a, "scaling"_a, "q_norm"_a.none(), "k_norm"_a.none(),
           "A norm is epsilon, offset and early, as of rms_norm; None: there is none.")
      .def("forward", &step_of_attention, "x"_a.none(), "cosine"_a.none(), "sine"_a.none(),
           "q_norm"_a.none(), "k_norm"_a.none(), "keys"_a.none(), "values"_a.none(), "position"_a,
           "out"_a.none(), "project"_a,
           "Writes what attention returns for a row x, and its row of keys and values, which are\n"
           "[1, shared_heads, room, depth], at `position`; rows before it are read. project: "
           "False:\n"
           "writes what the last layer would multiply.");
  m.def("route_and_compute", &route_and_compute, "layer"_a, "x"_a.none(), "weight"_a.none(),
        "bias"_a.none(), "out"_a.none(), "top_k"_a, "chosen_only"_a, "scores_in_f32"_a,
        "Writes what a layer makes of rows x with the choice of `route`, whose scores are rounded "
        "to the\n"
        "dtype of x, or not at all.");
  m.def("add_rms_norm", &add_rms_norm, "a"_a.none(), "b"_a.none(), "weight"_a.none(),
        "sum"_a.none(), "out"_a.none(), "epsilon"_a, "offset"_a, "early"_a,
        "Writes a + b and its `rms_norm`.");
}

}  // namespace ktk

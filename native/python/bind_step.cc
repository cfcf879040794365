#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <utility>

#include "core/floats.h"
#include "python/bind.h"
#include "python/gil.h"
#include "python/step_arguments.h"

namespace ktk {
namespace {

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

void check_one(const InputRows& x) {
  if (x.count != 1) throw nb::value_error("x must be one row");
}

void step_of_attention(BoundAttention& bound, nb::handle x_, nb::handle cosine, nb::handle sine,
                       nb::handle q_norm, nb::handle k_norm, nb::handle keys, nb::handle values,
                       size_t position, nb::handle out_, bool project) {
  AttentionStep& step = bound.step;
  const InputRows x("x", x_, step.width());
  check_one(x);
  const size_t queries = step.heads().queries * step.heads().depth;
  const OutputRows out("out", out_, x.shape_with(project ? step.out_width() : queries));
  AttentionArguments given(bound, x.rows.type, cosine, sine, q_norm, k_norm, keys, values,
                           position);
  given.call.x = x.rows;
  const Unlocked unlocked;
  if (project) return step.forward(given.call, out.rows);
  const DefaultFloats floats;
  step.attend(given.call, out.rows);
}

// Writes what a router and its experts make of few rows.
void route_and_compute(Layer& layer, nb::handle x_, nb::handle weight, nb::handle bias,
                       nb::handle out_, size_t top_k, bool chosen_only, bool scores_in_f32) {
  const InputRows x("x", x_, layer.config().hidden);
  const OutputRows out("out", out_, x.shape_with(layer.config().hidden));
  const RouterArguments router(layer, x.rows.type, weight, bias, top_k, chosen_only, scores_in_f32);
  const Unlocked unlocked;
  router.block.forward(x.rows, x.count, out.rows);
}

// Writes what a layer of a model makes of a row.
void step_of_layer(BoundAttention& bound, Layer& layer, nb::handle x_, nb::handle before_,
                   const NormKind& before_kind, nb::handle cosine, nb::handle sine,
                   nb::handle q_norm, nb::handle k_norm, nb::handle keys, nb::handle values,
                   size_t position, nb::handle between_, const NormKind& between_kind,
                   nb::handle weight, nb::handle bias, size_t top_k, bool chosen_only,
                   bool scores_in_f32, nb::handle out_) {
  const size_t width = bound.step.width();
  if (bound.step.out_width() != width || layer.config().hidden != width) {
    throw nb::value_error("attention and experts must have one hidden size");
  }
  const InputRows x("x", x_, width);
  check_one(x);
  const OutputRows out("out", out_, x.shape_with(width));
  if (out.rows.type != x.rows.type) throw nb::type_error("out must have the dtype of x");
  Norm before = norm_from("before", before_, before_kind, width);
  Norm between = norm_from("between", between_, between_kind, width);
  AttentionArguments given(bound, x.rows.type, cosine, sine, q_norm, k_norm, keys, values,
                           position);
  given.call.x = x.rows;
  const RouterArguments router(layer, x.rows.type, weight, bias, top_k, chosen_only, scores_in_f32);
  const Unlocked unlocked;
  layer_step(bound.step, given.call, before, between, router.block, out.rows);
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
  m.def("layer_step", &step_of_layer, "attention"_a, "experts"_a, "x"_a.none(), "before"_a.none(),
        "before_kind"_a, "cosine"_a.none(), "sine"_a.none(), "q_norm"_a.none(), "k_norm"_a.none(),
        "keys"_a.none(), "values"_a.none(), "position"_a, "between"_a.none(), "between_kind"_a,
        "weight"_a.none(), "bias"_a.none(), "top_k"_a, "chosen_only"_a, "scores_in_f32"_a,
        "out"_a.none(),
        "Writes what a layer makes of a row: what rms_norm, AttentionStep.forward, add_rms_norm, "
        "route_and_compute\n"
        "and a sum would, one after the other, to the same bits.");
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

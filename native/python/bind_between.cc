#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/floats.h"
#include "moe/engine.h"
#include "moe/router.h"
#include "python/bind.h"
#include "python/flat.h"
#include "python/gil.h"
#include "step/norm.h"
#include "step/rotary.h"

namespace ktk {
namespace {

// Rows of x by the root of their mean square, times weight + offset. `early`: rounded to the type
// of x before that, too, as most models have it.
void rms_norm(nb::handle x_, nb::handle weight_, nb::handle out_, float epsilon, float offset,
              bool early, const std::shared_ptr<Engine>& pool) {
  const AnyArray weight = input_from("weight", weight_);
  check_array("weight", weight, {-1});
  check_device("weight", weight);
  const size_t n = weight.shape(0);
  if (n > 1 && weight.stride(0) != 1) throw nb::value_error("weight must be contiguous");
  const InputRows x("x", x_, n);
  const OutputRows out("out", out_, x.shape_with(n));
  if (out.rows.type != x.rows.type) throw nb::type_error("out must have the dtype of x");
  const DefaultFloats floats;
  Norm norm(weight.data(), float_of("weight", weight.dtype()), n, epsilon, offset, early);
  const auto compute = [&](Norm& one, size_t begin, size_t end) {
    for (size_t r = begin; r < end; ++r) one(x.rows.at(r), x.rows.type, out.rows.at(r));
  };
  if (!pool) return compute(norm, 0, x.count);
  const Unlocked unlocked;
  const auto turn = pool->turn();
  const auto workers = static_cast<size_t>(pool->pool.size());
  pool->pool.run([&](int worker) {
    const auto w = static_cast<size_t>(worker);
    Norm own = norm;  // with memory for a row
    compute(own, x.count * w / workers, x.count * (w + 1) / workers);
  });
}

// Throws unless an array is n floats side by side; n -1: any number.
void check_vector(const char* name, const AnyArray& array, int64_t n) {
  check_array(name, array, {n});
  if (array.shape(0) > 1 && array.stride(0) != 1) {
    throw nb::value_error((std::string(name) + " must be contiguous").c_str());
  }
}

void rotate_rows(const InputRows& x, const OutputRows& out, size_t columns, Rotary& rotary) {
  for (size_t r = 0; r < x.count; ++r) {
    rotary(x.rows.at(r), x.rows.type, columns, out.rows.at(r));
  }
}

void rotate(nb::handle q_, nb::handle k_, nb::handle cosine_, nb::handle sine_, nb::handle q_out_,
            nb::handle k_out_) {
  const AnyArray cosine = input_from("cosine", cosine_), sine = input_from("sine", sine_);
  check_vector("cosine", cosine, -1);
  const size_t n = cosine.shape(0);
  check_vector("sine", sine, static_cast<int64_t>(n));
  AnyArray q_any = input_from("q", q_);
  const size_t columns = q_any.ndim() ? q_any.shape(q_any.ndim() - 1) : 0;
  if (n == 0 || n % 2 != 0 || n > columns) {
    throw nb::value_error(
        "cosine must have an even number of values, and no more than q has columns");
  }
  const InputRows q("q", std::move(q_any), columns), k("k", k_, columns);
  const OutputRows q_out("q_out", q_out_, q.shape_with(columns));
  const OutputRows k_out("k_out", k_out_, k.shape_with(columns));
  if (q_out.rows.type != q.rows.type || k_out.rows.type != k.rows.type) {
    throw nb::type_error("q_out and k_out must have the dtypes of q and k");
  }
  const DefaultFloats floats;
  Rotary rotary(cosine.data(), float_of("cosine", cosine.dtype()), sine.data(),
                float_of("sine", sine.dtype()), n);
  rotate_rows(q, q_out, columns, rotary);
  rotate_rows(k, k_out, columns, rotary);
}

void route(nb::handle x_, nb::handle weight_, nb::handle bias_, nb::handle logits_,
           nb::handle scores_,
           const nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& ids,
           bool chosen_only) {
  AnyArray w = input_from("weight", weight_);
  check_array("weight", w, {-1, -1});
  const size_t experts = w.shape(0), k = w.shape(1), top_k = ids.shape(1);
  const InputRows x("x", x_, k), weight("weight", std::move(w), k);
  const std::optional<AnyArray> bias = optional_input_from("bias", bias_);
  if (bias) {
    check_vector("bias", *bias, static_cast<int64_t>(experts));
    if (float_of("bias", bias->dtype()) != weight.rows.type) {
      throw nb::type_error("bias must have the dtype of weight");
    }
  }
  const auto tokens = static_cast<int64_t>(x.count);
  const OutputRows logits("logits", logits_, {tokens, static_cast<int64_t>(experts)});
  const OutputRows scores("scores", scores_, {tokens, static_cast<int64_t>(top_k)});
  if (top_k == 0 || top_k > experts || ids.shape(0) != x.count) {
    throw nb::value_error(("ids must have " + std::to_string(tokens) + " rows of 1 to " +
                           std::to_string(experts) + " numbers")
                              .c_str());
  }
  const DefaultFloats floats;
  const Router router{weight.rows, bias ? static_cast<const char*>(bias->data()) : nullptr, experts,
                      k, chosen_only};
  choose_experts(router, x.rows, x.count, top_k, logits.rows, scores.rows, ids.data());
}

}  // namespace

void bind_between(nb::module_& m) {
  m.def(
      "rms_norm", &rms_norm, "x"_a.none(), "weight"_a.none(), "out"_a.none(), "epsilon"_a,
      "offset"_a, "early"_a, "pool"_a = nb::none(),
      "Writes rows of x, by the root of their mean square, times weight + offset. early: rounded\n"
      "to the dtype of x, which out has too, before that. pool: divides many rows; None: the "
      "caller's\n"
      "thread computes all.");
  m.def("rotate", &rotate, "q"_a.none(), "k"_a.none(), "cosine"_a.none(), "sine"_a.none(),
        "q_out"_a.none(), "k_out"_a.none(),
        "Writes rows of q and k turned by one position: x cosine + (-second half, first half) "
        "sine, with\n"
        "each product rounded to the dtype of x. Columns behind those of cosine stay as they are.");
  m.def("route", &route, "x"_a.none(), "weight"_a.none(), "bias"_a.none(), "logits"_a.none(),
        "scores"_a.none(), "ids"_a.noconvert(), "chosen_only"_a,
        "Writes logits x weight^T + bias, of the dtype of `logits`, and of each row's largest, as "
        "many\n"
        "as ids has columns, the numbers and a softmax over all logits or the chosen ones.");
}

}  // namespace ktk

#include <nanobind/nanobind.h>

#include <vector>

#include "core/floats.h"
#include "ops/select.h"
#include "python/bind.h"
#include "python/flat.h"

namespace ktk {
namespace {

// Rows of x by the root of their mean square, times weight + offset. `early`: rounded to the type
// of x before that, too, as most models have it.
void rms_norm(nb::handle x_, nb::handle weight_, nb::handle out_, float epsilon, float offset,
              bool early) {
  const AnyArray weight = input_from("weight", weight_);
  check_array("weight", weight, {-1});
  check_device("weight", weight);
  const size_t n = weight.shape(0);
  if (n > 1 && weight.stride(0) != 1) throw nb::value_error("weight must be contiguous");
  const InputRows x("x", x_, n);
  const OutputRows out("out", out_, x.shape_with(n));
  const ktk_ops& o = ops();
  const DefaultFloats floats;
  std::vector<float> scale(n), row(n);
  o.to_f32(weight.data(), float_of("weight", weight.dtype()), n, scale.data());
  if (offset != 0) {
    for (float& one : scale) one += offset;
  }
  for (size_t r = 0; r < x.count; ++r) {
    o.to_f32(x.rows.at(r), x.rows.type, n, row.data());
    o.normalize(row.data(), epsilon, n, row.data());
    if (early && x.rows.type != KTK_F32) {
      o.from_f32(row.data(), x.rows.type, n, out.rows.at(r));
      o.to_f32(out.rows.at(r), x.rows.type, n, row.data());
    }
    o.multiply(scale.data(), n, row.data());
    o.from_f32(row.data(), out.rows.type, n, out.rows.at(r));
  }
}

}  // namespace

void bind_norm(nb::module_& m) {
  m.def(
      "rms_norm", &rms_norm, "x"_a.none(), "weight"_a.none(), "out"_a.none(), "epsilon"_a,
      "offset"_a, "early"_a,
      "Writes rows of x, by the root of their mean square, times weight + offset. early: rounded\n"
      "to the dtype of x, which out has too, before that.");
}

}  // namespace ktk

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "moe/divide.h"
#include "python/array.h"
#include "python/bind.h"

namespace ktk {

namespace {

using Ids = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Held = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// A numpy array that owns a vector.
template <typename T>
nb::object array_of(std::vector<T>&& values, std::initializer_list<size_t> shape) {
  auto owned = std::make_unique<std::vector<T>>(std::move(values));
  T* data = owned->data();
  nb::capsule owner(owned.release(),
                    [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T>(data, shape, owner));
}

// Ids as int32, checked to name experts or zero experts, or nobody by -1.
template <typename T>
nb::object expert_ids(const nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>& ids,
                      int64_t experts) {
  const size_t values = ids.shape(0) * ids.shape(1);
  std::vector<int32_t> checked(values);
  for (size_t i = 0; i < values; ++i) {
    const auto id = static_cast<int64_t>(ids.data()[i]);
    if (id < -1 || id >= experts) {
      throw nb::value_error(("topk_ids has " + std::to_string(id) + ", expected 0 <= id < " +
                             std::to_string(experts) + ", or -1 for no expert")
                                .c_str());
    }
    checked[i] = static_cast<int32_t>(id);
  }
  return array_of(std::move(checked), {ids.shape(0), ids.shape(1)});
}

nb::list divide(const Ids& ids, const Held& held, int home) {
  const Holders holders{held.data(), held.shape(0), held.shape(1)};
  const size_t k = ids.shape(1);
  nb::list found;
  for (RankPart& part : divide_tokens(ids.data(), ids.shape(0), k, holders, home)) {
    const size_t rows = part.ids.size() / k;
    nb::object which = part.all ? nb::none() : array_of(std::move(part.rows), {rows});
    found.append(nb::make_tuple(part.rank, which, array_of(std::move(part.ids), {rows, k})));
  }
  return found;
}

}  // namespace

void bind_divide(nb::module_& m) {
  const char* about = "Ids as int32, checked: ValueError for what is neither an expert nor -1.";
  m.def("expert_ids", &expert_ids<int64_t>, "ids"_a.noconvert(), "experts"_a, about);
  m.def("expert_ids", &expert_ids<int32_t>, "ids"_a.noconvert(), "experts"_a, about);
  m.def(
      "divide_tokens", &divide, "ids"_a, "held"_a, "home"_a,
      "What each rank computes of the tokens of a call: (rank, rows or None for all, ids with -1\n"
      "in place of other ranks' experts). `held` has a row for each expert, and is not 0 in the\n"
      "columns of ranks that hold it. Ids are those of `expert_ids`; of those behind all experts,\n"
      "which are zero experts, a rank takes care that computes an expert of the token anyway.");
}

}  // namespace ktk

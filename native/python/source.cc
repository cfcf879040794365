#include "python/source.h"

#include "moe/table.h"

namespace ktk {
namespace {

struct Groups {
  const void* data = nullptr;
  size_t stride = 0;  // bytes
  ktk_element element = KTK_NONE;
  uint32_t group_n = 0, group_k = 0;
};

// Extent of a group when `count` of them cover `extent`; 0 for a single one.
uint32_t group_extent(const std::string& name, size_t extent, size_t count) {
  if (count == 1) return 0;
  const size_t group = count ? (extent + count - 1) / count : 0;
  if (group == 0 || (extent + group - 1) / group != count) {
    throw nb::value_error(
        (name + ": " + std::to_string(count) + " groups do not divide " + std::to_string(extent))
            .c_str());
  }
  return static_cast<uint32_t>(group);
}

Groups groups_from(const std::string& name, const AnyArray& array, size_t n, size_t k,
                   const std::optional<ktk_format>& given, ktk_element given_element) {
  if (array.ndim() != 1 && array.ndim() != 2) {
    throw nb::value_error(
        (name + " must be [groups of n, groups of k], got " + describe_array(array)).c_str());
  }
  check_array(name.c_str(), array, std::vector<int64_t>(array.ndim(), -1));
  Groups groups;
  groups.data = array.data();
  groups.element = given ? given_element : element_of(name.c_str(), array.dtype());
  const size_t bytes = array.itemsize();
  if (element_bits(groups.element) != 8 * bytes) {
    throw nb::type_error((name + " is " + describe_array(array) + ", which does not hold " +
                          element_name(groups.element))
                             .c_str());
  }
  const size_t columns = array.ndim() == 2 ? array.shape(1) : 1;
  groups.stride = bytes * static_cast<size_t>(array.shape(0) > 1 ? array.stride(0) : columns);
  if (given) {
    groups.group_n = given->group_n;
    groups.group_k = given->group_k;
    const auto count = [](size_t extent, uint32_t group) {
      return group ? (extent + group - 1) / group : 1;
    };
    if (array.shape(0) != count(n, groups.group_n) || columns != count(k, groups.group_k)) {
      throw nb::value_error((name + " has shape " + describe_array(array) +
                             ", which does not fit " + describe(*given))
                                .c_str());
    }
  } else {
    groups.group_n = array.shape(0) == n ? 1 : group_extent(name, n, array.shape(0));
    groups.group_k = group_extent(name, k, columns);
  }
  return groups;
}

}  // namespace

ktk_source source_from(const char* name, const AnyArray& data, const std::optional<AnyArray>& scale,
                       const std::optional<AnyArray>& zero, const std::optional<ktk_format>& given,
                       int64_t n, int64_t k) {
  ktk_source source{};
  ktk_format& format = source.format;
  format.element = given ? given->element : element_of(name, data.dtype());
  const size_t bits = element_bits(format.element);
  const size_t item_bits = 8 * data.itemsize();
  if (bits == 0 || (bits != item_bits && (item_bits != 8 || bits > 8))) {
    throw nb::type_error((std::string(name) + " is " + describe_array(data) +
                          ", which cannot hold " + element_name(format.element))
                             .c_str());
  }
  const int64_t per_item = static_cast<int64_t>(item_bits / bits);
  if (k >= 0 && k % per_item) {
    throw nb::value_error(
        (std::string(name) + ": depth " + std::to_string(k) + " does not fill whole bytes")
            .c_str());
  }
  check_array(name, data, {n, k < 0 ? k : k / per_item});
  source.data = data.data();
  source.data_stride = row_stride(data) * data.itemsize();
  const size_t rows = data.shape(0), depth = data.shape(1) * static_cast<size_t>(per_item);
  const auto check_given = [&](ktk_element element, bool has, const char* what) {
    if ((element != KTK_NONE) == has) return;
    throw nb::value_error(
        (std::string(name) + ": " + describe(*given) + (has ? " takes no " : " needs a ") + what)
            .c_str());
  };
  if (given) {
    check_given(given->scale, scale.has_value(), "scale");
    check_given(given->zero, zero.has_value(), "zero point");
  }
  if (scale) {
    const Groups g = groups_from(std::string(name) + "_scale", *scale, rows, depth, given,
                                 given ? given->scale : ktk_element{KTK_NONE});
    source.scale = g.data;
    source.scale_stride = g.stride;
    format.scale = g.element;
    format.group_n = g.group_n;
    format.group_k = g.group_k;
  }
  if (zero) {
    const Groups g = groups_from(std::string(name) + "_zero", *zero, rows, depth, given,
                                 given ? given->zero : ktk_element{KTK_NONE});
    if (scale && (g.group_n != format.group_n || g.group_k != format.group_k)) {
      throw nb::value_error((std::string(name) + ": scale and zero have different groups").c_str());
    }
    source.zero = g.data;
    source.zero_stride = g.stride;
    format.zero = g.element;
    format.group_n = g.group_n;
    format.group_k = g.group_k;
  }
  return source;
}

}  // namespace ktk

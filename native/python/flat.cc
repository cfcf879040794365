#include "python/flat.h"

#include <cstring>
#include <optional>
#include <utility>

#include "core/size.h"

namespace ktk {
namespace {

template <typename Array>
size_t extent(const Array& array, size_t dims) {
  size_t count = 1;
  for (size_t i = 0; i < dims; ++i) count = product(count, array.shape(i));
  return count;
}

// Elements from one row to the next where all rows of the last dimension lie at one distance, and
// what is in a row side by side.
template <typename Array>
std::optional<size_t> one_stride(const Array& array) {
  const size_t last = array.ndim() - 1;
  if (array.size() == 0) return array.shape(last);
  if (array.shape(last) > 1 && array.stride(last) != 1) return std::nullopt;
  int64_t stride = static_cast<int64_t>(array.shape(last)), rows = 1;
  for (size_t i = last; i-- > 0;) {
    if (array.shape(i) == 1) continue;
    if (rows == 1) {
      stride = array.stride(i);
      if (stride < 0) return std::nullopt;
    } else if (array.stride(i) != stride * rows) {
      return std::nullopt;
    }
    rows *= static_cast<int64_t>(array.shape(i));
  }
  return static_cast<size_t>(stride);
}

// All elements, the last dimension side by side.
std::vector<char> compact(const AnyArray& array) {
  const size_t item = array.itemsize();
  std::vector<char> copy(product(array.size(), item));
  std::vector<size_t> at(array.ndim(), 0);
  const char* from = static_cast<const char*>(array.data());
  for (size_t done = 0; done < copy.size(); done += item) {
    std::memcpy(copy.data() + done, from, item);
    for (size_t i = array.ndim(); i-- > 0;) {
      const int64_t step = array.stride(i) * static_cast<int64_t>(item);
      from += step;
      if (++at[i] < array.shape(i)) break;
      from -= step * static_cast<int64_t>(array.shape(i));
      at[i] = 0;
    }
  }
  return copy;
}

template <typename Array>
std::vector<int64_t> leading(const Array& array, size_t dims, size_t last) {
  std::vector<int64_t> shape;
  for (size_t i = 0; i < dims; ++i) shape.push_back(static_cast<int64_t>(array.shape(i)));
  shape.push_back(static_cast<int64_t>(last));
  return shape;
}

}  // namespace

InputRows::InputRows(const char* name, nb::handle argument, size_t columns)
    : InputRows(name, input_from(name, argument), columns) {}

InputRows::InputRows(const char* name, AnyArray given, size_t columns) : array(std::move(given)) {
  check_device(name, array);
  if (array.ndim() == 0 || array.shape(array.ndim() - 1) != columns) {
    throw nb::value_error((std::string(name) + " must have shape [..., " + std::to_string(columns) +
                           "], got " + describe_array(array))
                              .c_str());
  }
  check_aligned(name, array);
  count = extent(array, array.ndim() - 1);
  rows.type = float_of(name, array.dtype());
  rows.data = const_cast<void*>(array.data());
  if (const std::optional<size_t> stride = one_stride(array)) {
    rows.stride = *stride;
  } else {
    copy = compact(array);
    rows.data = copy.data();
    rows.stride = columns;
  }
}

std::vector<int64_t> InputRows::shape_with(size_t last) const {
  return leading(array, array.ndim() - 1, last);
}

OutputRows::OutputRows(const char* name, nb::handle argument, const std::vector<int64_t>& shape)
    : array(output_from(name, argument)) {
  check_array(name, array, shape);
  rows.type = float_of(name, array.dtype());
  rows.data = array.data();
  const std::optional<size_t> stride = one_stride(array);
  if (!stride) {
    throw nb::value_error(
        (std::string(name) + " must have all its rows at one distance from each other").c_str());
  }
  rows.stride = *stride;
  const size_t columns = array.shape(array.ndim() - 1);
  if (array.size() > columns && rows.stride < columns) {
    throw nb::value_error((std::string(name) + " must not overlap itself").c_str());
  }
}

Ids::Ids(const char* name, nb::handle argument) : array(input_from(name, argument)) {
  check_device(name, array);
  const auto code = static_cast<nb::dlpack::dtype_code>(array.dtype().code);
  const size_t bits = array.dtype().bits;
  if (code != nb::dlpack::dtype_code::Int || (bits != 32 && bits != 64)) {
    throw nb::type_error(
        (std::string(name) + " must be int32 or int64, got " + describe_array(array)).c_str());
  }
  const std::vector<char> compacted = compact(array);
  all.resize(array.size());
  for (size_t i = 0; i < all.size(); ++i) {
    if (bits == 64) {
      std::memcpy(&all[i], &compacted[i * 8], 8);
    } else {
      int32_t id;
      std::memcpy(&id, &compacted[i * 4], 4);
      all[i] = id;
    }
  }
}

std::vector<int64_t> Ids::shape_with(size_t last) const {
  return leading(array, array.ndim(), last);
}

}  // namespace ktk

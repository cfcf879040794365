#include "python/source.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <utility>

#include "core/size.h"
#include "format/elements.h"
#include "format/format.h"
#include "ops/select.h"

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
  const size_t group = count ? groups_of(extent, count) : 0;
  if (group == 0 || groups_of(extent, group) != count) {
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
    if (array.shape(0) != groups_of(n, groups.group_n) || columns != groups_of(k, groups.group_k)) {
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

// "whole bytes of u4", "whole blocks of q4_k (256 elements in 144 bytes)", for messages.
std::string describe_block(ktk_element element, const Block& block) {
  const std::string name = element_name(element);
  if (!is_ggml(element)) return "whole bytes of " + name;
  return "whole blocks of " + name + " (" + std::to_string(block.columns) + " elements in " +
         std::to_string(block.bytes) + " bytes)";
}

// `of` says what matrix it is for.
float one_float(const char* name, const AnyArray& array, const std::string& of) {
  check_device(name, array);
  if (array.size() != 1 || element_of(name, array.dtype()) != KTK_F32) {
    throw nb::value_error((std::string(name) + " must be one float32 for a whole matrix" + of +
                           ", got " + describe_array(array))
                              .c_str());
  }
  check_aligned(name, array);
  return *static_cast<const float*>(array.data());
}

// Bytes hold anything of at most eight bits and blocks; wider elements have a dtype of their size.
void check_holds(const char* name, const AnyArray& data, ktk_element element, const Block& block) {
  const size_t item = data.itemsize();
  const bool wide = block.columns == 1 && block.bytes > 1;
  if (block.bytes > 0 && item == (wide ? block.bytes : 1)) return;
  throw nb::type_error((std::string(name) + " is " + describe_array(data) + ", which cannot hold " +
                        element_name(element))
                           .c_str());
}

}  // namespace

ktk_source source_from(const char* name, const AnyArray& data, const std::optional<AnyArray>& scale,
                       const std::optional<AnyArray>& zero, const std::optional<ktk_format>& given,
                       int64_t n, int64_t k) {
  ktk_source source{};
  ktk_format& format = source.format;
  format.element = given ? given->element : element_of(name, data.dtype());
  if (is_ggml(format.element)) format = *given;
  const Block block = block_of(format.element);
  check_holds(name, data, format.element, block);
  if (k >= 0 && k % static_cast<int64_t>(block.columns)) {
    throw nb::value_error((std::string(name) + ": depth " + std::to_string(k) + " is not made of " +
                           describe_block(format.element, block))
                              .c_str());
  }
  const size_t row_items =
      block.bytes_of(static_cast<size_t>(std::max<int64_t>(k, 0))) / data.itemsize();
  check_array(name, data, {n, k < 0 ? k : static_cast<int64_t>(row_items)});
  const size_t row_bytes = product(data.shape(1), data.itemsize());
  if (row_bytes % block.bytes) {
    throw nb::value_error((std::string(name) + " is " + describe_array(data) +
                           ", whose rows are not made of " + describe_block(format.element, block))
                              .c_str());
  }
  source.data = data.data();
  source.data_stride = product(row_stride(data), data.itemsize());
  const size_t rows = data.shape(0), depth = row_bytes / block.bytes * block.columns;
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

const float* bias_from(const char* name, nb::handle given, size_t n, std::vector<float>& copy) {
  const std::optional<AnyArray> bias = optional_input_from(name, given);
  if (!bias) return nullptr;
  check_array(name, *bias, {static_cast<int64_t>(n)});
  const ktk_element type = float_of(name, bias->dtype());
  copy.resize(n);
  ops().to_f32(bias->data(), type, n, copy.data());
  return copy.data();
}

float take_factor(const char* name, const OptFormat& given, std::optional<AnyArray>& scale) {
  if (!scale || !given || !is_ggml(given->element)) return 1;
  const float factor = one_float(name, *scale, " of " + element_name(given->element));
  scale.reset();
  return factor;
}

float factor_from(const char* name, nb::handle given) {
  const std::optional<AnyArray> factor = optional_input_from(name, given);
  return factor ? one_float(name, *factor, "") : 1;
}

Order order_from(const char* name, nb::handle given, size_t k) {
  const std::optional<AnyArray> array = optional_input_from(name, given);
  if (!array) return nullptr;
  check_array(name, *array, {static_cast<int64_t>(k)});
  if (array->dtype() != nb::dtype<int32_t>()) {
    throw nb::type_error(
        (std::string(name) + " must be int32, got " + describe_array(*array)).c_str());
  }
  const auto* const from = static_cast<const int32_t*>(array->data());
  std::vector<uint32_t> order(k);
  std::vector<bool> seen(k);
  bool sorted = false;
  for (size_t i = 0; i < k; ++i) {
    const size_t column = static_cast<uint32_t>(from[i]);
    if (column >= k || seen[column]) {
      throw nb::value_error((std::string(name) + " must have each of 0 to " +
                             std::to_string(k - 1) + " once; " + std::to_string(from[i]) +
                             (column < k ? " comes twice" : " is none of them"))
                                .c_str());
    }
    seen[column] = true;
    order[i] = static_cast<uint32_t>(column);
    sorted |= column != i;
  }
  return sorted ? std::make_shared<const std::vector<uint32_t>>(std::move(order)) : nullptr;
}

nb::object order_array(const Order& order) {
  if (!order) return nb::none();
  auto bytes = new_bytes(1, order->size() * sizeof(uint32_t));
  std::memcpy(bytes.data(), order->data(), bytes.nbytes());
  return nb::cast(bytes).attr("reshape")(-1).attr("view")("int32");
}

std::vector<Unread> unread_from(const FileReads& reads, const ExpertSource& source, size_t hidden,
                                size_t intermediate) {
  std::vector<Unread> unread;
  for (const auto& [file, begin, memory, file_bytes, changed_ns] : reads) {
    const AnyOutput array = output_from("unread", memory);
    check_array("unread", array, {static_cast<int64_t>(array.size())});
    if (array.itemsize() != 1) throw nb::type_error("unread must be bytes");
    char* const at = static_cast<char*>(array.data());
    const char* const end = at + array.size();
    bool is_of_one = false;
    const auto check = [&](const ktk_source& matrix, size_t rows, size_t columns) {
      if (rows == 0) return;
      const std::less<const char*> before;
      const char* const first = static_cast<const char*>(matrix.data);
      const char* const last = first + (rows - 1) * matrix.data_stride +
                               block_of(matrix.format.element).bytes_of(columns);
      if (!before(at, last) || !before(first, end)) return;
      if (before(first, at) || before(end, last)) {
        throw nb::value_error("unread has a part of a matrix, which must be all or nothing");
      }
      is_of_one = true;
    };
    check(source.gate, intermediate, hidden);
    check(source.up, intermediate, hidden);
    check(source.down, hidden, intermediate);
    if (!is_of_one) throw nb::value_error("unread has bytes of no matrix that is packed");
    unread.push_back({unread.size(), file, begin, at, array.size(), file_bytes, changed_ns});
  }
  return unread;
}

void raise_read_failure(const ReadFailure& failure) {
  if (failure.error) {
    errno = failure.error;
    PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, nb::cast(failure.which).ptr());
  } else {
    PyErr_SetObject(PyExc_EOFError, nb::cast(failure.which).ptr());
  }
  throw nb::python_error();
}

Parts<OptFormat> parts_from(const std::optional<PartFormats>& formats) {
  if (!formats) return {};
  if (const ktk_format* all = std::get_if<ktk_format>(&*formats)) return {*all, *all, *all};
  const auto& [gate, up, down] = std::get<1>(*formats);
  return {gate, up, down};
}

}  // namespace ktk

// Weight matrices as they come from Python.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "moe/weights.h"
#include "python/array.h"

namespace ktk {

// A 2-D weight [n, k] with its scales and zero points as [groups of n, groups of k] (or [n] for one
// per row). The format is read off dtypes and shapes unless `given` says it: 4-bit elements, for
// instance, come two to a byte as uint8.
ktk_source source_from(const char* name, const AnyArray& data, const std::optional<AnyArray>& scale,
                       const std::optional<AnyArray>& zero, const std::optional<ktk_format>& given,
                       int64_t n, int64_t k);

// A bias of n floats as f32, in `copy`; NULL for None.
const float* bias_from(const char* name, nb::handle given, size_t n, std::vector<float>& copy);

// ggml's blocks have their scales within: one beside them is a factor of the whole matrix, which
// the core applies to products. Takes it out of `scale`; 1 where there is none.
float take_factor(const char* name, const std::optional<ktk_format>& given,
                  std::optional<AnyArray>& scale);
// A factor of the whole matrix that is given as such: one f32; 1 for None.
float factor_from(const char* name, nb::handle given);

// The order that columns of a matrix are given in: int32 [k], each of 0 to k - 1 once. NULL for
// None, and where they are as they were.
Order order_from(const char* name, nb::handle given, size_t k);
// The same for Python.
nb::object order_array(const Order& order);

// A format for gate, up and down, or one for each; None where dtypes tell.
using OptFormat = std::optional<ktk_format>;
using PartFormats = std::variant<ktk_format, std::tuple<OptFormat, OptFormat, OptFormat>>;

// Bytes that are still in files: path, descriptor, first byte, and the memory they belong in,
// uint8.
using FileReads = std::vector<std::tuple<std::string, int, uint64_t, nb::object>>;

// They must belong to the matrices of an expert, which are [intermediate, hidden] and [hidden,
// intermediate]. The memory is that of the matrices.
std::vector<Unread> unread_from(const FileReads& reads, const ExpertSource& source, size_t hidden,
                                size_t intermediate);
// Throws OSError, or EOFError for 0.
[[noreturn]] void raise_os_error(int error, const std::string& path);

Parts<OptFormat> parts_from(const std::optional<PartFormats>& formats);

}  // namespace ktk

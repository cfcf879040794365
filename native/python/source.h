// Weight matrices as they come from Python.
#pragma once

#include <optional>
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

// Bytes that are still in files: descriptor, first byte, the memory they belong in, uint8, and what
// the file's size and time of change, in ns, must be when they are read.
using FileReads = std::vector<std::tuple<int, uint64_t, nb::object, int64_t, int64_t>>;

// Each piece must hold all of the matrices of an expert that it has a part of, which are
// [intermediate, hidden] and [hidden, intermediate], and of one at least.
std::vector<Unread> unread_from(const FileReads& reads, const ExpertSource& source, size_t hidden,
                                size_t intermediate);
// Throws OSError, whose filename is the number of what could not be read; or EOFError, whose
// argument it is, where the file has ended or was changed.
[[noreturn]] void raise_read_failure(const ReadFailure& failure);

Parts<OptFormat> parts_from(const std::optional<PartFormats>& formats);

}  // namespace ktk

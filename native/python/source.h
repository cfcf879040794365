// Weight matrices as they come from Python.
#pragma once

#include <optional>

#include "python/array.h"

namespace ktk {

// A 2-D weight [n, k] with its scales and zero points as [groups of n, groups of k] (or [n] for one
// per row). The format is read off dtypes and shapes unless `given` says it: 4-bit elements, for
// instance, come two to a byte as uint8.
ktk_source source_from(const char* name, const AnyArray& data, const std::optional<AnyArray>& scale,
                       const std::optional<AnyArray>& zero, const std::optional<ktk_format>& given,
                       int64_t n, int64_t k);

}  // namespace ktk

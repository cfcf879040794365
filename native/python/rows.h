// Matrices that Python hands to a packed matrix.
#pragma once

#include <string>
#include <type_traits>

#include "python/arguments.h"
#include "python/array.h"

namespace ktk {

// A matrix of T, which stays alive with it.
template <typename Array, typename T>
struct Rows2D {
  Rows2D(const char* name, const Array& from, bool contiguous) : array(from) {
    check_array(name, array, {-1, -1});
    const bool whole = array.shape(0) < 2 || static_cast<size_t>(array.stride(0)) == array.shape(1);
    if (array.dtype() == nb::dtype<std::remove_const_t<T>>() && (whole || !contiguous)) return;
    throw nb::type_error((std::string(name) + " must be " + (contiguous ? "contiguous " : "") +
                          (sizeof(T) == 4 ? "float32" : "uint8") + " in two dimensions, got " +
                          describe_array(array))
                             .c_str());
  }
  size_t shape(size_t axis) const { return array.shape(axis); }
  T* data() const { return static_cast<T*>(array.data()); }

  Array array;
};
using F32Input = Rows2D<AnyArray, const float>;
using ByteInput = Rows2D<AnyArray, const uint8_t>;
using ByteOutput = Rows2D<AnyOutput, uint8_t>;
using F32Output = Rows2D<AnyOutput, float>;

inline F32Input f32_from(nb::handle x) { return {"x", input_from("x", x), true}; }
inline ByteInput act_from(nb::handle act) { return {"act", input_from("act", act), true}; }

}  // namespace ktk

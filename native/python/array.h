// Arrays as they come from Python: numpy, torch or anything else that speaks DLPack.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ktk/abi.h"

namespace ktk {

namespace nb = nanobind;
using nb::literals::operator""_a;

using AnyArray = nb::ndarray<nb::ro>;
using AnyOutput = nb::ndarray<>;
using F32Matrix = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

// An array argument that is read. Throws TypeError with a sentence for all that is no array in CPU
// memory with values in it.
AnyArray input_from(const char* name, nb::handle argument);
// The same, or nothing for None.
std::optional<AnyArray> optional_input_from(const char* name, nb::handle argument);
// An array argument that is written; it must allow that.
AnyOutput output_from(const char* name, nb::handle argument);

// "[4, 8] bf16", for messages.
template <typename Array>
std::string describe_array(const Array& array);

// The element type; throws TypeError for `name` when ktk has none for its dtype.
ktk_element element_of(const char* name, const nb::dlpack::dtype& dtype);
// The same where only float32, float16 and bfloat16 will do.
ktk_element float_of(const char* name, const nb::dlpack::dtype& dtype);

// Throws TypeError unless the array is in CPU memory.
template <typename Array>
void check_device(const char* name, const Array& array);

// Throws ValueError unless the array starts at a multiple of its elements' size, which numpy and
// DLPack leave open: code that reads whole elements relies on it.
template <typename Array>
void check_aligned(const char* name, const Array& array);

// Throws unless the array is in CPU memory, has the shape (-1: any), is aligned and its last
// dimension is contiguous. TypeError for the wrong device, ValueError for the rest.
template <typename Array>
void check_array(const char* name, const Array& array, const std::vector<int64_t>& shape);

// Elements between rows of a 2-D array.
template <typename Array>
size_t row_stride(const Array& array) {
  return array.shape(0) > 1 ? static_cast<size_t>(array.stride(0)) : array.shape(1);
}

// Bytes in rows that are made without the interpreter, zeros at first.
class ByteRows {
 public:
  ByteRows(size_t rows, size_t columns);

  // NULL where there are none.
  uint8_t* data() const { return rows_ && columns_ ? data_.get() : nullptr; }
  size_t columns() const { return columns_; }
  // A numpy array that has them from now on.
  nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>> array() &&;

 private:
  struct Free {
    void operator()(uint8_t* bytes) const;
  };
  size_t rows_, columns_;
  std::unique_ptr<uint8_t[], Free> data_;
};

// A new numpy array that owns its memory.
F32Matrix new_matrix(size_t rows, size_t columns);
nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>> new_bytes(size_t rows, size_t columns);

}  // namespace ktk

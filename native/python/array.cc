#include "python/array.h"

#include <cstring>
#include <new>

#include "core/size.h"

namespace ktk {
namespace {

using Code = nb::dlpack::dtype_code;

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t n : shape) {
    text += (text.size() > 1 ? ", " : "") + (n < 0 ? std::string("any") : std::to_string(n));
  }
  return text + "]";
}

template <typename Array>
std::vector<int64_t> shape_of(const Array& array) {
  std::vector<int64_t> shape;
  for (size_t i = 0; i < array.ndim(); ++i) shape.push_back(static_cast<int64_t>(array.shape(i)));
  return shape;
}

std::string dtype_name(const nb::dlpack::dtype& dtype) {
  const auto code = static_cast<Code>(dtype.code);
  const std::string bits = std::to_string(dtype.bits);
  if (code == Code::Int) return "int" + bits;
  if (code == Code::UInt) return "uint" + bits;
  if (code == Code::Float) return "float" + bits;
  if (code == Code::Bfloat) return "bfloat" + bits;
  if (code == Code::Bool) return "bool";
  if (code == Code::Complex) return "complex" + bits;
  if (code == Code::Float8_E4M3FN) return "float8_e4m3fn";
  if (code == Code::Float8_E4M3FNUZ) return "float8_e4m3fnuz";
  if (code == Code::Float8_E5M2) return "float8_e5m2";
  if (code == Code::Float8_E5M2FNUZ) return "float8_e5m2fnuz";
  if (code == Code::Float8_E8M0FNU) return "float8_e8m0fnu";
  return "dtype code " + std::to_string(dtype.code) + " of " + bits + " bits";
}

// An element type, or KTK_NONE for a dtype that ktk does not read.
ktk_element known_element(const nb::dlpack::dtype& dtype) {
  const auto code = static_cast<Code>(dtype.code);
  if (code == Code::Float && dtype.bits == 32) return KTK_F32;
  if (code == Code::Float && dtype.bits == 16) return KTK_F16;
  if (code == Code::Bfloat && dtype.bits == 16) return KTK_BF16;
  if (code == Code::Int && dtype.bits == 8) return KTK_I8;
  if (code == Code::UInt && dtype.bits == 8) return KTK_U8;
  return KTK_NONE;
}

[[noreturn]] void refuse_dtype(const char* name, const nb::dlpack::dtype& dtype,
                               const char* expected) {
  throw nb::type_error(
      (std::string(name) + " has dtype " + dtype_name(dtype) + "; expected " + expected).c_str());
}

// str() of an attribute, without the name of its module; empty where there is none.
std::string attribute(nb::handle object, const char* name) {
  const nb::object value = nb::getattr(object, name, nb::none());
  if (value.is_none()) return {};
  const std::string text = nb::str(value).c_str();
  return text.starts_with("torch.") ? text.substr(6) : text;
}

[[noreturn]] void refuse_traced(const char* name) {
  throw nb::type_error((std::string(name) +
                        " is a tensor without values, with which torch traces; "
                        "keep ktk out of what is traced (torch.compiler.disable)")
                           .c_str());
}

// Why an object cannot be had as an array.
[[noreturn]] void refuse_array(const char* name, nb::handle argument, bool written) {
  std::string what = std::string(name) + " must be an array in CPU memory (numpy, torch, DLPack)";
  if (argument.is_none()) throw nb::type_error((what + ", got None").c_str());
  const std::string type = nb::type_name(nb::handle(argument.type())).c_str();
  if (type.ends_with("FakeTensor")) refuse_traced(name);
  const std::string device = attribute(argument, "device"), layout = attribute(argument, "layout");
  what += ", got " + type;
  if (!device.empty() && device != "cpu") {
    what += " on " + device;
  } else if (!layout.empty() && layout != "strided") {
    what += " of layout " + layout;
  } else if (const std::string dtype = attribute(argument, "dtype"); !dtype.empty()) {
    const bool readable = nb::ndarray_check(argument) || nb::hasattr(argument, "__dlpack__");
    nb::ndarray<nb::ro> array;
    if (written && readable && nb::try_cast(argument, array)) {
      what = std::string(name) + " is read-only; expected an array that may be written";
    } else {
      what += " of " + dtype + " that has no memory to share";
    }
  }
  throw nb::type_error(what.c_str());
}

template <typename Array>
Array array_from(const char* name, nb::handle argument, bool written) {
  Array array;
  if (argument.is_none() || !nb::try_cast(argument, array)) refuse_array(name, argument, written);
  // What torch traces with (FakeTensor) says that it is in CPU memory, and has none.
  if (!array.data() && array.size() > 0) refuse_traced(name);
  return array;
}

void* new_zeros(size_t bytes) {
  void* const data = ::operator new(std::max<size_t>(bytes, 1), std::align_val_t{KTK_ALIGNMENT});
  return std::memset(data, 0, bytes);
}
void delete_bytes(void* bytes) noexcept {
  ::operator delete(bytes, std::align_val_t{KTK_ALIGNMENT});
}

template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<2>> owning(T* data, size_t rows, size_t columns) {
  return {data, {rows, columns}, nb::capsule(data, delete_bytes)};
}

template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<2>> allocate(size_t rows, size_t columns) {
  return owning(static_cast<T*>(new_zeros(product(rows, columns, sizeof(T)))), rows, columns);
}

}  // namespace

template <typename Array>
std::string describe_array(const Array& array) {
  return shape_text(shape_of(array)) + " " + dtype_name(array.dtype());
}

AnyArray input_from(const char* name, nb::handle argument) {
  return array_from<AnyArray>(name, argument, false);
}

std::optional<AnyArray> optional_input_from(const char* name, nb::handle argument) {
  if (argument.is_none()) return std::nullopt;
  return input_from(name, argument);
}

AnyOutput output_from(const char* name, nb::handle argument) {
  return array_from<AnyOutput>(name, argument, true);
}

ktk_element element_of(const char* name, const nb::dlpack::dtype& dtype) {
  const ktk_element element = known_element(dtype);
  if (element != KTK_NONE) return element;
  refuse_dtype(name, dtype, "float32, float16, bfloat16, int8 or uint8");
}

ktk_element float_of(const char* name, const nb::dlpack::dtype& dtype) {
  const ktk_element element = known_element(dtype);
  if (element == KTK_F32 || element == KTK_F16 || element == KTK_BF16) return element;
  refuse_dtype(name, dtype, "float32, float16 or bfloat16");
}

template <typename Array>
void check_device(const char* name, const Array& array) {
  // Page-locked memory is CPU memory as well.
  const int device = array.device_type();
  if (device != nb::device::cpu::value && device != nb::device::cuda_host::value) {
    throw nb::type_error((std::string(name) + " must be in CPU memory").c_str());
  }
}

template <typename Array>
void check_aligned(const char* name, const Array& array) {
  const auto at = reinterpret_cast<uintptr_t>(array.data());
  if (array.size() == 0 || at % array.itemsize() == 0) return;
  throw nb::value_error((std::string(name) + " is " + describe_array(array) + " at the address " +
                         std::to_string(at) + ", which is no multiple of its elements' " +
                         std::to_string(array.itemsize()) + " bytes; pass a copy of it")
                            .c_str());
}

template <typename Array>
void check_array(const char* name, const Array& array, const std::vector<int64_t>& shape) {
  check_device(name, array);
  const std::vector<int64_t> got = shape_of(array);
  bool fits = got.size() == shape.size();
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = shape[i] < 0 || shape[i] == got[i];
  if (!fits) {
    throw nb::value_error((std::string(name) + " must have shape " + shape_text(shape) + ", got " +
                           describe_array(array))
                              .c_str());
  }
  const size_t last = shape.size() - 1;
  if (array.size() > 0 && got[last] > 1 && array.stride(last) != 1) {
    throw nb::value_error(
        (std::string(name) + " must be contiguous in its last dimension").c_str());
  }
  for (size_t i = 0; i < last; ++i) {
    if (got[i] > 1 && array.stride(i) < 0) {
      throw nb::value_error((std::string(name) + " must not have negative strides").c_str());
    }
  }
  check_aligned(name, array);
}

template std::string describe_array(const AnyArray&);
template std::string describe_array(const AnyOutput&);
template void check_device(const char*, const AnyArray&);
template void check_aligned(const char*, const AnyArray&);
template void check_array(const char*, const AnyArray&, const std::vector<int64_t>&);
template void check_array(const char*, const AnyOutput&, const std::vector<int64_t>&);

ByteRows::ByteRows(size_t rows, size_t columns)
    : rows_(rows),
      columns_(columns),
      data_(static_cast<uint8_t*>(new_zeros(product(rows, columns)))) {}

void ByteRows::Free::operator()(uint8_t* bytes) const { delete_bytes(bytes); }

nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>> ByteRows::array() && {
  return owning(data_.release(), rows_, columns_);
}

F32Matrix new_matrix(size_t rows, size_t columns) { return allocate<float>(rows, columns); }

nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>> new_bytes(size_t rows, size_t columns) {
  return allocate<uint8_t>(rows, columns);
}

}  // namespace ktk

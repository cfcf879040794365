// The rules of abi.h that a backend's table can be held to before anything of it is called.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#include "ktk/abi.h"

namespace ktk {

// Throws std::invalid_argument: "AMXINT8, variant avx2: what".
[[noreturn]] void reject(const std::string& where, const std::string& what);

// Each throws std::invalid_argument, with field and value, for a struct that ends before the last
// field of ABI 1.0, that is larger than any version of ktk will have it, or that would leave the
// next one of a list unaligned.
void check_struct(const std::string& where, const ktk_backend& backend);
void check_struct(const std::string& where, const ktk_variant& variant);
void check_struct(const std::string& where, const ktk_ukernel& kernel);

// A pointer to `count` things.
void check_list(const std::string& where, const char* field, const void* list, size_t count);
// Text that Python can show: not NULL, not empty, UTF-8.
void check_name(const std::string& where, const char* field, const char* name);
// A pointer that may not be NULL.
template <typename Pointer>
void check_given(const std::string& where, const char* field, Pointer pointer) {
  if (!pointer) reject(where, std::string(field) + " is NULL");
}
void check_tile(const std::string& where, const ktk_tile& tile);
// Elements, scales, zero points and groups that exist.
void check_format(const std::string& where, const std::string& field, const ktk_format& format);

// Copies what the writer knew of a struct; fields of a later MINOR than its own stay zero.
template <typename T>
T copy_struct(const std::string& where, const T* source) {
  check_struct(where, *source);
  T copy{};
  std::memcpy(&copy, source, std::min(source->struct_size, sizeof(T)));
  copy.struct_size = sizeof(T);
  return copy;
}

}  // namespace ktk

// A backend's table, checked and copied into structs of this ABI version.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "ktk/abi.h"

namespace ktk {

// No matrix has more rows or columns.
inline constexpr size_t kMostExtent = size_t{1} << 24;

// The table was written for another ABI.
class AbiError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Variant : ktk_variant {
  std::vector<ktk_ukernel> kernels;  // what `ukernels` points at
  std::string where;                 // "AMXINT8, variant avx2", for messages

  // Bytes of a packed matrix, of a packed row of activations, and of a micro-kernel's scratch for
  // m rows, as the backend says. Throw std::runtime_error where that is nonsense,
  // std::length_error where it is more than a process can address. A micro-kernel is asked for no
  // more rows than it takes.
  size_t weight_bytes(const ktk_matrix& matrix) const;
  // The same of a matrix whose source takes `bytes`, the largest result of source_size().
  size_t weight_bytes(const ktk_matrix& matrix, size_t bytes) const;
  size_t act_bytes(const ktk_matrix& matrix) const;
  size_t scratch_bytes(const ktk_ukernel& kernel, const ktk_matrix& matrix, size_t m) const;

  // What source_size() says of rows of a source; 0 for backends without.
  size_t source_bytes(const ktk_matrix& matrix, const ktk_source& source, size_t n_begin,
                      size_t n_end) const;
  // Packs rows of a source into `bytes`, what weight_bytes() returned for it.
  void pack(const ktk_matrix& matrix, const ktk_source& source, size_t n_begin, size_t n_end,
            char* packed, size_t bytes) const;

  // The micro-kernel for m rows.
  const ktk_ukernel& kernel_for(size_t m) const;
  // What activations are encoded as that are multiplied with a matrix.
  ktk_format act_of(const ktk_matrix& matrix) const;
  // Whether activations that are encoded once may be multiplied with both, as for gate and up.
  bool share_acts(const ktk_matrix& gate, const ktk_matrix& up) const;
};

// Held by threads without a Python state: enable_shared_from_this makes nanobind hand out the C++
// reference count instead of the Python one, which only the GIL may touch.
struct BackendTable : std::enable_shared_from_this<BackendTable> {
  BackendTable() = default;
  BackendTable(const BackendTable&) = delete;  // variants are pointed at
  BackendTable& operator=(const BackendTable&) = delete;

  std::string name;
  uint32_t abi_major = 0, abi_minor = 0;
  std::vector<ktk_format> formats;
  std::vector<ktk_accept> accepts;
  std::vector<std::unique_ptr<Variant>> variants;

  // Throws AbiError for another MAJOR, std::invalid_argument for a table that breaks a rule of
  // abi.h; the message names backend, variant, field and value.
  static std::shared_ptr<BackendTable> copy(const ktk_backend* table);

  // The variant called `name`; or, for an empty name, the first one that allowed_isa() covers,
  // without what slow_isa() names if there is one.
  // A named variant must be covered too, or be `forced`. Throws std::invalid_argument when there
  // is no such variant, std::runtime_error with the missing instruction sets when it cannot run.
  const Variant& select(const std::string& name, bool forced = false) const;

  // A matrix of n x k that is stored as one of `formats`. Throws std::invalid_argument where it is
  // not, or where an extent is not between 1 and kMostExtent.
  ktk_matrix matrix(const ktk_format& stored, size_t n, size_t k) const;

  // What a matrix of n x k that comes as `given` is stored as: the backend's choice, or `wanted`,
  // when that is not NULL. Throws std::invalid_argument with what is accepted.
  const ktk_format& stored(const ktk_format& given, const ktk_format* wanted, size_t n,
                           size_t k) const;
};

}  // namespace ktk

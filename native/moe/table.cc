#include "moe/table.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <set>

#include "core/cpu.h"

namespace ktk {
namespace {

// Copies what the writer knew of a struct; fields appended later stay zero.
template <typename T>
T copy_struct(const T* source) {
  T copy{};
  std::memcpy(&copy, source, std::min(source->struct_size, sizeof(T)));
  copy.struct_size = sizeof(T);
  return copy;
}

// What a struct of ABI 1.0 ends with; fields behind it are optional.
constexpr size_t kUkernelSize = offsetof(ktk_ukernel, run) + sizeof(ktk_ukernel::run);
constexpr size_t kVariantSize = offsetof(ktk_variant, weight_offset) + sizeof(void*);
constexpr size_t kBackendSize = offsetof(ktk_backend, num_variants) + sizeof(size_t);

[[noreturn]] void reject(const std::string& where, const std::string& what) {
  throw std::invalid_argument(where + ": " + what);
}

void check_steps(const std::string& where, const ktk_tile& tile) {
  if (tile.m_step == 0 || tile.n_step == 0 || tile.k_step == 0) {
    reject(where, "tile steps must be positive");
  }
  if (tile.m_step > 64 || tile.n_step > 4096 || tile.k_step > 65536) {
    reject(where, "tile steps are out of range (m 64, n 4096, k 65536)");
  }
}

std::vector<ktk_ukernel> copy_kernels(const std::string& where, const ktk_variant& variant) {
  if (!variant.ukernels || variant.num_ukernels == 0) reject(where, "has no micro-kernel");
  const size_t step = variant.ukernels->struct_size;  // of the writer, who may know more fields
  if (step < kUkernelSize) reject(where, "a micro-kernel's struct_size is too small");
  std::vector<ktk_ukernel> kernels;
  const char* at = reinterpret_cast<const char*>(variant.ukernels);
  for (size_t i = 0; i < variant.num_ukernels; ++i, at += step) {
    const ktk_ukernel kernel = copy_struct(reinterpret_cast<const ktk_ukernel*>(at));
    if (!kernel.name || !kernel.run) reject(where, "a micro-kernel lacks name or run");
    if (!kernels.empty() && kernel.m_max <= kernels.back().m_max) {
      reject(where, "micro-kernels must come by ascending m_max");
    }
    kernels.push_back(kernel);
  }
  if (kernels.back().m_max != SIZE_MAX) reject(where, "the last micro-kernel must take any m");
  return kernels;
}

std::unique_ptr<Variant> copy_variant(const std::string& backend, const ktk_variant* source) {
  if (!source) reject(backend, "a variant is NULL");
  if (source->struct_size < kVariantSize) reject(backend, "a variant's struct_size is too small");
  auto variant = std::make_unique<Variant>();
  static_cast<ktk_variant&>(*variant) = copy_struct(source);
  if (!variant->name || !*variant->name) reject(backend, "a variant has no name");
  const std::string where = backend + ", variant " + variant->name;
  if (!variant->layout) reject(where, "names no layout");
  check_steps(where, variant->tile);
  if (!variant->weight_size || !variant->pack_weight || !variant->unpack_weight) {
    reject(where, "lacks a function of the weight codec");
  }
  if (!variant->act_size || !variant->pack_act || !variant->unpack_act) {
    reject(where, "lacks a function of the activation codec");
  }
  if (!variant->enter != !variant->leave) reject(where, "has only one of enter and leave");
  variant->kernels = copy_kernels(where, *variant);
  variant->ukernels = variant->kernels.data();
  return variant;
}

uint32_t normal_group(uint32_t group, size_t extent) { return group == extent ? 0 : group; }

std::string join(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

}  // namespace

const ktk_ukernel& Variant::kernel_for(size_t m) const {
  for (const ktk_ukernel& kernel : kernels) {
    if (m <= kernel.m_max) return kernel;
  }
  return kernels.back();
}

ktk_format Variant::act_of(const ktk_matrix& matrix) const {
  ktk_format format = act;
  if (act_format) act_format(&matrix, &format);
  return format;
}

bool Variant::share_acts(const ktk_matrix& gate, const ktk_matrix& up) const {
  if (same_format(gate.format, up.format, gate.n, gate.k)) return true;
  return act_format && same_format(act_of(gate), act_of(up), 1, gate.k);
}

std::shared_ptr<BackendTable> BackendTable::copy(const ktk_backend* source) {
  if (source->abi_major != KTK_ABI_MAJOR) {
    throw AbiError("speaks ABI " + std::to_string(source->abi_major) + "." +
                   std::to_string(source->abi_minor) + ", this ktk speaks " +
                   std::to_string(KTK_ABI_MAJOR) + "." + std::to_string(KTK_ABI_MINOR));
  }
  if (source->struct_size < kBackendSize) reject("backend", "struct_size is too small");
  const ktk_backend table = copy_struct(source);
  if (!table.name || !*table.name) reject("backend", "has no name");
  auto result = std::make_shared<BackendTable>();
  result->name = table.name;
  result->abi_major = table.abi_major;
  result->abi_minor = table.abi_minor;
  if (!table.formats || table.num_formats == 0) reject(result->name, "stores no format");
  result->formats.assign(table.formats, table.formats + table.num_formats);
  if (!table.accepts || table.num_accepts == 0) reject(result->name, "accepts no format");
  result->accepts.assign(table.accepts, table.accepts + table.num_accepts);
  for (const ktk_accept& accept : result->accepts) {
    if (accept.stored >= table.num_formats) reject(result->name, "accepts into an unknown format");
  }
  if (!table.variants || table.num_variants == 0) reject(result->name, "has no variant");
  std::set<std::string> names;
  for (size_t i = 0; i < table.num_variants; ++i) {
    result->variants.push_back(copy_variant(result->name, table.variants[i]));
    const char* name = result->variants.back()->name;
    if (!names.insert(name).second)
      reject(result->name, std::string("two variants are called ") + name);
  }
  return result;
}

const Variant& BackendTable::select(const std::string& wanted, bool forced) const {
  const ktk_isa allowed = allowed_isa();
  std::string reasons;
  for (const auto& variant : variants) {
    if (!wanted.empty() && wanted != variant->name) continue;
    const ktk_isa missing = variant->required_isa & ~allowed;
    if (missing == 0 || (forced && !wanted.empty())) return *variant;
    reasons += (reasons.empty() ? "" : "; ") + std::string(variant->name) + " lacks " +
               join(isa_names(missing));
  }
  if (reasons.empty()) {
    std::vector<std::string> names;
    for (const auto& variant : variants) names.emplace_back(variant->name);
    throw std::invalid_argument(name + " has no variant '" + wanted + "'; it has " + join(names));
  }
  throw std::runtime_error(name + " cannot run on this CPU: " + reasons);
}

const ktk_format& BackendTable::stored(const ktk_format& given, const ktk_format* wanted, size_t n,
                                       size_t k) const {
  std::string known;
  for (const ktk_accept& accept : accepts) {
    const ktk_format& stored = formats[accept.stored];
    if (wanted && !same_format(stored, *wanted, n, k)) continue;
    if (same_format(accept.given, given, n, k)) return stored;
    known += (known.empty() ? "" : "; ") + describe(accept.given);
  }
  if (known.empty()) {
    throw std::invalid_argument(name + " does not store weights as " + describe(*wanted));
  }
  throw std::invalid_argument(name + " does not take weights in " + describe(given) +
                              (wanted ? " to store them as " + describe(*wanted) : "") +
                              "; it takes " + known);
}

bool same_format(const ktk_format& a, const ktk_format& b, size_t n, size_t k) {
  if (a.element != b.element || a.scale != b.scale || a.zero != b.zero) return false;
  if (a.scale == KTK_NONE && a.zero == KTK_NONE) return true;  // groups mean nothing
  return normal_group(a.group_n, n) == normal_group(b.group_n, n) &&
         normal_group(a.group_k, k) == normal_group(b.group_k, k);
}

std::string describe(const ktk_format& format) {
  std::string text = element_name(format.element);
  if (format.scale == KTK_NONE && format.zero == KTK_NONE) return text;
  const auto group = [](uint32_t extent, const char* whole) {
    return extent ? std::to_string(extent) : std::string(whole);
  };
  text += " with " + element_name(format.scale) + " scales";
  if (format.zero != KTK_NONE) text += " and " + element_name(format.zero) + " zero points";
  return text + " per " + group(format.group_n, "n") + " x " + group(format.group_k, "k");
}

}  // namespace ktk

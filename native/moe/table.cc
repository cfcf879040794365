#include "moe/table.h"

#include <algorithm>
#include <set>

#include "core/cpu.h"
#include "core/size.h"
#include "core/slow_isa.h"
#include "format/format.h"
#include "moe/table_check.h"

namespace ktk {
namespace {

std::vector<ktk_ukernel> copy_kernels(const std::string& where, const ktk_variant& variant) {
  check_list(where, "ukernels", variant.ukernels, variant.num_ukernels);
  const size_t step = variant.ukernels->struct_size;  // of the writer, who may know more fields
  std::vector<ktk_ukernel> kernels;
  const char* at = reinterpret_cast<const char*>(variant.ukernels);
  for (size_t i = 0; i < variant.num_ukernels; ++i, at += step) {
    const std::string which = where + ", ukernels[" + std::to_string(i) + "]";
    const ktk_ukernel kernel = copy_struct(which, reinterpret_cast<const ktk_ukernel*>(at));
    check_name(which, "name", kernel.name);
    check_given(which, "run", kernel.run);
    if (kernel.m_max <= (kernels.empty() ? 0 : kernels.back().m_max)) {
      reject(which, "m_max is " + std::to_string(kernel.m_max) +
                        "; micro-kernels come by ascending m_max, from 1 on");
    }
    kernels.push_back(kernel);
  }
  if (kernels.back().m_max != SIZE_MAX) {
    reject(where, "the last micro-kernel's m_max is " + std::to_string(kernels.back().m_max) +
                      "; expected SIZE_MAX, because one of them has to take any m");
  }
  return kernels;
}

std::unique_ptr<Variant> copy_variant(const std::string& backend, size_t index,
                                      const ktk_variant* source) {
  std::string where = backend + ", variants[" + std::to_string(index) + "]";
  if (!source) reject(where, "is NULL");
  auto variant = std::make_unique<Variant>();
  static_cast<ktk_variant&>(*variant) = copy_struct(where, source);
  check_name(where, "name", variant->name);
  where = backend + ", variant " + variant->name;
  check_name(where, "layout", variant->layout);
  check_tile(where, variant->tile);
  check_format(where, "act", variant->act);
  check_given(where, "weight_size", variant->weight_size);
  if (!variant->source_size != !variant->pack_sized) {
    reject(where, variant->source_size ? "has source_size, but pack_sized is NULL"
                                       : "has pack_sized, but source_size is NULL");
  }
  if (!variant->pack_sized) check_given(where, "pack_weight", variant->pack_weight);
  check_given(where, "unpack_weight", variant->unpack_weight);
  check_given(where, "act_size", variant->act_size);
  check_given(where, "pack_act", variant->pack_act);
  check_given(where, "unpack_act", variant->unpack_act);
  if (!variant->enter != !variant->leave) {
    reject(where, variant->enter ? "has enter, but leave is NULL" : "has leave, but enter is NULL");
  }
  if (variant->is_packed) check_given(where, "export_weight", variant->export_weight);
  variant->kernels = copy_kernels(where, *variant);
  variant->ukernels = variant->kernels.data();
  variant->where = where;
  return variant;
}

// What a size function returned for a matrix, held to abi.h: whole `steps`, at least one of them.
size_t check_bytes(const Variant& variant, const char* function, const ktk_matrix& matrix,
                   size_t bytes, size_t step) {
  if (bytes >= step && bytes <= kMostBytes && bytes % step == 0) return bytes;
  const std::string says = variant.where + ": " + function + " says " + std::to_string(bytes) +
                           " bytes for a weight [" + std::to_string(matrix.n) + ", " +
                           std::to_string(matrix.k) + "] in " + describe(matrix.format);
  if (bytes > kMostBytes) refuse_size(says + ", which");
  throw std::runtime_error(says + "; expected a positive multiple of " + std::to_string(step));
}

std::string join(const std::vector<std::string>& parts, const char* between = ", ") {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : between) + part;
  return text;
}

}  // namespace

size_t Variant::weight_bytes(const ktk_matrix& matrix) const {
  return check_bytes(*this, "weight_size", matrix, weight_size(&matrix), KTK_ALIGNMENT);
}

size_t Variant::weight_bytes(const ktk_matrix& matrix, size_t bytes) const {
  const size_t least = weight_bytes(matrix);
  if (!source_size) return least;
  check_bytes(*this, "source_size", matrix, bytes, KTK_ALIGNMENT);
  if (bytes >= least) return bytes;
  throw std::runtime_error(where + ": source_size says " + std::to_string(bytes) +
                           " bytes for a weight [" + std::to_string(matrix.n) + ", " +
                           std::to_string(matrix.k) + "] in " + describe(matrix.format) +
                           "; expected the " + std::to_string(least) + " of weight_size, or more");
}

size_t Variant::source_bytes(const ktk_matrix& matrix, const ktk_source& source, size_t n_begin,
                             size_t n_end) const {
  return source_size ? source_size(&matrix, &source, n_begin, n_end) : 0;
}

void Variant::pack(const ktk_matrix& matrix, const ktk_source& source, size_t n_begin, size_t n_end,
                   char* packed, size_t bytes) const {
  if (pack_sized) {
    pack_sized(&matrix, &source, n_begin, n_end, packed, bytes);
  } else {
    pack_weight(&matrix, &source, n_begin, n_end, packed);
  }
}

size_t Variant::act_bytes(const ktk_matrix& matrix) const {
  return check_bytes(*this, "act_size", matrix, act_size(&matrix), KTK_ALIGNMENT);
}

size_t Variant::scratch_bytes(const ktk_ukernel& kernel, const ktk_matrix& matrix, size_t m) const {
  if (!kernel.scratch_size) return 0;
  const size_t bytes = kernel.scratch_size(&matrix, std::min(m, kernel.m_max));
  return bytes == 0 ? 0 : check_bytes(*this, "scratch_size", matrix, bytes, 1);
}

const ktk_ukernel& Variant::kernel_for(size_t m) const {
  for (const ktk_ukernel& kernel : kernels) {
    if (m <= kernel.m_max) return kernel;
  }
  return kernels.back();
}

ktk_format Variant::act_of(const ktk_matrix& matrix) const {
  ktk_format format = act;
  if (act_format) {
    act_format(&matrix, &format);
    check_format(where, "act_format", format);
  }
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
  const ktk_backend table = copy_struct("backend", source);
  check_name("backend", "name", table.name);
  auto result = std::make_shared<BackendTable>();
  const std::string& name = result->name = table.name;
  result->abi_major = table.abi_major;
  result->abi_minor = table.abi_minor;
  check_list(name, "formats", table.formats, table.num_formats);
  for (size_t i = 0; i < table.num_formats; ++i) {
    check_format(name, "formats[" + std::to_string(i) + "]", table.formats[i]);
  }
  result->formats.assign(table.formats, table.formats + table.num_formats);
  check_list(name, "accepts", table.accepts, table.num_accepts);
  for (size_t i = 0; i < table.num_accepts; ++i) {
    const std::string field = "accepts[" + std::to_string(i) + "]";
    check_format(name, field + ".given", table.accepts[i].given);
    if (table.accepts[i].stored >= table.num_formats) {
      reject(name, field + ".stored is " + std::to_string(table.accepts[i].stored) +
                       ", but there are " + std::to_string(table.num_formats) + " formats");
    }
  }
  result->accepts.assign(table.accepts, table.accepts + table.num_accepts);
  check_list(name, "variants", table.variants, table.num_variants);
  std::set<std::string> names;
  for (size_t i = 0; i < table.num_variants; ++i) {
    result->variants.push_back(copy_variant(name, i, table.variants[i]));
    const char* variant = result->variants.back()->name;
    if (!names.insert(variant).second) {
      reject(name, std::string("two variants are called ") + variant);
    }
  }
  return result;
}

const Variant& BackendTable::select(const std::string& wanted, bool forced) const {
  const ktk_isa allowed = allowed_isa();
  if (wanted.empty()) {
    const ktk_isa fast = allowed & ~slow_isa();
    for (const auto& variant : variants) {
      if (!(variant->required_isa & ~fast)) return *variant;
    }
  }
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

ktk_matrix BackendTable::matrix(const ktk_format& stored, size_t n, size_t k) const {
  if (n == 0 || k == 0 || n > kMostExtent || k > kMostExtent) {
    throw std::invalid_argument("a weight must have between 1 and " + std::to_string(kMostExtent) +
                                " rows and columns, got [" + std::to_string(n) + ", " +
                                std::to_string(k) + "]");
  }
  for (const ktk_format& format : formats) {
    if (same_format(format, stored, n, k)) return {n, k, format};
  }
  throw std::invalid_argument(name + " does not store weights as " + describe(stored));
}

const ktk_format& BackendTable::stored(const ktk_format& given, const ktk_format* wanted, size_t n,
                                       size_t k) const {
  std::vector<std::string> known;  // each once: a format may become several
  for (const ktk_accept& accept : accepts) {
    const ktk_format& stored = formats[accept.stored];
    if (wanted && !same_format(stored, *wanted, n, k)) continue;
    if (same_format(accept.given, given, n, k)) return stored;
    const std::string text = describe(accept.given);
    if (std::find(known.begin(), known.end(), text) == known.end()) known.push_back(text);
  }
  if (known.empty()) {
    throw std::invalid_argument(name + " does not store weights as " + describe(*wanted));
  }
  throw std::invalid_argument(name + " does not take weights in " + describe(given) +
                              (wanted ? " to store them as " + describe(*wanted) : "") +
                              "; it takes " + join(known, "; "));
}

}  // namespace ktk

#include "format/format.h"

#include "core/size.h"
#include "format/elements.h"

namespace ktk {

bool same_format(const ktk_format& a, const ktk_format& b, size_t n, size_t k) {
  if (a.element != b.element || a.scale != b.scale || a.zero != b.zero) return false;
  if (!has_groups(a)) return true;
  const auto same = [](uint32_t one, uint32_t other, size_t extent) {
    const auto spans = [extent](uint32_t group) { return group && group < extent ? group : 0; };
    return spans(one) == spans(other);
  };
  return same(a.group_n, b.group_n, n) && same(a.group_k, b.group_k, k);
}

SourceShape source_shape(const ktk_format& format, size_t n, size_t k) {
  const size_t groups_n = groups_of(n, format.group_n), groups_k = groups_of(k, format.group_k);
  return {groups_n, groups_k, block_of(format.element).bytes_of(k),
          groups_k * element_bits(format.scale) / 8, groups_k * element_bits(format.zero) / 8};
}

std::string describe(const ktk_format& format) {
  std::string text = element_name(format.element);
  if (!has_groups(format)) return text;
  const auto group = [](uint32_t extent, const char* whole) {
    return extent ? std::to_string(extent) : std::string(whole);
  };
  text += " with " + element_name(format.scale) + " scales";
  if (format.zero != KTK_NONE) text += " and " + element_name(format.zero) + " zero points";
  return text + " per " + group(format.group_n, "n") + " x " + group(format.group_k, "k");
}

}  // namespace ktk

#include "moe/table_check.h"

#include <cstddef>
#include <stdexcept>

#include "format/elements.h"
#include "moe/table.h"

namespace ktk {
namespace {

// Larger than any struct of abi.h will grow, longer than any list in a table.
constexpr size_t kMostBytesOfStruct = 4096, kMostEntries = 4096;

// `end` is where the last field of ABI 1.0 ends, which every table has.
void check_size(const std::string& where, size_t size, const char* last_field, size_t end) {
  const std::string is = "struct_size is " + std::to_string(size);
  if (size < end) {
    reject(where, is + ", but a struct up to its field " + last_field + " has " +
                      std::to_string(end) + " bytes");
  }
  if (size > kMostBytesOfStruct) {
    reject(where, is + "; expected at most " + std::to_string(kMostBytesOfStruct));
  }
  // Structs hold pointers and sizes, and a list of them has to keep each aligned.
  if (size % alignof(size_t) != 0) {
    reject(where, is + "; expected a multiple of " + std::to_string(alignof(size_t)));
  }
}
#define KTK_CHECK_SIZE(where, table, field)                                        \
  check_size(where, table.struct_size, #field,                                     \
             static_cast<size_t>(reinterpret_cast<const char*>(&table.field + 1) - \
                                 reinterpret_cast<const char*>(&table)))

// Bytes of the UTF-8 sequence at `text`, or 0 where it is none (RFC 3629).
size_t sequence(const char* text) {
  const auto at = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = at(0);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4) return 0;
  for (size_t i = 1; i < length; ++i) {
    if (at(i) >> 6 != 2) return 0;  // the terminator, too
  }
  // Overlong forms, surrogates, and what lies beyond U+10FFFF.
  if ((first == 0xe0 && at(1) < 0xa0) || (first == 0xed && at(1) > 0x9f)) return 0;
  if ((first == 0xf0 && at(1) < 0x90) || (first == 0xf4 && at(1) > 0x8f)) return 0;
  return length;
}

bool is_utf8(const char* text) {
  while (*text) {
    const size_t length = sequence(text);
    if (length == 0) return false;
    text += length;
  }
  return true;
}

}  // namespace

void reject(const std::string& where, const std::string& what) {
  throw std::invalid_argument(where + ": " + what);
}

void check_struct(const std::string& where, const ktk_backend& backend) {
  KTK_CHECK_SIZE(where, backend, num_variants);
}

void check_struct(const std::string& where, const ktk_variant& variant) {
  KTK_CHECK_SIZE(where, variant, leave);
}

void check_struct(const std::string& where, const ktk_ukernel& kernel) {
  KTK_CHECK_SIZE(where, kernel, run);
}

void check_list(const std::string& where, const char* field, const void* list, size_t count) {
  check_given(where, field, list);
  if (count == 0 || count > kMostEntries) {
    reject(where, std::string("num_") + field + " is " + std::to_string(count) +
                      "; expected 1 to " + std::to_string(kMostEntries));
  }
}

void check_name(const std::string& where, const char* field, const char* name) {
  check_given(where, field, name);
  if (!*name) reject(where, std::string(field) + " is empty");
  if (!is_utf8(name)) reject(where, std::string(field) + " is not UTF-8");
}

void check_tile(const std::string& where, const ktk_tile& tile) {
  const auto check = [&](const char* field, uint32_t step, uint32_t most) {
    if (step == 0 || step > most) {
      reject(where, std::string("tile.") + field + " is " + std::to_string(step) +
                        "; expected 1 to " + std::to_string(most));
    }
  };
  check("m_step", tile.m_step, 64);
  check("n_step", tile.n_step, 4096);
  check("k_step", tile.k_step, 65536);
}

void check_format(const std::string& where, const std::string& field, const ktk_format& format) {
  const Block block = block_of(format.element);
  const auto bad = [&](const char* part, const std::string& value, const std::string& expected) {
    reject(where, field + "." + part + " is " + value + "; expected " + expected);
  };
  if (block.bytes == 0) {
    bad("element", element_name(format.element), "an element type of abi.h that ktk knows");
  }
  if (format.scale == KTK_NONE && format.zero == KTK_NONE) return;  // groups mean nothing
  if (is_ggml(format.element)) {
    reject(where, field + " is " + element_name(format.element) +
                      ", which has its scales in its blocks, beside a scale or a zero point");
  }
  const auto check_part = [&](const char* part, ktk_element element) {
    if (element == KTK_NONE || (!is_ggml(element) && element_bits(element) >= 8)) return;
    bad(part, element_name(element), "KTK_NONE or an element of whole bytes");
  };
  check_part("scale", format.scale);
  check_part("zero", format.zero);
  const auto check_group = [&](const char* part, uint32_t group, size_t step) {
    if (group <= kMostExtent && group % step == 0) return;
    bad(part, std::to_string(group),
        "0 (the whole extent) or a multiple of " + std::to_string(step) + " up to " +
            std::to_string(kMostExtent));
  };
  check_group("group_n", format.group_n, 1);
  check_group("group_k", format.group_k, block.columns);
}

}  // namespace ktk

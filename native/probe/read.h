// Ways of reading memory once from end to end. The best of them is the machine's limit.
#pragma once

#include <cstddef>
#include <span>

namespace ktk::probe {

struct ReadPattern {
  const char* name;
  // Reads bytes [begin, begin + bytes); begin is 64-byte aligned, bytes a multiple of kReadStep.
  void (*read)(const char* begin, size_t bytes);
};

inline constexpr size_t kReadStep = 4096;

std::span<const ReadPattern> read_patterns();

}  // namespace ktk::probe

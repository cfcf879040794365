// With KTK_GUARD=1 in the environment, which tests/native/meson.build sets.
#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstring>

#include "check.h"
#include "core/guard.h"
#include "core/memory.h"
#include "moe/carver.h"
#include "moe/scratch.h"
#include "signals.h"

using ktk::Carver;
using ktk::Memory;

namespace {

bool unwritten(const char* data, size_t bytes) {
  return std::all_of(data, data + bytes, [](char c) { return c == '\xff'; });
}

// Data of so many bytes, rounded up to whole lines, whose last may be read, and no byte behind it.
void check_end(const char* data, size_t bytes) {
  const size_t lines = (bytes + 63) / 64 * 64;
  CHECK_EQ(reinterpret_cast<uintptr_t>(data) % 64, 0u);
  if (lines > 0) CHECK_EQ(signal_of_reading(data + lines - 1), 0);
  CHECK_EQ(signal_of_reading(data + lines), SIGSEGV);
}

}  // namespace

TEST(the_environment_asks_for_it) { CHECK(ktk::guard_mode); }

TEST(memory_ends_at_a_page_without_access) {
  for (const size_t bytes : {size_t{1}, size_t{64}, size_t{4096}, size_t{4097}, size_t{3} << 20}) {
    Memory memory(bytes);
    CHECK_EQ(memory.size(), bytes);
    std::memset(memory.data(), 1, bytes);
    check_end(memory.data(), bytes);
    const Memory moved(std::move(memory));
    check_end(moved.data(), bytes);
  }
}

TEST(pieces_end_at_a_page_without_access) {
  Carver inner, pieces;
  const size_t of_inner = inner.add(100);
  const size_t first = pieces.add(64), none = pieces.add(0), second = pieces.add(5, 1000);
  const size_t third = pieces.add(inner) + of_inner, last = pieces.add(4096);
  const Memory memory(pieces.size());
  for (int again = 0; again < 2; ++again) {
    pieces.guard(memory.data());
    for (const auto& [at, bytes] :
         {std::pair{first, 64}, std::pair{none, 0}, std::pair{second, 5000}, std::pair{third, 100},
          std::pair{last, 4096}}) {
      char* const data = memory.data() + at;
      CHECK(unwritten(data, static_cast<size_t>(bytes)));
      check_end(data, static_cast<size_t>(bytes));
      std::memset(data, 1, static_cast<size_t>(bytes));
    }
  }
}

TEST(scratch_is_unwritten_whenever_it_is_taken) {
  ktk::Scratch scratch(1);
  Carver small, large;
  const size_t of_small = small.add(64);
  const size_t before = large.add(10000), of_large = large.add(200);
  for (int again = 0; again < 2; ++again) {
    char* data = scratch.own(0, large, -1);
    CHECK(unwritten(data + before, 10000) && unwritten(data + of_large, 200));
    check_end(data + of_large, 200);
    std::memset(data + before, 1, 10000);
    data = scratch.own(0, small, -1);
    CHECK(unwritten(data + of_small, 64));
    check_end(data + of_small, 64);
  }
}

TEST(memory_is_given_back) {
  const char* data;
  {
    const Memory memory(10000);
    data = memory.data();
  }
  CHECK_EQ(signal_of_reading(data), SIGSEGV);
}

// Sizes that do not fit an address space are refused, with the numbers.
#include <cstdint>

#include "check.h"
#include "core/memory.h"
#include "core/size.h"

namespace {

TEST(sizes_that_fit_are_exact) {
  CHECK_EQ(ktk::product(3, 5), 15u);
  CHECK_EQ(ktk::product(2, 3, 5, 7), 210u);
  CHECK_EQ(ktk::product(size_t{1} << 23, size_t{1} << 24), ktk::kMostBytes);
  CHECK_EQ(ktk::product(0, SIZE_MAX), 0u);
  CHECK_EQ(ktk::sum(3, 5), 8u);
  CHECK_EQ(ktk::round_up(0, 64), 0u);
  CHECK_EQ(ktk::round_up(1, 64), 64u);
  CHECK_EQ(ktk::round_up(128, 64), 128u);
  CHECK_EQ(ktk::common_multiple(24, 36), 72u);
  CHECK_EQ(ktk::groups_of(65, 64), 2u);
  CHECK_EQ(ktk::groups_of(64, 64), 1u);
  CHECK_EQ(ktk::groups_of(64, 0), 1u);
  CHECK_EQ(ktk::groups_of(SIZE_MAX, 2), SIZE_MAX / 2 + 1);
}

TEST(sizes_that_do_not_fit_are_refused) {
  const size_t most = ktk::kMostBytes;
  CHECK_THROWS(std::length_error, ktk::product(most, 2));
  CHECK_THROWS(std::length_error, ktk::product(size_t{1} << 32, size_t{1} << 32));  // wraps to 0
  CHECK_THROWS(std::length_error, ktk::product(size_t{1} << 24, size_t{1} << 24, 4));
  CHECK_THROWS(std::length_error, ktk::sum(most, 1));
  CHECK_THROWS(std::length_error, ktk::sum(SIZE_MAX, 1));
  CHECK_THROWS(std::length_error, ktk::round_up(SIZE_MAX, 64));
  CHECK_THROWS(std::length_error, ktk::common_multiple(most - 1, most));
  const std::string said = CHECK_THROWS(std::length_error, ktk::product(16777216, 33554432));
  CHECK_EQ(said, "16777216 x 33554432 is more than the 2^47 bytes that a process can address");
}

TEST(memory_says_how_much_the_system_refuses) {
  const std::string said = CHECK_THROWS(std::bad_alloc, ktk::Memory(ktk::kMostBytes / 2));
  CHECK(said.starts_with("the system refuses 7036874"));
  CHECK_THROWS(std::length_error, ktk::Memory(SIZE_MAX));
}

}  // namespace

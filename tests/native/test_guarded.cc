#include <csignal>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "check.h"
#include "core/guarded.h"
#include "signals.h"

using ktk::Guarded;

namespace {

std::string complaint(const Guarded& memory) {
  try {
    memory.check("f");
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

TEST(data_are_unwritten_and_end_at_a_page_without_access) {
  for (const size_t bytes : {size_t{0}, size_t{64}, size_t{4096}, size_t{3} << 20}) {
    const Guarded memory(bytes, 64);
    CHECK_EQ(reinterpret_cast<uintptr_t>(memory.data()) % 64, 0u);
    for (size_t i = 0; i < bytes; ++i) CHECK(memory.data()[i] == '\xff');
    if (bytes > 0) CHECK_EQ(signal_of_reading(memory.data() + bytes - 1), 0);
    CHECK_EQ(signal_of_reading(memory.data() + bytes), SIGSEGV);
    CHECK_EQ(complaint(memory), "");
  }
}

TEST(writing_beside_the_data_is_named) {
  const Guarded memory(100, 64);
  memory.data()[99] = 1;
  CHECK_EQ(complaint(memory), "");
  memory.data()[103] = 1;
  CHECK_EQ(complaint(memory), "f wrote byte 4 behind the 100 bytes that there are");
  memory.data()[-2] = 1;
  CHECK_EQ(complaint(memory), "f wrote byte 2 before the 100 bytes that there are");
}

}  // namespace

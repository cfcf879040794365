#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <new>
#include <utility>

#include "check.h"
#include "core/memory.h"
#include "core/topology.h"

using ktk::Memory;

namespace {

constexpr size_t kHuge = size_t{2} << 20;

size_t page_size() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

// Whether a page is mapped, without touching it.
bool mapped(const char* page) {
  unsigned char resident;
  return mincore(const_cast<char*>(page), 1, &resident) == 0;
}

bool all_are(const char* data, size_t bytes, char value) {
  for (size_t i = 0; i < bytes; ++i) {
    if (data[i] != value) return false;
  }
  return true;
}

// Of the address space of the process.
size_t mapped_pages() {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages;
}

}  // namespace

TEST(memory_is_zero_and_page_aligned) {
  for (size_t bytes :
       {size_t{1}, page_size(), page_size() + 1, kHuge - 1, kHuge, 2 * kHuge + 12345}) {
    Memory memory(bytes);
    CHECK_EQ(memory.size(), bytes);
    CHECK_EQ(reinterpret_cast<uintptr_t>(memory.data()) % page_size(), 0u);
    CHECK(all_are(memory.data(), bytes, 0));
    std::memset(memory.data(), 7, bytes);
    CHECK(all_are(memory.data(), bytes, 7));
  }
}

TEST(large_mappings_start_on_a_huge_page) {
  // Odd sizes between them, so that alignment is not the luck of the previous mapping.
  for (size_t bytes : {kHuge, kHuge + page_size(), 5 * kHuge + 3, kHuge + 1}) {
    Memory first(bytes), second(bytes);
    CHECK_EQ(reinterpret_cast<uintptr_t>(first.data()) % kHuge, 0u);
    CHECK_EQ(reinterpret_cast<uintptr_t>(second.data()) % kHuge, 0u);
  }
}

TEST(nothing_is_mapped_for_zero_bytes) {
  Memory memory(0, 0);
  CHECK(!memory);
  CHECK_EQ(memory.size(), 0u);
  CHECK(memory.data() == nullptr);
}

TEST(a_binding_to_any_node_leaves_usable_memory) {
  std::vector<int> nodes{-1, 63, 64, 65, 1000, 100000};  // most of them do not exist
  for (const ktk::Node& node : ktk::topology().nodes) nodes.push_back(node.id);
  for (int node : nodes) {
    Memory memory(3 * page_size(), node);
    std::memset(memory.data(), 1, memory.size());
    CHECK(all_are(memory.data(), memory.size(), 1));
  }
}

TEST(more_than_the_address_space_is_refused) {
  CHECK_THROWS(std::length_error, Memory(SIZE_MAX));
  CHECK_THROWS(std::length_error, Memory(SIZE_MAX - kHuge));
  CHECK_THROWS(std::length_error, Memory(size_t{1} << 60));
}

TEST(destruction_unmaps_the_first_and_the_last_page) {
  for (size_t bytes : {3 * page_size() + 1, 2 * kHuge + page_size() + 1}) {
    const char *first, *last;
    {
      Memory memory(bytes);
      first = memory.data();
      last = memory.data() + (bytes - 1) / page_size() * page_size();
      CHECK(mapped(first) && mapped(last));
    }
    CHECK(!mapped(first) && !mapped(last));
  }
}

TEST(alignment_leaves_no_address_space_behind) {
  const size_t before = mapped_pages();
  for (int i = 0; i < 100; ++i) Memory memory(kHuge + page_size());
  CHECK_LESS(mapped_pages(), before + 20 * kHuge / page_size());
}

TEST(moving_hands_the_mapping_over) {
  Memory source(page_size());
  source.data()[0] = 42;
  const char* data = source.data();
  Memory target(std::move(source));
  CHECK(target.data() == data && target.data()[0] == 42);

  Memory other(2 * page_size());
  const char* dropped = other.data();
  other = std::move(target);
  CHECK(other.data() == data && other.size() == page_size());
  target = Memory();
  CHECK(!target && !mapped(dropped) && mapped(data));
}

TEST(discard_zeroes_whole_pages_only) {
  const size_t page = page_size();
  Memory memory(8 * page);
  const auto fill = [&] { std::memset(memory.data(), 9, memory.size()); };

  fill();
  memory.discard(page, 2 * page);
  CHECK(all_are(memory.data(), page, 9));
  CHECK(all_are(memory.data() + page, 2 * page, 0));
  CHECK(all_are(memory.data() + 3 * page, 5 * page, 9));

  fill();
  memory.discard(page - 1, 2 * page);  // only page 1 lies inside
  CHECK(all_are(memory.data(), page, 9));
  CHECK(all_are(memory.data() + page, page, 0));
  CHECK(all_are(memory.data() + 2 * page, 6 * page, 9));

  fill();
  memory.discard(1, page);  // none does
  memory.discard(0, 0);
  CHECK(all_are(memory.data(), memory.size(), 9));
}

TEST(discarded_huge_pages_are_given_back) {
  Memory memory(4 * kHuge);
  std::memset(memory.data(), 9, memory.size());
  memory.discard(kHuge, kHuge);
  std::vector<unsigned char> resident(memory.size() / page_size());
  CHECK_EQ(mincore(memory.data(), memory.size(), resident.data()), 0);
  const size_t per_huge = kHuge / page_size();
  for (size_t i = 0; i < resident.size(); ++i) {
    CHECK_EQ(resident[i] & 1, i / per_huge == 1 ? 0 : 1);
  }
  CHECK(all_are(memory.data() + kHuge, kHuge, 0));
}

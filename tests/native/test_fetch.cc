// Which lines of a stream are fetched while a tile works, in order and by pages.
#include <cstdint>
#include <map>
#include <vector>

#include "check.h"
#include "gemm/driver.h"

namespace {

using ktk::by_pages, ktk::Fetch, ktk::kFetchWindow, ktk::kLine, ktk::kPage, ktk::WeightStream;

const char* at_address(uintptr_t address) { return reinterpret_cast<const char*>(address); }
uintptr_t address(const char* line) { return reinterpret_cast<uintptr_t>(line); }

// Not read, but of the right kind: windows begin at multiples of their size.
constexpr uintptr_t kSomewhere = 123 * kFetchWindow;

TEST(a_window_is_fetched_one_line_of_each_page_in_turn) {
  for (size_t i = 0; i < 16; ++i) {
    CHECK_EQ(by_pages(i * kLine), i % 8 * kPage + i / 8 * kLine);
    CHECK_EQ(by_pages(5 * kFetchWindow + i * kLine + 7),
             5 * kFetchWindow + by_pages(i * kLine) + 7);
  }
  std::map<size_t, int> times;
  for (size_t at = 0; at < kFetchWindow; at += kLine) ++times[by_pages(at)];
  CHECK_EQ(times.size(), kFetchWindow / kLine);
  CHECK_EQ(times.rbegin()->first, kFetchWindow - kLine);
}

TEST(lines_follow_each_other_however_many_are_fetched_at_once) {
  const size_t lines = 2 * kFetchWindow / kLine;
  Fetch one = Fetch::pages(at_address(kSomewhere + 3 * kLine), at_address(64)), four = one;
  Fetch unseen = one, skipping = one;
  for (size_t i = 3; i + 4 <= lines; i += 4) {
    for (const Fetch* fetch : {&one, &four, &unseen, &skipping}) {
      CHECK_EQ(address(fetch->line), kSomewhere + by_pages(i * kLine));
      CHECK_EQ(address(fetch->l1_line), 64 + (i - 3) * kLine);
    }
    for (size_t j = 0; j < 4; ++j) one.next();
    four.next_of<4>();
    unseen.next_unseen_of<4>();
    skipping.skip(4);
  }
}

TEST(in_order_a_step_may_be_less_than_a_line) {
  for (const uint16_t cache : {KTK_FETCH_L1, KTK_FETCH_L2, KTK_FETCH_L2_THEN_L1}) {
    Fetch seen = Fetch::in_order(at_address(kSomewhere), 24, cache, at_address(64)), unseen = seen;
    for (size_t i = 0; i < 100; i += 2) {
      CHECK_EQ(address(seen.line), kSomewhere + i * 24);
      CHECK_EQ(address(unseen.line), kSomewhere + i * 24);
      CHECK_EQ(address(unseen.l1_line), address(seen.l1_line));
      seen.next_of<2>();
      unseen.next_unseen_of<2>();
    }
    CHECK_EQ(address(seen.l1_line), cache == KTK_FETCH_L2_THEN_L1 ? 64 + 100 * 24 : 64);
  }
}

TEST(windows_are_whole_between_the_ends_of_a_stream) {
  const size_t begin = kSomewhere + 1088, first = kFetchWindow - 1088;
  const WeightStream stream{at_address(begin), 100'000, at_address(40 * kFetchWindow + 64)};
  const size_t last = (begin + stream.bytes) / kFetchWindow * kFetchWindow - begin;
  const auto is = [&](size_t offset, size_t end, bool whole) {
    const ktk::Stretch found = ktk::stretch_at(stream, offset);
    CHECK_EQ(found.end, end);
    CHECK_EQ(found.whole, whole);
  };
  is(0, first, false);
  is(first - 1, first, false);
  is(first, last, true);
  is(last - 1, last, true);
  is(last, stream.bytes, false);
  is(stream.bytes, stream.bytes + kFetchWindow - 64, false);
  is(stream.bytes + kFetchWindow - 64, SIZE_MAX, true);
  const WeightStream little{at_address(begin), 640, nullptr};
  CHECK_EQ(ktk::stretch_at(little, 0).end, 640u);
  CHECK_EQ(ktk::stretch_at(little, 640).end, 640 + first);
}

// Writes down what tiles of one row fetch, a line for each that they use.
std::vector<Fetch> asked;
struct Recorder {
  static constexpr size_t kMr = 1, kNr = 16, kLineProducts = 1, kSlabLines = 5;
  size_t depth;

  explicit Recorder(const ktk_matmul* mm) : depth(mm->matrix->k) {}
  static size_t passes(size_t) { return 1; }
  size_t slabs() const { return depth; }
  static size_t offset(size_t slab) { return (1 + slab * kSlabLines) * kLine; }
  static void tile(const ktk::Tile& t) {
    Fetch fetch = t.fetch;
    for (size_t i = 0; i < (t.end - t.begin) * kSlabLines; ++i) {
      asked.push_back(fetch);
      fetch.next();
    }
  }
};

TEST(every_line_of_a_stream_is_fetched_and_hardly_any_twice) {
  constexpr size_t kDepth = 100, kBlocks = 12;
  constexpr size_t kBlockLines = 1 + kDepth * Recorder::kSlabLines;
  ktk_matrix matrix = {};
  matrix.k = kDepth;
  ktk_prefetch prefetch = {};
  prefetch.pages_products = 1;
  float dst[16];
  ktk_matmul mm = {};
  mm.matrix = &matrix;
  mm.weight = at_address(kSomewhere + 17 * kLine);
  mm.n_end = kBlocks * Recorder::kNr;
  mm.m = 1;
  mm.dst = dst;
  mm.next = at_address(kSomewhere + 40 * kFetchWindow + 9 * kLine);
  mm.prefetch = &prefetch;
  for (const uint16_t order : {KTK_FETCH_IN_ORDER, KTK_FETCH_BY_PAGES}) {
    prefetch.few = prefetch.one = {kFetchWindow, KTK_FETCH_L2_THEN_L1, order};
    asked.clear();
    ktk::gemm<Recorder>(&mm);
    std::map<uintptr_t, size_t> l2, l1;
    size_t in_pages = 0;
    for (const Fetch& fetch : asked) {
      ++l2[address(fetch.line)];
      ++l1[address(fetch.l1_line)];
      in_pages += fetch.into == Fetch::kPagesAndL1;
    }
    // Headers, which the driver fetches itself, may be missing, and a slab where the order changes.
    const uintptr_t begin = kSomewhere + 17 * kLine, bytes = kBlocks * kBlockLines * kLine;
    size_t missing = 0, twice = 0;
    for (uintptr_t line = begin + kFetchWindow; line < begin + bytes; line += kLine) {
      missing += l2[line] == 0;
      twice += l2[line] > 1;
    }
    // Of the next stream all ahead of its first window, which is only begun.
    for (uintptr_t line = address(static_cast<const char*>(mm.next)); line % kFetchWindow != 0;
         line += kLine) {
      missing += l2[line] == 0;
    }
    CHECK(missing <= kBlocks + 4 * Recorder::kSlabLines);
    CHECK(twice <= 4 * Recorder::kSlabLines);
    if (order == KTK_FETCH_BY_PAGES) {
      CHECK(in_pages * kLine > bytes - 3 * kFetchWindow);
    } else {
      CHECK_EQ(in_pages, 0u);
    }
    // L1 goes ahead in this stream wherever L2 is.
    CHECK_EQ(l1[begin + KTK_FETCH_L1_AHEAD + kLine], 1u);
    CHECK_EQ(l1[begin + bytes - kLine], 1u);
  }
}

}  // namespace

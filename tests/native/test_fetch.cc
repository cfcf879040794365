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
      CHECK_EQ(fetch->l1_or_part, 64 + (i - 3) * kLine);
    }
    for (size_t j = 0; j < 4; ++j) one.next();
    four.next_of<4>();
    unseen.next_unseen_of<4>();
    skipping.skip(4);
  }
}

TEST(tiles_that_share_fetching_leave_no_line_out) {
  for (const size_t step : {24, 32, 64}) {
    Fetch one = Fetch::shared_pages(at_address(kSomewhere), step), four = one;
    Fetch unseen = one, skipping = one;
    for (size_t used = 0; used < 2000; used += 4) {
      // The first of every line's uses fetches.
      const size_t fetched = (used * step + kLine - step) / kLine;
      for (const Fetch* fetch : {&one, &four, &unseen, &skipping}) {
        CHECK_EQ(address(fetch->line), kSomewhere + by_pages(fetched * kLine));
        CHECK(fetch->l1_or_part < kLine);
      }
      for (size_t j = 0; j < 4; ++j) one.next();
      four.next_of<4>();
      unseen.next_unseen_of<4>();
      skipping.skip(4);
    }
  }
}

TEST(in_order_a_step_may_be_less_than_a_line) {
  for (const uint16_t cache : {KTK_FETCH_L1, KTK_FETCH_L2, KTK_FETCH_L2_THEN_L1}) {
    Fetch seen = Fetch::in_order(at_address(kSomewhere), 24, cache, at_address(64)), unseen = seen;
    for (size_t i = 0; i < 100; i += 2) {
      CHECK_EQ(address(seen.line), kSomewhere + i * 24);
      CHECK_EQ(address(unseen.line), kSomewhere + i * 24);
      CHECK_EQ(unseen.l1_or_part, seen.l1_or_part);
      seen.next_of<2>();
      unseen.next_unseen_of<2>();
    }
    CHECK_EQ(seen.l1_or_part, cache == KTK_FETCH_L2_THEN_L1 ? 64 + 100 * 24 : 64);
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

// Writes down what tiles of one row fetch, for each line that they use.
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

// The lines of a stream that begins a few lines behind a window, and the next one, which does too.
struct Fetched {
  static constexpr size_t kDepth = 100, kBlocks = 12;
  static constexpr size_t kBytes = kBlocks * (1 + kDepth * Recorder::kSlabLines) * kLine;
  static constexpr uintptr_t kBegin = kSomewhere + 17 * kLine;
  static constexpr uintptr_t kNext = kSomewhere + 40 * kFetchWindow + 9 * kLine;
  std::map<uintptr_t, size_t> l2, l1;
  size_t in_pages = 0, missing = 0, twice = 0;

  Fetched(size_t rows, ktk_prefetch prefetch) {
    ktk_matrix matrix = {};
    matrix.k = kDepth;
    std::vector<float> dst(rows * kBlocks * Recorder::kNr);
    ktk_matmul mm = {};
    mm.matrix = &matrix;
    mm.weight = at_address(kBegin);
    mm.n_end = kBlocks * Recorder::kNr;
    mm.m = rows;
    mm.dst = dst.data();
    mm.dst_stride = mm.n_end;
    mm.next = at_address(kNext);
    mm.prefetch = &prefetch;
    asked.clear();
    ktk::gemm<Recorder>(&mm);
    for (const Fetch& fetch : asked) {
      const bool by_pages = fetch.into >= Fetch::kPagesAndL1;
      in_pages += by_pages;
      if (fetch.into == Fetch::kPages && fetch.l1_or_part + fetch.step < kLine) continue;
      ++l2[address(fetch.line) / kLine * kLine];
      if (fetch.into == Fetch::kBoth || fetch.into == Fetch::kPagesAndL1) ++l1[fetch.l1_or_part];
    }
    for (uintptr_t line = kBegin + kFetchWindow; line < kBegin + kBytes; line += kLine) {
      missing += l2[line] == 0;
      twice += l2[line] > 1;
    }
    // Of the next stream all ahead of its first window, which is only begun.
    for (uintptr_t line = kNext; line % kFetchWindow != 0; line += kLine) missing += l2[line] == 0;
  }
};

// Headers, which the driver fetches itself, and slabs where the order changes.
constexpr size_t kMayMiss = Fetched::kBlocks + 4 * Recorder::kSlabLines;

TEST(every_line_of_a_stream_is_fetched_and_hardly_any_twice) {
  for (const uint16_t order : {KTK_FETCH_IN_ORDER, KTK_FETCH_BY_PAGES}) {
    ktk_prefetch prefetch = {};
    prefetch.few = prefetch.one = {kFetchWindow, KTK_FETCH_L2_THEN_L1, order};
    prefetch.pages_products = 1;
    prefetch.l1_ahead = order == KTK_FETCH_BY_PAGES ? 2048 : 1024;
    Fetched found(1, prefetch);
    CHECK(found.missing <= kMayMiss);
    CHECK(found.twice <= 4 * Recorder::kSlabLines);
    if (order == KTK_FETCH_BY_PAGES) {
      CHECK(found.in_pages * kLine > Fetched::kBytes - 3 * kFetchWindow);
    } else {
      CHECK_EQ(found.in_pages, 0u);
    }
    // L1 goes ahead in this stream wherever L2 is.
    CHECK_EQ(found.l1.begin()->first, Fetched::kBegin + prefetch.l1_ahead + kLine);
    CHECK_EQ(found.l1.begin()->second, 1u);
    CHECK_EQ(found.l1[Fetched::kBegin + Fetched::kBytes - kLine], 1u);
  }
}

TEST(two_tiles_fetch_every_line_by_pages_and_three_in_order) {
  ktk_prefetch prefetch = {};
  prefetch.pair = {kFetchWindow, KTK_FETCH_L2, KTK_FETCH_BY_PAGES};
  prefetch.pages_products = 3;
  const Fetched two(2, prefetch), three(3, prefetch);
  CHECK(two.missing <= kMayMiss);
  CHECK(two.in_pages * kLine > 2 * (Fetched::kBytes - 3 * kFetchWindow));
  CHECK_EQ(three.in_pages, 0u);
  prefetch.pages_products = 1;  // products bind
  CHECK_EQ(Fetched(2, prefetch).in_pages, 0u);
}

}  // namespace

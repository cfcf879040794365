// Packed weights as a stream of cache lines that is fetched ahead of its use.
//
// A core has 10 to 16 buffers for lines that its prefetch instructions and loads wait for: far too
// few to cover the latency of memory at full bandwidth. The prefetcher of the L2 cache has more,
// but works within one page at a time and only ahead of what it sees being read. What leads it best
// depends on the CPU and on how often a line is used.
//
// Intel with AMX (DRAM read rate of a thread, 2 threads, plain loads: 15.5 GB/s):
//
//   near  1 KiB ahead of the line that is used, in order: 17.9 GB/s, when every line is used once
//         (15.6 with `far`, 14.4 at 4 KiB);
//   far   a chunk of eight pages ahead, one line of each page in turn: for weights that several
//         tiles of rows pass over, where the next chunk has all that time to arrive. In order, the
//         same distance ahead, it gives 60 % of that.
//
// AMD Zen 4 (share of the rate of plain loads, 2 threads, bf16 and int8 weights):
//
//   lone    one prefetch per line, in the order of memory: up to 4 rows 0.97-1.00 when lines are
//           used in that order, too, and 512 B ahead. Two tiles that alternate line by line: 0.60
//           with any prefetch up to 4 KiB ahead, 0.9 at 8 KiB. Bursts of 32 lines: 0.65. 8 rows
//           keep the core busy for longer than the prefetcher looks ahead: 0.83 at 8 KiB, 0.69 at
//           512 B, 0.46 at 2 KiB.
//   linear  several tiles of rows share fetching the next 16 KiB, in order: 411 GFLOP/s at 24 rows
//           (of 469), where `far` gives 320. From 4 tiles on there is time to fetch into L1: 429
//           instead of 416 at 64 rows.
#pragma once

#include <stddef.h>

namespace ktk {
namespace {

// Not _mm_prefetch: gcc 12 takes a function that only prefetches for one without effect and drops
// calls of it.
#if defined(__aarch64__)
inline void prefetch_l1(const void* line) { asm volatile("prfm pldl1keep, [%0]" : : "r"(line)); }
inline void prefetch_l2(const void* line) { asm volatile("prfm pldl2keep, [%0]" : : "r"(line)); }
#else
inline void prefetch_l1(const void* line) {
  asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(line)));
}
inline void prefetch_l2(const void* line) {
  asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(line)));
}
#endif

struct WeightStream {
  static constexpr size_t kLine = 64;
  static constexpr size_t kPage = 4096;
  static constexpr size_t kNearBytes = 1024;
  static constexpr size_t kFarLines = 512;

  const char* begin;
  size_t lines;
  const char* next;  // continues the stream; may be null

  // The line that comes `index` lines after the first one of the stream.
  const char* at(size_t index) const {
    if (index < lines) return begin + index * kLine;
    return (next ? next : begin) + (index - lines) * kLine;
  }

  // Fetches kLines lines from kNearBytes behind `used` on. A prefetch past the end of memory is
  // ignored by the CPU.
  template <size_t kLines>
  static void near(const void* used) {
    const char* line = static_cast<const char*>(used) + kNearBytes;
#pragma GCC unroll 32
    for (size_t i = 0; i < kLines; ++i) prefetch_l2(line + i * kLine);
  }

  // Fetches the first lines of `next`, for streams that are fetched `near`.
  void begin_next() const {
    if (!next) return;
    for (size_t i = 0; i < 2 * kNearBytes; i += kLine) prefetch_l2(next + i);
  }

  // Fetches the `count` lines whose turn comes when `line` is used. Both are multiples of 4, four
  // lines are one instruction each: what waits for memory should not fill the reorder buffer.
  void far(size_t line, size_t count) const {
    const size_t chunk = line / kFarLines * kFarLines + kFarLines;
    const char* base = chunk < lines ? begin + chunk * kLine : next;
    if (!base) return;
    if (chunk >= lines) base += (chunk - lines) * kLine;
    const size_t in_chunk = line % kFarLines;
    base += in_chunk / 8 * kLine;
    for (size_t i = in_chunk % 8; i < in_chunk % 8 + count; i += 4) {
      const char* four = base + i / 8 * kLine + i % 8 * kPage;
      prefetch_l2(four);
      prefetch_l2(four + kPage);
      prefetch_l2(four + 2 * kPage);
      prefetch_l2(four + 3 * kPage);
    }
  }
};

// What a tile of rows fetches in each step when it is the only one, and every line is used once.
struct NearShare {
  static constexpr bool kFollowsNext = false;
  NearShare() = default;
  NearShare(const WeightStream&, size_t, size_t, size_t, size_t, size_t) {}

  // `weight` is what the step multiplies.
  template <size_t kStepLines>
  void prefetch(size_t, const void* weight) const {
    WeightStream::near<kStepLines>(weight);
  }
};

// What one of several tiles of rows fetches while all of them pass over a run of steps.
struct FarShare {
  static constexpr bool kFollowsNext = true;
  const WeightStream* stream;
  size_t line, lines_per_step;

  // For tile number `tile` and a run of `steps` steps of `step_lines` lines that starts at `line`.
  FarShare(const WeightStream& from, size_t tile, size_t tiles, size_t first_line, size_t steps,
           size_t step_lines)
      : stream(&from) {
    size_t share = step_lines;
    while (share > 1 && share / 2 * tiles >= step_lines) share /= 2;
    const size_t done = tile * steps * share;
    line = first_line + done;
    lines_per_step = done < steps * step_lines ? share : 0;
  }

  template <size_t kStepLines>
  void prefetch(size_t step, const void*) const {
    const size_t from = (line + step * lines_per_step) & ~size_t{3};
    const size_t to = (line + (step + 1) * lines_per_step) & ~size_t{3};
    if (from != to) stream->far(from, to - from);
  }
};

// How far ahead of its use the only tile of rows should fetch a line: where lines are used in
// order, and where two tiles of columns alternate.
constexpr size_t kWideAhead = 8192;
constexpr size_t bytes_ahead(size_t rows) { return rows <= 4 ? 512 : kWideAhead; }

// What the only tile of rows fetches: every line, in order. The tile does it line by line.
struct LoneShare {
  static constexpr bool kFollowsNext = true;
  const WeightStream* stream;
  size_t line, step_lines;

  LoneShare(const WeightStream& from, size_t, size_t, size_t first_line, size_t, size_t per_step)
      : stream(&from), line(first_line), step_lines(per_step) {}

  // What to fetch first in a step.
  const char* at(size_t step, size_t bytes_ahead) const {
    return stream->at(line + step * step_lines + bytes_ahead / WeightStream::kLine);
  }
};

// What one of several tiles of rows fetches, in order.
struct LinearShare {
  static constexpr bool kFollowsNext = true;
  static constexpr size_t kAheadLines = 256;  // 16 KiB
  const WeightStream* stream;
  size_t line, lines_per_step;

  LinearShare(const WeightStream& from, size_t tile, size_t tiles, size_t first_line, size_t steps,
              size_t step_lines)
      : stream(&from), lines_per_step((step_lines + tiles - 1) / tiles) {
    const size_t done = tile * steps * lines_per_step;
    if (done >= steps * step_lines) lines_per_step = 0;
    line = first_line + kAheadLines + done;
  }

  template <size_t kStepLines>
  void prefetch(size_t step, const void*) const {
    const char* from = stream->at(line + step * lines_per_step);
    if (lines_per_step * 4 > kStepLines) {
      for (size_t i = 0; i < lines_per_step; ++i) prefetch_l2(from + i * WeightStream::kLine);
    } else {
      for (size_t i = 0; i < lines_per_step; ++i) prefetch_l1(from + i * WeightStream::kLine);
    }
  }
};

}  // namespace
}  // namespace ktk

// Packed weights as a stream of cache lines that is fetched ahead of its use.
//
// How far ahead, and into which cache, is for the CPU to say: ktk_matmul.prefetch, from the table
// in native/core/prefetch.cc, which also says why CPUs differ.
#pragma once

#include "gemm/math.h"
#include "ktk/abi.h"

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

inline void prefetch(const void* line, bool into_l1) {
  if (into_l1) {
    prefetch_l1(line);
  } else {
    prefetch_l2(line);
  }
}

// Packed columns [n_begin, n_end) of a product, which lie one behind the other, and what the worker
// reads after them.
struct WeightStream {
  const char* begin;
  size_t bytes;
  const char* next;  // may be NULL

  // What comes `offset` bytes behind the beginning. Where nothing is known to follow, the beginning
  // again: to fetch what is in a cache costs nothing.
  const char* at(size_t offset) const {
    return offset < bytes ? begin + offset : after() + (offset - bytes);
  }
  const char* after() const { return next ? next : begin; }
};

// Fetching by pages: in windows of eight pages one line of each page in turn. The prefetcher of the
// L2 cache follows in all of the pages at once, and reads ahead in them. So the bits of a line's
// number in a window are rotated by three:
//
//   bits of the offset in order      14 .... 9   8 7 6
//   become bits                      11 .... 6  14 13 12
constexpr size_t kPage = 4096, kFetchPages = 8, kFetchWindow = kFetchPages * kPage;

constexpr size_t by_pages(size_t offset) {
  constexpr size_t kNumber = kFetchWindow - kLine;
  const size_t in_order = offset & kNumber;
  return offset - in_order + ((in_order * 513 >> 3) & kNumber);
}

// What is fetched alike.
struct Stretch {
  size_t end;  // offset in the stream
  bool whole;  // consists of windows
};

// The stretch around an offset: windows begin where their address is a multiple of kFetchWindow.
inline Stretch stretch_at(const WeightStream& stream, size_t offset) {
  const bool is_next = offset >= stream.bytes;
  const char* const begin = is_next ? stream.after() : stream.begin;
  const size_t before = is_next ? stream.bytes : 0;
  const size_t address = reinterpret_cast<uintptr_t>(begin);
  const size_t first = round_up(address, kFetchWindow) - address + before;
  if (offset < first) return {is_next ? first : smaller(first, stream.bytes), false};
  if (is_next) return {SIZE_MAX, true};
  const size_t last = (address + stream.bytes) / kFetchWindow * kFetchWindow - address;
  return offset < last ? Stretch{last, true} : Stretch{stream.bytes, false};
}

// `block_bytes` are those of the nr columns that are packed together, the first of which is at
// `first`.
inline WeightStream weight_stream(const ktk_matmul* mm, size_t nr, size_t block_bytes,
                                  size_t first) {
  return {
      .begin = static_cast<const char*>(mm->weight) + first,
      .bytes = ceil_div(mm->n_end - mm->n_begin, nr) * block_bytes,
      .next = static_cast<const char*>(mm->next),
  };
}

// How to fetch where `tiles` tiles of rows read the same weights, and multiply `products` lines of
// operands (gemm/driver.h) with every row for a line of weights.
inline const ktk_fetch& fetch_policy(const ktk_matmul* mm, size_t tiles, size_t products) {
  const ktk_prefetch& prefetch = *mm->prefetch;
  if (tiles == 1) return mm->m * products <= prefetch.few_products ? prefetch.few : prefetch.one;
  return tiles < 4 ? prefetch.pair : prefetch.many;
}

// Whether tiles that have a form for it use weights in the order of memory.
inline bool uses_in_order(const ktk_matmul* mm, size_t products) {
  return mm->m * products <= mm->prefetch->in_order_products;
}

// Whether weights are decoded once for all tiles of rows, where a micro-kernel can do either.
inline bool decodes_once(const ktk_matmul* mm) {
  const size_t rows = mm->prefetch->decode_rows;
  return rows > 0 && mm->m >= rows;
}

// What a tile fetches while it computes: for every line of weights that it uses, `step` bytes of
// what follows what it fetched last, in order or by pages.
struct Fetch {
  enum Into : uint8_t { kL1 = 1, kL2, kBoth, kPagesAndL1, kPages };

  const char* line;  // the next one
  size_t step;       // less than a line where tiles share fetching; 0: nothing new
  Into into;
  // The address of what goes into L1, where `line` goes into L2 ahead of that; at the end of a
  // stream it is what lies behind, for nothing. kPages: how many bytes of `line` were asked for.
  size_t l1_or_part = 0;

  // In order, as a policy of this `cache` (ktk_fetch_caches) has it; `l1_line` for both caches.
  static Fetch in_order(const char* line, size_t step, uint16_t cache, const char* l1_line) {
    return {line, step, static_cast<Into>(cache), reinterpret_cast<uintptr_t>(l1_line)};
  }
  // By pages, a line for each that is used, as if `line` were next.
  static Fetch pages(const char* line, const char* l1_line) {
    return {placed(line), kLine, kPagesAndL1, reinterpret_cast<uintptr_t>(l1_line)};
  }
  // The same for tiles that share fetching, into L2 alone. The first use fetches.
  static Fetch shared_pages(const char* line, size_t step) {
    return {placed(line), step, kPages, kLine - step};
  }

  void next() { next_of<1>(); }

  // For several lines that are used, with one branch.
  template <size_t kCount>
  void next_of() {
    if (into == kPagesAndL1) {
      for (size_t i = 0; i < kCount; ++i, line = next_page(line)) prefetch_l2(line);
      for (size_t i = 0; i < kCount; ++i) next_l1(kLine);
    } else if (into == kPages) {
      for (size_t i = 0; i < kCount; ++i) {
        if (!is_due()) continue;
        prefetch_l2(line);
        line = next_page(line);
      }
    } else if (into == kL1) {
      for (size_t i = 0; i < kCount; ++i, line += step) prefetch_l1(line);
    } else {
      for (size_t i = 0; i < kCount; ++i, line += step) prefetch_l2(line);
      if (into != kL2) {
        for (size_t i = 0; i < kCount; ++i) next_l1(step);
      }
    }
  }

  // The same where tiles share fetching, so that this may come to a line or less.
  template <size_t kCount>
  void next_shared() {
    if (kCount * step > kLine || into >= kPagesAndL1) return next_of<kCount>();
    prefetch(line, into == kL1);
    line += kCount * step;
  }

  // For kernels with kFetchesNextRun, which never fetch by pages: into one cache, whatever the
  // policy, because their tiles read what was decoded.
  void next_to_one() {
    prefetch(line, into == kL1);
    line += step;
  }
  // So many lines, into L2.
  void next_lines(size_t count) {
    for (size_t i = 0; i < count; ++i, line += kLine) prefetch_l2(line);
  }

  // Leaves lines out.
  void skip(size_t count) {
    if (into == kPagesAndL1) {
      for (size_t i = 0; i < count; ++i) line = next_page(line);
      l1_or_part += count * kLine;
    } else if (into == kPages) {
      for (size_t i = 0; i < count; ++i) {
        if (is_due()) line = next_page(line);
      }
    } else {
      line += count * step;
      l1_or_part += count * step;
    }
  }

  // The same from the same line on, whole lines.
  Fetch of_lines() const {
    Fetch fetch = *this;
    fetch.step = kLine;
    return fetch;
  }

  // next_of() in one piece, for straight code so long that gcc 12 spills registers where it
  // branches.
  template <size_t kCount>
  void next_unseen_of() {
#if defined(__x86_64__)
    // Locals: what is in a structure with operands of asm, gcc 12 leaves in memory.
    const char* to = line;
    size_t other = l1_or_part;
    const size_t by = step;
    const Into where = into;
#define KTK_NEXT_PAGE                                                                     \
  "add %[page], %[line]\n\ttest %[pages], %k[line]\n\tjnz 5f\n\tadd %[back], %[line]\n\t" \
  "test %[lines], %k[line]\n\tjnz 5f\n\tadd %[on], %[line]\n5:\n\t"
    // `inline`: gcc takes every line for an instruction, and would inline less around it.
    asm volatile inline(
        "cmpb $2, %[into]\n\tjb 1f\n\tja 3f\n\t"
        // kL2
        ".rept %c[count]\n\tprefetcht1 (%[line])\n\tadd %[step], %[line]\n\t.endr\n\tjmp 9f\n"
        "3:\tcmpb $4, %[into]\n\tje 4f\n\tja 8f\n\t"
        // kBoth
        ".rept %c[count]\n\tprefetcht1 (%[line])\n\tadd %[step], %[line]\n\t"
        "prefetcht0 (%[other])\n\tadd %[step], %[other]\n\t.endr\n\tjmp 9f\n"
        // kPagesAndL1
        "4:\n\t.rept %c[count]\n\tprefetcht1 (%[line])\n\tprefetcht0 (%[other])\n\t"
        "add %[kline], %[other]\n\t" KTK_NEXT_PAGE
        ".endr\n\tjmp 9f\n"
        // kPages
        "8:\n\t.rept %c[count]\n\tadd %[step], %[other]\n\tcmp %[kline], %[other]\n\tjb 5f\n\t"
        "sub %[kline], %[other]\n\tprefetcht1 (%[line])\n\t" KTK_NEXT_PAGE
        ".endr\n\tjmp 9f\n"
        // kL1
        "1:\n\t.rept %c[count]\n\tprefetcht0 (%[line])\n\tadd %[step], %[line]\n\t.endr\n9:"
        : [line] "+&r"(to), [other] "+&r"(other)
        : [step] "rm"(by), [into] "qm"(where), [count] "i"(kCount), [page] "i"(kPage),
          [kline] "i"(kLine), [pages] "i"(kFetchWindow - kPage), [back] "i"(kBack),
          [lines] "i"(kPage - kLine), [on] "i"(kOn)
        : "cc");
#undef KTK_NEXT_PAGE
    line = to;
    l1_or_part = other;
#else
    next_of<kCount>();
#endif
  }
  void next_unseen() { next_unseen_of<1>(); }

 private:
  // From one page too far to the next line of the first page, and from there, where that was the
  // last line, to the next window.
  static constexpr ptrdiff_t kBack = ptrdiff_t{kLine} - ptrdiff_t{kFetchWindow};
  static constexpr ptrdiff_t kOn = ptrdiff_t{kFetchWindow} - ptrdiff_t{kPage};

  static const char* next_page(const char* line) {
    line += kPage;
    if (reinterpret_cast<uintptr_t>(line) & (kFetchWindow - kPage)) return line;
    line += kBack;
    return reinterpret_cast<uintptr_t>(line) & (kPage - kLine) ? line : line + kOn;
  }
  static const char* placed(const char* line) {
    return reinterpret_cast<const char*>(by_pages(reinterpret_cast<uintptr_t>(line)));
  }
  // kPages: whether a line is due for what was used.
  bool is_due() {
    l1_or_part += step;
    if (l1_or_part < kLine) return false;
    l1_or_part -= kLine;
    return true;
  }
  void next_l1(size_t bytes) {
    prefetch_l1(reinterpret_cast<const char*>(l1_or_part));
    l1_or_part += bytes;
  }
};

// The same for tiles that use many lines at once, as AMX does, and have time to think of the order:
// one line after the other, or in chunks of eight pages one line of each page in turn.
struct BulkFetch {
  WeightStream stream;
  size_t offset;  // in the stream, of what comes next
  size_t step;
  bool into_l1, in_pages;

  // For so many lines that are used.
  void next(size_t lines) {
    const size_t end = offset + lines * step;
    for (size_t at = round_up(offset, kLine); at < end;) {
      if (at % kGroup == 0 && at + kGroup <= end && (at | (kFetchWindow - 1)) < stream.bytes) {
        next_group(stream.begin + place(at), in_pages ? kPage : kLine);
        at += kGroup;
      } else {
        prefetch(stream.at(place(at)), into_l1);
        at += kLine;
      }
    }
    offset = end;
  }

 private:
  static constexpr size_t kGroup = 4 * kLine;  // with one look at where the stream ends

  void next_group(const char* line, size_t apart) const {
    if (into_l1) {
      for (size_t i = 0; i < 4; ++i) prefetch_l1(line + i * apart);
    } else {
      for (size_t i = 0; i < 4; ++i) prefetch_l2(line + i * apart);
    }
  }

  size_t place(size_t at) const { return in_pages ? by_pages(at) : at; }
};

}  // namespace
}  // namespace ktk

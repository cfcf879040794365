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
    if (offset < bytes) return begin + offset;
    return (next ? next : begin) + (offset - bytes);
  }
};

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

// What a tile fetches while it computes: for every line of weights that it uses, what lies `step`
// bytes behind what it fetched last.
struct Fetch {
  const char* line;  // the next one
  size_t step;       // less than a line where tiles share fetching; 0: nothing new
  uint8_t cache;     // ktk_fetch_caches; what lies KTK_FETCH_L1_BEHIND a line is another stream
                     // where the line is of the next one, and fetched for nothing

  void next() {
    fetch(line);
    line += step;
  }

  // For several lines that are used, with one branch.
  template <size_t kCount>
  void next_of() {
    if (cache == KTK_FETCH_L1) {
      for (size_t i = 0; i < kCount; ++i) prefetch_l1(line + i * step);
    } else {
      for (size_t i = 0; i < kCount; ++i) prefetch_l2(line + i * step);
    }
    if (cache == KTK_FETCH_L2_THEN_L1) {
      for (size_t i = 0; i < kCount; ++i) prefetch_l1(line + i * step - KTK_FETCH_L1_BEHIND);
    }
    line += kCount * step;
  }

  // The same where tiles share fetching, so that this may come to a line or less.
  template <size_t kCount>
  void next_shared() {
    if (kCount * step > kLine) return next_of<kCount>();
    fetch(line);
    line += kCount * step;
  }

  // So many adjacent lines, into L2.
  void next_lines(size_t count) {
    for (size_t i = 0; i < count; ++i, line += kLine) prefetch_l2(line);
  }

  // next() in one piece, for straight code so long that gcc 12 spills registers where it
  // branches.
  void next_unseen() {
#if defined(__x86_64__)
    asm volatile(
        "cmpb $2, %[cache]\n\tjb 1f\n\t"
        "prefetcht1 %[line]\n\tje 2f\n\tprefetcht0 %[behind]\n\tjmp 2f\n1:\t"
        "prefetcht0 %[line]\n2:"
        :
        : [line] "m"(*line), [behind] "m"(*(line - KTK_FETCH_L1_BEHIND)), [cache] "q"(cache)
        : "cc");
    line += step;
#else
    next();
#endif
  }

  // The same for several lines, a branch for four of them.
  template <size_t kCount>
  void next_unseen_of() {
#if defined(__x86_64__)
    if constexpr (kCount >= 4) {
      asm volatile(
          "cmpb $2, %[cache]\n\tjb 1f\n\t"
          "prefetcht1 (%[a])\n\tprefetcht1 (%[b])\n\t"
          "prefetcht1 (%[a],%[step],2)\n\tprefetcht1 (%[b],%[step],2)\n\t"
          "je 2f\n\t"
          "prefetcht0 %c[behind](%[a])\n\tprefetcht0 %c[behind](%[b])\n\t"
          "prefetcht0 %c[behind](%[a],%[step],2)\n\tprefetcht0 %c[behind](%[b],%[step],2)\n\t"
          "jmp 2f\n1:\t"
          "prefetcht0 (%[a])\n\tprefetcht0 (%[b])\n\t"
          "prefetcht0 (%[a],%[step],2)\n\tprefetcht0 (%[b],%[step],2)\n2:"
          :
          : [a] "r"(line), [b] "r"(line + step), [step] "r"(step), [cache] "q"(cache),
            [behind] "i"(-KTK_FETCH_L1_BEHIND)
          : "cc");
      line += 4 * step;
      return next_unseen_of<kCount - 4>();
    }
#endif
#pragma GCC unroll 4
    for (size_t i = 0; i < kCount; ++i) next_unseen();
  }

 private:
  void fetch(const char* at) const {
    prefetch(at, cache == KTK_FETCH_L1);
    if (cache == KTK_FETCH_L2_THEN_L1) prefetch_l1(at - KTK_FETCH_L1_BEHIND);
  }
};

// The same for tiles that use many lines at once, as AMX does, and have time to think of the order:
// one line after the other, or in chunks of eight pages one line of each page in turn.
struct BulkFetch {
  WeightStream stream;
  size_t offset;  // in the stream, of what comes next
  size_t step;
  bool into_l1, by_pages;

  // For so many lines that are used.
  void next(size_t lines) {
    const size_t end = offset + lines * step;
    for (size_t at = round_up(offset, kLine); at < end;) {
      if (at % kGroup == 0 && at + kGroup <= end && (at | (kChunk - 1)) < stream.bytes) {
        next_group(stream.begin + place(at), by_pages ? kPage : kLine);
        at += kGroup;
      } else {
        prefetch(stream.at(place(at)), into_l1);
        at += kLine;
      }
    }
    offset = end;
  }

 private:
  static constexpr size_t kPages = 8, kPage = 4096, kChunk = kPages * kPage;
  static constexpr size_t kGroup = 4 * kLine;  // with one look at where the stream ends

  void next_group(const char* line, size_t apart) const {
    if (into_l1) {
      for (size_t i = 0; i < 4; ++i) prefetch_l1(line + i * apart);
    } else {
      for (size_t i = 0; i < 4; ++i) prefetch_l2(line + i * apart);
    }
  }

  size_t place(size_t at) const {
    if (!by_pages) return at;
    const size_t line = at % kChunk / kLine;
    return at / kChunk * kChunk + line % kPages * kPage + line / kPages * kLine;
  }
};

}  // namespace
}  // namespace ktk

#include "core/prefetch.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <vector>

#include "core/cpu.h"

namespace ktk {
namespace {

constexpr uint16_t kInOrder = KTK_FETCH_IN_ORDER, kByPages = KTK_FETCH_BY_PAGES;
constexpr uint16_t kL2ThenL1 = KTK_FETCH_L2_THEN_L1;

struct Row {
  const char* name;
  const char* vendor;  // "": any
  unsigned family, first_model, last_model;
  ktk_isa isa;  // all of these bits
  ktk_prefetch prefetch;
};

// The last three as nearly all rows have them. `l1_ahead` counts where a row has kL2ThenL1.
constexpr ktk_prefetch policy(uint32_t few_products, uint32_t in_order_products,
                              uint32_t decode_rows, ktk_fetch few, ktk_fetch one, ktk_fetch pair,
                              ktk_fetch many, ktk_fetch decode, uint32_t accumulators = 8,
                              uint32_t pages_products = 30, uint32_t l1_ahead = 2048) {
  return {.struct_size = sizeof(ktk_prefetch),
          .few = few,
          .one = one,
          .pair = pair,
          .many = many,
          .decode = decode,
          .few_products = few_products,
          .in_order_products = in_order_products,
          .pages_products = pages_products,
          .l1_ahead = l1_ahead,
          .decode_rows = decode_rows,
          .accumulators = accumulators};
}

constexpr uint32_t kAll = 64;   // products that no tile has more of
constexpr uint32_t kNever = 0;  // rows from which weights are decoded once
constexpr unsigned kAnyModel = ~0u;
constexpr ktk_isa kAmx = KTK_ISA_AMX_INT8 | KTK_ISA_AMX_BF16;

// The first row that fits a CPU counts. tools/bench/prefetch measures one for another CPU.
//
// Why CPUs differ: a core has 10 to 16 buffers for lines that its prefetch instructions and loads
// wait for, too few to cover the latency of memory at full bandwidth. The prefetcher of the L2
// cache has more, but works within a page and ahead of what it sees being read; prefetch
// instructions lead it, or get in its way.
constexpr Row kRows[] = {
    // 512 B ahead a single tile reaches 0.97-1.00 of plain loads up to 4 rows; 8 rows keep the core
    // busy for longer than the prefetcher looks ahead: 0.83 at 8 KiB, 0.69 at 512 B, 0.46 at 2 KiB.
    // From four tiles on there is time to fetch into L1: 429 GFLOP/s instead of 416 at 64 rows.
    // Decoding in registers has ports of its own beside bf16 products: MXFP4 in L2, one thread, 206
    // GFLOP/s instead of 172 at 13 rows, 207 instead of 190 at 128; FP8 212 and 187, 219 and 213.
    {"zen4", "AuthenticAMD", 0x19, 0x10, 0xff, KTK_ISA_AVX512,
     policy(4, kAll, kNever, {512, 2, kInOrder}, {8192, 2, kInOrder}, {16384, 2, kInOrder},
            {16384, 1, kInOrder}, {8192, 2, kInOrder})},
    // Against the row of Zen 4, a layer in bf16: 1.25 -> 0.99 ms with 1 token, 8.6 -> 6.7 with 8,
    // 17.3 -> 14.9 with 32.
    {"zen5", "AuthenticAMD", 0x1a, 0, kAnyModel, KTK_ISA_AVX512,
     policy(4, kAll, 13, {4096, 1, kInOrder}, {16384, 1, kInOrder}, {16384, 1, kInOrder},
            {16384, 1, kInOrder}, {8192, 2, kInOrder})},
    // Milan, 2 threads, plain loads at 35 GB/s, bf16 with AVX2. 512 B ahead, two products for each
    // line keep a core busy for longer than its prefetcher looks ahead: 2 KiB into L1 takes 0.90
    // (0.88 to 0.91) of the time, 16 KiB 0.97 where there are four rows or more; more tiles gain
    // nothing from any distance. Zen 4 without AVX-512 was not met; its row is above.
    {"zen3", "AuthenticAMD", 0x19, 0, kAnyModel, KTK_ISA_NONE,
     policy(4, kAll, 13, {2048, 1, kInOrder}, {16384, 1, kInOrder}, {16384, 1, kInOrder},
            {16384, 1, kInOrder}, {8192, 2, kInOrder})},
    // Rome, 2 threads, plain loads at 28 to 31 GB/s. Of the time at 512 B into L2, 1 KiB takes 0.92
    // to 0.98 with one and two rows of bf16 and int8 and one of 4 bits, into L1 as much; 2 KiB and
    // more take 0.97 to 1.1. MXFP4 and FP8, which decode for longer, gain with one row as others do
    // with three or more: 0.83 to 0.86 at 8 KiB, where bf16 and int8 take 0.48 with four rows, 4
    // bits 0.65, and nothing beyond. A product takes five cycles where later AMDs take four: 8 rows
    // as tiles of 5 and 3 take 0.87 of the time of 4 and 4 in bf16, weights in L2.
    {"zen2", "AuthenticAMD", 0x17, 0x30, kAnyModel, KTK_ISA_NONE,
     policy(4, kAll, 13, {1024, 2, kInOrder}, {8192, 2, kInOrder}, {16384, 2, kInOrder},
            {16384, 1, kInOrder}, {8192, 2, kInOrder}, 10)},
    // Emerald Rapids, 2 threads, plain loads at 28 GB/s, against 2 KiB into L1 for few rows and 1
    // KiB into L2 for more. Time in AMXINT4, Q4_K and Q8_0 at T = 1, 4, 16, 32, 128: 0.89 0.83 0.84
    // 0.80 0.96, 0.86 0.86 0.79 0.75 0.77, 0.99 0.99 0.95 0.87 0.76; by pages for more rows, too,
    // these take as long, and MXFP4, FP8 and RAWINT4 at T = 1, 8, 32 0.85 0.83 0.94, 0.86 0.92
    // 0.89, 0.87 0.82 0.80. A single tile of AMX in bf16 fetches in order all the same: 0.98 to
    // 1.03 for anything from 512 B to 8 KiB, 1.06 for 32. Where tiles of rows share fetching, the
    // order of memory reaches 0.60 of what one line of each page does on model 167, 0.83 here; two
    // tiles of RAWINT4's vectors gain nothing from either.
    {"intel_amx", "GenuineIntel", 6, 0, kAnyModel, kAmx,
     policy(4, kAll, 13, {32768, kL2ThenL1, kByPages}, {8192, kL2ThenL1, kInOrder},
            {32768, 2, kByPages}, {32768, 2, kByPages}, {8192, 2, kInOrder})},
    // Emerald Rapids whose AMX a hypervisor hides, 2 threads, plain loads at 33 GB/s, bf16: one and
    // two rows reach 31 and 29 GB/s at 8 KiB, 23 and 21 at 512 B (times 0.78 and 0.72, +-0.02);
    // 4, 16 and 32 KiB gain nothing over 8, nor does anything gain for more rows, within 1 to 3 %;
    // int8 likewise, where fetching one or two tiles' weights into L1 loses 3 to 5 %. In the order
    // of memory: 2 % less time for int8 with one row; 7 % more for bf16 with four rows, 2 % for
    // int8 with eight. Into L2 at 8 KiB and then into L1 at 2 takes 0.90 to 0.99 of the time of L2
    // alone in all formats with 1 to 4 rows, 0.94 to 1.00 with 8: a core that waits for L2 fetches
    // nothing from memory meanwhile. Of that time, into L2 by pages takes 0.98 with one row, 0.88
    // with 8 and 0.90 with 12 in bf16, 0.97 and 0.94 in int8, 0.88 and 0.93 in 4 bits, and up to
    // 1.06 with more than 30 products a line; at 36, 48 and 64 KiB as much. Two or four pages in
    // turn gain half of it, 16 no more. Two tiles of rows gain nothing from L1, but by pages they
    // take 0.90 and 0.88 with 16 and 24 rows of int8, 0.94 with 13 of bf16; three 0.98 to 1.07.
    // What is not by pages fetches in order: 0.99 to 1.01 at 32 KiB of what it takes at 8 or 16.
    {"intel", "GenuineIntel", 6, 0, kAnyModel, KTK_ISA_AVX512,
     policy(4, 3, 13, {32768, kL2ThenL1, kByPages}, {32768, kL2ThenL1, kByPages},
            {32768, 2, kByPages}, {16384, 1, kInOrder}, {8192, 2, kInOrder})},
#if defined(__aarch64__)
    // Not measured: no Arm server has been met.
    {"arm", "", 0, 0, kAnyModel, KTK_ISA_NEON,
     policy(4, kAll, 13, {8192, 2, kInOrder}, {8192, 2, kInOrder}, {16384, 2, kInOrder},
            {16384, 1, kInOrder}, {8192, 2, kInOrder})},
#endif
    {"default", "", 0, 0, kAnyModel, KTK_ISA_NONE,
     policy(4, kAll, 13, {512, 2, kInOrder}, {8192, 2, kInOrder}, {16384, 2, kInOrder},
            {16384, 1, kInOrder}, {8192, 2, kInOrder})},
};

bool fits(const Row& row, const CpuId& cpu, ktk_isa isa) {
  if ((isa & row.isa) != row.isa) return false;
  if (!*row.vendor) return true;
  return cpu.vendor == row.vendor && cpu.family == row.family && cpu.model >= row.first_model &&
         cpu.model <= row.last_model;
}

const Row& row_for(const CpuId& cpu, ktk_isa isa) {
  for (const Row& row : kRows) {
    if (fits(row, cpu, isa)) return row;
  }
  __builtin_unreachable();  // the last one fits all
}

struct Cache {
  const char* name;
  uint16_t cache;
};
constexpr Cache kCaches[] = {
    {"l1", KTK_FETCH_L1}, {"l2", KTK_FETCH_L2}, {"l2+l1", KTK_FETCH_L2_THEN_L1}};

struct Entry {
  const char* name;
  ktk_fetch ktk_prefetch::* fetch;
};
constexpr Entry kEntries[] = {
    {"few", &ktk_prefetch::few},   {"one", &ktk_prefetch::one},       {"pair", &ktk_prefetch::pair},
    {"many", &ktk_prefetch::many}, {"decode", &ktk_prefetch::decode},
};
struct Number {
  const char* name;
  size_t ktk_prefetch::* number;
};
constexpr Number kNumbers[] = {{"few_products", &ktk_prefetch::few_products},
                               {"in_order_products", &ktk_prefetch::in_order_products},
                               {"pages_products", &ktk_prefetch::pages_products},
                               {"l1_ahead", &ktk_prefetch::l1_ahead},
                               {"decode_rows", &ktk_prefetch::decode_rows},
                               {"accumulators", &ktk_prefetch::accumulators}};

[[noreturn]] void reject(std::string_view setting, std::string_view part) {
  std::string rows, entries;
  for (const Row& row : kRows) rows += (rows.empty() ? "" : ", ") + std::string(row.name);
  for (const Entry& entry : kEntries) entries += std::string(entry.name) + ", ";
  throw SettingError(
      "KTK_PREFETCH is '" + std::string(setting) + "', and '" + std::string(part) +
      "' in it is neither a CPU (" + rows + ") nor like 'few=4096:l1' or " +
      "'many=32768:l2:pages' (" + entries +
      "with l1, l2 or l2+l1) nor 'few_products=8', 'in_order_products=0', 'pages_products=30', "
      "'l1_ahead=2048', 'decode_rows=13' nor 'accumulators=8'");
}

std::vector<std::string_view> split(std::string_view text, char between) {
  std::vector<std::string_view> parts;
  for (;;) {
    const size_t at = text.find(between);
    parts.push_back(text.substr(0, at));
    if (at == text.npos) return parts;
    text.remove_prefix(at + 1);
  }
}

bool read_number(std::string_view text, uint32_t& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

bool read_fetch(std::string_view text, ktk_fetch& fetch) {
  const std::vector<std::string_view> words = split(text, ':');
  if (words.size() < 2 || words.size() > 3 || !read_number(words[0], fetch.ahead)) return false;
  const auto* const cache = std::ranges::find(kCaches, words[1], &Cache::name);
  if (cache == std::end(kCaches)) return false;
  fetch.cache = cache->cache;
  if (words.size() == 3 && words[2] != "pages") return false;
  fetch.order = words.size() == 3 ? kByPages : kInOrder;
  return true;
}

bool read_part(std::string_view part, ktk_prefetch& prefetch) {
  for (const Row& row : kRows) {
    if (part == row.name) {
      prefetch = row.prefetch;
      return true;
    }
  }
  const size_t equals = part.find('=');
  if (equals == part.npos) return false;
  const std::string_view name = part.substr(0, equals), value = part.substr(equals + 1);
  for (const Number& entry : kNumbers) {
    uint32_t number;
    if (name == entry.name && read_number(value, number)) {
      prefetch.*entry.number = number;
      return true;
    }
  }
  for (const Entry& entry : kEntries) {
    if (name == entry.name) return read_fetch(value, prefetch.*entry.fetch);
  }
  return false;
}

// What products are told. Others may still read an earlier one, so all of them are kept.
std::atomic<const ktk_prefetch*> current;

const ktk_prefetch* keep(const ktk_prefetch& prefetch) {
  static std::mutex mutex;
  static std::deque<ktk_prefetch>* const kept = new std::deque<ktk_prefetch>;
  const std::lock_guard lock(mutex);
  return &kept->emplace_back(prefetch);
}

const ktk_prefetch* of_environment() {
  const char* setting = std::getenv("KTK_PREFETCH");
  return keep(prefetch_for(cpu_id(), allowed_isa(), setting ? setting : ""));
}

}  // namespace

ktk_prefetch prefetch_for(const CpuId& cpu, ktk_isa isa, std::string_view setting) {
  ktk_prefetch result = row_for(cpu, isa).prefetch;
  if (setting.empty()) return result;
  for (const std::string_view part : split(setting, ',')) {
    if (!read_part(part, result)) reject(setting, part);
  }
  return result;
}

const char* prefetch_row(const CpuId& cpu, ktk_isa isa) { return row_for(cpu, isa).name; }

std::string describe(const ktk_prefetch& prefetch) {
  std::string text;
  for (const Entry& entry : kEntries) {
    const ktk_fetch& fetch = prefetch.*entry.fetch;
    text += std::string(entry.name) + "=" + std::to_string(fetch.ahead) + ":" +
            std::ranges::find(kCaches, fetch.cache, &Cache::cache)->name +
            (fetch.order == kByPages ? ":pages," : ",");
  }
  for (const Number& entry : kNumbers) {
    text += std::string(entry.name) + "=" + std::to_string(prefetch.*entry.number) + ",";
  }
  text.pop_back();
  return text;
}

const ktk_prefetch& prefetch() {
  if (const ktk_prefetch* known = current.load(std::memory_order_acquire)) return *known;
  static const ktk_prefetch* const first = of_environment();
  const ktk_prefetch* none = nullptr;
  current.compare_exchange_strong(none, first, std::memory_order_acq_rel);
  return *current.load(std::memory_order_acquire);
}

void set_prefetch(std::string_view setting) {
  const ktk_prefetch* wanted =
      setting.empty() ? of_environment() : keep(prefetch_for(cpu_id(), allowed_isa(), setting));
  current.store(wanted, std::memory_order_release);
}

}  // namespace ktk

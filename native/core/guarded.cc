#include "core/guarded.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>
#include <stdexcept>

#include "core/size.h"

namespace ktk {
namespace {

constexpr unsigned char kPattern = 0xa5, kUnwritten = 0xff;

size_t page_size() {
  static const size_t size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

bool is_pattern(const char* begin, const char* end) {
  if (begin == end) return true;
  const size_t others = static_cast<size_t>(end - begin) - 1;
  return static_cast<unsigned char>(*begin) == kPattern && !std::memcmp(begin, begin + 1, others);
}

}  // namespace

Guarded::Guarded(size_t bytes, size_t align)
    : memory_(sum(round_up(bytes, page_size()), 2 * page_size())), size_(bytes) {
  const size_t page = page_size();
  char* begin = memory_.data() + page;
  char* end = begin + round_up(bytes, page);
  if (mprotect(memory_.data(), page, PROT_NONE) != 0 || mprotect(end, page, PROT_NONE) != 0) {
    throw std::bad_alloc();
  }
  data_ = end - round_up(bytes, align);
  std::memset(begin, kPattern, static_cast<size_t>(end - begin));
  std::memset(data_, kUnwritten, bytes);
}

void Guarded::check(const std::string& who) const {
  const size_t page = page_size();
  const char* begin = memory_.data() + page;
  const char* end = begin + round_up(size_, page);
  if (is_pattern(begin, data_) && is_pattern(data_ + size_, end)) return;
  const auto refuse = [&](ptrdiff_t distance, const char* where) {
    throw std::runtime_error(who + " wrote byte " + std::to_string(distance) + where +
                             std::to_string(size_) + " bytes that there are");
  };
  for (const char* at = data_; at-- != begin;) {
    if (static_cast<unsigned char>(*at) != kPattern) refuse(data_ - at, " before the ");
  }
  for (const char* at = data_ + size_; at != end; ++at) {
    if (static_cast<unsigned char>(*at) != kPattern) refuse(at - data_ - size_ + 1, " behind the ");
  }
}

}  // namespace ktk

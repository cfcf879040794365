#include "core/guarded.h"

#include <cstring>
#include <stdexcept>

#include "core/guard.h"
#include "core/size.h"

namespace ktk {
namespace {

constexpr unsigned char kPattern = 0xa5;

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
  make_unwritten(begin, static_cast<size_t>(end - begin));
  forbid(memory_.data(), page);
  forbid(end, page);
  data_ = end - round_up(bytes, align);
  std::memset(begin, kPattern, static_cast<size_t>(data_ - begin));
  std::memset(data_ + bytes, kPattern, static_cast<size_t>(end - data_) - bytes);
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

#include "moe/unread.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <functional>

namespace ktk {
namespace {

constexpr size_t kChunk = 1 << 20;  // bytes that a worker reads at a time

// Index of the piece that an address belongs to, or as many as there are.
size_t find(const char* at, std::span<const Unread> unread) {
  const std::less_equal<const char*> not_behind;
  const auto holds = [&](const Unread& one) {
    return not_behind(one.at, at) && !not_behind(one.at + one.bytes, at);
  };
  return static_cast<size_t>(std::ranges::find_if(unread, holds) - unread.begin());
}

}  // namespace

bool is_unread(const char* at, std::span<const Unread> unread) {
  return find(at, unread) < unread.size();
}

void read(const char* at, size_t bytes, std::span<const Unread> unread, char* to) {
  const Unread& one = unread[find(at, unread)];
  uint64_t from = one.begin + static_cast<uint64_t>(at - one.at);
  for (char* const end = to + bytes; to < end;) {
    const ssize_t count =
        pread(one.file, to, static_cast<size_t>(end - to), static_cast<off_t>(from));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) throw ReadFailure(one.which, count < 0 ? errno : 0);
    to += count;
    from += static_cast<uint64_t>(count);
  }
}

void read_all(std::span<const Unread> unread, WorkerPool& pool) {
  if (unread.empty()) return;
  size_t longest = 0;
  for (const Unread& one : unread) longest = std::max(longest, one.bytes);
  const size_t chunks = (longest + kChunk - 1) / kChunk;
  std::atomic<size_t> next{0};
  pool.run([&](int) {
    for (size_t i = next++; i < chunks * unread.size(); i = next++) {
      const Unread& one = unread[i / chunks];
      const size_t begin = i % chunks * kChunk;
      if (begin >= one.bytes) continue;
      read(one.at + begin, std::min(kChunk, one.bytes - begin), unread, one.at + begin);
    }
  });
}

void check_unchanged(std::span<const Unread> unread) {
  for (const Unread& one : unread) {
    struct stat found;
    if (fstat(one.file, &found)) throw ReadFailure(one.which, errno);
    const int64_t changed_ns =
        found.st_mtim.tv_sec * int64_t{1'000'000'000} + found.st_mtim.tv_nsec;
    if (found.st_size != one.file_bytes || changed_ns != one.changed_ns) {
      throw ReadFailure(one.which, 0);
    }
  }
}

}  // namespace ktk

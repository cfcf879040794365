#include "core/guard.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace ktk {
namespace {

bool is_set(const char* variable) {
  const char* const value = std::getenv(variable);
  return value && *value && std::strcmp(value, "0") != 0;
}

void protect(char* pages, size_t bytes, int access) {
  // No bytes: qemu's emulation of Linux (7.2) has an error for them.
  if (bytes == 0 || mprotect(pages, bytes, access) == 0) return;
  throw std::runtime_error(
      "the system protects no more pages (KTK_GUARD=1 takes two mappings for each piece of "
      "memory): raise vm.max_map_count");
}

}  // namespace

const bool guard_mode = is_set("KTK_GUARD");

size_t page_size() {
  static const size_t size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

void forbid(char* pages, size_t bytes) { protect(pages, bytes, PROT_NONE); }

void make_unwritten(char* pages, size_t bytes) {
  protect(pages, bytes, PROT_READ | PROT_WRITE);
  std::memset(pages, 0xff, bytes);
}

}  // namespace ktk

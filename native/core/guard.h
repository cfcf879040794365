// Guard mode, for tests: KTK_GUARD=1 in the environment of the process.
//
// What ktk maps is cut into pieces, and sanitizers see neither where one ends nor whether it was
// written. In this mode each piece ends at a page that nobody may touch, and holds 0xff, a NaN in
// every float, before it is used:
//
//   | 0xff ... piece | no access | 0xff ... piece | no access |
//
// Pieces begin on a multiple of KTK_ALIGNMENT, so that one whose size is none ends up to 63 bytes
// before its page.
#pragma once

#include <cstddef>

namespace ktk {

// Read once, when ktk is loaded.
extern const bool guard_mode;

size_t page_size();

// Forbids whole pages to everybody. Throws std::runtime_error.
void forbid(char* pages, size_t bytes);
// Allows them again, as memory that nobody wrote. Throws std::runtime_error.
void make_unwritten(char* pages, size_t bytes);

}  // namespace ktk

// Bytes of weights that are still in files. Workers read what they are about to pack: it comes from
// the system's cache of files and stays in a core's own, instead of going through memory, and all
// workers read. The address of a byte says which it is; the memory there need not be touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>

#include "core/worker_pool.h"

namespace ktk {

struct Unread {
  size_t which;  // what errors call it
  int file;      // a descriptor
  uint64_t begin;
  char* at;  // where they belong
  size_t bytes;
  // The file's, as they have to be when all is read.
  int64_t file_bytes, changed_ns;
};

// A file could not be read, or is not as it was.
struct ReadFailure : std::exception {
  ReadFailure(size_t which_, int error_) : which(which_), error(error_) {}
  const char* what() const noexcept override { return "a file cannot be read"; }

  size_t which;
  int error;  // errno, or 0 where the file has ended or was changed
};

// Whether what belongs to an address is unread.
bool is_unread(const char* at, std::span<const Unread> unread);
// Reads the bytes that belong to the memory [at, at + bytes), all of one piece that is unread.
void read(const char* at, size_t bytes, std::span<const Unread> unread, char* to);
// Reads all where it belongs, by all workers.
void read_all(std::span<const Unread> unread, WorkerPool& pool);
// Throws ReadFailure if a file is not as it was.
void check_unchanged(std::span<const Unread> unread);

}  // namespace ktk

// What fork() leaves behind: a child has none of its parent's threads, and their locks for ever.
#pragma once

#include <unistd.h>

#include <stdexcept>

namespace ktk {

// The process that made an object. In a child of it, the object's threads do not exist, and its
// locks may be held by one of them: whoever would take a lock or wait asks here first.
class Process {
 public:
  bool here() const { return pid_ == getpid(); }
  // Throws std::logic_error in another process.
  void check() const {
    if (here()) return;
    throw std::logic_error(
        "the threads of a WorkerPool do not survive fork(); make a new WorkerPool after fork(), or "
        "load the model in the process that computes it");
  }

 private:
  pid_t pid_ = getpid();
};

}  // namespace ktk

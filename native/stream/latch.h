// Keeps an error from where it cannot be thrown (a worker, a CUDA host function) until somebody
// asks.
#pragma once

#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "core/process.h"

namespace ktk {

// Like BackendTable, its reference count must not be Python's.
class Latch : public std::enable_shared_from_this<Latch> {
 public:
  // The first one stays; what fails after it usually follows from it.
  void set(const std::string& message) {
    const std::lock_guard lock(mutex_);
    if (message_.empty()) message_ = message;
  }

  // Throws std::runtime_error if an error was kept, and forgets it; std::logic_error in a
  // forked child.
  void raise() {
    process_.check();
    std::string message;
    {
      const std::lock_guard lock(mutex_);
      message.swap(message_);
    }
    if (!message.empty()) throw std::runtime_error(message);
  }

 private:
  const Process process_;
  std::mutex mutex_;
  std::string message_;
};

}  // namespace ktk

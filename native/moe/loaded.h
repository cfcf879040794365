// A layer's weights, while somebody looks at them.
#pragma once

#include <memory>
#include <mutex>

#include "core/process.h"

namespace ktk {

// What is loaded, for as long as this lives: loading and leaving out wait for it, calls do not.
// False until something has been loaded. A thread must not ask for two of a layer at a time. Throws
// std::logic_error in a forked child if the parent was changing the layer.
template <class Weights>
class Loaded {
 public:
  // `changing` guards `weights`.
  Loaded(const Process& process, std::mutex& changing, const std::unique_ptr<Weights>& weights) {
    if (process.here()) {
      lock_ = std::unique_lock(changing);
    } else {
      // The memory was inherited, and may be read unless a thread of the parent was writing it.
      lock_ = std::unique_lock(changing, std::try_to_lock);
      if (!lock_) process.check();
    }
    weights_ = weights.get();
  }
  explicit operator bool() const { return weights_ != nullptr; }
  const Weights* operator->() const { return weights_; }
  const Weights& operator*() const { return *weights_; }

 private:
  std::unique_lock<std::mutex> lock_;
  const Weights* weights_;
};

}  // namespace ktk

// Work that is queued behind the calls of an engine, and waited for later.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <memory>

#include "moe/engine.h"

namespace ktk {

class Job {
 public:
  Job(Engine& engine, std::function<void()> work) {
    auto promise = std::make_shared<std::promise<void>>();
    ended_ = promise->get_future().share();
    engine.enqueue([work = std::move(work), promise]() mutable {
      try {
        work();
      } catch (...) {
        work = nullptr;  // what it holds goes before anybody hears of the end
        promise->set_exception(std::current_exception());
        return;
      }
      work = nullptr;
      promise->set_value();
    });
  }
  ~Job() {
    if (process_.here()) ended_.wait();
  }

  // In a forked child: as wait().
  bool done() const {
    process_.check();
    return ended_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }

  // Rethrows what the work threw, at every wait. Throws std::logic_error in a forked child.
  void wait() const {
    process_.check();
    ended_.get();
  }

 private:
  const Process process_;
  std::shared_future<void> ended_;
};

}  // namespace ktk

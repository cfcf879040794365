// A worker pool with what layers share on it: one call at a time, scratch memory, a queue.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "core/worker_pool.h"
#include "moe/scratch.h"

namespace ktk {

// Like BackendTable, its reference count must not be Python's.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  explicit Engine(const WorkerPool::Options& options);
  // For owners that may let go anywhere: the last reference can go in a job of the engine's own
  // thread, or in a forked child, where the threads to wait for do not exist.
  static std::shared_ptr<Engine> make(const WorkerPool::Options& options);
  // Finishes what is queued.
  ~Engine();

  WorkerPool pool;
  Scratch scratch;
  std::mutex busy;  // held for the length of a call

  // Runs `job` later, in the order of calls, on a thread of the engine's own (which is worker 0 of
  // the regions it runs). `job` must not throw.
  void enqueue(std::function<void()> job);

 private:
  void serve();

  std::mutex queue_mutex_;
  std::condition_variable queue_changed_;
  std::deque<std::function<void()>> queue_;
  bool stopping_ = false;
  std::thread server_;  // started by the first enqueue
};

}  // namespace ktk

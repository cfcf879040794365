// A worker pool with what layers share on it: one call at a time, scratch memory, a queue.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "core/process.h"
#include "core/worker_pool.h"
#include "moe/scratch.h"

namespace ktk {

// Like BackendTable, its reference count must not be Python's.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  explicit Engine(const WorkerPool::Options& options, const Topology& topology = ktk::topology());
  // The deleter is safe where the last reference goes on the queue's own thread (the engine then
  // goes on another) or in a forked child (nothing is freed).
  static std::shared_ptr<Engine> make(const WorkerPool::Options& options,
                                      const Topology& topology = ktk::topology());
  // Finishes what is queued.
  ~Engine();

  WorkerPool pool;
  Scratch scratch;

  // A caller's turn on the pool, held for the length of a call. Throws std::logic_error in a child
  // of the process that made the engine, where another thread's turn may never end.
  std::unique_lock<std::mutex> turn();

  // Runs `job` later, in the order of calls, on a thread of the engine's own (which is worker 0 of
  // the regions it runs). `job` must not throw. Throws std::runtime_error where the system starts
  // no thread. In a forked child: as turn().
  void enqueue(std::function<void()> job);

 private:
  void start_server();
  void serve();

  const Process process_;
  std::mutex busy_;
  std::mutex queue_mutex_;
  std::condition_variable queue_changed_;
  std::deque<std::function<void()>> queue_;
  bool stopping_ = false;
  std::thread server_;  // started by the first enqueue
};

}  // namespace ktk

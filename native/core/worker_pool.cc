#include "core/worker_pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cfenv>
#include <cstdint>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "core/affinity.h"
#include "core/floats.h"
#include "core/placement.h"
#include "core/process.h"
#include "core/signals.h"
#include "core/sync.h"

namespace ktk {
namespace {

// Leaves barrier() where another worker failed. run() reports that worker's exception instead.
struct BarrierBroken : std::exception {
  const char* what() const noexcept override { return "another worker of the region failed"; }
};

// The calling thread's part in a region of any pool.
struct Part {
  const void* pool = nullptr;
  int worker = -1;
};
thread_local Part current;

// Moves the calling thread to some CPUs for as long as it lives.
class Visit {
 public:
  explicit Visit(const CpuMask& cpus) : moved_(home_.read() && cpus.apply()) {}
  ~Visit() {
    if (moved_) home_.apply();
  }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

 private:
  CpuMask home_;
  bool moved_;
};

CpuMask known_cpus(const Topology& topology) {
  CpuMask known;
  for (const Node& node : topology.nodes) {
    for (int cpu : node.cpus) known.add(cpu);
  }
  return known;
}

}  // namespace

struct WorkerPool::Impl {
  Impl(const Options& options, const Topology& topology)
      : places(place_workers(options, topology)),
        pinned(options.pin),
        spin(may_spin(places, topology)),
        callers_cpus(caller_cpus(places, topology)),
        known(pinned ? known_cpus(topology) : CpuMask()),
        arrived(static_cast<int>(places.size())),
        ended(static_cast<int>(places.size())) {
    try {
      start_threads();
    } catch (...) {
      stop_threads();
      throw;
    }
  }
  ~Impl() { stop_threads(); }

  void start_threads() {
    const BlockSignals block;
    for (size_t w = 1; w < places.size(); ++w) {
      try {
        threads.emplace_back([this, w] { serve(static_cast<int>(w)); });
      } catch (const std::system_error& error) {
        throw std::runtime_error("the system started " + std::to_string(w - 1) + " of " +
                                 std::to_string(places.size() - 1) + " threads, and no more (" +
                                 error.code().message() +
                                 "): use fewer, or raise the limits (ulimit -u, pids.max)");
      }
      const pthread_t handle = threads.back().native_handle();
      pthread_setname_np(handle, ("ktk-" + std::to_string(w)).substr(0, 15).c_str());
      if (pinned && !CpuMask(places[w].cpu).apply_to(handle)) places[w].cpu = -1;
    }
  }

  void stop_threads() {
    {
      const std::lock_guard<std::mutex> turn(callers);
      stop.store(true, std::memory_order_relaxed);
      start.advance();
    }
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }

  // The life of an owned thread.
  void serve(int worker) {
    std::fesetenv(FE_DFL_ENV);
    for (uint32_t region = 0;; ++region) {
      start.wait(region, spin);
      if (stop.load(std::memory_order_relaxed)) return;
      work(worker);
    }
  }

  // One worker's part of a region.
  void work(int worker) {
    current = {this, worker};
    try {
      (*body)(worker);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
      passed.advance();  // those in barrier() look at `failed`
    }
    current = {};
    if (ended.arrive(worker)) end.advance();
  }

  bool must_move() const {
    const int cpu = sched_getcpu();
    return cpu >= 0 && known.has(cpu) && !callers_cpus.has(cpu);
  }

  void run_here(const std::function<void(int)>& work_body) {
    const DefaultFloats floats;
    body = &work_body;
    error = nullptr;
    failed.store(false, std::memory_order_relaxed);
    arrived.reset();
    const uint32_t before = end.value();
    start.advance();
    work(0);
    end.wait(before, spin);
    body = nullptr;
  }

  std::vector<Place> places;
  const bool pinned;
  const bool spin;
  // Where callers compute; from elsewhere they are moved there, unless the topology, or the pool,
  // leaves open where they are.
  const CpuMask callers_cpus, known;
  const Process process;
  std::mutex callers;
  std::vector<std::thread> threads;

  // Written by the caller between two regions, read by workers after `start` moved.
  const std::function<void(int)>* body = nullptr;
  std::exception_ptr error;
  std::atomic<bool> stop{false};
  std::atomic<bool> failed{false};

  Signal start;      // regions begun
  Arrivals arrived;  // at the barrier
  Signal passed;     // barriers opened
  Arrivals ended;    // bodies that returned
  Signal end;        // regions ended
};

WorkerPool::WorkerPool(const Options& options, const Topology& topology)
    : impl_(std::make_unique<Impl>(options, topology)) {}

WorkerPool::~WorkerPool() {
  // After fork() there are no threads to join, and their locks are in any state: leave all as it
  // is.
  if (!impl_->process.here()) static_cast<void>(impl_.release());
}

int WorkerPool::size() const { return static_cast<int>(impl_->places.size()); }

int WorkerPool::node_of(int worker) const {
  return impl_->places.at(static_cast<size_t>(worker)).node;
}

int WorkerPool::cpu_of(int worker) const {
  return impl_->pinned ? impl_->places.at(static_cast<size_t>(worker)).cpu : -1;
}

void WorkerPool::run(const std::function<void(int)>& body) {
  if (current.pool != nullptr) {
    throw std::logic_error("WorkerPool::run was called by a worker of a pool that is running");
  }
  impl_->process.check();
  std::exception_ptr error;
  {
    const std::lock_guard<std::mutex> turn(impl_->callers);
    if (impl_->must_move()) {
      const Visit visit(impl_->callers_cpus);
      impl_->run_here(body);
    } else {
      impl_->run_here(body);
    }
    error = std::exchange(impl_->error, nullptr);
  }
  if (error) std::rethrow_exception(error);
}

void WorkerPool::barrier() {
  Impl& impl = *impl_;
  if (current.pool != &impl) {
    throw std::logic_error("WorkerPool::barrier was called outside a region of the pool");
  }
  // In this order: whoever sees the opening that a failure causes also sees `failed`.
  const uint32_t before = impl.passed.value();
  if (impl.failed.load(std::memory_order_acquire)) throw BarrierBroken();
  if (impl.arrived.arrive(current.worker)) {
    impl.passed.advance();
  } else {
    impl.passed.wait(before, impl.spin);
  }
  if (impl.failed.load(std::memory_order_acquire)) throw BarrierBroken();
}

}  // namespace ktk

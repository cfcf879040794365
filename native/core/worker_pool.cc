#include "core/worker_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <climits>
#include <cstdint>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "core/affinity.h"

namespace ktk {
namespace {

constexpr size_t kCacheLine = 64;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");  // "yield" is a no-op on most cores; this waits about as long as pause
#endif
}

using Clock = std::chrono::steady_clock;
// The time between two layers of a model that decodes, and well above the cost of a futex.
constexpr std::chrono::microseconds kSpin{200};

// A counter that threads wait for. Sleeping costs nothing to those who spin: the system is only
// called when somebody sleeps.
class alignas(kCacheLine) Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }

  void advance() {
    // Sequentially consistent, as is wait(): either we see the sleeper, or it sees the new value.
    value_.fetch_add(1);
    if (sleepers_.load() != 0) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
  }

  // Returns when the value is not `old`. Without `spin`, others need this CPU: gives way at once.
  void wait(uint32_t old, bool spin) {
    if (spin ? spin_while(old) : yield_while(old)) return;
    sleepers_.fetch_add(1);
    while (value_.load() == old) futex(FUTEX_WAIT_PRIVATE, old);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  bool spin_while(uint32_t old) const {
    Clock::time_point end{};
    while (true) {
      for (int i = 0; i < 64; ++i) {
        if (value() != old) return true;
        pause();
      }
      const Clock::time_point now = Clock::now();
      if (end == Clock::time_point{}) end = now + kSpin;
      if (now >= end) return false;
    }
  }

  bool yield_while(uint32_t old) const {
    for (int i = 0; i < 4; ++i) {
      if (value() != old) return true;
      sched_yield();
    }
    return false;
  }

  void futex(int operation, uint32_t argument) {
    static_assert(sizeof value_ == sizeof(uint32_t) && decltype(value_)::is_always_lock_free);
    syscall(SYS_futex, &value_, operation, argument, nullptr, nullptr, 0);
  }

  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};

// Counts the arrivals of all workers, in two levels: with 64 threads on one counter, the last one
// waits several microseconds for the cache line.
class Arrivals {
 public:
  explicit Arrivals(int workers) : leaves_((static_cast<size_t>(workers) + kFan - 1) / kFan) {
    for (size_t i = 0; i < leaves_.size(); ++i) {
      leaves_[i].expected = std::min<uint32_t>(kFan, static_cast<uint32_t>(workers - i * kFan));
    }
  }

  // True for the last one, which finds the counter ready for the next round. The others must wait
  // for a sign from the last one before they arrive again.
  bool arrive(int worker) {
    Leaf& leaf = leaves_[static_cast<size_t>(worker) / kFan];
    if (leaf.count.fetch_add(1, std::memory_order_acq_rel) + 1 != leaf.expected) return false;
    leaf.count.store(0, std::memory_order_relaxed);
    if (root_.fetch_add(1, std::memory_order_acq_rel) + 1 != leaves_.size()) return false;
    root_.store(0, std::memory_order_relaxed);
    return true;
  }

  // Forgets a round that an exception cut short. Nobody may be arriving.
  void reset() {
    for (Leaf& leaf : leaves_) leaf.count.store(0, std::memory_order_relaxed);
    root_.store(0, std::memory_order_relaxed);
  }

 private:
  static constexpr size_t kFan = 16;
  struct alignas(kCacheLine) Leaf {
    std::atomic<uint32_t> count{0};
    uint32_t expected = 0;
  };
  std::vector<Leaf> leaves_;
  alignas(kCacheLine) std::atomic<uint32_t> root_{0};
};

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

// Rounding and denormals as a new thread has them. Worker 0 is a thread of the user, who may have
// changed them; the others' results must not differ from its.
class DefaultFloats {
 public:
  DefaultFloats() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloats() { std::fesetenv(&saved_); }
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
  std::fenv_t saved_;
};

// Threads that are made inside inherit a mask that blocks all signals but those of their own
// faults (the tests emulate instructions in a SIGILL handler): handlers of the program, Python's
// for one, run on threads of the program.
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t blocked;
    sigfillset(&blocked);
    for (int fault : {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGTRAP, SIGSYS, SIGABRT}) {
      sigdelset(&blocked, fault);
    }
    pthread_sigmask(SIG_SETMASK, &blocked, &saved_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }
  BlockSignals(const BlockSignals&) = delete;
  BlockSignals& operator=(const BlockSignals&) = delete;

 private:
  sigset_t saved_;
};

// Moves the calling thread to a CPU for as long as it lives.
class Visit {
 public:
  explicit Visit(int cpu) : moved_(home_.read() && CpuMask(cpu).apply()) {}
  ~Visit() {
    if (moved_) home_.apply();
  }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

 private:
  CpuMask home_;
  bool moved_;
};

// Where a worker belongs.
struct Place {
  int cpu;
  int node;  // position in Topology::nodes
};

// `threads` workers, grouped by node. Nodes get workers in proportion to their cores, because
// every node's memory channels are wanted; a node's cores come before its second hardware threads.
std::vector<Place> spread(const Topology& topology, int threads) {
  const size_t nodes = topology.nodes.size();
  std::vector<size_t> share(nodes, 0);
  for (int i = 0; i < threads; ++i) {
    size_t best = 0;
    for (size_t n = 1; n < nodes; ++n) {
      // The next seat goes to the largest cores / (share + 1); compared without division.
      if (topology.nodes[n].cores.size() * (share[best] + 1) >
          topology.nodes[best].cores.size() * (share[n] + 1)) {
        best = n;
      }
    }
    ++share[best];
  }
  std::vector<Place> places;
  for (size_t n = 0; n < nodes; ++n) {
    const Node& node = topology.nodes[n];
    std::vector<int> order = node.cores;
    for (int cpu : node.cpus) {
      if (std::find(node.cores.begin(), node.cores.end(), cpu) == node.cores.end()) {
        order.push_back(cpu);
      }
    }
    for (size_t i = 0; i < share[n]; ++i) {
      places.push_back({order[i % order.size()], static_cast<int>(n)});
    }
  }
  return places;
}

int node_with(const Topology& topology, int cpu) {
  for (size_t n = 0; n < topology.nodes.size(); ++n) {
    const std::vector<int>& cpus = topology.nodes[n].cpus;
    if (std::find(cpus.begin(), cpus.end(), cpu) != cpus.end()) return static_cast<int>(n);
  }
  throw std::invalid_argument("CPU " + std::to_string(cpu) +
                              " does not exist, is offline or is outside the affinity mask");
}

int core_with(const Topology& topology, int cpu) {
  for (const Node& node : topology.nodes) {
    const auto found = std::find(node.cpus.begin(), node.cpus.end(), cpu);
    const size_t i = static_cast<size_t>(found - node.cpus.begin());
    if (i < node.core_of.size()) return node.core_of[i];
  }
  return cpu;
}

std::vector<Place> plan(const WorkerPool::Options& options, const Topology& topology) {
  if (options.threads < 0) {
    throw std::invalid_argument("expected a number of threads >= 0, got " +
                                std::to_string(options.threads));
  }
  if (options.cpus.empty()) {
    return spread(topology, options.threads > 0 ? options.threads : topology.default_threads());
  }
  if (options.threads != 0 && static_cast<size_t>(options.threads) != options.cpus.size()) {
    throw std::invalid_argument("got " + std::to_string(options.cpus.size()) + " CPUs for " +
                                std::to_string(options.threads) + " threads");
  }
  std::vector<Place> places;
  for (int cpu : options.cpus) places.push_back({cpu, node_with(topology, cpu)});
  std::stable_sort(places.begin(), places.end(),
                   [](const Place& a, const Place& b) { return a.node < b.node; });
  return places;
}

}  // namespace

struct WorkerPool::Impl {
  Impl(const Options& options, const Topology& topology)
      : places(plan(options, topology)),
        pinned(options.pin),
        pid(getpid()),
        arrived(static_cast<int>(places.size())),
        ended(static_cast<int>(places.size())) {
    plan_waiting(topology);
    try {
      start_threads();
    } catch (...) {
      stop_threads();
      throw;
    }
  }
  ~Impl() { stop_threads(); }

  // Decides who may spin, and from where a caller has to move.
  void plan_waiting(const Topology& topology) {
    std::vector<int> distinct;
    for (const Place& place : places) distinct.push_back(place.cpu);
    std::sort(distinct.begin(), distinct.end());
    distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
    const size_t quota = topology.quota > 0 ? static_cast<size_t>(topology.quota) : SIZE_MAX;
    // More threads than CPUs: who spins keeps the one it waits for from running. A quota is used up
    // by spinning all the same.
    spin = places.size() <= std::min(distinct.size(), quota);

    if (!pinned) return;
    const int home_core = core_with(topology, places[0].cpu);
    for (size_t w = 1; w < places.size(); ++w) {
      const int core = core_with(topology, places[w].cpu);
      for (const Node& node : topology.nodes) {
        for (int cpu : node.cpus) {
          // A second hardware thread of a busy core is as bad as the first.
          if (core != core_with(topology, cpu) || cpu == places[0].cpu) continue;
          if (core == home_core && cpu != places[w].cpu) continue;
          if (taken.size() <= static_cast<size_t>(cpu)) taken.resize(static_cast<size_t>(cpu) + 1);
          taken[static_cast<size_t>(cpu)] = true;
        }
      }
    }
  }

  void start_threads() {
    const BlockSignals block;
    for (size_t w = 1; w < places.size(); ++w) {
      threads.emplace_back([this, w] { serve(static_cast<int>(w)); });
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
    if (taken.empty()) return false;
    const int cpu = sched_getcpu();
    return cpu >= 0 && static_cast<size_t>(cpu) < taken.size() && taken[static_cast<size_t>(cpu)];
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
  bool pinned;
  bool spin = false;
  std::vector<bool> taken;  // CPUs whose core an owned thread uses
  const pid_t pid;
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
  if (impl_->pid != getpid()) static_cast<void>(impl_.release());
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
  if (impl_->pid != getpid()) {
    throw std::logic_error(
        "the threads of a WorkerPool do not survive fork(); make a new WorkerPool after fork()");
  }
  std::exception_ptr error;
  {
    const std::lock_guard<std::mutex> turn(impl_->callers);
    if (impl_->must_move()) {
      const Visit visit(impl_->places[0].cpu);
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

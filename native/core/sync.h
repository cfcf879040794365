// How threads of a worker pool wait for each other: spinning for a while, then asleep on a futex.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ktk {

inline constexpr size_t kCacheLine = 64;

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");  // "yield" is a no-op on most cores; this waits about as long as pause
#endif
}

// The time between two layers of a model that decodes, and well above the cost of a futex.
inline constexpr std::chrono::microseconds kSpin{200};

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
  using Clock = std::chrono::steady_clock;

  bool spin_while(uint32_t old) const {
    Clock::time_point end{};
    while (true) {
      for (int i = 0; i < 64; ++i) {
        if (value() != old) return true;
        cpu_pause();
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

}  // namespace ktk

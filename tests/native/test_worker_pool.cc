#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <cstdlib>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include "check.h"
#include "core/placement.h"
#include "core/worker_pool.h"

using ktk::Topology;
using ktk::WorkerPool;
using std::chrono::milliseconds;
using List = std::vector<int>;

namespace {

WorkerPool make_pool(int threads) {
  return WorkerPool({.threads = threads, .cpus = {}, .pin = true});
}

// More workers than this machine has CPUs included: nobody may starve there either.
const List kSizes{1, 2, 3, 5, 8, 17, 33};

// Two nodes of two cores with two hardware threads each. The CPUs need not exist: the pools made
// with it do not pin.
Topology fake_topology() {
  return {.nodes = {{.id = 0, .cores = {0, 1}, .cpus = {0, 1, 4, 5}, .core_of = {0, 1, 0, 1}},
                    {.id = 2, .cores = {2, 3}, .cpus = {2, 3, 6, 7}, .core_of = {2, 3, 2, 3}}},
          .quota = 0};
}

List nodes_of(const WorkerPool& pool) {
  List nodes;
  for (int w = 0; w < pool.size(); ++w) nodes.push_back(pool.node_of(w));
  return nodes;
}

double process_seconds() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

}  // namespace

TEST(every_worker_runs_the_body_once) {
  for (int size : kSizes) {
    WorkerPool pool = make_pool(size);
    CHECK_EQ(pool.size(), size);
    for (int region = 0; region < 50; ++region) {
      std::vector<int> calls(static_cast<size_t>(size), 0);
      pool.run([&](int worker) { ++calls[static_cast<size_t>(worker)]; });
      CHECK_EQ(calls, List(static_cast<size_t>(size), 1));
    }
  }
}

TEST(worker_0_is_the_caller_and_the_others_are_not) {
  WorkerPool pool = make_pool(3);
  std::vector<std::thread::id> ids(3);
  pool.run([&](int worker) { ids[static_cast<size_t>(worker)] = std::this_thread::get_id(); });
  CHECK(ids[0] == std::this_thread::get_id());
  CHECK_EQ(std::set<std::thread::id>(ids.begin(), ids.end()).size(), 3u);
}

TEST(a_barrier_shows_what_was_written_before_it) {
  for (int size : kSizes) {
    WorkerPool pool = make_pool(size);
    std::vector<int> values(static_cast<size_t>(size), -1);
    std::atomic<int> wrong{0};
    // Plain memory on purpose: the thread sanitizer judges whether the barrier orders it.
    pool.run([&](int worker) {
      for (int round = 0; round < 20; ++round) {
        values[static_cast<size_t>(worker)] = round;
        pool.barrier();
        for (int value : values) wrong += value != round;
        pool.barrier();
      }
    });
    CHECK_EQ(wrong.load(), 0);
  }
}

TEST(regions_follow_each_other_rapidly) {
  for (int size : {2, 3}) {
    WorkerPool pool = make_pool(size);
    long sum = 0;  // written by another worker in every region
    for (int region = 0; region < 3000; ++region) {
      pool.run([&](int worker) {
        if (worker == region % size) ++sum;
      });
    }
    CHECK_EQ(sum, 3000);
  }
}

TEST(workers_wake_up_after_they_slept) {
  WorkerPool pool = make_pool(4);
  for (int region = 0; region < 10; ++region) {
    std::this_thread::sleep_for(milliseconds(3));
    std::atomic<int> calls{0};
    pool.run([&](int worker) {
      if (worker == region % 4) std::this_thread::sleep_for(milliseconds(2));  // others sleep too
      pool.barrier();
      ++calls;
    });
    CHECK_EQ(calls.load(), 4);
  }
}

TEST(an_exception_of_any_worker_reaches_the_caller) {
  WorkerPool pool = make_pool(4);
  for (int thrower = 0; thrower < 4; ++thrower) {
    std::atomic<int> ended{0};
    const std::string message = CHECK_THROWS(std::runtime_error, pool.run([&](int worker) {
      if (worker == thrower) throw std::runtime_error("worker " + std::to_string(worker));
      ++ended;
    }));
    CHECK_EQ(message, "worker " + std::to_string(thrower));
    CHECK_EQ(ended.load(), 3);
  }
  std::atomic<int> calls{0};
  pool.run([&](int) { ++calls; });
  CHECK_EQ(calls.load(), 4);
}

TEST(one_of_many_exceptions_reaches_the_caller) {
  WorkerPool pool = make_pool(4);
  for (int i = 0; i < 100; ++i) {
    CHECK_THROWS(std::runtime_error, pool.run([](int) { throw std::runtime_error("all"); }));
  }
}

TEST(an_exception_releases_those_in_the_barrier) {
  WorkerPool pool = make_pool(4);
  for (int thrower = 0; thrower < 4; ++thrower) {
    for (int delay : {0, 3}) {  // the others arrive before, and sleep, or after
      std::atomic<int> passed{0};
      const std::string message = CHECK_THROWS(std::runtime_error, pool.run([&](int worker) {
        pool.barrier();
        if (worker == thrower) {
          std::this_thread::sleep_for(milliseconds(delay));
          throw std::runtime_error("original");
        }
        pool.barrier();
        ++passed;
      }));
      CHECK_EQ(message, "original");
      CHECK_EQ(passed.load(), 0);
    }
  }
  // The cut-off round is forgotten.
  std::atomic<int> first{0}, wrong{0};
  pool.run([&](int) {
    ++first;
    pool.barrier();
    wrong += first.load() != 4;
  });
  CHECK_EQ(wrong.load(), 0);
}

TEST(a_region_inside_a_region_is_refused) {
  WorkerPool pool = make_pool(2), other = make_pool(2);
  std::atomic<int> refused{0};
  pool.run([&](int) {
    for (WorkerPool* inner : {&pool, &other}) {
      try {
        inner->run([](int) {});
      } catch (const std::logic_error&) {
        ++refused;
      }
    }
  });
  CHECK_EQ(refused.load(), 4);
  CHECK_THROWS(std::logic_error, pool.run([&](int) { pool.run([](int) {}); }));
}

TEST(a_barrier_outside_its_pool_is_refused) {
  WorkerPool pool = make_pool(2), other = make_pool(2);
  CHECK_THROWS(std::logic_error, pool.barrier());
  CHECK_THROWS(std::logic_error, pool.run([&](int) { other.barrier(); }));
}

TEST(callers_take_turns) {
  WorkerPool pool = make_pool(3);
  int inside = 0, most = 0, total = 0;  // guarded by nothing but the turns
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        pool.run([&](int worker) {
          if (worker == 1) most = std::max(most, ++inside);
          pool.barrier();
          if (worker == 2) --inside, ++total;
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK_EQ(most, 1);
  CHECK_EQ(total, 200);
}

TEST(pools_work_side_by_side) {
  WorkerPool first = make_pool(2), second = make_pool(3);
  std::atomic<int> calls{0};
  const auto use = [&](WorkerPool& pool) {
    for (int i = 0; i < 200; ++i) {
      pool.run([&](int) {
        ++calls;
        pool.barrier();
      });
    }
  };
  std::thread other([&] { use(second); });
  use(first);
  other.join();
  CHECK_EQ(calls.load(), 200 * 5);
}

TEST(a_forked_child_gets_an_error_and_can_make_a_new_pool) {
  auto* pool = new WorkerPool({.threads = 2, .cpus = {}, .pin = true});
  pool->run([](int) {});
  const pid_t child = fork();
  if (child == 0) {
    int status = 1;
    try {
      pool->run([](int) {});
    } catch (const std::logic_error& error) {
      if (std::string(error.what()).find("fork") != std::string::npos) status = 0;
    }
    delete pool;  // must not wait for threads that are not there
#if !defined(__SANITIZE_THREAD__)
    constexpr bool kMayMakeThreads = true;
#else
    constexpr bool kMayMakeThreads = false;
#endif
    // ThreadSanitizer and qemu-user end a child that makes threads.
    if (kMayMakeThreads && !std::getenv("QEMU_CPU")) {
      std::atomic<int> calls{0};
      make_pool(2).run([&](int) { ++calls; });
      if (calls != 2) status = 2;
    }
    _exit(status);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status));
  CHECK_EQ(WEXITSTATUS(status), 0);
  pool->run([](int) {});
  delete pool;
}

TEST(an_idle_pool_uses_no_cpu) {
  // The first spins before it sleeps. The second has more threads than most test machines have
  // CPUs.
  WorkerPool pool = make_pool(0), crowded = make_pool(5);
  pool.run([](int) {});
  crowded.run([](int) {});
  std::this_thread::sleep_for(milliseconds(50));
  const double before = process_seconds();
  std::this_thread::sleep_for(milliseconds(500));
  const double used = process_seconds() - before;
  CHECK_LESS(used, 0.005);
}

TEST(workers_that_wait_long_in_a_barrier_sleep) {
  for (int size : {0, 5}) {
    WorkerPool pool = make_pool(size);
    const double before = process_seconds();
    pool.run([&](int worker) {
      if (worker == pool.size() - 1) std::this_thread::sleep_for(milliseconds(300));
      pool.barrier();
    });
    const double used = process_seconds() - before;
    CHECK_LESS(used, 0.03);
  }
}

TEST(owned_threads_stay_on_their_cpu) {
  WorkerPool pool = make_pool(0);
  CHECK_EQ(pool.size(), ktk::topology().default_threads());
  std::vector<List> masks(static_cast<size_t>(pool.size()));
  pool.run([&](int worker) { masks[static_cast<size_t>(worker)] = ktk::affinity_mask(); });
  for (int w = 1; w < pool.size(); ++w) {
    CHECK_EQ(masks[static_cast<size_t>(w)], List{pool.cpu_of(w)});
  }
}

TEST(a_caller_leaves_the_cpu_of_an_owned_thread_for_the_region) {
  WorkerPool pool = make_pool(0);
  if (pool.size() < 2) return;
  int during = -1;
  List after, owned;
  for (int w = 1; w < pool.size(); ++w) owned.push_back(pool.cpu_of(w));
  std::thread([&] {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    CPU_SET(static_cast<size_t>(pool.cpu_of(1)), &mask);
    pthread_setaffinity_np(pthread_self(), sizeof mask, &mask);
    pool.run([&](int worker) {
      if (worker == 0) during = sched_getcpu();
    });
    after = ktk::affinity_mask();
  }).join();
  CHECK(std::find(owned.begin(), owned.end(), during) == owned.end());
  CHECK_EQ(after, List{pool.cpu_of(1)});
}

TEST(without_pinning_threads_go_anywhere) {
  WorkerPool pool({.threads = 2, .cpus = {}, .pin = false});
  CHECK_EQ(pool.cpu_of(1), -1);
  std::vector<List> masks(2);
  pool.run([&](int worker) { masks[static_cast<size_t>(worker)] = ktk::affinity_mask(); });
  CHECK_EQ(masks[1], masks[0]);
}

TEST(workers_are_spread_over_nodes_in_proportion_to_cores) {
  const auto nodes = [](int threads) {
    return nodes_of(WorkerPool({.threads = threads, .cpus = {}, .pin = false}, fake_topology()));
  };
  CHECK_EQ(nodes(1), (List{0}));
  CHECK_EQ(nodes(2), (List{0, 1}));
  CHECK_EQ(nodes(3), (List{0, 0, 1}));
  CHECK_EQ(nodes(0), (List{0, 0, 1, 1}));
  CHECK_EQ(nodes(8), (List{0, 0, 0, 0, 1, 1, 1, 1}));

  Topology uneven = fake_topology();
  uneven.nodes[1] = {.id = 1, .cores = {2}, .cpus = {2}, .core_of = {2}};
  CHECK_EQ(nodes_of(WorkerPool({.threads = 3, .cpus = {}, .pin = false}, uneven)), (List{0, 0, 1}));
}

TEST(given_cpus_are_kept_in_order_and_grouped_by_node) {
  const WorkerPool pool({.threads = 0, .cpus = {6, 1, 2, 0}, .pin = false}, fake_topology());
  CHECK_EQ(nodes_of(pool), (List{0, 0, 1, 1}));
  const int cpu = ktk::topology().nodes[0].cpus[0];
  const WorkerPool pinned({.threads = 2, .cpus = {cpu, cpu}, .pin = true});
  CHECK_EQ(pinned.cpu_of(0), cpu);
  CHECK_EQ(pinned.cpu_of(1), cpu);
}

TEST(a_caller_computes_on_free_cores_of_worker_0s_node) {
  const Topology fake = fake_topology();  // the second hardware thread of core c is c + 4
  const auto free = [&](const List& cpus) {
    const WorkerPool::Options options{.threads = 0, .cpus = cpus, .pin = true};
    return ktk::caller_cpus(ktk::place_workers(options, fake), fake);
  };
  CHECK_EQ(free({0}), (List{0, 1, 4, 5}));
  CHECK_EQ(free({7}), (List{2, 3, 6, 7}));
  CHECK_EQ(free({0, 2}), (List{0, 1, 4, 5}));
  CHECK_EQ(free({0, 1, 2, 3}), (List{0, 4}));
  CHECK_EQ(free({0, 4}), (List{0, 1, 5}));
  CHECK_EQ(free({0, 0}), (List{0, 1, 4, 5}));
}

TEST(who_waits_spins_only_with_a_cpu_of_its_own) {
  Topology machine = fake_topology();
  const auto spins = [&](const List& cpus) {
    return ktk::may_spin(ktk::place_workers({.threads = 0, .cpus = cpus, .pin = true}, machine),
                         machine);
  };
  CHECK(spins({0, 1, 2, 3}));
  CHECK(!spins({0, 1, 1}));
  machine.quota = 3;
  CHECK(spins({0, 1, 2}));
  CHECK(!spins({0, 1, 2, 3}));
}

TEST(bad_options_are_refused) {
  const Topology fake = fake_topology();
  CHECK_THROWS(std::invalid_argument, WorkerPool({.threads = -1, .cpus = {}, .pin = false}, fake));
  CHECK_THROWS(std::invalid_argument, WorkerPool({.threads = 0, .cpus = {8}, .pin = false}, fake));
  CHECK_THROWS(std::invalid_argument, WorkerPool({.threads = 0, .cpus = {-1}, .pin = false}, fake));
  CHECK_THROWS(std::invalid_argument,
               WorkerPool({.threads = 1, .cpus = {0, 1}, .pin = false}, fake));
}

TEST(all_workers_round_alike_whatever_the_caller_set) {
  WorkerPool pool = make_pool(3);
  List modes(3, -1);
  std::fesetround(FE_UPWARD);
  pool.run([&](int worker) { modes[static_cast<size_t>(worker)] = std::fegetround(); });
  const int after = std::fegetround();
  std::fesetround(FE_TONEAREST);
  CHECK_EQ(modes, List(3, FE_TONEAREST));
  CHECK_EQ(after, FE_UPWARD);
}

TEST(signals_of_the_process_are_for_other_threads) {
  WorkerPool pool = make_pool(2);
  sigset_t masks[2];
  pool.run([&](int worker) { pthread_sigmask(SIG_BLOCK, nullptr, &masks[worker]); });
  CHECK_EQ(sigismember(&masks[0], SIGINT), 0);
  CHECK_EQ(sigismember(&masks[1], SIGINT), 1);
  CHECK_EQ(sigismember(&masks[1], SIGILL), 0);
}

TEST(a_pool_can_be_dropped_at_any_time) {
  for (int i = 0; i < 30; ++i) {
    WorkerPool pool = make_pool(1 + i % 4);
    if (i % 3 == 0) pool.run([](int) {});
    if (i % 5 == 0) std::this_thread::sleep_for(milliseconds(1));
  }
}

// A few pinned threads that start together.
#pragma once

#include <functional>
#include <vector>

namespace ktk::probe {

// The CPUs for `threads` threads. Throws std::invalid_argument when there are not as many, or the
// affinity mask lacks one of `cpus`.
std::vector<int> choose_cpus(int threads, std::vector<int> cpus);

// Calls body(thread) on a thread per CPU, all at once, and returns when all have returned. Bodies
// must not throw.
void on_cpus(const std::vector<int>& cpus, const std::function<void(int)>& body);

}  // namespace ktk::probe

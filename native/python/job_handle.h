// Work on a pool's queue that Python waits for.
#pragma once

#include "python/gil.h"
#include "stream/job.h"

namespace ktk {

// Python's hold on a job, which waits for the job when it goes: that may take as long as all that
// is queued before.
struct JobHandle : Job {
  using Job::Job;
  ~JobHandle() {
    const Unlocked unlocked;
    try {
      wait();
    } catch (...) {  // nobody asked how it ended
    }
  }
};

}  // namespace ktk

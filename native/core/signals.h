// Signals of the program are for threads of the program.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace ktk {

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

}  // namespace ktk

// The interpreter's lock, around work that takes its time.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace ktk {

// Lets go of the lock for as long as it lives; nanobind's gil_scoped_release, but for the end.
//
// A thread that wants the lock back when the interpreter is ending is ended by CPython before 3.14:
// pthread_exit unwinds its stack, and the first frame that may not be unwound, such as a
// destructor, aborts the process. Such a thread sleeps instead until the process ends, as CPython
// 3.14 lets it. Nothing that it holds is freed, which is as it was.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // the unwinding, which may not end here
      for (;;) pause();
    }
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace ktk

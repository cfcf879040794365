// The floating-point environment that all results are computed in.
#pragma once

#include <cfenv>

namespace ktk {

// Rounding and denormals as a new thread has them. The thread of a user may have changed them; what
// it computes must not differ from what workers do.
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

}  // namespace ktk

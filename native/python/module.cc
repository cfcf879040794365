// ktk._core: everything that is written once, for every backend.
#include "ktk/abi.h"
#include "python/bind.h"

namespace nb = nanobind;

NB_MODULE(_core, m) {
#ifdef NDEBUG
  // Test frameworks keep references past the end of the interpreter.
  nb::set_leak_warnings(false);
#endif
  m.doc() = "The core of ktk: CPU detection, worker pool, memory and the MoE pipeline.";
  m.attr("ABI") = nb::make_tuple(KTK_ABI_MAJOR, KTK_ABI_MINOR);
  ktk::bind_system(m);
  ktk::bind_backend(m);
  ktk::bind_packed(m);
  ktk::bind_moe(m);
  ktk::bind_stream(m);
}

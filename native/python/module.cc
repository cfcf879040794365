// ktk._core: everything that is written once, for every backend.
#include <cxxabi.h>

#include <exception>
#include <new>
#include <typeinfo>

#include "ktk/abi.h"
#include "python/bind.h"

namespace nb = nanobind;

namespace {

// Backends are built by others, and one may throw what Python has no exception for. Of memory that
// is refused, the C++ library says no more than the name of its exception.
void translate_error(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const std::bad_alloc& refused) {
    if (typeid(refused) != typeid(std::bad_alloc)) throw;
    PyErr_SetString(PyExc_MemoryError, "the system refuses more memory");
  } catch (const std::exception&) {
    throw;  // nanobind knows these
  } catch (const abi::__forced_unwind&) {
    throw;
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError,
                    "a backend threw a C++ exception that is no std::exception; functions of a "
                    "backend's table must not throw (abi.h)");
  }
}

}  // namespace

NB_MODULE(_core, m) {
#ifdef NDEBUG
  // Test frameworks keep references past the end of the interpreter.
  nb::set_leak_warnings(false);
#endif
  m.doc() =
      "The core of ktk: CPU detection, worker pool, memory, the MoE pipeline and dense layers.";
  m.attr("ABI") = nb::make_tuple(KTK_ABI_MAJOR, KTK_ABI_MINOR);
  nb::register_exception_translator(translate_error);
  ktk::bind_system(m);
  ktk::bind_backend(m);
  ktk::bind_packed(m);
  ktk::bind_moe(m);
  ktk::bind_linear(m);
  ktk::bind_between(m);
  ktk::bind_step(m);
  ktk::bind_train(m);
  ktk::bind_stream(m);
  ktk::bind_divide(m);
}

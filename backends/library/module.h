// What Python hears from the module of a backend on a library.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "library/vendor_library.h"

namespace ktk {

// Ends __ktk_backend__() where this machine lacks what the backend needs. ktk then says which
// backend cannot run here, and `reason`; in listings it is absent, and not broken, with `brief`,
// the reason in some ten words, and `advice`, the one step that helps.
[[noreturn]] inline void raise_unsupported(const std::string& reason, const std::string& brief,
                                           const std::string& advice) {
  using namespace nanobind::literals;
  const nanobind::object kind = nanobind::module_::import_("ktk.errors").attr("BackendUnsupported");
  const nanobind::object error =
      kind(reason.c_str(), "brief"_a = brief.c_str(), "advice"_a = advice.c_str());
  PyErr_SetObject(kind.ptr(), error.ptr());
  throw nanobind::python_error();
}

// A RuntimeWarning; ktk asks for a table once.
inline void warn(const std::string& text) {
  if (PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) < 0) throw nanobind::python_error();
}

// What __ktk_library__() returns.
inline nanobind::dict to_dict(const LibraryFacts& facts) {
  nanobind::dict result;
  for (const auto& [word, text] : facts) result[word.c_str()] = text.c_str();
  return result;
}

}  // namespace ktk

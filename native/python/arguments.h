// Arguments of public constructors. What nanobind refuses, it refuses with its list of signatures,
// which is no sentence; these are told apart by name here.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

namespace ktk {

namespace nb = nanobind;

class Arguments {
 public:
  // Throws TypeError for what is given twice, too much, or unknown.
  Arguments(const char* function, std::vector<const char*> names, const nb::args& args,
            const nb::kwargs& kwargs);

  // The argument `name` as a T; `kind` says in words what that is. Throws TypeError.
  template <typename T>
  T get(const char* name, const char* kind, T otherwise) const {
    const nb::handle value = find(name);
    if (value.is_valid() && !nb::try_cast(value, otherwise)) refuse(name, kind, value);
    return otherwise;
  }
  template <typename T>
  T get(const char* name, const char* kind) const {
    if (!find(name).is_valid()) miss(name);
    return get(name, kind, T());
  }

  // Invalid where the argument was left out.
  nb::handle find(const char* name) const;

 private:
  [[noreturn]] void refuse(const char* name, const char* kind, nb::handle value) const;
  [[noreturn]] void miss(const char* name) const;

  std::string function_;
  std::vector<const char*> names_;
  std::vector<nb::handle> values_;
};

}  // namespace ktk

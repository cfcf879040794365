#include "python/arguments.h"

#include <cstring>

namespace ktk {

Arguments::Arguments(const char* function, std::vector<const char*> names, const nb::args& args,
                     const nb::kwargs& kwargs)
    : function_(function), names_(std::move(names)), values_(names_.size()) {
  if (args.size() > names_.size()) {
    throw nb::type_error((function_ + "() takes at most " + std::to_string(names_.size()) +
                          " arguments, got " + std::to_string(args.size()))
                             .c_str());
  }
  for (size_t i = 0; i < args.size(); ++i) values_[i] = args[i];
  for (const auto& [key, value] : kwargs) {
    const std::string given = nb::str(key).c_str();
    size_t i = 0;
    std::string known;
    for (; i < names_.size() && given != names_[i]; ++i) {
      known += (known.empty() ? "" : ", ") + std::string(names_[i]);
    }
    if (i == names_.size()) {
      throw nb::type_error(
          (function_ + "() has no argument '" + given + "'; it takes " + known).c_str());
    }
    if (values_[i].is_valid()) {
      throw nb::type_error((function_ + "() got the argument '" + given + "' twice").c_str());
    }
    values_[i] = value;
  }
}

nb::handle Arguments::find(const char* name) const {
  for (size_t i = 0; i < names_.size(); ++i) {
    if (std::strcmp(names_[i], name) == 0) return values_[i];
  }
  return {};
}

void Arguments::refuse(const char* name, const char* kind, nb::handle value) const {
  std::string shown = nb::repr(value).c_str();
  if (shown.size() > 60) shown = std::string("a ") + nb::type_name(value.type()).c_str();
  throw nb::type_error((function_ + "(): " + name + " must be " + kind + ", got " + shown).c_str());
}

void Arguments::miss(const char* name) const {
  throw nb::type_error((function_ + "() needs the argument '" + name + "'").c_str());
}

}  // namespace ktk

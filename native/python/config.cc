#include "python/config.h"

#include <nanobind/stl/string.h>

#include <cmath>

namespace ktk {

namespace nb = nanobind;

namespace {

[[noreturn]] void refuse(const char* name, const std::string& wanted, nb::handle value) {
  throw nb::type_error(
      (std::string(name) + " must be " + wanted + ", got " + nb::repr(value).c_str()).c_str());
}

void read(const char* name, nb::handle value, size_t& field) {
  if (!nb::try_cast(value, field)) refuse(name, "a size", value);
}

void read(const char* name, nb::handle value, bool& field) {
  if (!nb::try_cast(value, field)) refuse(name, "a bool", value);
}

// None is no limit.
void read(const char* name, nb::handle value, float& field) {
  if (value.is_none()) {
    field = HUGE_VALF;
  } else if (!nb::try_cast(value, field)) {
    refuse(name, "a number or None", value);
  }
}

void read(const char* name, nb::handle value, ktk_activation& field) {
  std::string asked, known;
  if (!nb::try_cast(value, asked)) refuse(name, "a name", value);
  for (const auto& one : kActivations) {
    if (asked == one.name) {
      field = one.kind;
      return;
    }
    known += (known.empty() ? "" : ", ") + std::string(one.name);
  }
  throw nb::value_error(
      (std::string(name) + " must be one of " + known + ", got '" + asked + "'").c_str());
}

}  // namespace

Config config_from(nb::handle given) {
  Config config;
  visit_fields(config, [given](const char* name, auto& field) {
    read(name, nb::getattr(given, name), field);
  });
  if (!(config.glu.limit > 0)) throw nb::value_error("activation_limit must be positive");
  return config;
}

std::vector<std::string> activation_names() {
  std::vector<std::string> names;
  for (const auto& one : kActivations) names.emplace_back(one.name);
  return names;
}

}  // namespace ktk

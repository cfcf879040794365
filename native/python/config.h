// ktk.MoEConfig as the core has it.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

#include "moe/config.h"

namespace ktk {

// Reads the fields of an object. Throws TypeError or ValueError with the name of the field.
Config config_from(nanobind::handle given);

// Names of all activation functions, as `activation` takes them.
std::vector<std::string> activation_names();

}  // namespace ktk

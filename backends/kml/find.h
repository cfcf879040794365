// Finds the Kunpeng Math Library.
#pragma once

#include <string>

#include "common/vendor_library.h"
#include "kml/library.h"

namespace ktk::kml {

struct Found {
  Calls calls{};
  LibraryFacts facts;   // empty: none was found
  std::string warning;  // the one that the user named cannot be used
  std::shared_ptr<const VendorLibrary> library;
};

Found find();

}  // namespace ktk::kml

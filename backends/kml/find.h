// Finds the Kunpeng Math Library.
#pragma once

#include <string>

#include "kml/library.h"
#include "library/vendor_library.h"

namespace ktk::kml {

struct Found {
  Calls calls{};
  LibraryFacts facts;   // empty: none was found
  std::string warning;  // the one that the user named cannot be used
  std::shared_ptr<const VendorLibrary> library;
};

Found find();

}  // namespace ktk::kml

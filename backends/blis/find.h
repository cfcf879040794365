// Finds the library that this process computes with.
#pragma once

#include <string>
#include <vector>

#include "blis/library.h"
#include "library/vendor_library.h"

namespace ktk::blis {

struct Found {
  Calls calls{};
  bool lpgemm = false, sgemm = false;
  std::string layout;         // of lpgemm's packed weights
  LibraryFacts facts;         // for Python
  std::string warning;        // worth telling the user; may be empty
  std::string failure;        // why nothing was found, and what to install; empty if something was
  std::string brief, advice;  // the same for one line: why, and what to do
  std::shared_ptr<const VendorLibrary> library;
};

Found find();

}  // namespace ktk::blis

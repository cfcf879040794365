// The backend that a test is linked with: tests are compiled once, backend.cc for each backend.
#pragma once

#include <span>

#include "ktk/abi.h"

extern const ktk_backend kBackend;
// What the backend is given, and stores in one of its formats: a backend with a single one does not
// look at it, and takes bf16 for all that it stores.
extern const std::span<const ktk_format> kGiven;

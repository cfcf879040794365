// The backend that a test is linked with: tests are compiled once, backend.cc for each backend.
#pragma once

#include "ktk/abi.h"

extern const ktk_backend kBackend;

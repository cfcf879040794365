// Small products compared with a plain loop, before a library is trusted.
#pragma once

#include <string>

#include "blis/library.h"

namespace ktk::blis {

// Both throw std::runtime_error with what is wrong.
void test_lpgemm(const Calls& calls);
void test_sgemm(const Calls& calls);

// Digits that tell apart how libraries reorder weights: a hash of some reordered ones.
std::string reorder_fingerprint(const Calls& calls);

}  // namespace ktk::blis

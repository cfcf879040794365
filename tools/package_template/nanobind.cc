// The compiled half of nanobind, found on the include path that meson.build gives.
#include <nb_combined.cpp>

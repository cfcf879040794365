#include "ktk/module.h"

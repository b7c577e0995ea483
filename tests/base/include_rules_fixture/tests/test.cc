// SPDX-License-Identifier: Apache-2.0
#include "node/loop.h"
#include "bench/report.h"
#include "tests/helper.h"

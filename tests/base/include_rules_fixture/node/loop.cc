// SPDX-License-Identifier: Apache-2.0
#include "core/engine/engine.h"
#include "transport/transport.h"
#include "membership/agent.h"
#include "tests/helper.h"  // against the rules
#include "bench/report.h"  // against the rules

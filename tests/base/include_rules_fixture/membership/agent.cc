// SPDX-License-Identifier: Apache-2.0
#include "membership/agent.h"
#include "transport/transport.h"  // against the rules
#include "agent.h"  // against the rules

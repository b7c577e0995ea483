// SPDX-License-Identifier: Apache-2.0
#include "membership/agent.h"
#include "transport/transport.h"  // against the law
#include "agent.h"  // against the law

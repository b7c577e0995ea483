// SPDX-License-Identifier: Apache-2.0
#include "api/client/client.h"
#include "node/loop.h"  // against the rules

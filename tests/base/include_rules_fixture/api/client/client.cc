// SPDX-License-Identifier: Apache-2.0
#include "api/include/ropeteam/ropeteam.h"
#include "core/shard/shard.h"
#include "core/engine/engine.h"  // against the rules
#include "node/loop.h"  // against the rules

// SPDX-License-Identifier: Apache-2.0
#include "core/base/leaf.h"
#include <string>
#include "core/shard/shard.h"  // against the rules
#include <unistd.h>  // against the rules
#include <chrono>  // against the rules

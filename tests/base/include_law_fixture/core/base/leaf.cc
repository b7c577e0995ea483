// SPDX-License-Identifier: Apache-2.0
#include "core/base/leaf.h"
#include <string>
#include "core/shard/shard.h"  // against the law
#include <unistd.h>  // against the law
#include <chrono>  // against the law

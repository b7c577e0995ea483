// SPDX-License-Identifier: Apache-2.0
#include "core/shard/shard.h"
#include "transport/transport.h"  // against the rules
#include "node/loop.h"  // against the rules
#  include   "membership/membership.h"  // against the rules
#include <sys/socket.h>  // against the rules
#include <thread>  // against the rules

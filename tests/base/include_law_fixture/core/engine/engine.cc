// SPDX-License-Identifier: Apache-2.0
#include "core/shard/shard.h"
#include "transport/transport.h"  // against the law
#include "node/loop.h"  // against the law
#  include   "membership/membership.h"  // against the law
#include <sys/socket.h>  // against the law
#include <thread>  // against the law

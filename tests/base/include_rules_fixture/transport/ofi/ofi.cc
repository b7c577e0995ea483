// SPDX-License-Identifier: Apache-2.0
#include <rdma/fabric.h>
#include "transport/transport.h"
#include "core/base/leaf.h"
#include "core/shard/shard.h"  // against the rules
#include "membership/membership.h"  // against the rules

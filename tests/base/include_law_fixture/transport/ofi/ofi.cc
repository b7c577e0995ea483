// SPDX-License-Identifier: Apache-2.0
#include <rdma/fabric.h>
#include "transport/transport.h"
#include "core/base/leaf.h"
#include "core/shard/shard.h"  // against the law
#include "membership/membership.h"  // against the law

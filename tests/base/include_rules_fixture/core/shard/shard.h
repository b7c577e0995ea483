// SPDX-License-Identifier: Apache-2.0
#include "core/base/leaf.h"
#include "core/engine/engine.h"  // against the rules

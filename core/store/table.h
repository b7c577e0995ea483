// SPDX-License-Identifier: Apache-2.0
//
// The Store's own copy of the table in the arena's memory: every byte that a later process relies on. It takes 8 bytes
// per chunk (32 with tags) and 4 KiB. Slots are computed from their shards.

#ifndef ROPETEAM_CORE_STORE_TABLE_H_
#define ROPETEAM_CORE_STORE_TABLE_H_

#include <cstdint>
#include <map>
#include <vector>

#include "core/store/format.h"
#include "core/store/store.h"

namespace ropeteam {

struct Store::Table {
  // The slot of a published shard, state word included.
  static arena::Slot SlotOf(const SealedShard& shard) {
    arena::Slot slot =
        arena::SlotFor(shard.meta, shard.generation, shard.extents[0].first,
                       static_cast<uint32_t>(shard.crcs.size()), shard.encryption.salt, shard.encryption.key);
    slot.state = arena::EncodeSlotState({shard.digest, shard.role, shard.committed});
    return slot;
  }

  arena::Superblock superblock{};
  std::vector<arena::ChunkDescriptor> descriptors;  // by chunk; meaningless for a chunk that is not sealed
  std::vector<ChunkTag> tags;                       // by chunk; empty: the arena has no tags
  std::map<uint32_t, const SealedShard*> begins;    // published shards by their first chunk
};

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_STORE_TABLE_H_

// SPDX-License-Identifier: Apache-2.0
//
// The Store's own copy of the table in the arena's memory: every byte of it that a later process would rely on. 8 bytes a chunk (32 with tags) and 4 KiB; slots follow from their shards.

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
    arena::Slot slot = arena::SlotFor(shard.meta, shard.generation, shard.extents[0].first,
                                      static_cast<uint32_t>(shard.crcs.size()), shard.encryption.salt,
                                      shard.encrypted());
    slot.state = arena::EncodeSlotState({shard.digest, shard.role, shard.committed});
    return slot;
  }

  arena::Superblock superblock{};
  std::vector<arena::ChunkDescriptor> descriptors;  // by chunk; of one that is not sealed it means nothing
  std::vector<ChunkTag> tags;                       // likewise; empty: the arena has none
  std::map<uint32_t, const SealedShard*> begins;    // published shards, by their first chunk
};

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_STORE_TABLE_H_

// SPDX-License-Identifier: Apache-2.0
//
// Compares the table in the memory with what the Store wrote there, and rewrites what differs. The process may be
// killed between any two of these stores, too:
//
//     published slot   all words but the state word, then the state word. The digest covers every other word and
//                       the descriptors, so a kill leaves either the shard or a slot that Adopt() rejects.
//     free slot        the state word := 0; the other words of a free slot are meaningless
//     descriptor       one store
//     tag              three stores; the slot's digest covers it
//     superblock       all words but the magic, then the magic. The checksum, and the check of each place of the
//                       facts, detect what a kill leaves half written.
//
// The chunks themselves are not changed. The Store never grants a chunk because of the table in the memory, so a
// damaged table corrupts no data.

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstring>

#include "core/base/log.h"
#include "core/store/format.h"
#include "core/store/publish.h"
#include "core/store/store.h"
#include "core/store/table.h"

namespace ropeteam {
namespace {

constexpr size_t kWordBytes = sizeof(uint64_t);
// Lines logged per call. A table that was overwritten as a whole has a bad place for each chunk.
constexpr size_t kReportedMax = 8;

static_assert(sizeof(arena::Slot) % kWordBytes == 0 && alignof(arena::Slot) >= kWordBytes);
static_assert(sizeof(arena::ChunkDescriptor) == kWordBytes);
static_assert(sizeof(arena::Superblock) % kWordBytes == 0);

uint64_t WordAt(const void* place, size_t word) {
  uint64_t value = 0;
  std::memcpy(&value, static_cast<const std::byte*>(place) + word * kWordBytes, sizeof(value));
  return value;
}

// The word that is in the memory now. Another process may write to it at any time, so each word is read once.
uint64_t LoadWord(void* place, size_t word) {
  auto* words = reinterpret_cast<uint64_t*>(place);
  return std::atomic_ref<uint64_t>(words[word]).load(std::memory_order_relaxed);
}

}  // namespace

size_t Store::HealPlace(const char* what, uint32_t index, void* place, const void* known, size_t bytes,
                        bool report) {
  ROPETEAM_CHECK(reinterpret_cast<uintptr_t>(place) % kWordBytes == 0 && bytes % kWordBytes == 0);
  const size_t words = bytes / kWordBytes;
  size_t wrong = 0;
  size_t first = 0;
  uint64_t found = 0;
  // In each structure, the word that makes the others valid comes first and is written last.
  for (size_t i = 1; i <= words; ++i) {
    const size_t word = i % words;
    const uint64_t now = LoadWord(place, word);
    const uint64_t right = WordAt(known, word);
    if (now == right) continue;
    if (wrong++ == 0) {
      first = word;
      found = now;
    }
    arena::Publish(static_cast<uint64_t*>(place) + word, right);
    arena::CrashPoint("heal: word written");
  }
  if (wrong == 0) return 0;
  ++table_repairs_;
  if (report) {
    LOG_WARNING("arena table %s %u byte %zu was 0x%016" PRIx64 ", written 0x%016" PRIx64
                ", words repaired %zu: memory lost a bit, or another process wrote there",
                what, index, first * kWordBytes, found, WordAt(known, first), wrong);
  }
  return 1;
}

size_t Store::HealSlot(uint32_t index) {
  const auto begins = table_->begins.find(index);
  if (begins == table_->begins.end()) {
    return HealPlace("slot", index, &slot(index)->state, &arena::kSlotFree, sizeof(arena::kSlotFree), true);
  }
  const arena::Slot known = Table::SlotOf(*begins->second);
  return HealPlace("slot", index, slot(index), &known, sizeof(known), true);
}

size_t Store::HealTable(uint32_t first, uint32_t count) {
  size_t healed = 0;
  const auto heal = [&](const char* what, uint32_t index, void* place, const void* known, size_t bytes) {
    healed += HealPlace(what, index, place, known, bytes, healed < kReportedMax);
  };
  if (first == 0) heal("superblock", 0, superblock(), &table_->superblock, sizeof(arena::Superblock));
  const uint64_t end = std::min(chunk_count_, uint64_t{first} + count);
  auto begins = table_->begins.lower_bound(first);
  for (uint64_t at = first; at < end; ++at) {
    const auto chunk = static_cast<uint32_t>(at);
    if (begins != table_->begins.end() && begins->first == chunk) {
      const arena::Slot known = Table::SlotOf(*begins->second);
      heal("slot", chunk, slot(chunk), &known, sizeof(known));
      ++begins;
    } else {
      heal("slot", chunk, &slot(chunk)->state, &arena::kSlotFree, sizeof(arena::kSlotFree));
    }
    if (chunk_use_[chunk] == ChunkUse::kSealed) {
      heal("descriptor", chunk, descriptor(chunk), &table_->descriptors[chunk],
           sizeof(arena::ChunkDescriptor));
      if (tags_begin_ != 0) heal("tag", chunk, tag(chunk), &table_->tags[chunk], sizeof(ChunkTag));
    }
  }
  if (healed > kReportedMax) LOG_WARNING("arena table %zu more places repaired", healed - kReportedMax);
  return healed;
}

size_t Store::CountTableDamage() const {
  const auto differs = [](const void* place, const void* known, size_t bytes) {
    return std::memcmp(place, known, bytes) != 0 ? size_t{1} : size_t{0};
  };
  size_t damage = differs(memory_.data(), &table_->superblock, sizeof(arena::Superblock));
  for (uint64_t at = 0; at < chunk_count_; ++at) {
    const auto chunk = static_cast<uint32_t>(at);
    const auto begins = table_->begins.find(chunk);
    if (begins == table_->begins.end()) {
      damage += slot(chunk)->state == arena::kSlotFree ? 0 : 1;
    } else {
      const arena::Slot known = Table::SlotOf(*begins->second);
      damage += differs(slot(chunk), &known, sizeof(known));
    }
    if (chunk_use_[chunk] != ChunkUse::kSealed) continue;
    damage += differs(descriptor(chunk), &table_->descriptors[chunk], sizeof(arena::ChunkDescriptor));
    if (tags_begin_ != 0) damage += differs(tag(chunk), &table_->tags[chunk], sizeof(ChunkTag));
  }
  return damage;
}

}  // namespace ropeteam

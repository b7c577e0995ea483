// SPDX-License-Identifier: Apache-2.0
//
// Inventories as a leader receives them: whole ones, matching changes, and changes that only claim to match.

#include "core/engine/inventory.h"

#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/values.h"

namespace ropeteam::fuzz {
namespace {

enum Op : uint8_t { kWhole, kDifference, kDelta, kOps };

// With the right sequence: the leader checks it before it calls Replace().
Inventory Next(FromBytes* in, const engine::HeldInventory& held) {
  auto inventory = in->Get<Inventory>();
  inventory.sequence = held.sequence() + 1;
  return inventory;
}

void RunInventory(std::string_view input) {
  FromBytes in(input);
  engine::HeldInventory held;
  while (!in.done()) {
    const uint8_t op = in.Byte() % kOps;
    if (op == kWhole || (op == kDifference && held.sequence() == 0)) {
      held.Replace(Next(&in, held));
    } else if (op == kDifference) {
      // The sender's difference of two inventories must turn the first one into the second.
      Inventory after = Next(&in, held);
      engine::Normalize(&after);
      const InventoryDelta delta = engine::Difference(held.inventory(), after, (in.Byte() & 1) != 0);
      ROPETEAM_CHECK(held.Apply(delta).has_value());
      ROPETEAM_CHECK(engine::DigestOf(held.inventory()) == engine::DigestOf(after));
    } else {
      auto delta = in.Get<InventoryDelta>();
      if ((in.Byte() & 1) != 0) delta.base = held.sequence();
      const uint64_t before = engine::DigestOf(held.inventory());
      const bool applied = held.Apply(delta).has_value();
      ROPETEAM_CHECK(engine::DigestOf(held.inventory()) == (applied ? delta.digest : before));
    }
  }
}

Inventory Sample() {
  Inventory inventory;
  inventory.sequence = 1;
  inventory.report.id = 1;
  inventory.report.name = "n1";
  for (Rank rank = 0; rank < 2; ++rank) {
    inventory.report.sessions.push_back({rank, 2, kIncarnations + 1, 7 + rank, true, 1, 2, {3}});
    inventory.report.copies.push_back(
        {{kIncarnations + 1, 1, rank}, 2, 1, 4096, Role::kOwn, true, false, true, {}, 77});
  }
  return inventory;
}

std::vector<std::string> InventorySeeds() {
  const Inventory first = Sample();
  Inventory second = first;
  second.sequence = 2;
  second.report.copies.pop_back();
  second.report.sessions[0].open_steps.clear();
  InventoryDelta delta = engine::Difference(first, second, true);
  return {
      ToBytes().Byte(kWhole).Put(first).Byte(kDifference).Put(second).Byte(1).bytes(),
      ToBytes().Byte(kWhole).Put(first).Byte(kDelta).Put(delta).Byte(1).bytes(),
      ToBytes().Byte(kDifference).Put(first).Byte(0).bytes(),
  };
}

const Target kInventory("inventory", RunInventory, InventorySeeds);

}  // namespace
}  // namespace ropeteam::fuzz

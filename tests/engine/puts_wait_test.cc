// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <vector>

#include "tests/engine/engines_for_test.h"

namespace ropeteam {
namespace {

constexpr TimeUs kWaitUs = 50'000;

// Node 1 saves, node 2 holds. Every put is counted when its bytes land.
class PutsWait : public ::testing::Test, protected Engines {
 protected:
  PutsWait() : Engines(2, 64, 0, false, kWaitUs) {
    on_wire_ = [this](TestNode&, std::string*) { ++puts_; };
  }
  void Fill(uint32_t first, uint32_t count) {
    const std::vector<uint32_t> crcs(shard_.crcs.begin() + first, shard_.crcs.begin() + first + count);
    node(1).engine->OnSaveFilled(now_, kSession, save_, first, crcs);
    Carry();
  }

  const TestShard shard_{6, 'a'};
  const SaveId save_ = BeginSave(1, 5, shard_);
  size_t puts_ = 0;
};

TEST_F(PutsWait, FullChunksArePutAtTheCommit) {
  Fill(0, 4);
  PassTime(kWaitUs - 1);
  EXPECT_EQ(puts_, 0u);
  CommitSave(1, save_, shard_);
  EXPECT_EQ(puts_, shard_.crcs.size());
  EXPECT_TRUE(Replicated(Id(5, 0)));
}

TEST_F(PutsWait, ASaveThatTakesLongIsPutMeanwhile) {
  Fill(0, 2);
  PassTime(kWaitUs);
  EXPECT_EQ(puts_, 2u);
  Fill(2, 2);
  EXPECT_EQ(puts_, 4u);
  CommitSave(1, save_, shard_);
  EXPECT_EQ(puts_, shard_.crcs.size());
  EXPECT_TRUE(Replicated(Id(5, 0)));
}

}  // namespace
}  // namespace ropeteam

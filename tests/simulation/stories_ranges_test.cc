// SPDX-License-Identifier: Apache-2.0
//
// Stories of ranged reads of a shard that is not here, while its holders die or their memory is damaged. The
// Checker checks that the bytes are those that were saved.
#include "tests/simulation/simulation.h"
#include "tests/simulation/story.h"

namespace ropeteam::simulation {
namespace {

class RangesStory : public Story {
 protected:
  // Rank 0's shard of step 1 is on its own host and on one other. The reader is on neither.
  void Begin() {
    StartNodes(4);
    StartWorld(1);
    SaveEverywhere(1, 1);
    for (Rank rank = 1; rank < 4; ++rank)
      if (!Holds(rank, Shard())) reader_ = rank;
  }
  ShardId Shard() { return ShardOf(1, 1, 0); }
  Status ReadRanges() {
    return Sync([&](Client::StatusDone done) {
      RankOf(1, reader_).ReadRanges(1, 0, 5 * kSecond, [done](const Status& status, const ShardMeta&) {
        done(status);
      });
    });
  }
  // Number of ranged reads that returned bytes.
  uint64_t Brought() const { return cluster_->checker().statistics().ranges; }

  Rank reader_ = 0;
};

TEST_F(RangesStory, NothingOfTheShardStaysHereAndAllChunksAreFreeAgain) {
  Begin();
  const uint64_t free_before = FreeChunks(reader_);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(ReadRanges().ok());
  EXPECT_GE(Brought(), 10u);
  EXPECT_FALSE(Holds(reader_, Shard()));
  EXPECT_TRUE(Until([&] {
    return FreeChunks(reader_) == free_before && Checker::AtRest(cluster_->host(reader_)) &&
           Checker::AtRest(cluster_->host(0));
  }));
}

TEST_F(RangesStory, AHolderDiesWhileItIsReadFrom) {
  Begin();
  bool lost = false;
  cluster_->on_transfer = [&](const Transfer& transfer) {
    if (!transfer.get || transfer.initiator != reader_ || std::exchange(lost, true)) return;
    cluster_->scheduler().After(0, [this, holder = transfer.target] { LoseHost(holder); });
  };
  EXPECT_TRUE(ReadRanges().ok());
  EXPECT_TRUE(lost);
  EXPECT_GE(Brought(), 1u);
}

TEST_F(RangesStory, AReaderDiesAndItsHoldersHaveTheirChunksBack) {
  Begin();
  bool lost = false;
  cluster_->on_transfer = [&](const Transfer& transfer) {
    if (!transfer.get || transfer.initiator != reader_ || std::exchange(lost, true)) return;
    cluster_->scheduler().After(0, [this] { LoseHost(reader_); });
  };
  RankOf(1, reader_).ReadRanges(1, 0, 5 * kSecond, [](const Status&, const ShardMeta&) {});
  EXPECT_TRUE(Until([&] { return lost; }));
  for (size_t host = 0; host < 4; ++host)
    if (host != reader_) {
      EXPECT_TRUE(Until([&] { return Checker::AtRest(cluster_->host(host)); })) << host;
    }
}

// Every chunk of one holder is bad. It refuses every request, and repairs the chunks.
TEST_F(RangesStory, ABadHolderGivesNothingAndRepairsItself) {
  Begin();
  const size_t chunks = cluster_->host(0).store->Find(Shard())->crcs.size();
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) ASSERT_TRUE(cluster_->FlipBit(0, Shard(), chunk));
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(ReadRanges().ok());
  EXPECT_GE(Brought(), 1u);
  EXPECT_TRUE(Until([&] { return cluster_->host(0).engine->Report().counters.chunks_repaired > 0; }));
}

// No holder can serve ranges. The shard is fetched, and the bytes are right.
TEST_F(RangesStory, WhereRangesCannotBeHadTheShardIsFetched) {
  options_.encrypts = true;
  Begin();
  EXPECT_TRUE(ReadRanges().ok());
  EXPECT_EQ(Brought(), 0u);
  EXPECT_TRUE(Holds(reader_, Shard()));
}

}  // namespace
}  // namespace ropeteam::simulation

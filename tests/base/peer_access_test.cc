// SPDX-License-Identifier: Apache-2.0
#include "core/base/peer_access.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace ropeteam {
namespace {

using Kind = PeerAccess::Kind;
constexpr uint64_t kChunk = 4096;

bool May(PeerAccess* access, uint64_t offset, uint64_t length, Kind kind) {
  PeerAccess::Use use;
  return use.Begin(access, offset, length, kind);
}

TEST(PeerAccess, AllowsARangeIfItAllowsEachOfItsChunks) {
  PeerAccess access(8, kChunk);
  EXPECT_FALSE(May(&access, 0, 8 * kChunk, Kind::kRead));
  access.Set(2, 3, Kind::kRead);
  access.Set(5, 1, Kind::kWrite);
  EXPECT_TRUE(May(&access, 2 * kChunk, 3 * kChunk, Kind::kRead));
  EXPECT_FALSE(May(&access, 2 * kChunk - 1, 2, Kind::kRead));
  EXPECT_FALSE(May(&access, 5 * kChunk - 1, 2, Kind::kRead));
  EXPECT_FALSE(May(&access, 2 * kChunk, 1, Kind::kWrite));
  EXPECT_TRUE(May(&access, 5 * kChunk + 1, kChunk - 1, Kind::kWrite));
  EXPECT_FALSE(May(&access, 8 * kChunk, 1, Kind::kRead)) << "behind the last chunk";
  access.Set(3, 1, Kind::kNone);
  EXPECT_FALSE(May(&access, 2 * kChunk, 3 * kChunk, Kind::kRead));
  EXPECT_TRUE(May(&access, 4 * kChunk, kChunk, Kind::kRead));
  EXPECT_TRUE(May(nullptr, 0, 100 * kChunk, Kind::kWrite)) << "no table";
}

TEST(PeerAccess, AChunkIsRevokedWhenItsUseHasEnded) {
  PeerAccess access(8, kChunk);
  access.Set(0, 8, Kind::kRead);
  PeerAccess::Use use;
  ASSERT_TRUE(use.Begin(&access, 3 * kChunk, 2 * kChunk, Kind::kRead));
  access.Set(2, 1, Kind::kNone);  // this one is not used, nor is the next: both return at once
  access.Set(5, 1, Kind::kNone);
  std::atomic<bool> revoked{false};
  std::thread owner([&] {
    access.Set(4, 1, Kind::kNone);
    revoked = true;
  });
  while (access.Of(4) != Kind::kNone) std::this_thread::yield();
  EXPECT_FALSE(revoked);
  use.End();
  owner.join();
  EXPECT_TRUE(revoked);
  EXPECT_FALSE(May(&access, 4 * kChunk, 1, Kind::kRead));
}

// The owner reuses the chunk after each revocation. A sanitizer sees the conflict if a use is left over.
TEST(PeerAccess, NoUseSeesTheNextOwner) {
  constexpr int kRounds = 2'000;
  PeerAccess access(2, kChunk);
  int memory = 0;  // even while peers may read
  std::atomic<bool> ended{false};
  std::atomic<int> uses{0};
  std::thread server([&] {
    while (!ended) {
      PeerAccess::Use use;
      if (!use.Begin(&access, kChunk, 1, Kind::kRead)) continue;
      EXPECT_EQ(memory % 2, 0);
      uses++;
    }
  });
  for (int i = 0; i < kRounds || uses < 10; ++i) {
    access.Set(1, 1, Kind::kRead);
    if (i % 16 == 0) std::this_thread::yield();
    access.Set(1, 1, Kind::kNone);
    memory++;
    memory++;
  }
  ended = true;
  server.join();
}

}  // namespace
}  // namespace ropeteam

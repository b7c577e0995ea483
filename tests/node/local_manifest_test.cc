// SPDX-License-Identifier: Apache-2.0
//
// Commits of saves with large manifests, which are read off the loop's thread.

#include "core/base/checksum.h"
#include "core/shard/manifest.h"
#include "tests/node/local_server_fixture.h"

namespace ropeteam {
namespace {

class LocalManifestTest : public LocalServerTest {
 protected:
  LocalManifestTest() {
    chunks_ = 1024;
    off_loop_ = true;
  }
  // Opens a rank and begins a save of step 1 whose stream is a manifest of `objects` empty objects.
  void Begin(size_t objects) {
    Send(rank_, Type::kHello, 1, RankHello());
    ASSERT_EQ(Receive(rank_).type, Type::kHelloReply);
    Manifest manifest;
    for (size_t i = 0; i < objects; ++i) {
      const std::string number = std::to_string(i);
      ASSERT_TRUE(manifest.Add(number + std::string(kNameBytesMax - number.size(), '.'), 0).ok());
    }
    stream_ = manifest.Encode();
    objects_ = objects;
    Send(rank_, Type::kSaveBegin, 2, Encode(local::SaveBegin{1, stream_.size()}));
    const Received received = Receive(rank_);
    ASSERT_EQ(received.type, Type::kSaveGrant);
    ASSERT_TRUE(Decode(received.payload, grant_));
  }
  void Commit(uint64_t request) {
    local::SaveCommit commit{grant_.save, stream_.size(), 0, static_cast<uint32_t>(objects_), {}};
    for (uint64_t at = 0; at < stream_.size(); at += kChunk) {
      const std::string_view chunk = std::string_view(stream_).substr(at, kChunk);
      std::memcpy(store_->chunk(ChunkAt(grant_.extents, at / kChunk)), chunk.data(), chunk.size());
      commit.crcs.push_back(Crc32c(chunk.data(), chunk.size()));
    }
    Send(rank_, Type::kSaveCommit, request, Encode(commit));
  }
  bool Silent() {
    for (int i = 0; i < 20; ++i) Turn();
    char byte = 0;
    return recv(rank_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
  }
  void WaitForWork() {
    const TimeUs give_up = EventLoop::Now() + kGiveUpUs;
    while (works_.empty() && EventLoop::Now() < give_up) Turn();
    ASSERT_EQ(works_.size(), 1u);
  }

  static constexpr size_t kLarge = kManifestOnLoopBytesMax / kNameBytesMax;  // objects
  UniqueFd rank_;
  std::string stream_;
  size_t objects_ = 0;
  local::SaveGrant grant_;
  void SetUp() override {
    LocalServerTest::SetUp();
    rank_ = Connect();
  }
};

TEST_F(LocalManifestTest, TheLoopGoesOnWhileItIsReadAndAnswersStayInOrder) {
  Begin(kLarge);
  Commit(3);
  Send(rank_, Type::kSaveBegin, 4, Encode(local::SaveBegin{2, 100}));
  WaitForWork();
  const UniqueFd admin = Connect();
  Send(admin, Type::kHello, 1, AdminHello());
  EXPECT_EQ(Receive(admin).type, Type::kHelloReply) << "other sessions are served";
  EXPECT_TRUE(Silent());
  Send(rank_, Type::kSaveAbort, 5, Encode(local::SaveAbort{grant_.save}));
  EXPECT_TRUE(Silent());
  EXPECT_TRUE(store_->shards().empty());
  works_[0].first();
  EXPECT_TRUE(store_->shards().empty()) << "decided on another thread";
  works_[0].second();
  EXPECT_EQ(store_->shards().size(), 1u);
  const Received commit = Receive(rank_);
  EXPECT_EQ(commit.request, 3u);
  local::Reply reply;
  ASSERT_TRUE(Decode(commit.payload, reply));
  EXPECT_EQ(reply.code, Code::kOk) << reply.message;
  EXPECT_EQ(Receive(rank_).request, 4u);
  EXPECT_EQ(Receive(rank_).request, 5u);
  EXPECT_EQ(store_->shards().size(), 1u) << "an abort after the commit";
}

TEST_F(LocalManifestTest, AViewSaysWhereTheShardIsToLibrariesThatKnowIt) {
  Begin(1);
  Commit(3);
  ASSERT_EQ(ReceiveReply(rank_).code, Code::kOk);
  Send(rank_, Type::kViewOpen, 4, Encode(local::ViewOpen{1, 0, 1000}));
  const Received known = Receive(rank_);
  local::ViewGrant grant;
  ASSERT_EQ(known.type, Type::kViewGrant);
  ASSERT_TRUE(Decode(known.payload, grant));
  EXPECT_EQ(grant.origin, static_cast<uint8_t>(Origin::kHere));

  const UniqueFd older = Connect();
  local::Hello hello;
  hello.version = 4;
  hello.kind = local::ClientKind::kAdmin;
  Send(older, Type::kHello, 1, Encode(hello, 4));
  ASSERT_EQ(Receive(older).type, Type::kHelloReply);
  Send(older, Type::kViewOpen, 2, Encode(local::ViewOpen{1, 0, 1000}, 4));
  const Received received = Receive(older);
  ASSERT_EQ(received.type, Type::kViewGrant);
  EXPECT_EQ(received.payload.size() + sizeof(grant.origin), known.payload.size());
}

TEST_F(LocalManifestTest, ABadOneIsRefusedAsOnTheLoop) {
  Begin(kLarge);
  const uint64_t free_before = store_->chunks_free();
  stream_[stream_.size() / 2] ^= 1;
  Commit(3);
  WaitForWork();
  works_[0].first();
  works_[0].second();
  const local::Reply reply = ReceiveReply(rank_);
  EXPECT_EQ(reply.code, Code::kCorrupt);
  EXPECT_THAT(reply.message, HasSubstr("manifest's checksum is"));
  EXPECT_GT(store_->chunks_free(), free_before);
  EXPECT_TRUE(store_->shards().empty());
}

TEST_F(LocalManifestTest, ASaveWhoseRankIsGoneMeanwhileIsAborted) {
  const uint64_t free_before = store_->chunks_free();
  Begin(kLarge);
  Commit(3);
  WaitForWork();
  rank_.reset();
  for (int i = 0; i < 10000 && store_->chunks_free() != free_before; ++i) Turn();
  EXPECT_EQ(store_->chunks_free(), free_before);
  works_[0].first();
  works_[0].second();
  EXPECT_TRUE(store_->shards().empty());
}

TEST_F(LocalManifestTest, ASmallOneIsReadOnTheLoop) {
  Begin(10);
  Commit(3);
  EXPECT_EQ(ReceiveReply(rank_).code, Code::kOk);
  EXPECT_TRUE(works_.empty());
}

TEST_F(LocalManifestTest, ACommitOfAnUnknownSaveIsAnsweredAtOnce) {
  Begin(kLarge);
  ++grant_.save;
  Commit(3);
  EXPECT_EQ(ReceiveReply(rank_).code, Code::kNotFound);
  EXPECT_TRUE(works_.empty());
}

}  // namespace
}  // namespace ropeteam

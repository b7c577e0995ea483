// SPDX-License-Identifier: Apache-2.0
//
// In which order a node does the leader's work on storage, and when it releases the lock by itself.
#include "core/engine/storage_desk.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <optional>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "core/store/store.h"

namespace ropeteam::engine {
namespace {

using ::testing::ElementsAre;

// Node 2 of three; node 1 leads.
class StorageDeskTest : public ::testing::Test {
 protected:
  StorageDeskTest()
      : memory_(static_cast<std::byte*>(mmap(nullptr, Store::MemoryFor(4, 4096), PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))),
        store_(Store::Format({memory_, Store::MemoryFor(4, 4096)}, 4096, {"job", "b"}).value()),
        context_(Config(), store_.get()),
        works_(&context_),
        desk_(&context_, &works_) {
    context_.lease_until = kNever;
    LedBy(1);
  }
  ~StorageDeskTest() override {
    store_.reset();
    munmap(memory_, Store::MemoryFor(4, 4096));
  }
  static EngineConfig Config() {
    EngineConfig config;
    config.self = 2;
    config.node = "b";
    return config;
  }
  void LedBy(NodeId leader) {
    View view;
    view.epoch = ++epoch_;
    view.leader = leader;
    view.led_since = epoch_;
    for (const NodeId node : {1, 2, 3}) {
      Member member;
      member.id = node;
      member.name = "node" + std::to_string(node);
      view.members.push_back(member);
    }
    const View before = context_.view;
    context_.SetView(view);
    desk_.OnView(before);
  }
  void Order(uint64_t number, RemoteWork work) {
    desk_.OnOrder(context_.view.leader, {number, 1, std::move(work)});
  }
  template <typename Work>
  bool Runs() const {
    return works_running() == 1 && std::get_if<Work>(&context_.out.storage.back().work) != nullptr;
  }
  size_t works_running() const { return context_.out.storage.size(); }
  void End(const Status& status = OkStatus()) {
    const uint64_t tag = context_.out.storage.back().tag;
    context_.out.storage.pop_back();
    works_.OnDone(tag, status, {});
  }
  // What the leader was answered since the last call.
  std::vector<std::pair<uint64_t, Code>> Answers() {
    std::vector<std::pair<uint64_t, Code>> answers;
    for (const SendMessage& message : std::exchange(context_.out.messages, {})) {
      Envelope envelope;
      StorageResult result;
      EXPECT_TRUE(Decode(message.envelope, envelope) && Decode(envelope.payload, result, context_.protocol));
      answers.emplace_back(result.number, result.code);
    }
    return answers;
  }

  std::byte* memory_;
  std::unique_ptr<Store> store_;
  Context context_;
  StorageWorks works_;
  StorageDesk desk_;
  Epoch epoch_ = 0;
};

TEST_F(StorageDeskTest, AFormerLeadersRequestForTheLockIsFollowedByARelease) {
  Order(1, HoldStorage{});
  ASSERT_TRUE(Runs<HoldStorage>());
  Order(2, ReleaseStorage{});
  LedBy(3);  // nobody waits for the two any more
  ASSERT_TRUE(Runs<HoldStorage>());
  End();
  EXPECT_TRUE(Runs<ReleaseStorage>());
}

TEST_F(StorageDeskTest, ARequestForTheLockThatALaterReleaseHasOvertakenIsNotDone) {
  Order(2, ReleaseStorage{});
  ASSERT_TRUE(Runs<ReleaseStorage>());
  Order(1, HoldStorage{});
  End();
  EXPECT_EQ(works_running(), 0u);
  EXPECT_THAT(Answers(), ElementsAre(std::pair(2u, Code::kOk)));
}

TEST_F(StorageDeskTest, AReleaseThatALaterRequestHasOvertakenIsAnsweredAndNotDone) {
  Order(2, HoldStorage{});
  Order(1, ReleaseStorage{});
  EXPECT_THAT(Answers(), ElementsAre(std::pair(1u, Code::kOk)));
  ASSERT_TRUE(Runs<HoldStorage>());
  End();
  EXPECT_EQ(works_running(), 0u);
}

TEST_F(StorageDeskTest, WithoutALeaseTheLockIsNotTaken) {
  context_.lease_until = 0;
  Order(1, HoldStorage{});
  EXPECT_EQ(works_running(), 0u);
  context_.lease_until = kNever;
  Order(1, HoldStorage{});  // the leader repeats it
  EXPECT_TRUE(Runs<HoldStorage>());
}

TEST_F(StorageDeskTest, WhileStorageHangsOnlyTheNewestWorkOnTheLockWaits) {
  Order(1, HoldStorage{});
  for (uint64_t number = 2; number < 100; number += 2) {
    Order(number, ReleaseStorage{});
    Order(number + 1, HoldStorage{});
  }
  Order(100, ReleaseStorage{});
  EXPECT_EQ(Answers().size(), 98u) << "the others have failed";
  End();
  ASSERT_TRUE(Runs<ReleaseStorage>());
  End();
  EXPECT_EQ(works_running(), 0u);
}

TEST_F(StorageDeskTest, WhileStorageHangsFewReadsWait) {
  for (uint64_t number = 1; number <= 1000; ++number) Order(number, ListStored{});
  size_t done = 0;
  for (; works_running() != 0; ++done) End();
  EXPECT_LE(done, 16u);
  EXPECT_GT(done, 1u);
}

}  // namespace
}  // namespace ropeteam::engine

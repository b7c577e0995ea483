// SPDX-License-Identifier: Apache-2.0
//
// Two allocations of one job under one URL, over a directory and over the strict S3 server. Tests set the
// clock.

#include "storage/lock/job_lock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <functional>
#include <future>
#include <mutex>
#include <set>
#include <thread>

#include "core/base/log.h"
#include "storage/forwarding_sink.h"
#include "storage/steps/steps.h"
#include "tests/storage/conformance.h"
#include "tests/storage/posix/place.h"

namespace ropeteam::storage::test {
namespace {

using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// Fails or delays calls as a test requests.
class FlakySink final : public ForwardingSink {
 public:
  using ForwardingSink::ForwardingSink;
  Status Put(const std::string& name, std::string_view bytes, PutMode mode, Deadline deadline) override {
    if (block_puts) {
      blocked.set_value();
      unblock.get_future().wait();
    }
    if (put_code != Code::kOk) return Error(put_code, "the put is refused");
    if (lose_puts > 0 && lose_puts-- > 0) return Error(Code::kDeadlineExceeded, "lost on the way there");
    const Status status = Here().Put(name, bytes, mode, deadline);
    if (lose_answers > 0 && lose_answers-- > 0) return Error(Code::kDeadlineExceeded, "lost on the way back");
    return status;
  }
  Status Read(const std::string& name, uint64_t offset, std::span<const Target> targets,
              Deadline deadline) override {
    if (lose_files > 0 && lose_files-- > 0) return Error(Code::kNotFound, "it is not there");
    if (read_code != Code::kOk) return Error(read_code, "the read is refused");
    return Here().Read(name, offset, targets, deadline);
  }
  Result<ListPage> List(const std::string& folder, const std::string& page, Deadline deadline) override {
    if (away) return Error(Code::kUnavailable, "the store is away");
    return Here().List(folder, page, deadline);
  }
  Status Delete(const std::string& name, Deadline deadline) override { return Here().Delete(name, deadline); }
  bool away = false;
  Code put_code = Code::kOk, read_code = Code::kOk;
  int lose_puts = 0, lose_answers = 0, lose_files = 0;
  std::atomic<bool> block_puts{false};
  std::promise<void> blocked, unblock;
  std::unique_ptr<Sink> instead;  // if not null: what is there while the store is not mounted

 private:
  Sink& Here() const { return instead != nullptr ? *instead : below(); }
};

// A process on another machine.
ProcessMark Elsewhere(const std::string& node) {
  return {"boot of " + node, "pid:[4026531836]", getpid(), 1};
}

class JobLockTest : public testing::TestWithParam<SinkKind> {
 protected:
  void SetUp() override {
    if (const std::string absent = GetParam().absent(); !absent.empty()) GTEST_SKIP() << absent;
    place_ = GetParam().make();
    SetLogSink(
        [this](LogLevel, std::string_view message) {
          const std::lock_guard lock(log_mutex_);
          log_ += std::string(message) + "\n";
        },
        LogLevel::kInfo);
  }
  void TearDown() override {
    SetLogSink([](LogLevel, std::string_view) {}, LogLevel::kOff);
  }

  struct Node {
    std::shared_ptr<FlakySink> sink;
    std::unique_ptr<JobLock> lock;
    JobLock* operator->() const { return lock.get(); }
  };
  Node Start(const std::string& name, bool take_over = false) {
    return Start(name, take_over, Elsewhere(name));
  }
  Node Start(const std::string& name, bool take_over, ProcessMark process) {
    Result<std::unique_ptr<Sink>> sink = place_->Open();
    EXPECT_TRUE(sink.ok()) << sink.status().ToString();
    Node node;
    node.sink = std::make_shared<FlakySink>(std::move(sink.value()));
    node.lock = std::make_unique<JobLock>(JobLock::Config{.sink = node.sink,
                                                          .job = "team/train",
                                                          .node = name,
                                                          .take_over = take_over,
                                                          .now = [this] { return now_; },
                                                          .process = std::move(process),
                                                          .renew_by_itself = false});
    return node;
  }
  // Lets time pass; these nodes renew as their threads would.
  void Pass(seconds time, std::initializer_list<const Node*> awake) {
    for (seconds passed{0}; passed < time; passed += JobLock::kRenewEvery) {
      now_ += JobLock::kRenewEvery;
      for (const Node* node : awake) node->lock->Renew();
    }
  }
  std::vector<std::string> Files() { return place_->Everything(); }
  bool Logged(const std::string& words) {
    const std::lock_guard lock(log_mutex_);
    return log_.find(words) != std::string::npos;
  }
  static std::string Epoch(int epoch) {
    return "team/train/ropeteam-lock/000000000" + std::to_string(epoch) + ".json";
  }

  std::unique_ptr<SinkPlace> place_;
  JobLock::Time now_{};
  std::mutex log_mutex_;
  std::string log_;
};
class WeakJobLockTest : public JobLockTest {};

TEST_P(JobLockTest, TheSecondIsRefusedWithTheFirstsNameOnceTheFirstIsSeenToLive) {
  const Node one = Start("node-a"), two = Start("node-b");
  ASSERT_TRUE(one->Hold().ok());
  EXPECT_TRUE(one->Hold().ok()) << "repeating it is allowed";
  const Status unknown = two->Hold();
  EXPECT_EQ(unknown.code(), Code::kUnavailable);
  EXPECT_THAT(unknown.message(), HasSubstr("held by node node-a of host "));
  Pass(JobLock::kRenewEvery, {&one, &two});
  const Status refused = two->Hold();
  EXPECT_EQ(refused.code(), Code::kAlreadyExists);
  EXPECT_THAT(refused.message(), HasSubstr("node node-a of host "));
  EXPECT_THAT(refused.message(), testing::ContainsRegex("since 20[0-9-]*T[0-9:]*Z"));
  EXPECT_THAT(refused.message(), HasSubstr("--take-over-storage"));
  Pass(seconds(60), {&one, &two});
  EXPECT_EQ(two->Hold().code(), Code::kAlreadyExists);
  EXPECT_TRUE(one->Check().ok());
  EXPECT_EQ(two->Check().code(), Code::kUnavailable);
  EXPECT_THAT(Files(), ElementsAre(Epoch(1)));
}

TEST_P(JobLockTest, OfManyThatStartAtOnceOneHolds) {
  constexpr int kNodes = 6;
  std::vector<Node> nodes;
  for (int i = 0; i < kNodes; ++i) nodes.push_back(Start("node-" + std::to_string(i)));
  std::atomic<int> ready{0};
  std::vector<std::future<Status>> held;
  for (const Node& node : nodes)
    held.push_back(std::async(std::launch::async, [&ready, &node] {
      for (++ready; ready < kNodes;) std::this_thread::yield();
      return node->Hold();
    }));
  int holders = 0;
  for (auto& each : held) {
    const Status status = each.get();
    holders += status.ok();
    EXPECT_TRUE(status.ok() || status.code() == Code::kUnavailable) << status.ToString();
  }
  EXPECT_EQ(holders, 1);
  EXPECT_THAT(Files(), ElementsAre(Epoch(1)));
}

TEST_P(JobLockTest, AHolderThatIsSilentForFifteenSecondsLosesItAndSaysSoOnceWhenItWakes) {
  const Node one = Start("node-a"), two = Start("node-b");
  ASSERT_TRUE(one->Hold().ok());
  ASSERT_EQ(two->Hold().code(), Code::kUnavailable);
  Pass(seconds(10), {&two});
  EXPECT_EQ(two->Hold().code(), Code::kUnavailable) << "not yet";
  Pass(seconds(5), {&two});
  ASSERT_TRUE(two->Hold().ok());
  EXPECT_TRUE(Logged("node-a of host"));
  EXPECT_THAT(Files(), ElementsAre(Epoch(2))) << "the epoch below is deleted";
  const Status lost = one->Check();  // as before a manifest or a deletion
  EXPECT_EQ(lost.code(), Code::kAlreadyExists);
  EXPECT_THAT(lost.message(), HasSubstr("taken over by node node-b"));
  EXPECT_TRUE(Logged("writes and deletes nothing there any more"));
  log_.clear();
  Pass(seconds(30), {&one});
  EXPECT_EQ(one->Hold().code(), Code::kAlreadyExists);
  EXPECT_EQ(log_, "") << "once";
  EXPECT_TRUE(two->Check().ok());
  EXPECT_THAT(Files(), ElementsAre(Epoch(2)));
}

TEST_P(JobLockTest, AHolderThatWakesInARenewalLosesItToo) {
  const Node one = Start("node-a"), two = Start("node-b");
  ASSERT_TRUE(one->Hold().ok());
  ASSERT_FALSE(two->Hold().ok());
  Pass(seconds(15), {&two});
  ASSERT_TRUE(two->Hold().ok());
  one->Renew();
  EXPECT_TRUE(Logged("taken over by node node-b"));
  EXPECT_THAT(Files(), ElementsAre(Epoch(2))) << "it writes nothing";
  EXPECT_EQ(one->Hold().code(), Code::kAlreadyExists);
}

TEST_P(JobLockTest, WhoWasAwayItselfOrCouldNotLookJudgesNobodyDead) {
  const Node one = Start("node-a"), two = Start("node-b");
  ASSERT_TRUE(one->Hold().ok());
  ASSERT_FALSE(two->Hold().ok());
  now_ += seconds(100);  // this machine was suspended, and perhaps the holder's too
  EXPECT_EQ(two->Hold().code(), Code::kUnavailable);
  Pass(seconds(10), {&two});
  two.sink->away = true;
  two->Renew();
  EXPECT_EQ(two->Hold().message(), "the store is away");
  two.sink->away = false;
  Pass(seconds(15), {&two});
  EXPECT_EQ(two->Hold().code(), Code::kUnavailable)
      << "the first look after the failure began the time again";
  Pass(seconds(5), {&two});
  EXPECT_TRUE(two->Hold().ok());
}

TEST_P(JobLockTest, AProcessOfThisMachineThatIsGoneNeedsNoWaiting) {
  const ProcessMark own = OwnProcess();
  ASSERT_NE(own.boot, "");
  EXPECT_FALSE(IsGone(own, own));
  const pid_t child = fork();
  if (child == 0) _exit(0);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  ProcessMark gone = own;
  gone.pid = child;
  EXPECT_TRUE(IsGone(gone, own));
  ProcessMark reused = own;
  ++reused.started;
  EXPECT_TRUE(IsGone(reused, own)) << "another process has the pid now";
  for (std::string ProcessMark::*part : {&ProcessMark::boot, &ProcessMark::pid_namespace}) {
    ProcessMark other = gone;
    other.*part += "x";
    EXPECT_FALSE(IsGone(other, own));
  }
  ASSERT_TRUE(Start("node-a", false, gone)->Hold().ok());
  const Node two = Start("node-b", false, own);
  EXPECT_TRUE(two->Hold().ok());
  EXPECT_TRUE(Logged("whose process is gone"));
  EXPECT_THAT(Files(), ElementsAre(Epoch(2)));
}

TEST_P(JobLockTest, AnAnswerThatIsLostIsFoundByReading) {
  const Node one = Start("node-a");
  one.sink->lose_answers = 1;
  EXPECT_TRUE(one->Hold().ok());
  const Node two = Start("node-b");
  EXPECT_EQ(two->Hold().code(), Code::kUnavailable);
  Pass(seconds(15), {&two});
  two.sink->lose_puts = 1;
  EXPECT_EQ(two->Hold().code(), Code::kDeadlineExceeded) << "it did not arrive";
  EXPECT_TRUE(two->Hold().ok());
  EXPECT_THAT(Files(), ElementsAre(Epoch(2)));
}

TEST_P(JobLockTest, ItIsTakenOverOnceAndNeverAgainByItself) {
  const Node one = Start("node-a"), two = Start("node-b", /*take_over=*/true);
  ASSERT_TRUE(one->Hold().ok());
  ASSERT_TRUE(two->Hold().ok());
  EXPECT_TRUE(Logged("taken over from node node-a"));
  EXPECT_EQ(one->Hold().code(), Code::kAlreadyExists);
  const Node three = Start("node-c", /*take_over=*/true);
  ASSERT_TRUE(three->Hold().ok());
  EXPECT_EQ(two->Hold().code(), Code::kAlreadyExists);
  ASSERT_TRUE(two->Release().ok());
  EXPECT_EQ(two->Hold().code(), Code::kUnavailable) << "the flag is used up";
  EXPECT_TRUE(three->Check().ok());
}

TEST_P(JobLockTest, WhatIsReleasedIsFreeAtOnceAndNotWritten) {
  const Node one = Start("node-a"), two = Start("node-b");
  EXPECT_TRUE(one->Check().ok()) << "nobody has asked for protection";
  ASSERT_TRUE(one->Hold().ok());
  ASSERT_TRUE(one->Release().ok());
  EXPECT_EQ(one->Check().code(), Code::kUnavailable);
  EXPECT_THAT(Files(), IsEmpty());
  Pass(seconds(15), {&one});
  EXPECT_THAT(Files(), IsEmpty()) << "it is not renewed";
  ASSERT_TRUE(two->Hold().ok());
  two->Leave();
  EXPECT_THAT(Files(), IsEmpty());
  EXPECT_TRUE(one->Hold().ok());
  EXPECT_TRUE(two->Release().ok());
  EXPECT_TRUE(one->Check().ok()) << "another's file is not deleted";
}

TEST_P(JobLockTest, AFileThatAPersonDeletedIsCreatedAgain) {
  const Node one = Start("node-a");
  ASSERT_TRUE(one->Hold().ok());
  const std::string proof = one->Proof().value();
  ASSERT_TRUE(one.sink->Delete(Epoch(1), std::chrono::steady_clock::now() + seconds(60)).ok());
  EXPECT_TRUE(one->Check().ok());
  EXPECT_THAT(Files(), ElementsAre(Epoch(1)));
  EXPECT_NE(one->Proof().value(), proof) << "other nodes must look again whether they see the same store";
}

// The holder's mount is lost, and an empty directory is in its place. Then the mount is back, with the holder's own file.
TEST_P(JobLockTest, AHolderWhoseMountWasLostHoldsAgain) {
  const std::unique_ptr<SinkPlace> other = GetParam().make();
  const Node before = Start("node-z"), one = Start("node-a", false, OwnProcess()), two = Start("node-b");
  ASSERT_TRUE(before->Hold().ok());
  ASSERT_FALSE(one->Hold().ok());
  Pass(seconds(15), {&one});
  ASSERT_TRUE(one->Hold().ok());
  EXPECT_THAT(Files(), ElementsAre(Epoch(2)));
  std::set<std::string> tokens = {one->Proof().value().substr(2)};
  for (const bool renews : {false, true}) {
    one.sink->instead = other->Open().value();
    ASSERT_TRUE(one->Check().ok()) << "it cannot know that this is not the store";
    tokens.insert(one->Proof().value().substr(2));
    EXPECT_EQ(two->Prove(one->Proof().value()).code(), Code::kNotFound) << "but others do";
    one.sink->instead.reset();
    if (renews) Pass(JobLock::kRenewEvery, {&one});
    ASSERT_EQ(one->Hold().ToString(), "ok");
    tokens.insert(one->Proof().value().substr(2));
    EXPECT_EQ(two->Prove(one->Proof().value()).ToString(), "ok");
    EXPECT_THAT(Files(), ElementsAre(Epoch(renews ? 4 : 3)));
  }
  EXPECT_EQ(tokens.size(), 5u) << "each directory has a proof of its own, each time";
  EXPECT_FALSE(Logged("taken over"));
}

TEST_P(JobLockTest, AHolderWhoseMountWasLostLosesToAnother) {
  const std::unique_ptr<SinkPlace> other = GetParam().make();
  const Node one = Start("node-a"), two = Start("node-b");
  ASSERT_TRUE(one->Hold().ok());
  ASSERT_FALSE(two->Hold().ok());
  one.sink->instead = other->Open().value();
  EXPECT_TRUE(one->Check().ok());
  Pass(seconds(15), {&one, &two});
  ASSERT_TRUE(two->Hold().ok());
  one.sink->instead.reset();
  EXPECT_EQ(one->Check().code(), Code::kAlreadyExists);
}

TEST_P(JobLockTest, AFileThatNoNodeWroteIsWatchedLikeAnyOther) {
  const Node one = Start("node-a");
  for (const char* name : {"0000000003.json", "3.json", "notes.txt", "00000000004.json"})
    ASSERT_TRUE(one.sink
                    ->Put(std::string("team/train/ropeteam-lock/") + name, "[]", PutMode::kReplace,
                          std::chrono::steady_clock::now() + seconds(60))
                    .ok());
  EXPECT_THAT(one->Hold().message(), HasSubstr("an unknown holder, whose lock file cannot be read"));
  Pass(seconds(15), {&one});
  EXPECT_TRUE(one->Hold().ok());
  EXPECT_THAT(Files(), testing::Contains(Epoch(4)));
  EXPECT_THAT(Files(), testing::Not(testing::Contains(Epoch(3))));
  EXPECT_THAT(Files(), testing::Contains("team/train/ropeteam-lock/notes.txt"));
}

TEST_P(JobLockTest, AProofTellsANodeThatSeesTheStoreFromOneThatDoesNot) {
  const Node one = Start("node-a"), two = Start("node-b");
  EXPECT_EQ(one->Proof().status().code(), Code::kUnavailable);
  ASSERT_TRUE(one->Hold().ok());
  const std::string proof = one->Proof().value();
  EXPECT_THAT(proof, testing::MatchesRegex("1:[0-9a-f]{32}"));
  EXPECT_EQ(two->Prove(proof).ToString(), "ok");
  EXPECT_EQ(one->Prove(proof).ToString(), "ok");
  EXPECT_TRUE(two->Check().ok()) << "two has not asked for the lock";
  Pass(JobLock::kRenewEvery, {&one});
  EXPECT_EQ(two->Prove(proof).ToString(), "ok") << "a renewal does not change it";
  EXPECT_THAT(Files(), ElementsAre(Epoch(1)));

  std::unique_ptr<SinkPlace> elsewhere = GetParam().make();
  std::swap(place_, elsewhere);
  const Node stray = Start("node-c");
  const Status absent = stray->Prove(proof);
  EXPECT_EQ(absent.code(), Code::kNotFound);
  EXPECT_THAT(absent.message(), HasSubstr(Epoch(1) + " of " + stray.sink->Describe() + " is not there"));
  EXPECT_THAT(absent.message(), HasSubstr("is it mounted here?"));
  EXPECT_THAT(Files(), IsEmpty());
  ASSERT_TRUE(stray->Hold().ok());
  const Status others = stray->Prove(proof);
  EXPECT_EQ(others.code(), Code::kNotFound) << "this file has the epoch of the proof, but another token";
  EXPECT_THAT(others.message(), HasSubstr("is of another process"));
  std::swap(place_, elsewhere);

  ASSERT_TRUE(one->Release().ok());
  EXPECT_EQ(one->Proof().status().code(), Code::kUnavailable);
  EXPECT_EQ(two->Prove(proof).code(), Code::kNotFound) << "it is of a lock that is not held any more";
}

TEST_P(JobLockTest, AFileThatNoNodeWroteProvesNothing) {
  const Node one = Start("node-a"), two = Start("node-b");
  ASSERT_TRUE(one->Hold().ok());
  const std::string proof = one->Proof().value();
  for (const std::string& text :
       {std::string("short"), std::string(2000, 'x'), "[]" + std::string(1500, ' ')}) {
    ASSERT_TRUE(
        one.sink->Put(Epoch(1), text, PutMode::kReplace, std::chrono::steady_clock::now() + seconds(60))
            .ok());
    EXPECT_EQ(two->Prove(proof).code(), Code::kNotFound);
  }
}

TEST_P(JobLockTest, AProofIsNotLostToAStoreThatDoesNotAnswer) {
  const Node one = Start("node-a"), two = Start("node-b");
  ASSERT_TRUE(one->Hold().ok());
  two.sink->read_code = Code::kIo;
  EXPECT_EQ(two->Prove(one->Proof().value()), Error(Code::kIo, "the read is refused"));
}

TEST_P(JobLockTest, AFileThatIsThereAgainWasBeingRenewed) {
  const Node one = Start("node-a"), two = Start("node-b");
  ASSERT_TRUE(one->Hold().ok());
  two.sink->lose_files = 1;
  const Status status = two->Prove(one->Proof().value());
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr(Epoch(1) + " is being renewed"));
  EXPECT_EQ(two->Prove(one->Proof().value()).ToString(), "ok");
}

// A mounted bucket cannot rename: the file is deleted, and then written again under its own name.
TEST(JobLockInPlaceTest, AProofIsOpenWhileTheFileIsWrittenInItsPlace) {
  std::function<void()> look;  // while the file is renewed
  posix::Syscalls calls = posix::RealSyscalls();
  calls.file_system_type = [](int) { return long{FUSE_SUPER_MAGIC}; };
  calls.rename = [](int, const char*, const char*, unsigned) {
    errno = ENOSYS;
    return -1;
  };
  calls.link = [](int, const char*, const char*) {
    errno = ENOSYS;
    return -1;
  };
  calls.unlinkat = [&look](int folder, const char* name, int flags) {
    const int result = ::unlinkat(folder, name, flags);
    if (look && std::string_view(name).ends_with(".json")) look();  // the file is gone
    return result;
  };
  calls.pwritev = [&look](int fd, const iovec* pieces, int count, off_t at) {
    if (look) look();  // the file is empty
    return ::pwritev(fd, pieces, count, at);
  };
  PosixPlace place(calls);
  JobLock::Time now{};
  const auto start = [&](const std::string& name) {
    return std::make_unique<JobLock>(JobLock::Config{.sink = place.Open().value(),
                                                     .job = "train",
                                                     .node = name,
                                                     .now = [&now] { return now; },
                                                     .process = Elsewhere(name),
                                                     .renew_by_itself = false});
  };
  const auto one = start("node-a"), two = start("node-b");
  (void)one->Hold();
  now += JobLock::kDeadAfter;
  ASSERT_EQ(one->Hold().ToString(), "ok");
  const std::string proof = one->Proof().value();
  std::vector<Code> codes;
  look = [&] { codes.push_back(two->Prove(proof).code()); };
  one->Renew();
  look = nullptr;
  EXPECT_THAT(codes, ElementsAre(Code::kUnavailable, Code::kUnavailable));
  EXPECT_EQ(two->Prove(proof).ToString(), "ok");
  ASSERT_TRUE(one->Release().ok());
  EXPECT_EQ(two->Prove(proof).code(), Code::kNotFound);
}

TEST_P(JobLockTest, WhatIsNotAProofIsRefusedAndReadNowhere) {
  const Node one = Start("node-a");
  one.sink->read_code = Code::kIo;  // a read would answer kIo
  const std::string token(32, 'a');
  for (const std::string& bad :
       {std::string(), std::string(":"), std::string("1"), "1:" + token + "a", "1:" + token.substr(1),
        ":" + token, "0:" + token, "01:" + token, "-1:" + token, "+1:" + token, " 1:" + token, "1 :" + token,
        "1:" + std::string(32, 'A'), "1:" + std::string(32, '/'), "../1:" + token,
        "1234567890123456789:" + token, std::string(1 << 20, '1') + ":" + token,
        "1:" + std::string(32, '\0')}) {
    const Status status = one->Prove(bad);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << bad.substr(0, 60);
    EXPECT_LT(status.message().size(), 200u);
  }
}

TEST_P(JobLockTest, AStoreThatCannotBeWrittenCannotBeHeld) {
  const Node one = Start("node-a");
  one.sink->put_code = Code::kIo;
  const Status status = one->Hold();
  EXPECT_EQ(status, Error(Code::kIo, "the put is refused"));
}

// kUnavailable would mean that another holder may be alive, so that the caller waits for it.
TEST_P(JobLockTest, AStoreThatIsAwayIsNoOtherHolder) {
  const Node one = Start("node-a"), two = Start("node-b");
  one.sink->away = true;
  EXPECT_EQ(one->Hold(), Error(Code::kLinkFailed, "the store is away"));
  one.sink->away = false;
  one.sink->put_code = Code::kUnavailable;
  EXPECT_EQ(one->Hold(), Error(Code::kLinkFailed, "the put is refused"));
  one.sink->put_code = Code::kOk;
  ASSERT_TRUE(one->Hold().ok());
  one.sink->away = true;
  EXPECT_EQ(one->Check().code(), Code::kLinkFailed) << "also while it is held";
  EXPECT_EQ(two->Hold().code(), Code::kUnavailable) << "a holder that may be alive";
  two.sink->read_code = Code::kUnavailable;
  EXPECT_EQ(two->Hold().code(), Code::kLinkFailed);
}

TEST_P(JobLockTest, ARenewalThatFailsIsToldOnce) {
  const Node one = Start("node-a");
  ASSERT_TRUE(one->Hold().ok());
  one.sink->away = true;
  Pass(seconds(5), {&one});
  EXPECT_TRUE(
      Logged("is not renewed, after 15 s another allocation may take it: link failed: the store is away"));
  log_.clear();
  Pass(seconds(10), {&one});
  EXPECT_EQ(log_, "");
  one.sink->away = false;
  EXPECT_TRUE(one->Check().ok()) << "nobody took it";
}

TEST_P(JobLockTest, AStoreThatHangsHoldsUpNeitherTheEndOfTheProcessNorOthers) {
  const Node one = Start("node-a"), two = Start("node-b");
  ASSERT_TRUE(one->Hold().ok());
  one.sink->block_puts = true;
  std::thread renewal([&] { one->Renew(); });
  one.sink->blocked.get_future().wait();
  one->Leave();
  EXPECT_EQ(two->Hold().code(), Code::kUnavailable);
  one.sink->unblock.set_value();
  renewal.join();
}

TEST_P(JobLockTest, TheFolderIsNeitherAStepNorAJob) {
  const Node one = Start("node-a");
  ASSERT_TRUE(one->Hold().ok());
  const auto steps = ListSteps(one.sink.get(), "team/train", seconds(60));
  ASSERT_TRUE(steps.ok());
  EXPECT_TRUE(steps->empty());
  const auto jobs = FindJobs(one.sink.get(), seconds(60));
  ASSERT_TRUE(jobs.ok()) << jobs.status().ToString();
  EXPECT_THAT(*jobs, IsEmpty());
}

TEST_P(WeakJobLockTest, AStoreWithoutConditionalPutsIsReadAgainAfterAWhile) {
  const Node one = Start("node-a"), two = Start("node-b");
  EXPECT_THAT(one->Hold().message(), HasSubstr("waiting for 15 s"));
  EXPECT_TRUE(Logged("protection from a second allocation is weak"));
  EXPECT_EQ(two->Hold().code(), Code::kUnavailable);
  Pass(seconds(10), {&one, &two});
  EXPECT_FALSE(one->Hold().ok());
  Pass(seconds(5), {&one, &two});
  EXPECT_TRUE(one->Hold().ok());
  EXPECT_EQ(two->Hold().code(), Code::kAlreadyExists);
  log_.clear();
  ASSERT_TRUE(one->Release().ok());
  EXPECT_FALSE(one->Hold().ok());
  EXPECT_FALSE(Logged("weak")) << "once";
}

std::vector<SinkKind> Kinds(bool put_if_absent) {
  std::vector<SinkKind> kinds;
  for (const SinkKind& kind : SinkKinds())
    if (put_if_absent ? kind.name == "posix" || kind.name == "s3" : !kind.put_if_absent)
      kinds.push_back(kind);
  return kinds;
}
const auto kNameOf = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Sinks, JobLockTest, testing::ValuesIn(Kinds(true)), kNameOf);
INSTANTIATE_TEST_SUITE_P(Sinks, WeakJobLockTest, testing::ValuesIn(Kinds(false)), kNameOf);

}  // namespace
}  // namespace ropeteam::storage::test

// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <future>
#include <map>
#include <mutex>
#include <thread>

#include "core/base/checksum.h"
#include "node/check_workers.h"
#include "node/event_loop.h"
#include "node/parallel.h"

namespace ropeteam {
namespace {

TEST(EventLoop, RunsWhatOtherThreadsPostInTheirOrder) {
  EventLoop loop;
  ASSERT_TRUE(loop.Init().ok());
  std::vector<int> order;
  std::thread poster([&] {
    for (int i = 0; i < 1000; ++i) loop.Post([&order, i] { order.push_back(i); });
    loop.Post([&] { loop.Stop(); });
  });
  loop.Run();
  poster.join();
  ASSERT_EQ(order.size(), 1000u);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
}

TEST(EventLoop, TheTimerFiresOnceAndNotBeforeItsTime) {
  EventLoop loop;
  ASSERT_TRUE(loop.Init().ok());
  const TimeUs due = EventLoop::Now() + 2000;
  int fired = 0;
  loop.SetTimer(1, [&] { FAIL() << "replaced before the loop ran"; });
  loop.SetTimer(due, [&] {
    ++fired;
    EXPECT_GE(EventLoop::Now(), due);
    loop.Post([&] { loop.Post([&] { loop.Stop(); }); });
  });
  loop.Run();
  EXPECT_EQ(fired, 1);
}

TEST(EventLoop, ATimerInThePastFiresAtOnce) {
  EventLoop loop;
  ASSERT_TRUE(loop.Init().ok());
  loop.SetTimer(0, [&] { loop.Stop(); });
  loop.Run();
}

TEST(EventLoop, AnEventForARemovedDescriptorReachesNobody) {
  EventLoop loop;
  ASSERT_TRUE(loop.Init().ok());
  int first[2], second[2];
  ASSERT_EQ(pipe(first), 0);
  ASSERT_EQ(pipe(second), 0);
  ASSERT_EQ(write(first[1], "x", 1), 1);
  ASSERT_EQ(write(second[1], "x", 1), 1);
  int calls = 0;
  // Both are readable in one wait; the first callback removes both.
  const auto remove_both = [&](uint32_t) {
    ++calls;
    loop.Remove(first[0]);
    loop.Remove(second[0]);
    loop.Stop();
  };
  ASSERT_TRUE(loop.Add(first[0], EPOLLIN, remove_both).ok());
  ASSERT_TRUE(loop.Add(second[0], EPOLLIN, remove_both).ok());
  loop.Run();
  EXPECT_EQ(calls, 1);
  for (const int fd : {first[0], first[1], second[0], second[1]}) close(fd);
}

TEST(ParallelFor, DoesEachOnce) {
  std::vector<std::atomic<int>> done(1000);
  ParallelFor(done.size(), [&](uint64_t i) { ++done[i]; });
  for (const auto& count : done) EXPECT_EQ(count.load(), 1);
  ParallelFor(0, [](uint64_t) { FAIL(); });
}

class CheckWorkersTest : public ::testing::Test {
 protected:
  CheckWorkersTest() : memory_(1 << 20) {
    for (size_t i = 0; i < memory_.size(); ++i) memory_[i] = static_cast<std::byte>(i * 7);
  }
  StartCheck::Range Good(uint64_t offset, uint64_t length) const {
    return {offset, length, Crc32c(memory_.data() + offset, length)};
  }
  CheckWorkers::Done Collect() {
    return [this](uint64_t tag, std::vector<uint32_t> bad, const std::vector<EncryptedChunk>&) {
      const std::lock_guard lock(mutex_);
      EXPECT_TRUE(done_.emplace(tag, std::move(bad)).second) << "answered twice";
      changed_.notify_all();
    };
  }
  std::map<uint64_t, std::vector<uint32_t>> Wait(size_t count) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds(20), [&] { return done_.size() >= count; }));
    return done_;
  }

  std::vector<std::byte> memory_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, std::vector<uint32_t>> done_;
};

TEST_F(CheckWorkersTest, FindsExactlyTheRangesThatDoNotMatch) {
  CheckWorkers workers(memory_, nullptr, 3, Collect());
  StartCheck check{1, {}};
  for (uint64_t i = 0; i < 100; ++i) check.ranges.push_back(Good(i * 1000, i));
  check.ranges[17].crc ^= 1;
  check.ranges[99].crc ^= 0x80000000;
  workers.Submit(check);
  workers.Submit({2, {Good(0, 0)}});
  workers.Submit({3, {}});
  const auto done = Wait(3);
  EXPECT_THAT(done.at(1), ::testing::ElementsAre(17, 99));
  EXPECT_TRUE(done.at(2).empty());
  EXPECT_TRUE(done.at(3).empty());
}

TEST_F(CheckWorkersTest, ATaskRunsOnAWorkerAndChecksGoOnBesideIt) {
  std::promise<std::thread::id> began;
  std::promise<void> end;
  CheckWorkers workers(memory_, nullptr, 2, Collect());
  workers.Run([&] {
    began.set_value(std::this_thread::get_id());
    end.get_future().wait();
  });
  EXPECT_NE(began.get_future().get(), std::this_thread::get_id());
  workers.Submit({1, {Good(0, 1000)}});
  EXPECT_TRUE(Wait(1).at(1).empty());
  end.set_value();
}

TEST_F(CheckWorkersTest, ARangeOutsideTheMemoryIsBadAndNotRead) {
  CheckWorkers workers(memory_, nullptr, 1, Collect());
  workers.Submit(
      {1, {{memory_.size(), 1, 0}, {UINT64_MAX, 1, 0}, {0, UINT64_MAX, 0}, {memory_.size(), 0, 0}}});
  EXPECT_THAT(Wait(1).at(1), ::testing::ElementsAre(0, 1, 2));
}

}  // namespace
}  // namespace ropeteam

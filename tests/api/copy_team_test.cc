// SPDX-License-Identifier: Apache-2.0
//
// Puts that several threads copy: the bytes in the arena, what is reported to the daemon and when, and the
// threads themselves.

#include "api/client/copy_team.h"

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>

#include "api/client/client.h"
#include "api/client/environment.h"
#include "api/client/save.h"
#include "core/base/checksum.h"
#include "tests/api/api_fixture.h"

namespace ropeteam::test {
namespace {

using client::CopyTeam;

constexpr uint64_t kKiB = 1024;
constexpr uint64_t kChunk = 64 * kKiB;
constexpr uint64_t kChunks = 512;

// ---- the team alone

std::vector<ropeteam_part_t> Cut(const std::string& bytes, const std::vector<uint64_t>& lengths) {
  std::vector<ropeteam_part_t> parts;
  uint64_t at = 0;
  for (size_t i = 0; at < bytes.size(); ++i) {
    const uint64_t length = std::min<uint64_t>(lengths[i % lengths.size()], bytes.size() - at);
    parts.push_back({length == 0 ? nullptr : bytes.data() + at, length, nullptr, 0});
    at += length;
  }
  return parts;
}

class TeamTest : public ::testing::TestWithParam<uint32_t> {};
INSTANTIATE_TEST_SUITE_P(Threads, TeamTest, ::testing::Values(2, 3, 4, client::kCopyThreadsMax));

// Copies the parts to `target` in windows of `window` bytes. Returns the joined checksum.
uint32_t CopyBy(CopyTeam* team, const std::vector<ropeteam_part_t>& parts, uint64_t bytes, std::byte* target,
                uint64_t window, bool checksum) {
  CopyTeam::Turn turn(team, parts, bytes);
  EXPECT_TRUE(turn.taken());
  uint32_t crc = 0;
  uint64_t handed_out = 0;
  for (uint64_t taken = 0; taken < bytes;) {
    while (turn.HasRoom()) {
      handed_out += turn.HandOut(target + handed_out, window - handed_out % window, checksum);
    }
    const CopyTeam::Piece piece = turn.Take();
    EXPECT_EQ(piece.checksum, checksum);
    EXPECT_EQ(taken / window, (taken + piece.bytes - 1) / window);
    crc = Crc32cCombine(crc, piece.crc, piece.bytes);
    taken += piece.bytes;
  }
  return crc;
}

TEST_P(TeamTest, CopiesAndChecksumsEverySizeAndAlignment) {
  CopyTeam team(GetParam());
  const std::vector<std::vector<uint64_t>> cuts = {
      {UINT64_MAX}, {64, 300001, 0, 8}, {1, 4095, 4096, 4097, 0, 0, 65537}, {999}};
  uint64_t seed = 0;
  for (const uint64_t around : {CopyTeam::kShareBytesMin + 1, 4 * CopyTeam::kPieceBytesMin + 4096,
                                CopyTeam::kPieceBytesMax + 1, 5 * CopyTeam::kPieceBytesMax}) {
    for (const uint64_t bytes : {around - 1, around, around + 1, around + 4095}) {
      const std::string source = RandomBytes(bytes, ++seed);
      for (size_t i = 0; i < cuts.size(); ++i) {
        const uint64_t offset = i * 61;
        const uint64_t window = i % 2 == 0 ? UINT64_MAX : 100 * kKiB;
        const bool checksum = seed % 5 != 0;
        // One byte more, which must not change.
        std::vector<std::byte> target(offset + bytes + 1, std::byte{0x5a});
        const uint32_t crc =
            CopyBy(&team, Cut(source, cuts[i]), bytes, target.data() + offset, window, checksum);
        EXPECT_EQ(crc, checksum ? Crc32c(source.data(), bytes) : 0u) << bytes << " cut " << i;
        EXPECT_EQ(std::memcmp(target.data() + offset, source.data(), bytes), 0) << bytes << " cut " << i;
        EXPECT_EQ(target.back(), std::byte{0x5a});
      }
    }
  }
}

TEST_P(TeamTest, ATurnThatEndsEarlyLeavesNobodyAtWork) {
  CopyTeam team(GetParam());
  const std::string source = RandomBytes(2 << 20, 1);
  const auto parts = Cut(source, {UINT64_MAX});
  for (int i = 0; i < 100; ++i) {
    std::vector<std::byte> target(source.size());
    {
      CopyTeam::Turn turn(&team, parts, source.size());
      ASSERT_TRUE(turn.taken());
      for (uint64_t at = 0; turn.HasRoom();) at += turn.HandOut(target.data() + at, UINT64_MAX, true);
      if (i % 2 == 0) turn.Take();
    }
    // After the turn nothing is written here any more. The check below and the sanitizers would notice it.
    const std::vector<std::byte> at_the_end = target;
    std::this_thread::yield();
    EXPECT_EQ(target, at_the_end);
  }
  std::vector<std::byte> target(source.size());
  CopyBy(&team, parts, source.size(), target.data(), UINT64_MAX, true);
  EXPECT_EQ(std::memcmp(target.data(), source.data(), source.size()), 0);
}

TEST(CopyTeam, ATurnIsForOneThreadAndForPutsThatPay) {
  CopyTeam team(2);
  const std::string source(CopyTeam::kShareBytesMin, 's');
  const auto parts = Cut(source, {UINT64_MAX});
  EXPECT_FALSE(CopyTeam::Turn(&team, parts, source.size() - 1).taken());
  const CopyTeam::Turn turn(&team, parts, source.size());
  EXPECT_TRUE(turn.taken());
  std::thread([&] { EXPECT_FALSE(CopyTeam::Turn(&team, parts, source.size()).taken()); }).join();
  CopyTeam alone(1);
  EXPECT_FALSE(CopyTeam::Turn(&alone, parts, source.size()).taken());
}

// ---- saves

class CopyTest : public ApiTest, public ::testing::WithParamInterface<uint32_t> {
 protected:
  explicit CopyTest(uint64_t chunk_bytes = kChunk, uint64_t chunks = kChunks) : ApiTest(chunk_bytes, chunks) {
    auto opened = client::Client::Open(Options());
    EXPECT_TRUE(opened.ok()) << opened.status().ToString();
    client_ = *opened;
  }

  client::OpenOptions Options(uint32_t rank = kRank) const {
    client::OpenOptions options;
    options.socket = daemon_.socket();
    options.rank = rank;
    options.world_size = kWorld;
    options.incarnation_token = "run";
    options.timeout_ms = kTimeoutMs;
    options.copy_threads = GetParam();  // may exceed the C API's limit for few processors
    return options;
  }

  std::unique_ptr<client::Save> BeginSave(Step step, uint64_t bytes, uint64_t objects) {
    auto begun = client::Save::Begin(client_, step, bytes, objects, 0);
    EXPECT_TRUE(begun.ok()) << begun.status().ToString();
    return std::move(begun).value();
  }

  std::shared_ptr<client::Client> client_;
};
// Pieces of the largest size.
class CopyToLargeChunksTest : public CopyTest {
 protected:
  CopyToLargeChunksTest() : CopyTest(4096 * kKiB, 4) {}
};
INSTANTIATE_TEST_SUITE_P(Threads, CopyTest, ::testing::Values(1, 2, 4));
INSTANTIATE_TEST_SUITE_P(Threads, CopyToLargeChunksTest, ::testing::Values(1, 2, 4));

void ExpectOk(const Status& status) { EXPECT_TRUE(status.ok()) << status.ToString(); }

TEST_P(CopyTest, SizesAroundEveryBoundaryAndPartsOfOddSizes) {
  Step step = 0;
  for (const uint64_t around : {CopyTeam::kShareBytesMin, 8 * kChunk, 20 * kChunk + 4096}) {
    for (const uint64_t bytes : {around - 1, around, around + 1, around + 63}) {
      const std::string whole = RandomBytes(bytes, ++step);
      const std::string first = RandomBytes(step * 997 % kChunk, step);
      const auto save = BeginSave(step, first.size() + 2 * bytes, 3);
      // Shifts the following objects to arbitrary positions in a chunk.
      ExpectOk(save->Put("first", Cut(first, {UINT64_MAX})));
      ExpectOk(save->Put("whole", Cut(whole, {UINT64_MAX})));
      const std::vector<ropeteam_part_t> pieces = Cut(whole, {64, 70001, 0, 8, 200003, 1});
      ExpectOk(save->Put("parts", {pieces.data(), pieces.size() - 1}));
      ExpectOk(save->Extend({&pieces.back(), 1}));
      ExpectOk(save->Commit());
      EXPECT_EQ(daemon_.ObjectBytes(step, kRank, "first"), first);
      EXPECT_EQ(daemon_.ObjectBytes(step, kRank, "whole"), whole);
      EXPECT_EQ(daemon_.ObjectBytes(step, kRank, "parts"), whole);
    }
  }
  ExpectNoProblems();
}

TEST_P(CopyToLargeChunksTest, PiecesOfAChunkAreJoined) {
  const std::string bytes = RandomBytes((10 << 20) + 4097, 1);
  const auto save = BeginSave(1, bytes.size() + 100, 2);
  ExpectOk(save->Put("odd", Cut(bytes.substr(0, 99), {UINT64_MAX})));
  ExpectOk(save->Put("parts", Cut(bytes, {3 << 20, 77, 1 << 20})));
  EXPECT_TRUE(daemon_.WaitFor([](const FakeCounts& counts) { return counts.filled_chunks == 2; }));
  ExpectOk(save->Commit());
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "parts"), bytes);
  ExpectNoProblems();
}

TEST_P(CopyTest, ChunksOfReservedMemoryGetTheirChecksumAtTheCommit) {
  const std::string bytes = RandomBytes(10 * kChunk, 1);
  const auto save = BeginSave(1, 12 * kChunk, 2);
  const Result<void*> memory = save->Reserve("reserved", 1000);
  ASSERT_TRUE(memory.ok());
  ExpectOk(save->Put("put", Cut(bytes, {UINT64_MAX})));  // its first chunk is shared with the reserved object
  std::memset(*memory, 'r', 1000);
  ExpectOk(save->Commit());
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "put"), bytes);
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "reserved"), std::string(1000, 'r'));
  ExpectNoProblems();
}

TEST_P(CopyTest, ChunksAreAnnouncedInTheirOrder) {
  const std::string bytes = RandomBytes(20 * kChunk + 5, 1);
  const auto save = BeginSave(1, bytes.size(), 1);
  ExpectOk(save->Put("big", Cut(bytes, {UINT64_MAX})));
  EXPECT_TRUE(daemon_.WaitFor([](const FakeCounts& counts) { return counts.filled_chunks == 20; }));
  EXPECT_EQ(daemon_.counts().filled_frames, 5);  // each frame has only consecutive chunks
  ExpectOk(save->Commit());
  ExpectNoProblems();
}

// Source memory with one page that blocks its readers until it is opened.
class HeldSource {
 public:
  HeldSource(const std::string& bytes, uint64_t held_at) : bytes_(bytes.size()) {
    source_ = static_cast<std::byte*>(
        ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    std::memcpy(source_, bytes.data(), bytes_);
    page_ = source_ + held_at;
    reached_ = opened_ = false;
    struct sigaction action {};
    action.sa_sigaction = &OnFault;
    action.sa_flags = SA_SIGINFO;
    ::sigaction(SIGSEGV, &action, &before_);
    EXPECT_EQ(::mprotect(page_, kPage, PROT_NONE), 0);
  }
  ~HeldSource() {
    ::sigaction(SIGSEGV, &before_, nullptr);
    ::munmap(source_, bytes_);
  }
  ropeteam_part_t part() const { return {source_, bytes_, nullptr, 0}; }
  static void WaitUntilReached() {
    while (!reached_) std::this_thread::yield();
  }
  static void Open() { opened_ = true; }

 private:
  static constexpr uint64_t kPage = 4096;

  static void OnFault(int, siginfo_t* info, void*) {
    const auto* address = static_cast<std::byte*>(info->si_addr);
    if (address < page_ || address >= page_ + kPage) ::signal(SIGSEGV, SIG_DFL);  // a bug: crash
    reached_ = true;
    while (!opened_) ::sched_yield();
    ::mprotect(page_, kPage, PROT_READ);
  }

  static inline std::byte* page_ = nullptr;
  static inline std::atomic<bool> reached_ = false;
  static inline std::atomic<bool> opened_ = false;
  const uint64_t bytes_;
  std::byte* source_;
  struct sigaction before_ {};
};

TEST_P(CopyTest, WhenTheDaemonDiesAPutEndsAtOnceAndNobodyReadsTheSource) {
  constexpr uint64_t kHeldChunk = 10;
  const std::string bytes = RandomBytes(100 * kChunk, 1);
  std::optional<HeldSource> source(std::in_place, bytes, kHeldChunk * kChunk + 4096);
  const auto save = BeginSave(1, bytes.size(), 1);
  Status status;
  const ropeteam_part_t part = source->part();
  std::thread putter([&] { status = save->Put("big", {&part, 1}); });
  source->WaitUntilReached();
  daemon_.Kill();
  source->Open();
  putter.join();
  source.reset();  // a helper that still read it would crash
  EXPECT_EQ(status.code(), Code::kUnavailable) << status.ToString();
  EXPECT_EQ(save->Commit().code(), Code::kUnavailable);
  // The next daemon may grant the chunks to another save, so no new chunk may be begun.
  EXPECT_GE(daemon_.ChunksUntouched(), kChunks - (kHeldChunk + 1 + 2 * GetParam()));
  daemon_.Start();
  const auto next = BeginSave(2, bytes.size(), 1);
  ExpectOk(next->Put("big", Cut(bytes, {UINT64_MAX})));
  ExpectOk(next->Commit());
  EXPECT_EQ(daemon_.ObjectBytes(2, kRank, "big"), bytes);
  ExpectNoProblems();
}

TEST_P(CopyTest, AHelperThatIsHeldUpHoldsUpThePutsEnd) {
  const std::string bytes = RandomBytes(16 * kChunk, 1);
  const HeldSource source(bytes, 2 * kChunk);
  const auto save = BeginSave(1, bytes.size(), 1);
  std::atomic<bool> returned = false;
  const ropeteam_part_t part = source.part();
  std::thread putter([&] {
    ExpectOk(save->Put("big", {&part, 1}));
    returned = true;
  });
  source.WaitUntilReached();
  EXPECT_FALSE(returned);
  source.Open();
  putter.join();
  ExpectOk(save->Commit());
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "big"), bytes);
  ExpectNoProblems();
}

TEST_P(CopyTest, TwoSavesOfOneHandleAtOnce) {
  const std::string bytes = RandomBytes(10 * kChunk + 77, 1);
  const auto save_some = [&](Step first) {
    for (Step step = first; step < first + 20; ++step) {
      const auto save = BeginSave(step, 3 * bytes.size(), 3);
      for (const char* name : {"a", "b", "c"}) ExpectOk(save->Put(name, Cut(bytes, {100003})));
      if (step == first) {
        ExpectOk(save->Commit());
      } else {
        ExpectOk(save->Abort());
      }
    }
  };
  std::thread other(save_some, 100);
  save_some(1);
  other.join();
  for (const char* name : {"a", "b", "c"}) {
    EXPECT_EQ(daemon_.ObjectBytes(1, kRank, name), bytes);
    EXPECT_EQ(daemon_.ObjectBytes(100, kRank, name), bytes);
  }
  ExpectNoProblems();
}

// ---- threads

struct Task {
  char state;
  uint64_t blocked_signals;
};

std::vector<Task> Helpers() {
  std::vector<Task> helpers;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(task.path() / "status");
    std::string name;
    Task found{};
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("Name:\t")) name = line.substr(6);
      if (line.starts_with("State:\t")) found.state = line[7];
      if (line.starts_with("SigBlk:\t")) found.blocked_signals = std::stoull(line.substr(8), nullptr, 16);
    }
    if (name == "ropeteam-copy") helpers.push_back(found);
  }
  return helpers;
}

TEST_P(CopyTest, AThousandSavesHaveTheSameHelpersWhichSleepBetween) {
  const std::string bytes(CopyTeam::kShareBytesMin, 's');
  {
    const auto save = BeginSave(1, bytes.size(), 1);
    ExpectOk(save->Put("small", Cut(bytes.substr(1), {UINT64_MAX})));
    EXPECT_EQ(Helpers().size(), 0u);  // none before they are needed
  }
  for (Step step = 1; step <= 1000; ++step) {
    const auto save = BeginSave(step, bytes.size(), 1);
    ExpectOk(save->Put("big", Cut(bytes, {UINT64_MAX})));
    ExpectOk(save->Abort());
  }
  EXPECT_EQ(Helpers().size(), GetParam() - 1);
  for (const Task& helper : Helpers()) {
    const auto blocks = [&](int signal) { return (helper.blocked_signals >> (signal - 1) & 1) != 0; };
    EXPECT_TRUE(blocks(SIGINT) && blocks(SIGTERM) && blocks(SIGCHLD) && blocks(SIGUSR1));
    EXPECT_FALSE(blocks(SIGSEGV) || blocks(SIGBUS));
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(kTimeoutMs);
  const auto awake = [] {
    const std::vector<Task> helpers = Helpers();
    return std::count_if(helpers.begin(), helpers.end(), [](const Task& each) { return each.state != 'S'; });
  };
  while (awake() != 0 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_EQ(awake(), 0);
  client_ = nullptr;
  EXPECT_EQ(Helpers().size(), 0u);
}

TEST_P(CopyTest, AForkedChildOpensItsOwnAndTheParentGoesOn) {
  const std::string bytes = RandomBytes(10 * kChunk, 1);
  const auto save = BeginSave(1, 2 * bytes.size(), 2);
  ExpectOk(save->Put("a", Cut(bytes, {UINT64_MAX})));
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    auto opened = client::Client::Open(Options(kRank + 1));
    if (!opened.ok()) ::_exit(1);
    auto begun = client::Save::Begin(*opened, 1, bytes.size(), 1, 0);
    if (!begun.ok() || !(*begun)->Put("c", Cut(bytes, {UINT64_MAX})).ok()) ::_exit(2);
    if (!(*begun)->Commit().ok() || Helpers().size() != GetParam() - 1) ::_exit(3);
    ::_exit(client_->CheckProcess().ok() ? 4 : 0);
  }
  ExpectOk(save->Put("b", Cut(bytes, {UINT64_MAX})));
  ExpectOk(save->Commit());
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "a") + daemon_.ObjectBytes(1, kRank, "b"), bytes + bytes);
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank + 1, "c"), bytes);
  ExpectNoProblems();
}

// ---- how many

class CopyThreadsTest : public ApiTest {
 protected:
  ~CopyThreadsTest() override {
    ::unsetenv("ROPETEAM_COPY_THREADS");
    ::unsetenv("LOCAL_WORLD_SIZE");
  }
  static uint32_t Threads() {
    const Result<uint32_t> threads = client::CopyThreadsFromEnvironment();
    EXPECT_TRUE(threads.ok()) << threads.status().ToString();
    return threads.ok() ? *threads : 0;
  }
  static uint32_t Processors() {
    cpu_set_t set;
    CPU_ZERO(&set);
    EXPECT_EQ(::sched_getaffinity(0, sizeof(set), &set), 0);
    return static_cast<uint32_t>(CPU_COUNT(&set));
  }
};

TEST_F(CopyThreadsTest, ABadValueIsNamedWithItsLimit) {
  const ropeteam_open_options_t options = OptionsFor(daemon_.socket());
  for (const char* value : {"0", "17", "-1", "two", "2 ", "4294967298"}) {
    ::setenv("ROPETEAM_COPY_THREADS", value, 1);
    ropeteam_t* handle = nullptr;
    EXPECT_FAILS(ropeteam_open(&options, &handle), ROPETEAM_INVALID_ARGUMENT,
                 "ROPETEAM_COPY_THREADS is '" + std::string(value) + "', not a number from 1 to 16");
  }
}

TEST_F(CopyThreadsTest, WhatIsSaidIsDoneAsFarAsThereAreProcessors) {
  for (const uint32_t threads : {1u, 2u, 16u}) {
    ::setenv("ROPETEAM_COPY_THREADS", std::to_string(threads).c_str(), 1);
    EXPECT_EQ(Threads(), std::min(threads, Processors()));
    const Handle handle = Open();
    SaveOne(handle.get(), threads, RandomBytes(10 * kChunk, 1));
    EXPECT_EQ(Helpers().size(), std::min(threads, Processors()) - 1);
  }
}

TEST_F(CopyThreadsTest, TheDefaultIsFourWithinTheRanksPartOfTheProcessors) {
  EXPECT_EQ(Threads(), std::min(4u, Processors()));
  ::setenv("ROPETEAM_COPY_THREADS", "", 1);
  EXPECT_EQ(Threads(), std::min(4u, Processors()));
  const std::vector<std::pair<const char*, uint32_t>> parts = {{"1", Processors()},
                                                               {"2", Processors() / 2},
                                                               {"100000", 0},
                                                               {"0", Processors()},
                                                               {"many", Processors()}};
  for (const auto& [ranks, part] : parts) {
    ::setenv("LOCAL_WORLD_SIZE", ranks, 1);
    EXPECT_EQ(Threads(), std::clamp(part, 1u, 4u)) << ranks;
  }
  ::unsetenv("LOCAL_WORLD_SIZE");
  std::thread([] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<unsigned>(::sched_getcpu()), &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof(one), &one), 0);
    EXPECT_EQ(Threads(), 1u);
  }).join();
}

}  // namespace
}  // namespace ropeteam::test

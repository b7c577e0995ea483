// SPDX-License-Identifier: Apache-2.0
#include "node/arena_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "core/base/checksum.h"
#include "node/arena_guard.h"

namespace ropeteam {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kChunk = 64 * 1024;
constexpr uint64_t kMemory = 4 << 20;

// A temporary directory in shared memory.
class ArenaFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char path[] = "/dev/shm/ropeteam-test-XXXXXX";
    ASSERT_NE(mkdtemp(path), nullptr);
    directory_ = path;
  }
  void TearDown() override {
    (void)unlink(Path().c_str());
    (void)rmdir(directory_.c_str());
  }
  std::string Path() const { return directory_ + "/" + ArenaFileName("job", "node-1"); }
  ArenaFileConfig Config() const { return {directory_, "job", "node-1", kMemory, kChunk, false}; }
  off_t FileBytes() const {
    struct stat info {};
    return stat(Path().c_str(), &info) == 0 ? info.st_size : -1;
  }

  std::string directory_;
};

// Seals one shard of `bytes` bytes.
void SealOne(Store* store, Step step, uint64_t bytes) {
  Result<std::vector<Extent>> extents = store->Allocate(ChunksFor(bytes, kChunk));
  ASSERT_TRUE(extents.ok());
  std::vector<uint32_t> crcs;
  for (uint64_t i = 0; i < ChunksFor(bytes, kChunk); ++i) {
    std::byte* chunk = store->chunk(ChunkAt(*extents, i));
    const uint64_t length = ChunkLength(bytes, kChunk, i);
    std::memset(chunk, static_cast<int>(step + i), length);
    crcs.push_back(Crc32c(chunk, length));
  }
  ShardMeta meta;
  meta.id = {1, step, 0};
  meta.world_size = 1;
  meta.chunk_bytes = kChunk;
  meta.stream_bytes = bytes;
  ASSERT_TRUE(store->Seal(meta, Role::kOwn, *extents, crcs).ok());
}

TEST_F(ArenaFileTest, AFreshOneIsResidentPrivateAndEmpty) {
  Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(Config());
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  struct stat info {};
  ASSERT_EQ(stat(Path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_EQ(static_cast<uint64_t>(info.st_size), kMemory);
  EXPECT_EQ(static_cast<uint64_t>(info.st_blocks) * 512, kMemory) << "every page was faulted in";
  Result<std::unique_ptr<Store>> store = (*file)->OpenStore();
  ASSERT_TRUE(store.ok()) << store.status().ToString();
  EXPECT_TRUE((*store)->shards().empty());
  EXPECT_GT((*store)->chunks_total(), 0u);
}

TEST_F(ArenaFileTest, WhatAKilledProcessSealedIsThereBitForBitAndWhatItDidNotIsNot) {
  const pid_t child = fork();
  if (child == 0) {
    Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(Config());
    Result<std::unique_ptr<Store>> store = (*file)->OpenStore();
    SealOne(store->get(), 7, 3 * kChunk + 100);
    (void)(*store)->Allocate(2);  // never sealed
    raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));

  Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(Config());
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  Result<std::unique_ptr<Store>> store = (*file)->OpenStore();
  ASSERT_TRUE(store.ok()) << store.status().ToString();
  const SealedShard* shard = (*store)->Find({1, 7, 0});
  ASSERT_NE(shard, nullptr);
  EXPECT_TRUE(shard->bad.empty());
  EXPECT_EQ((*store)->chunk(ChunkAt(shard->extents, 2))[5], std::byte{9});
  EXPECT_EQ((*store)->chunks_free(), (*store)->chunks_total() - 4) << "the unsealed chunks are free again";
}

// Peers that do not know of a daemon's restart must not reach its arena with a former address, even if the
// fabric checks no key.
TEST_F(ArenaFileTest, RenewedItIsAtAnotherAddressAndNobodyReachesTheFormer) {
  Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(Config());
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  for (int round = 0; round < 3; ++round) {
    const std::span<std::byte> former = (*file)->memory();
    former[kMemory - 1] = std::byte{static_cast<unsigned char>(40 + round)};
    const Status renewed = (*file)->Renew();
    ASSERT_TRUE(renewed.ok()) << renewed.ToString();
    const std::span<std::byte> memory = (*file)->memory();
    ASSERT_EQ(memory.size(), kMemory);
    EXPECT_NE(memory.data(), former.data());
    EXPECT_EQ(memory[kMemory - 1], std::byte{static_cast<unsigned char>(40 + round)});
    char byte = 1;
    const iovec from{&byte, 1};
    const iovec to{former.data(), 1};
    EXPECT_EQ(process_vm_writev(getpid(), &from, 1, &to, 1, 0), -1);
    EXPECT_EQ(errno, EFAULT);
  }
}

TEST_F(ArenaFileTest, AFlippedByteIsFoundWhenItIsAdopted) {
  uint64_t offset = 0;
  {
    Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(Config());
    Result<std::unique_ptr<Store>> store = (*file)->OpenStore();
    SealOne(store->get(), 7, 4 * kChunk);
    offset = (*store)->chunk_offset(ChunkAt((*store)->Find({1, 7, 0})->extents, 2)) + 17;
    (*file)->memory()[offset] ^= std::byte{1};
  }
  Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(Config());
  ASSERT_TRUE(file.ok());
  Result<std::unique_ptr<Store>> store = (*file)->OpenStore();
  ASSERT_TRUE(store.ok());
  EXPECT_THAT((*store)->Find({1, 7, 0})->bad, ::testing::ElementsAre(2));
}

TEST_F(ArenaFileTest, ASecondDaemonIsRefusedByPidEvenWhileARankHoldsTheSharedDescriptor) {
  Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(Config());
  ASSERT_TRUE(file.ok());
  const Result<std::unique_ptr<ArenaFile>> second = ArenaFile::Open(Config());
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), Code::kAlreadyExists);
  EXPECT_THAT(second.status().message(), HasSubstr("pid " + std::to_string(getpid())));

  const int rank = dup((*file)->shared_fd());
  file = Error(Code::kAborted, "closed");  // the daemon has ended; the rank's descriptor is open
  const Result<std::unique_ptr<ArenaFile>> next = ArenaFile::Open(Config());
  EXPECT_TRUE(next.ok()) << next.status().ToString();
  close(rank);
}

TEST_F(ArenaFileTest, AnotherSizeIsRefusedNamesBothAndDestroysNothing) {
  { ASSERT_TRUE(ArenaFile::Open(Config()).ok()); }
  ArenaFileConfig other = Config();
  other.memory_bytes = 2 * kMemory;
  const Result<std::unique_ptr<ArenaFile>> refused = ArenaFile::Open(other);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.status().message(), HasSubstr(std::to_string(kMemory)));
  EXPECT_THAT(refused.status().message(), HasSubstr(std::to_string(2 * kMemory)));
  EXPECT_THAT(refused.status().message(), HasSubstr("--arena-reset"));
  EXPECT_EQ(static_cast<uint64_t>(FileBytes()), kMemory);

  other.reset = true;
  EXPECT_TRUE(ArenaFile::Open(other).ok());
  EXPECT_EQ(static_cast<uint64_t>(FileBytes()), 2 * kMemory);
}

// A rank can truncate the arena through its descriptor. What was behind the new end is lost, and nothing else.
TEST_F(ArenaFileTest, ATruncatedOneIsTakenOverWithoutWhatIsLost) {
  uint64_t kept = 0;  // the file's bytes up to the second shard
  {
    Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(Config());
    ASSERT_TRUE(file.ok()) << file.status().ToString();
    Result<std::unique_ptr<Store>> store = (*file)->OpenStore();
    SealOne(store->get(), 1, kChunk);
    SealOne(store->get(), 2, 2 * kChunk);
    const std::byte* second = (*store)->chunk(ChunkAt((*store)->Find({1, 2, 0})->extents, 0));
    const std::byte* first = (*store)->chunk(ChunkAt((*store)->Find({1, 1, 0})->extents, 0));
    ASSERT_LT(first, second);
    kept = static_cast<uint64_t>(second - (*file)->memory().data());
    ASSERT_EQ(ftruncate((*file)->shared_fd(), static_cast<off_t>(kept)), 0);
  }
  for (const uint64_t memory : {kMemory, uint64_t{0}}) {
    ArenaFileConfig config = Config();
    config.memory_bytes = memory;  // 0: --memory auto
    Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(config);
    ASSERT_TRUE(file.ok()) << file.status().ToString();
    EXPECT_EQ((*file)->memory().size(), kMemory);
    Result<std::unique_ptr<Store>> store = (*file)->OpenStore();
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    EXPECT_TRUE((*store)->Find({1, 1, 0})->bad.empty());
    EXPECT_EQ((*store)->Find({1, 2, 0})->bad.size(), 2u);
    ASSERT_EQ(ftruncate((*file)->shared_fd(), static_cast<off_t>(memory == 0 ? kept : 2 * kMemory)), 0);
  }
  // Not even the superblock is left.
  ASSERT_EQ(truncate(Path().c_str(), 100), 0);
  Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(Config());
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  Result<std::unique_ptr<Store>> store = (*file)->OpenStore();
  ASSERT_TRUE(store.ok()) << store.status().ToString();
  EXPECT_TRUE((*store)->shards().empty());
}

TEST_F(ArenaFileTest, ADaemonWhoseArenaIsTruncatedEndsWithItsOwnCode) {
  const auto truncated = [this](bool renewed) {
    std::unique_ptr<ArenaFile> file = std::move(ArenaFile::Open(Config()).value());
    GuardArena(file->memory(), Path());
    if (renewed && file->Renew().ok()) GuardArena(file->memory(), Path());
    if (ftruncate(file->shared_fd(), 4096) != 0) return;
    file->memory()[0] = std::byte{1};
    file->memory()[kMemory - 1] = std::byte{1};
  };
  for (const bool renewed : {false, true}) {
    EXPECT_EXIT(truncated(renewed), ::testing::ExitedWithCode(kExitTruncated),
                "has truncated the arena " + Path());
    ASSERT_EQ(unlink(Path().c_str()), 0);  // it was never formatted
  }
}

// Another SIGBUS stays a crash.
TEST_F(ArenaFileTest, OnlyTheArenaIsGuarded) {
  const auto touch_behind_the_end = [this] {
    const std::unique_ptr<ArenaFile> file = std::move(ArenaFile::Open(Config()).value());
    GuardArena(file->memory().first(kMemory / 2), Path());
    if (ftruncate(file->shared_fd(), 4096) == 0) file->memory()[kMemory - 1] = std::byte{1};
  };
  // By the signal, or as a sanitizer ends.
  const auto crashed = [](int status) { return !WIFEXITED(status) || WEXITSTATUS(status) != kExitTruncated; };
  EXPECT_EXIT(touch_behind_the_end(), crashed, "");
}

TEST_F(ArenaFileTest, ResetKeepsWhatFits) {
  {
    Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(Config());
    Result<std::unique_ptr<Store>> store = (*file)->OpenStore();
    SealOne(store->get(), 7, kChunk);
  }
  ArenaFileConfig config = Config();
  config.reset = true;
  Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(config);
  ASSERT_TRUE(file.ok());
  Result<std::unique_ptr<Store>> store = (*file)->OpenStore();
  ASSERT_TRUE(store.ok());
  EXPECT_NE((*store)->Find({1, 7, 0}), nullptr);
}

// --memory auto keeps the existing size, also with a reset.
TEST_F(ArenaFileTest, ResetWithoutASizeKeepsWhatFits) {
  {
    Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(Config());
    Result<std::unique_ptr<Store>> store = (*file)->OpenStore();
    SealOne(store->get(), 7, kChunk);
  }
  ArenaFileConfig config = Config();
  config.memory_bytes = 0;
  config.reset = true;
  Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(config);
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  EXPECT_EQ((*file)->memory().size(), kMemory);
  EXPECT_NE((*(*file)->OpenStore())->Find({1, 7, 0}), nullptr);
}

TEST_F(ArenaFileTest, AnotherChunkSizeIsRefusedAndSaysWhatToDo) {
  {
    Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(Config());
    ASSERT_TRUE((*file)->OpenStore().ok());
  }
  ArenaFileConfig other = Config();
  other.chunk_bytes = 2 * kChunk;
  Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(other);
  ASSERT_TRUE(file.ok());
  const Result<std::unique_ptr<Store>> store = (*file)->OpenStore();
  ASSERT_FALSE(store.ok());
  EXPECT_EQ(store.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(store.status().message(), HasSubstr("--arena-reset"));
}

TEST_F(ArenaFileTest, AutoTakesTheSizeThatIsThere) {
  { ASSERT_TRUE(ArenaFile::Open(Config()).ok()); }
  ArenaFileConfig config = Config();
  config.memory_bytes = 0;
  Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(config);
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  EXPECT_EQ((*file)->memory().size(), kMemory);
}

TEST_F(ArenaFileTest, MoreMemoryThanThereIsNamesNeededAndAvailableAndLeavesNoFile) {
  ArenaFileConfig config = Config();
  config.memory_bytes = 1ull << 50;
  const Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(config);
  ASSERT_FALSE(file.ok());
  EXPECT_EQ(file.status().code(), Code::kNoSpace);
  EXPECT_THAT(file.status().message(), HasSubstr("1.0 PiB"));
  EXPECT_THAT(file.status().message(), HasSubstr("--memory"));
  EXPECT_EQ(FileBytes(), -1);
}

TEST_F(ArenaFileTest, TooLittleForOneChunkNamesBothAndLeavesNoFile) {
  ArenaFileConfig config = Config();
  config.memory_bytes = kChunk;
  const Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(config);
  ASSERT_FALSE(file.ok());
  EXPECT_THAT(file.status().message(), HasSubstr(std::to_string(kChunk)));
  EXPECT_THAT(file.status().message(), HasSubstr(std::to_string(Store::MemoryFor(1, kChunk))));
  EXPECT_EQ(FileBytes(), -1);
}

TEST_F(ArenaFileTest, ADirectoryThatIsNotThereIsAnError) {
  ArenaFileConfig config = Config();
  config.directory = directory_ + "/none";
  const Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(config);
  ASSERT_FALSE(file.ok());
  EXPECT_EQ(file.status().code(), Code::kIo);
  EXPECT_THAT(file.status().message(), HasSubstr("No such file"));
}

TEST_F(ArenaFileTest, WhatAnotherUserHasPutInItsPlaceIsNamedWithItsOwnerAndARemedy) {
  { ASSERT_TRUE(ArenaFile::Open(Config()).ok()); }
  if (chown(Path().c_str(), 12345, 12345) != 0) GTEST_SKIP() << "giving a file away needs privileges";
  const Status status = ArenaFile::Open(Config()).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr(Path()));
  EXPECT_THAT(status.message(), HasSubstr("it is a file of uid 12345 (mode 0600), this daemon is uid "));
  EXPECT_THAT(status.message(), HasSubstr("have its owner or root remove it, or give another --arena-path"));
}

TEST_F(ArenaFileTest, ALinkInItsPlaceIsNotFollowed) {
  ASSERT_EQ(symlink("/dev/shm/ropeteam-elsewhere", Path().c_str()), 0);
  EXPECT_FALSE(ArenaFile::Open(Config()).ok());
  struct stat info {};
  EXPECT_NE(stat("/dev/shm/ropeteam-elsewhere", &info), 0);
}

TEST_F(ArenaFileTest, AFullFileSystemIsAnErrorAndNotASignal) {
  const std::string mount_point = directory_ + "/small";
  ASSERT_EQ(mkdir(mount_point.c_str(), 0700), 0);
  if (mount("ropeteam-test", mount_point.c_str(), "tmpfs", 0, "size=1m") != 0) {
    (void)rmdir(mount_point.c_str());
    GTEST_SKIP() << "mounting a small tmpfs needs privileges: " << std::strerror(errno);
  }
  ArenaFileConfig config = Config();
  config.directory = mount_point;
  const Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(config);
  EXPECT_FALSE(file.ok());
  EXPECT_EQ(file.status().code(), Code::kNoSpace);
  EXPECT_THAT(file.status().message(), HasSubstr("4.0 MiB"));
  EXPECT_THAT(file.status().message(), HasSubstr("1.0 MiB"));
  EXPECT_EQ(umount(mount_point.c_str()), 0);
  EXPECT_EQ(rmdir(mount_point.c_str()), 0);
}

TEST_F(ArenaFileTest, ADirectoryOnADiskIsRefusedWithWhatToDo) {
  ArenaFileConfig config = Config();
  config.directory = "/proc/self";  // on no machine tmpfs or hugetlbfs
  const Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(config);
  ASSERT_FALSE(file.ok());
  EXPECT_EQ(file.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(file.status().message(),
              HasSubstr("--arena-path /proc/self is on neither tmpfs nor hugetlbfs"));
}

TEST_F(ArenaFileTest, FaultingInTellsHowFarItIs) {
  ArenaFileConfig config = Config();
  uint64_t told = 0;
  config.progress = [&](uint64_t done, uint64_t total) {
    EXPECT_EQ(total, kMemory);
    told = std::max(told, done);
  };
  ASSERT_TRUE(ArenaFile::Open(config).ok());
  EXPECT_EQ(told, kMemory);
}

TEST_F(ArenaFileTest, AutoCountsWhatNobodyUsesAsFreeAndSaysSo) {
  const std::string mount_point = directory_ + "/fixed";
  ASSERT_EQ(mkdir(mount_point.c_str(), 0700), 0);
  if (mount("ropeteam-test", mount_point.c_str(), "tmpfs", 0, "size=128m") != 0) {
    (void)rmdir(mount_point.c_str());
    GTEST_SKIP() << "mounting a tmpfs needs privileges: " << std::strerror(errno);
  }
  const auto open = [&](const std::string& job, std::string* note) {
    ArenaFileConfig config{mount_point, job, "node", 0, kChunk, false};
    config.note = [note](const std::string& line) { *note += line; };
    return ArenaFile::Open(config);
  };
  std::string note;
  {
    const Result<std::unique_ptr<ArenaFile>> first = open("first", &note);
    ASSERT_TRUE(first.ok()) << first.status().ToString();
    EXPECT_EQ((*first)->memory().size(), 32u << 20) << "a quarter of what is free";
    const Result<std::unique_ptr<ArenaFile>> beside = open("beside", &note);
    ASSERT_TRUE(beside.ok()) << beside.status().ToString();
    EXPECT_EQ((*beside)->memory().size(), 24u << 20) << "what is in use is not free";
    EXPECT_EQ(note, "");
    ASSERT_TRUE(RemoveArena(mount_point + "/" + ArenaFileName("beside", "node")).code() ==
                Code::kAlreadyExists);
  }
  ASSERT_TRUE(RemoveArena(mount_point + "/" + ArenaFileName("beside", "node")).ok());
  {
    const Result<std::unique_ptr<ArenaFile>> next = open("next", &note);
    ASSERT_TRUE(next.ok()) << next.status().ToString();
    EXPECT_EQ((*next)->memory().size(), 32u << 20) << "a quarter of what is free and of what is left behind";
    EXPECT_THAT(note, HasSubstr("unused arenas hold 32.0 MiB"));
    EXPECT_THAT(note, HasSubstr("ropeteam clean --all-ended"));
  }
  EXPECT_EQ(umount(mount_point.c_str()), 0);
  EXPECT_EQ(rmdir(mount_point.c_str()), 0);
}

TEST_F(ArenaFileTest, AnArenaIsInUseWhileADaemonHasItOrSomebodyHoldsIt) {
  const auto listed = [this] {
    const std::vector<ArenaListing> arenas = ListArenas(directory_);
    EXPECT_EQ(arenas.size(), 1u);
    return arenas.empty() ? ArenaListing() : arenas.front();
  };
  {
    Result<std::unique_ptr<ArenaFile>> file = ArenaFile::Open(Config());
    ASSERT_TRUE(file.ok());
    EXPECT_EQ(listed().job, "") << "it is not formatted yet";
    ASSERT_TRUE((*file)->OpenStore().ok());
    EXPECT_TRUE(listed().in_use);
    EXPECT_EQ(listed().bytes, kMemory);
    EXPECT_EQ(listed().job, "job");
    EXPECT_EQ(listed().node, "node-1");
    EXPECT_EQ(RemoveArena(Path()).code(), Code::kAlreadyExists);
  }
  EXPECT_FALSE(listed().in_use);
  {
    const UniqueFd held = HoldArena(Path());
    EXPECT_TRUE(held.valid());
    EXPECT_TRUE(listed().in_use);
    EXPECT_EQ(RemoveArena(Path()).code(), Code::kAlreadyExists);
    EXPECT_TRUE(ArenaFile::Open(Config()).ok()) << "a daemon that comes back is not kept out";
  }
  EXPECT_TRUE(RemoveArena(Path()).ok());
  EXPECT_TRUE(ListArenas(directory_).empty());
}

TEST_F(ArenaFileTest, AnotherUsersArenaIsNeitherListedNorRemoved) {
  ASSERT_TRUE(ArenaFile::Open(Config()).ok());
  if (chown(Path().c_str(), 12345, 12345) != 0) GTEST_SKIP() << "giving a file away needs privileges";
  EXPECT_TRUE(ListArenas(directory_).empty());
  EXPECT_EQ(RemoveArena(Path()).code(), Code::kInvalidArgument);
  EXPECT_EQ(FileBytes(), static_cast<off_t>(kMemory));
}

TEST(ArenaFileName, EscapesWhatAFileNameCannotHold) {
  EXPECT_EQ(ArenaFileName("train", "node-1"), "ropeteam-train-node-1.arena");
  EXPECT_EQ(ArenaFileName("a/b c", "n"), "ropeteam-a%2Fb%20c-n.arena");
  EXPECT_EQ(ArenaFileName("../x", "n"), "ropeteam-..%2Fx-n.arena");
  const std::string long_a = ArenaFileName(std::string(255, 'a') + "1", "n");
  const std::string long_b = ArenaFileName(std::string(255, 'a') + "2", "n");
  EXPECT_LE(long_a.size(), 255u);
  EXPECT_NE(long_a, long_b) << "cut names stay different";
}

}  // namespace
}  // namespace ropeteam

// SPDX-License-Identifier: Apache-2.0
//
// A disk that is full, broken, read-only, gone or slow. No half-written file appears under its name, the
// message says what failed and why, and the next attempt works.

#include "tests/storage/posix/faults.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <linux/magic.h>
#include <sys/uio.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <future>
#include <thread>

#include "storage/posix/store.h"
#include "tests/storage/bytes.h"
#include "tests/storage/posix/place.h"

namespace ropeteam::storage::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr uint64_t kPart = 128 << 10;

// Without O_DIRECT: every byte goes through the page cache.
posix::Syscalls PageCache() {
  posix::Syscalls calls = posix::RealSyscalls();
  calls.direct_alignment = [](int, posix::DirectAlignment* alignment) {
    *alignment = {};
    return true;
  };
  return calls;
}

// Without rename and link: files are written in place.
posix::Syscalls NoRename() {
  posix::Syscalls calls = posix::RealSyscalls();
  calls.file_system_type = [](int) { return long{V9FS_MAGIC}; };
  calls.rename = [](int, const char*, const char*, unsigned) {
    errno = EOPNOTSUPP;
    return -1;
  };
  calls.link = [](int, const char*, const char*) {
    errno = EPERM;
    return -1;
  };
  return calls;
}

// One directory, a sink with faults on request, and a healthy sink of the same directory.
struct Rig {
  explicit Rig(posix::Syscalls below = posix::RealSyscalls())
      : faults(below), place(faults.calls()), healthy(below) {
    sink = place.Open().value();
    Url url;
    url.path = place.path();
    other = posix::OpenSinkWith(url, healthy, kTestPage).value();
    // The sink probes the file system now, so that faults hit only the tested calls.
    EXPECT_EQ(sink->Put("probe", "x", PutMode::kReplace, Soon()).ToString(), "ok");
    EXPECT_EQ(sink->Delete("probe", Soon()).ToString(), "ok");
  }
  std::unique_ptr<Upload> Begin(const std::string& name, uint64_t bytes, Deadline deadline = Soon()) {
    Result<std::unique_ptr<Upload>> upload = sink->Begin(name, bytes, kPart, deadline);
    status = upload.ok() ? OkStatus() : upload.status();
    return upload.ok() ? std::move(*upload) : nullptr;
  }
  Status PutPart(Upload* upload, const std::string& file, uint32_t index, Deadline deadline = Soon()) {
    const std::string_view part =
        std::string_view(file).substr(index * upload->part_bytes(), upload->PartLength(index));
    const Piece piece = PieceOf(part);
    return upload->PutPart(index, {&piece, 1}, Crc(part), deadline);
  }
  // Puts all of a file, up to the first error.
  Status PutFile(const std::string& name, const std::string& file) {
    std::unique_ptr<Upload> upload = Begin(name, file.size());
    if (upload == nullptr) return status;
    for (uint32_t i = 0; i < upload->part_count(); ++i)
      if (!upload->Has(i,
                       Crc(std::string_view(file).substr(i * upload->part_bytes(), upload->PartLength(i)))))
        ROPETEAM_RETURN_IF_ERROR(PutPart(upload.get(), file, i));
    return upload->Finish(Crc(file), Soon());
  }
  std::string Seen(const std::string& name) {
    const Result<FileInfo> info = other->Stat(name, Soon());
    if (!info.ok()) return CodeName(info.status().code());
    std::string bytes(info->bytes, '\0');
    const Target target{reinterpret_cast<std::byte*>(bytes.data()), bytes.size()};
    const Status read = other->Read(name, 0, {&target, 1}, Soon());
    return read.ok() ? bytes : CodeName(read.code());
  }

  Faults faults;
  PosixPlace place;
  posix::Syscalls healthy;
  std::unique_ptr<Sink> sink, other;
  Status status;
};

const std::string kAbsent = CodeName(Code::kNotFound);

TEST(PosixFaults, AFullDiskIsFoundAtBeginAndNamed) {
  for (const int error : {ENOSPC, EDQUOT}) {
    Rig rig;
    rig.faults.Fail(Call::kReserve, error);
    EXPECT_EQ(rig.Begin("a/file", 1'234'567), nullptr);
    EXPECT_EQ(rig.status.code(), Code::kNoSpace);
    EXPECT_THAT(rig.status.message(), HasSubstr("needed 1234567 bytes, available "));
    EXPECT_THAT(rig.status.message(), HasSubstr(rig.place.path() + "/a/file"));
    EXPECT_THAT(rig.place.Everything(), IsEmpty());
    rig.faults.Heal();
    const std::string file = Bytes(kPart + 1, 1);
    EXPECT_EQ(rig.PutFile("a/file", file).ToString(), "ok");
    EXPECT_TRUE(rig.Seen("a/file") == file);
  }
}

TEST(PosixFaults, AWriteThatIsRefusedIsTriedAgain) {
  for (const posix::Syscalls& below : {posix::RealSyscalls(), PageCache()}) {
    for (const auto& [error, code] :
         {std::pair(ENOSPC, Code::kNoSpace), std::pair(EDQUOT, Code::kNoSpace), std::pair(EIO, Code::kIo),
          std::pair(EROFS, Code::kIo), std::pair(ESTALE, Code::kUnavailable)}) {
      Rig rig(below);
      const std::string file = Bytes(2 * kPart + 700, 2);
      std::unique_ptr<Upload> upload = rig.Begin("file", file.size());
      ASSERT_NE(upload, nullptr) << rig.status.ToString();
      ASSERT_TRUE(rig.PutPart(upload.get(), file, 0).ok());
      rig.faults.Fail(Call::kWrite, error);
      const Status status = rig.PutPart(upload.get(), file, 1);
      EXPECT_EQ(status.code(), code) << status.ToString();
      EXPECT_THAT(status.message(), HasSubstr(rig.place.path() + "/file"));
      EXPECT_FALSE(upload->Has(1, Crc(std::string_view(file).substr(kPart, kPart))));
      EXPECT_FALSE(upload->Finish(Crc(file), Soon()).ok());
      EXPECT_EQ(rig.Seen("file"), kAbsent);
      rig.faults.Heal();
      EXPECT_EQ(rig.PutPart(upload.get(), file, 1).ToString(), "ok");
      EXPECT_EQ(rig.PutPart(upload.get(), file, 2).ToString(), "ok");
      EXPECT_EQ(upload->Finish(Crc(file), Soon()).ToString(), "ok");
      EXPECT_TRUE(rig.Seen("file") == file);
    }
  }
}

TEST(PosixFaults, ADirectoryThatIsRefusedByPermissionIsReadOn) {
  for (const int error : {EROFS, EACCES, EPERM}) {
    Rig rig;
    ASSERT_TRUE(rig.sink->Put("old", "x", PutMode::kReplace, Soon()).ok());
    for (const Call call : {Call::kCreate, Call::kMakeFolder, Call::kUnlink}) rig.faults.Fail(call, error);
    EXPECT_EQ(rig.Begin("file", 10), nullptr);
    EXPECT_EQ(rig.status.code(), Code::kIo) << rig.status.ToString();
    EXPECT_EQ(rig.Begin("new/folder/file", 10), nullptr);
    EXPECT_EQ(rig.status.code(), Code::kIo) << rig.status.ToString();
    for (const PutMode mode : {PutMode::kReplace, PutMode::kIfAbsent})
      EXPECT_EQ(rig.sink->Put("file", "x", mode, Soon()).code(), Code::kIo);
    const Status refused = rig.sink->Delete("old", Soon());
    EXPECT_EQ(refused.code(), Code::kIo);
    EXPECT_THAT(refused.message(), HasSubstr(rig.place.path() + "/old: " + std::strerror(error)));
    char byte = 0;
    const Target target{reinterpret_cast<std::byte*>(&byte), 1};
    EXPECT_EQ(rig.sink->Read("old", 0, {&target, 1}, Soon()).ToString(), "ok");
    EXPECT_THAT(rig.place.Everything(), ElementsAre("old"));
  }
}

TEST(PosixFaults, ShortAndInterruptedWritesAndReadsAddUp) {
  for (const posix::Syscalls& below : {posix::RealSyscalls(), PageCache(), NoRename()}) {
    Rig rig(below);
    std::atomic<uint32_t> count{0};
    // The kernel may have moved more bytes than it reports.
    const auto cut = [&](auto move) {
      return [&count, move](int fd, const iovec* pieces, int n, off_t at) -> ssize_t {
        const uint32_t k = count++;
        if (k % 3 == 1) {
          errno = k % 2 == 0 ? EINTR : EAGAIN;
          return -1;
        }
        const ssize_t moved = move(fd, pieces, n, at);
        constexpr ssize_t kCuts[] = {1, 4096, 12'345, 512, 70'001, 4097};
        return std::min(moved, kCuts[k % 6]);
      };
    };
    rig.faults.ReplaceWrites(cut(below.pwritev));
    rig.faults.ReplaceReads(cut(below.preadv));
    const std::string file = Bytes(2 * kPart + 701, 3);
    EXPECT_EQ(rig.PutFile("file", file).ToString(), "ok");
    EXPECT_TRUE(rig.Seen("file") == file);
    EXPECT_EQ(rig.sink->Put("small", file.substr(0, 50'001), PutMode::kReplace, Soon()).ToString(), "ok");
    EXPECT_TRUE(rig.Seen("small") == file.substr(0, 50'001));
    std::swap(rig.sink, rig.other);
    EXPECT_TRUE(rig.Seen("file") == file);
    EXPECT_GT(count, 20u);
  }
}

TEST(PosixFaults, AWriteThatTakesNothingIsAnError) {
  Rig rig(PageCache());
  rig.faults.ReplaceWrites([](int, const iovec*, int, off_t) -> ssize_t { return 0; });
  EXPECT_EQ(rig.PutFile("file", Bytes(10, 4)).code(), Code::kIo);
  EXPECT_EQ(rig.Seen("file"), kAbsent);
}

TEST(PosixFaults, ODirectThatIsRefusedLateIsGivenUp) {
  Rig rig;
  std::atomic<int> refused{0};
  const auto refuse = [&](auto move) {
    return [&refused, move](int fd, const iovec* pieces, int n, off_t at) -> ssize_t {
      if ((fcntl(fd, F_GETFL) & O_DIRECT) == 0) return move(fd, pieces, n, at);
      ++refused;
      errno = EINVAL;
      return -1;
    };
  };
  rig.faults.ReplaceWrites(refuse(rig.healthy.pwritev));
  rig.faults.ReplaceReads(refuse(rig.healthy.preadv));
  const std::string file = Bytes(3 * kPart, 5);
  EXPECT_EQ(rig.PutFile("file", file).ToString(), "ok");
  EXPECT_TRUE(rig.Seen("file") == file);
  std::swap(rig.sink, rig.other);
  EXPECT_TRUE(rig.Seen("file") == file);
  EXPECT_LE(refused, 1) << "one refusal is enough";
}

TEST(PosixFaults, AFailedFsyncLosesTheFileForGood) {
  for (const auto& [error, code] : {std::pair(EIO, Code::kIo), std::pair(ENOSPC, Code::kNoSpace)}) {
    Rig rig;
    ASSERT_TRUE(rig.sink->Put("file", "old", PutMode::kReplace, Soon()).ok());
    const std::string file = Bytes(2 * kPart, 6);
    std::unique_ptr<Upload> upload = rig.Begin("file", file.size());
    ASSERT_NE(upload, nullptr);
    ASSERT_TRUE(rig.PutPart(upload.get(), file, 0).ok());
    ASSERT_TRUE(rig.PutPart(upload.get(), file, 1).ok());
    // Linux reports the error only once: a second fsync would succeed.
    rig.faults.Fail(Call::kSyncFile, error, 0, 1);
    const Status status = upload->Finish(Crc(file), Soon());
    EXPECT_EQ(status.code(), code);
    EXPECT_THAT(status.message(), HasSubstr("fsync"));
    EXPECT_EQ(upload->Finish(Crc(file), Soon()).code(), Code::kNotFound);
    EXPECT_EQ(rig.PutPart(upload.get(), file, 0).code(), Code::kNotFound);
    EXPECT_EQ(rig.Seen("file"), "old");
    EXPECT_THAT(rig.place.Everything(), ElementsAre("file"));
    upload = rig.Begin("file", file.size());
    ASSERT_NE(upload, nullptr);
    EXPECT_FALSE(upload->Has(0, Crc(std::string_view(file).substr(0, kPart))));
    upload.reset();
    EXPECT_EQ(rig.PutFile("file", file).ToString(), "ok");
    EXPECT_TRUE(rig.Seen("file") == file);
  }
}

TEST(PosixFaults, AFileWhoseFsyncFailedIsNotFoundAgainThoughItCannotBeDeleted) {
  Rig rig;
  const std::string file = Bytes(kPart, 17);
  rig.faults.Fail(Call::kSyncFile, EIO, 0, 1);
  rig.faults.Fail(Call::kUnlink, EIO);
  EXPECT_EQ(rig.PutFile("file", file).code(), Code::kIo);
  rig.faults.Heal();
  EXPECT_EQ(rig.place.Everything().size(), 1u);
  std::unique_ptr<Upload> upload = rig.Begin("file", file.size());
  ASSERT_NE(upload, nullptr);
  EXPECT_FALSE(upload->Has(0, Crc(file)));
  upload.reset();
  EXPECT_EQ(rig.PutFile("file", file).ToString(), "ok");
  EXPECT_THAT(rig.place.Everything(), ElementsAre("file"));
}

TEST(PosixFaults, AFailedWriteBackLosesTheUpload) {
  Rig rig(PageCache());
  const std::string file = Bytes(2 * kPart, 7);
  std::unique_ptr<Upload> upload = rig.Begin("file", file.size());
  ASSERT_NE(upload, nullptr);
  ASSERT_TRUE(rig.PutPart(upload.get(), file, 0).ok());
  rig.faults.Fail(Call::kWriteBack, EIO, 0, 1);
  EXPECT_EQ(rig.PutPart(upload.get(), file, 1).code(), Code::kIo);
  EXPECT_EQ(rig.PutPart(upload.get(), file, 1).code(), Code::kNotFound);
  EXPECT_EQ(upload->Finish(Crc(file), Soon()).code(), Code::kNotFound);
  EXPECT_THAT(rig.place.Everything(), IsEmpty());
  EXPECT_EQ(rig.PutFile("file", file).ToString(), "ok");
  EXPECT_TRUE(rig.Seen("file") == file);
}

TEST(PosixFaults, AFailedCloseLosesTheUpload) {
  Rig rig;
  const std::string file = Bytes(kPart, 8);
  rig.faults.Fail(Call::kClose, EIO, 0, 1);
  EXPECT_EQ(rig.PutFile("file", file).code(), Code::kIo);
  EXPECT_TRUE(rig.faults.struck());
  EXPECT_THAT(rig.place.Everything(), IsEmpty());
  EXPECT_EQ(rig.PutFile("file", file).ToString(), "ok");
}

TEST(PosixFaults, AFailedRenameIsFinishedLater) {
  Rig rig;
  const std::string file = Bytes(kPart + 5, 9);
  std::unique_ptr<Upload> upload = rig.Begin("file", file.size());
  ASSERT_NE(upload, nullptr);
  ASSERT_TRUE(rig.PutPart(upload.get(), file, 0).ok());
  ASSERT_TRUE(rig.PutPart(upload.get(), file, 1).ok());
  // The first rename is to a name of the upload's own, the second to the file's name.
  for (const int skip : {0, 1}) {
    rig.faults.Fail(Call::kRename, EIO, skip, 1);
    EXPECT_EQ(upload->Finish(Crc(file), Soon()).code(), Code::kIo);
    EXPECT_EQ(rig.Seen("file"), kAbsent);
  }
  EXPECT_TRUE(upload->Has(0, Crc(std::string_view(file).substr(0, kPart))));
  EXPECT_EQ(rig.PutPart(upload.get(), file, 0).ToString(), "ok");
  EXPECT_EQ(upload->Finish(Crc(file), Soon()).ToString(), "ok");
  EXPECT_TRUE(rig.Seen("file") == file);
  EXPECT_THAT(rig.place.Everything(), ElementsAre("file"));
}

TEST(PosixFaults, AFolderThatCannotBeSyncedLeavesTheOutcomeUnknown) {
  Rig rig;
  const std::string file = Bytes(kPart, 10);
  rig.faults.Fail(Call::kSyncFolder, EIO);
  EXPECT_EQ(rig.PutFile("a/file", file).code(), Code::kUnavailable);
  EXPECT_TRUE(rig.Seen("a/file") == file);
  EXPECT_EQ(rig.sink->Put("b", "x", PutMode::kReplace, Soon()).code(), Code::kUnavailable);
  EXPECT_EQ(rig.Seen("b"), "x");
}

TEST(PosixFaults, AnAnswerThatNfsLostIsNoFailure) {
  posix::Syscalls below = posix::RealSyscalls();
  std::atomic<bool> losing{false};
  below.link = [&, real = below.link](int folder, const char* from, const char* to) {
    const int result = real(folder, from, to);
    if (result != 0 || !losing) return result;
    errno = EEXIST;
    return -1;
  };
  below.rename = [&, real = below.rename](int folder, const char* from, const char* to, unsigned flags) {
    const int result = real(folder, from, to, flags);
    if (result != 0 || !losing || std::string_view(to) != "file") return result;
    errno = ENOENT;
    return -1;
  };
  Rig rig(below);
  losing = true;
  EXPECT_EQ(rig.sink->Put("lock", "mine", PutMode::kIfAbsent, Soon()).ToString(), "ok");
  EXPECT_EQ(rig.sink->Put("lock", "other", PutMode::kIfAbsent, Soon()).code(), Code::kAlreadyExists);
  EXPECT_EQ(rig.Seen("lock"), "mine");
  const std::string file = Bytes(kPart, 11);
  EXPECT_EQ(rig.PutFile("file", file).ToString(), "ok");
  EXPECT_TRUE(rig.Seen("file") == file);
}

TEST(PosixFaults, ADirectoryThatVanishesIsUnavailableUntilItIsBack) {
  Rig rig;
  const std::string file = Bytes(2 * kPart, 12);
  std::unique_ptr<Upload> upload = rig.Begin("a/file", file.size());
  ASSERT_NE(upload, nullptr);
  ASSERT_TRUE(rig.PutPart(upload.get(), file, 0).ok());
  std::filesystem::remove_all(rig.place.path());
  EXPECT_EQ(rig.PutPart(upload.get(), file, 1).code(), Code::kNotFound);
  EXPECT_FALSE(upload->Finish(Crc(file), Soon()).ok());
  upload.reset();
  EXPECT_EQ(rig.Begin("a/file", file.size()), nullptr);
  EXPECT_EQ(rig.status.code(), Code::kUnavailable);
  EXPECT_THAT(rig.status.message(), HasSubstr("the directory " + rig.place.path() + " has vanished"));
  std::byte byte{};
  const Target target{&byte, 1};
  for (const Status& status :
       {rig.sink->Put("a/file", "x", PutMode::kReplace, Soon()), rig.sink->Read("x", 0, {&target, 1}, Soon()),
        rig.sink->Stat("x", Soon()).status(), rig.sink->List("", "", Soon()).status(),
        rig.sink->List("a", "", Soon()).status(), rig.sink->Delete("x", Soon()),
        rig.sink->DeleteFolder("a", Soon()),
        rig.sink->AbortUploads("", std::chrono::seconds(0), Soon()).status()})
    EXPECT_EQ(status.code(), Code::kUnavailable) << status.ToString();
  EXPECT_FALSE(std::filesystem::exists(rig.place.path())) << "the directory itself is never made";
  std::filesystem::create_directory(rig.place.path());
  EXPECT_EQ(rig.PutFile("a/file", file).ToString(), "ok");
  EXPECT_TRUE(rig.Seen("a/file") == file);
}

// Some file systems do not tell an entry's type while they list: it is looked up. A step must not seem to lack a file
// because that is refused.
TEST(PosixFaults, AnEntryOfUnknownTypeIsPassedOverOnlyWhenItIsGone) {
  posix::Syscalls calls = posix::RealSyscalls();
  calls.readdir = [](DIR* folder) {
    dirent* const entry = ::readdir(folder);
    if (entry != nullptr) entry->d_type = DT_UNKNOWN;
    return entry;
  };
  int error = 0;
  calls.lstatat = [&error, below = calls.lstatat](int folder, const char* name, struct stat* info) {
    if (error == 0 || std::string(name) != "file") return below(folder, name, info);
    errno = error;
    return -1;
  };
  PosixPlace place(calls);
  const auto sink = place.Open().value();
  for (const char* name : {"step/file", "step/other", "step/inner/x"})
    ASSERT_EQ(sink->Put(name, "x", PutMode::kReplace, Soon()).ToString(), "ok");
  EXPECT_EQ(sink->List("step", "", Soon()).value().files.size(), 2u);
  EXPECT_EQ(sink->List("step", "", Soon()).value().folders.size(), 1u);
  for (const auto& [refused, code] :
       {std::pair(EACCES, Code::kIo), {EIO, Code::kIo}, {ESTALE, Code::kUnavailable}}) {
    error = refused;
    const Status list = sink->List("step", "", Soon()).status();
    EXPECT_EQ(list.code(), code) << list.ToString();
    EXPECT_THAT(list.message(), HasSubstr(place.path() + "/step/file"));
    EXPECT_EQ(sink->AbortUploads("", std::chrono::seconds(0), Soon()).status().code(), code);
    EXPECT_EQ(sink->DeleteFolder("step", Soon()).code(), code);
  }
  error = ENOENT;
  EXPECT_EQ(sink->List("step", "", Soon()).value().files.size(), 1u) << "it was deleted meanwhile";
}

TEST(PosixFaults, AMountThatIsLostIsNotWrittenUnder) {
  posix::Syscalls below = posix::RealSyscalls();
  std::atomic<bool> lost{false};
  below.file_system_type = [&](int) { return lost ? long{TMPFS_MAGIC} : long{NFS_SUPER_MAGIC}; };
  Rig rig(below);
  lost = true;
  EXPECT_EQ(rig.sink->Put("file", "x", PutMode::kReplace, Soon()).code(), Code::kUnavailable);
  EXPECT_EQ(rig.sink->List("", "", Soon()).status().code(), Code::kUnavailable);
  EXPECT_THAT(rig.place.Everything(), IsEmpty());
  lost = false;
  EXPECT_EQ(rig.sink->Put("file", "x", PutMode::kReplace, Soon()).ToString(), "ok");
}

TEST(PosixFaults, AWriteThatHangsOutlivesItsDeadlineAndStallsNobodyElse) {
  Rig rig;
  const std::string file = Bytes(9 << 20, 13);  // three writes
  Result<std::unique_ptr<Upload>> upload = rig.sink->Begin("file", file.size(), file.size(), Soon());
  ASSERT_TRUE(upload.ok());
  // Tries again with more time if this machine is so slow that the deadline passes before the first write.
  bool hung = false;
  for (std::chrono::milliseconds time(20); !hung; time *= 4) {
    std::promise<void> stopped, goes_on;
    std::shared_future<void> wait = goes_on.get_future().share();
    std::atomic<bool> first{true};
    rig.faults.ReplaceWrites([&, wait](int fd, const iovec* pieces, int n, off_t at) {
      if (first.exchange(false)) {
        hung = true;
        stopped.set_value();
        wait.wait();
      }
      return rig.healthy.pwritev(fd, pieces, n, at);
    });
    const Deadline deadline = In(time);
    std::thread thread([&] {
      EXPECT_EQ(rig.PutPart(upload->get(), file, 0, deadline).code(), Code::kDeadlineExceeded);
      if (first.exchange(false)) stopped.set_value();
    });
    stopped.get_future().wait();
    EXPECT_EQ(rig.sink->Put("other", "x", PutMode::kReplace, Soon()).ToString(), "ok");
    EXPECT_EQ(rig.Seen("other"), "x");
    while (std::chrono::steady_clock::now() <= deadline) std::this_thread::yield();
    goes_on.set_value();
    thread.join();
    rig.faults.Heal();
  }
  EXPECT_FALSE((*upload)->Finish(Crc(file), Soon()).ok());
  EXPECT_EQ(rig.Seen("file"), kAbsent);
  EXPECT_EQ(rig.PutPart(upload->get(), file, 0).ToString(), "ok");
  EXPECT_EQ((*upload)->Finish(Crc(file), Soon()).ToString(), "ok");
  EXPECT_TRUE(rig.Seen("file") == file);
}

TEST(PosixFaults, NoMoreBuffersThanTheLimitAreEverUsed) {
  Rig rig;
  // Memory at an odd address goes through a buffer if O_DIRECT is available.
  const std::string memory = "#" + Bytes(kPart, 14);
  const std::string_view part = std::string_view(memory).substr(1);
  const Piece piece = PieceOf(part);
  constexpr size_t kUploads = posix::kBouncesMax + 1;
  std::vector<std::unique_ptr<Upload>> uploads;
  for (size_t i = 0; i < kUploads; ++i) {
    uploads.push_back(rig.Begin("file" + std::to_string(i), kPart));
    ASSERT_NE(uploads.back(), nullptr);
  }
  std::promise<void> goes_on;
  std::shared_future<void> wait = goes_on.get_future().share();
  std::atomic<size_t> hanging{0}, direct{0};
  rig.faults.ReplaceWrites([&, wait](int fd, const iovec* pieces, int n, off_t at) {
    if ((fcntl(fd, F_GETFL) & O_DIRECT) != 0) ++direct;
    ++hanging;
    wait.wait();
    return rig.healthy.pwritev(fd, pieces, n, at);
  });
  std::vector<std::thread> threads;
  for (size_t i = 0; i < posix::kBouncesMax; ++i) {
    threads.emplace_back([&, i] {
      EXPECT_EQ(uploads[i]->PutPart(0, {&piece, 1}, Crc(part), Soon()).ToString(), "ok");
    });
  }
  while (hanging < posix::kBouncesMax) std::this_thread::yield();
  if (direct == posix::kBouncesMax) {
    const Status status =
        uploads.back()->PutPart(0, {&piece, 1}, Crc(part), In(std::chrono::milliseconds(20)));
    EXPECT_EQ(status.code(), Code::kDeadlineExceeded) << status.ToString();
  }
  goes_on.set_value();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(uploads.back()->PutPart(0, {&piece, 1}, Crc(part), Soon()).ToString(), "ok");
  for (const auto& upload : uploads) EXPECT_EQ(upload->Finish(Crc(part), Soon()).ToString(), "ok");
  if (direct == 0) GTEST_SKIP() << "no O_DIRECT in " << rig.place.path() << ": no buffers are used";
}

// Checks what a fault leaves under "a/file", and that the next attempt succeeds.
void ExpectOldOrNew(Rig* rig, const Status& status, const std::string& file, bool may_hide) {
  const std::string seen = rig->Seen("a/file");
  if (status.ok()) {
    EXPECT_TRUE(seen == file);
  } else if (status.code() == Code::kUnavailable) {
    EXPECT_TRUE(seen == file || seen == "old" || may_hide);
  } else {
    EXPECT_TRUE(seen == "old" || (may_hide && seen == kAbsent)) << seen.size() << " bytes are seen";
  }
  rig->faults.Heal();
  const Status again = rig->PutFile("a/file", file);
  EXPECT_EQ(again.ToString(), "ok");
  EXPECT_TRUE(rig->Seen("a/file") == file);
}

struct Mode {
  const char* name;
  posix::Syscalls below;
  bool may_hide;  // the old file may be invisible while the new one is written
};
std::vector<Mode> Modes() {
  return {{"direct", posix::RealSyscalls(), false},
          {"page cache", PageCache(), false},
          {"no rename", NoRename(), true}};
}

TEST(PosixFaults, WhicheverCallFailsTheOldFileOrTheNewIsSeenWhole) {
  const std::string file = Bytes(2 * kPart + 333, 15);
  for (const Mode& mode : Modes()) {
    Rig rig(mode.below);
    for (int call = 0; call < static_cast<int>(Call::kCount); ++call) {
      for (int skip = 0;; ++skip) {
        for (const bool small : {false, true}) {
          SCOPED_TRACE(std::string(mode.name) + ", " + NameOf(Call(call)) + " " + std::to_string(skip));
          ASSERT_TRUE(rig.sink->Put("a/file", "old", PutMode::kReplace, Soon()).ok());
          rig.faults.Fail(Call(call), EIO, skip, 1);
          const Status status =
              small ? rig.sink->Put("a/file", file, PutMode::kReplace, Soon()) : rig.PutFile("a/file", file);
          const bool struck = rig.faults.struck();
          ExpectOldOrNew(&rig, status, file, mode.may_hide);
          ASSERT_FALSE(testing::Test::HasFailure());
          if (!struck && !small) goto next_call;
        }
      }
    next_call:;
    }
    EXPECT_TRUE(rig.other->AbortUploads("", std::chrono::seconds(0), Soon()).ok());
    EXPECT_THAT(rig.place.Everything(), ElementsAre("a/file")) << mode.name;
  }
}

TEST(PosixFaults, AProcessThatIsKilledAnywhereLeavesTheOldFileOrTheNew) {
  const std::string file = Bytes(2 * kPart + 333, 16);
  for (const Mode& mode : Modes()) {
    for (int after = 0;; ++after) {
      SCOPED_TRACE(std::string(mode.name) + ", killed after " + std::to_string(after) + " calls");
      Rig rig(mode.below);
      ASSERT_TRUE(rig.sink->Put("a/file", "old", PutMode::kReplace, Soon()).ok());
      rig.faults.DieAfter(after);
      const Status status = rig.PutFile("a/file", file);
      const bool struck = rig.faults.struck();
      const std::string seen = rig.Seen("a/file");
      EXPECT_TRUE(seen == file || seen == "old" || (mode.may_hide && seen == kAbsent));
      EXPECT_TRUE(!status.ok() || seen == file);
      // The next process.
      rig.sink.reset();
      rig.faults.Heal();
      rig.sink = rig.place.Open().value();
      const Result<ListPage> list = rig.sink->List("a", "", Soon());
      ASSERT_TRUE(list.ok());
      for (const FileInfo& info : list->files) EXPECT_EQ(info.name, "a/file");
      EXPECT_EQ(rig.PutFile("a/file", file).ToString(), "ok");
      EXPECT_TRUE(rig.Seen("a/file") == file);
      EXPECT_TRUE(rig.sink->AbortUploads("", std::chrono::seconds(0), Soon()).ok());
      EXPECT_THAT(rig.place.Everything(), ElementsAre("a/file"));
      EXPECT_TRUE(rig.Seen("a/file") == file);
      ASSERT_FALSE(testing::Test::HasFailure());
      if (!struck) break;
    }
  }
}

TEST(PosixFaults, AFailedPutIfAbsentLeavesNothing) {
  for (const Call call : {Call::kWrite, Call::kSyncFile, Call::kClose, Call::kLink}) {
    Rig rig;
    rig.faults.Fail(call, EIO, 0, 1);
    EXPECT_EQ(rig.sink->Put("lock", "x", PutMode::kIfAbsent, Soon()).code(), Code::kIo) << NameOf(call);
    EXPECT_TRUE(rig.faults.struck());
    EXPECT_THAT(rig.place.Everything(), IsEmpty());
    EXPECT_EQ(rig.sink->Put("lock", "y", PutMode::kIfAbsent, Soon()).ToString(), "ok");
    EXPECT_EQ(rig.Seen("lock"), "y");
  }
}

}  // namespace
}  // namespace ropeteam::storage::test

// SPDX-License-Identifier: Apache-2.0
//
// What the posix sink does in addition to storage/sink.h: its URLs, what it never follows or lists, how bytes
// get to the disk.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sched.h>
#include <sys/fsuid.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <random>
#include <set>

#include "storage/posix/names.h"
#include "storage/posix/store.h"
#include "storage/sinks.h"
#include "tests/storage/bytes.h"
#include "tests/storage/posix/faults.h"
#include "tests/storage/posix/place.h"

namespace ropeteam::storage::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// Page-aligned memory, as in an arena.
class Pages {
 public:
  explicit Pages(size_t bytes) : data_(new (std::align_val_t{4096}) char[bytes]), bytes_(bytes) {
    std::mt19937 random(1);
    for (size_t i = 0; i < bytes; ++i) data_[i] = static_cast<char>(random());
  }
  ~Pages() { ::operator delete[](data_, std::align_val_t{4096}); }
  std::string_view view() const { return {data_, bytes_}; }
  Piece piece() const { return {reinterpret_cast<const std::byte*>(data_), bytes_}; }
  Target target() { return {reinterpret_cast<std::byte*>(data_), bytes_}; }

 private:
  char* data_;
  size_t bytes_;
};

Status PutWhole(Sink* sink, const std::string& name, const Piece& piece) {
  const std::string_view view(reinterpret_cast<const char*>(piece.data), piece.bytes);
  Result<std::unique_ptr<Upload>> upload = sink->Begin(name, piece.bytes, piece.bytes, Soon());
  if (!upload.ok()) return upload.status();
  ROPETEAM_RETURN_IF_ERROR((*upload)->PutPart(0, {&piece, 1}, Crc(view), Soon()));
  return (*upload)->Finish(Crc(view), Soon());
}

TEST(PosixSink, UrlsThatAreNoDirectoryAreRefusedInWords) {
  PosixPlace place;
  std::ofstream(place.path() + "/file") << "x";
  for (const auto& [url, why] : {std::pair<std::string, const char*>("ftp://host/x", "unknown scheme"),
                                 {"relative/path", "relative/path"},
                                 {place.path() + "/absent", "is not there"},
                                 {place.path() + "/file", "is not a directory"},
                                 {"file://" + place.path() + "/file/", "is not a directory"},
                                 {"file://host" + place.path(), "a host"},
                                 {"file://" + place.path() + "?endpoint=x", "endpoint"}}) {
    const Result<std::unique_ptr<Sink>> sink = OpenSink(url);
    ASSERT_FALSE(sink.ok()) << url;
    const bool absent = url.ends_with("/absent");  // it may be there later
    EXPECT_EQ(sink.status().code(), absent ? Code::kNotFound : Code::kInvalidArgument) << url;
    EXPECT_THAT(sink.status().message(), HasSubstr(why));
  }
  EXPECT_THAT(place.Everything(), ElementsAre("file"));
}

TEST(PosixSink, APathAndAFileUrlAreTheSamePlace) {
  PosixPlace place;
  const auto one = OpenSink(place.path()), two = OpenSink("file://" + place.path() + "/");
  ASSERT_TRUE(one.ok() && two.ok());
  EXPECT_THAT((*one)->Describe(), HasSubstr(place.path()));
  EXPECT_THAT(place.Everything(), IsEmpty()) << "opening writes nothing";
  EXPECT_EQ((*one)->Put("a", "x", PutMode::kReplace, Soon()).ToString(), "ok");
  EXPECT_EQ((*two)->Stat("a", Soon()).value().bytes, 1u);
}

TEST(PosixSink, NewFilesAndFoldersHaveTheirModesWhateverTheWayTheyAreWritten) {
  posix::Syscalls in_place = posix::RealSyscalls();
  in_place.rename = [](int, const char*, const char*, unsigned) {
    errno = ENOSYS;
    return -1;
  };
  posix::Syscalls loose = posix::RealSyscalls();  // parts in files of their own, as for a mounted bucket
  loose.pwritev = [](int fd, const iovec* pieces, int count, off_t at) -> ssize_t {
    struct stat info {};
    if (fstat(fd, &info) == 0 && info.st_size == at) return ::pwritev(fd, pieces, count, at);
    errno = EINVAL;
    return -1;
  };
  const mode_t mask = umask(0);
  for (const posix::Syscalls& calls : {posix::RealSyscalls(), in_place, loose}) {
    for (const auto& [file_mode, folder_mode] :
         {std::pair(kFileModeDefault, mode_t{0750}), std::pair(mode_t{0600}, mode_t{0700}),
          std::pair(mode_t{0664}, mode_t{0775})}) {
      PosixPlace place;
      Url url;
      url.scheme = "file";
      url.path = place.path();
      const auto sink = posix::OpenSinkWith(url, calls, kTestPage, file_mode).value();
      int files = 0;
      const auto check = [&] {
        for (const auto& entry : std::filesystem::recursive_directory_iterator(place.path())) {
          struct stat info {};
          if (lstat(entry.path().c_str(), &info) != 0) continue;
          EXPECT_EQ(info.st_mode & 07777, entry.is_directory() ? folder_mode : file_mode) << entry.path();
          files += entry.is_directory() ? 0 : 1;
        }
      };
      EXPECT_EQ(sink->Put("job/step/put", "x", PutMode::kReplace, Soon()).ToString(), "ok");
      const Pages pages(16 << 10);
      const Piece half = {pages.piece().data, pages.view().size() / 2};
      auto upload = sink->Begin("job/step/parts", 2 * half.bytes, half.bytes, Soon()).value();
      EXPECT_TRUE(upload->PutPart(0, {&half, 1}, Crc(pages.view().substr(0, half.bytes)), Soon()).ok());
      check();
      EXPECT_GE(files, 2) << "one is not finished";
      upload.reset();
      EXPECT_EQ(PutWhole(sink.get(), "job/step/whole", pages.piece()).ToString(), "ok");
      check();
    }
  }
  umask(mask);
}

TEST(PosixSink, SymbolicLinksAreNeverFollowed) {
  posix::Syscalls walking = posix::RealSyscalls();
  walking.open_beneath = [](int, const char*, int, mode_t) {
    errno = ENOSYS;
    return -1;
  };
  for (const posix::Syscalls& calls : {posix::RealSyscalls(), walking}) {
    PosixPlace outside, place(calls);
    std::ofstream(outside.path() + "/secret") << "x";
    std::filesystem::create_directory_symlink(outside.path(), place.path() + "/folder");
    std::filesystem::create_symlink(outside.path() + "/secret", place.path() + "/file");
    const auto sink = place.Open().value();
    for (const char* name : {"folder/new", "folder/sub/new"}) {
      EXPECT_EQ(sink->Put(name, "y", PutMode::kReplace, Soon()).code(), Code::kInvalidArgument);
      EXPECT_EQ(sink->Begin(name, 1, 1, Soon()).status().code(), Code::kInvalidArgument);
    }
    std::byte byte{};
    const Target target{&byte, 1};
    for (const char* name : {"file", "folder/secret"}) {
      EXPECT_FALSE(sink->Read(name, 0, {&target, 1}, Soon()).ok());
      EXPECT_FALSE(sink->Stat(name, Soon()).ok());
    }
    EXPECT_FALSE(sink->Delete("folder/secret", Soon()).ok());
    const ListPage list = sink->List("", "", Soon()).value();
    EXPECT_THAT(list.files, IsEmpty());
    EXPECT_THAT(list.folders, IsEmpty());
    EXPECT_EQ(sink->AbortUploads("", std::chrono::seconds(0), Soon()).value(), 0u);
    EXPECT_THAT(outside.Everything(), ElementsAre("secret"));
    // The link itself may be replaced like any file.
    EXPECT_EQ(sink->Put("file", "y", PutMode::kReplace, Soon()).ToString(), "ok");
    EXPECT_EQ(sink->Stat("file", Soon()).value().bytes, 1u);
    EXPECT_EQ(std::filesystem::file_size(outside.path() + "/secret"), 1u);
  }
}

TEST(PosixSink, NamesOfUnfinishedFilesFitAndAreTakenFromNobody) {
  PosixPlace place;
  const auto sink = place.Open().value();
  // 254 bytes. The cut for the unfinished name falls inside a character.
  std::string longest(199, 'n');
  longest += "\xc3\xa9" + std::string(53, 'n');
  EXPECT_EQ(PutWhole(sink.get(), "a/" + longest, {reinterpret_cast<const std::byte*>("x"), 1}).ToString(),
            "ok");
  EXPECT_THAT(place.Everything(), ElementsAre("a/" + longest));
  const std::string unfinished = posix::UploadName(longest, 7);
  EXPECT_LE(posix::PartName(unfinished, 9999).size(), 255u);
  EXPECT_THAT(unfinished, HasSubstr("." + std::string(199, 'n') + ".ropeteam-"));
  EXPECT_EQ(posix::IdOf(unfinished), 7u);
  for (const std::string& name : {unfinished, posix::PartName(unfinished, 3), posix::MarkerName("x")}) {
    EXPECT_EQ(sink->Put(name, "x", PutMode::kReplace, Soon()).code(), Code::kInvalidArgument);
    EXPECT_EQ(sink->Stat("a/" + name, Soon()).status().code(), Code::kInvalidArgument);
    EXPECT_EQ(sink->List(name + "/x", "", Soon()).status().code(), Code::kInvalidArgument);
  }
  EXPECT_EQ(posix::HiddenBy(posix::MarkerName("x.json")), "x.json");
  EXPECT_EQ(posix::HiddenBy(posix::MarkerName(longest)), "") << "the name is cut";
  for (const char* name : {".metadata", ".x.ropeteam-1.part", "x.ropeteam-0123456789abcdef.part",
                           ".x.ropeteam-0123456789abcdef.other", ".x.ropeteam-0123456789ABCDEF.part"})
    EXPECT_EQ(posix::KindOf(name), posix::NameKind::kFile) << name;
}

// The threads of a process may act on files as different users: this one without root's rights.
class Unprivileged {
 public:
  Unprivileged() { setfsuid(kNobody); }
  ~Unprivileged() { setfsuid(geteuid()); }

 private:
  static constexpr uid_t kNobody = 65534;
};

TEST(PosixSink, AFolderThatMayNotBeReadIsNeitherAbsentNorDamaged) {
  PosixPlace place;
  const auto sink = place.Open().value();
  ASSERT_TRUE(sink->Put("step/file", "x", PutMode::kReplace, Soon()).ok());
  ASSERT_EQ(chmod(place.path().c_str(), 0755), 0);
  ASSERT_EQ(chmod((place.path() + "/step").c_str(), 0), 0);
  {
    const Unprivileged here;
    std::byte byte{};
    const Target target{&byte, 1};
    for (const Status& status :
         {sink->Read("step/file", 0, {&target, 1}, Soon()), sink->Stat("step/file", Soon()).status(),
          sink->List("step", "", Soon()).status(), sink->Put("step/new", "x", PutMode::kReplace, Soon())}) {
      EXPECT_EQ(status.code(), Code::kIo);
      EXPECT_THAT(status.message(), HasSubstr(place.path() + "/step"));
      EXPECT_THAT(status.message(), HasSubstr("Permission denied"));
    }
  }
  ASSERT_EQ(chmod((place.path() + "/step").c_str(), 0755), 0);
}

TEST(PosixSink, WhatOthersLayThereIsListedAsTheyNamedIt) {
  PosixPlace place;
  const auto sink = place.Open().value();
  std::ofstream(place.path() + "/model.pt") << "xy";
  std::ofstream(place.path() + "/new\nline") << "x";
  ASSERT_EQ(mkfifo((place.path() + "/pipe").c_str(), 0600), 0);
  const ListPage list = sink->List("", "", Soon()).value();
  ASSERT_EQ(list.files.size(), 1u) << "names that no call takes, and what is no file, are left out";
  EXPECT_EQ(list.files[0].name, "model.pt");
  EXPECT_EQ(list.files[0].bytes, 2u);
  std::byte byte{};
  const Target target{&byte, 1};
  EXPECT_EQ(sink->Read("pipe", 0, {&target, 1}, Soon()).code(), Code::kNotFound);
}

// Counts the bytes that the kernel gets directly from the caller's memory.
TEST(PosixSink, AlignedMemoryGoesToTheDiskAsItLies) {
  Faults faults;
  PosixPlace place(faults.calls());
  const auto sink = place.Open().value();
  Pages pages((8 << 20) + 777);
  const posix::Syscalls real = posix::RealSyscalls();
  size_t in_place = 0, copied = 0, largest = 0;
  bool direct = false;
  const auto watch = [&](auto move) {
    return [&, move](int fd, const iovec* pieces, int count, off_t at) {
      for (int i = 0; i < count; ++i) {
        const char* data = static_cast<const char*>(pieces[i].iov_base);
        const bool ours = data >= pages.view().data() && data < pages.view().data() + pages.view().size();
        (ours ? in_place : copied) += pieces[i].iov_len;
        largest = std::max(largest, pieces[i].iov_len);
      }
      direct = direct || (fcntl(fd, F_GETFL) & O_DIRECT) != 0;
      return move(fd, pieces, count, at);
    };
  };
  ASSERT_EQ(sink->Put("probe", "x", PutMode::kReplace, Soon()).ToString(), "ok");
  faults.ReplaceWrites(watch(real.pwritev));
  EXPECT_EQ(PutWhole(sink.get(), "file", pages.piece()).ToString(), "ok");
  EXPECT_EQ(in_place + copied, direct ? in_place + 777 : in_place);
  EXPECT_GE(in_place, size_t{8} << 20);
  EXPECT_LE(largest, posix::kIoBytesMax);
  const std::string written(pages.view());
  in_place = copied = 0;
  const Target target = pages.target();
  std::memset(target.data, 0, target.bytes);
  faults.ReplaceReads(watch(real.preadv));
  EXPECT_EQ(sink->Read("file", 0, {&target, 1}, Soon()).ToString(), "ok");
  EXPECT_TRUE(pages.view() == written);
  if (direct) {
    EXPECT_EQ(in_place, 0u) << "what comes back passes through a buffer, where its checksum is taken";
  }
  if (!direct) GTEST_SKIP() << "no O_DIRECT in " << place.path() << ": the page cache was used";
}

TEST(PosixSink, ThePageCacheDoesNotGrow) {
  // On tmpfs the page cache is the only place for files.
  posix::Syscalls calls = posix::RealSyscalls();
  calls.direct_alignment = [](int, posix::DirectAlignment* alignment) {
    *alignment = {};
    return true;
  };
  PosixPlace place(calls);
  constexpr long kTmpfs = 0x01021994;
  const int folder = open(place.path().c_str(), O_RDONLY | O_DIRECTORY);
  const long type = calls.file_system_type(folder);
  close(folder);
  if (type == kTmpfs) GTEST_SKIP() << place.path() << " is a tmpfs";
  const auto sink = place.Open().value();
  Pages pages(16 << 20);
  const auto resident = [&] {
    const int fd = open((place.path() + "/file").c_str(), O_RDONLY);
    void* memory = mmap(nullptr, pages.view().size(), PROT_READ, MAP_SHARED, fd, 0);
    std::vector<unsigned char> in(pages.view().size() / 4096);
    EXPECT_EQ(mincore(memory, pages.view().size(), in.data()), 0);
    munmap(memory, pages.view().size());
    close(fd);
    return std::count_if(in.begin(), in.end(), [](unsigned char c) { return (c & 1) != 0; });
  };
  EXPECT_EQ(PutWhole(sink.get(), "file", pages.piece()).ToString(), "ok");
  EXPECT_LT(resident(), 2048) << "pages of 4,096";
  const Target target = pages.target();
  EXPECT_EQ(sink->Read("file", 0, {&target, 1}, Soon()).ToString(), "ok");
  EXPECT_LT(resident(), 2048) << "pages of 4,096";
}

TEST(PosixSink, ALeftoverIsFoundByThisMachineOnlyWhenNobodyHoldsIt) {
  PosixPlace place;
  const auto one = place.Open().value(), two = place.Open().value();
  const std::string part(4096, 'p');
  const Piece piece = PieceOf(part);
  Result<std::unique_ptr<Upload>> first = one->Begin("file", part.size(), part.size(), Soon());
  ASSERT_TRUE(first.ok());
  ASSERT_EQ((*first)->PutPart(0, {&piece, 1}, Crc(part), Soon()).ToString(), "ok");
  Result<std::unique_ptr<Upload>> second = two->Begin("file", part.size(), part.size(), Soon());
  ASSERT_TRUE(second.ok());
  EXPECT_FALSE((*second)->Has(0, Crc(part))) << "the first is still writing";
  EXPECT_EQ(place.Everything().size(), 2u);
  first->reset();
  Result<std::unique_ptr<Upload>> third = two->Begin("file", part.size(), part.size(), Soon());
  ASSERT_TRUE(third.ok());
  EXPECT_TRUE((*third)->Has(0, Crc(part)));
  EXPECT_EQ((*third)->Finish(Crc(part), Soon()).ToString(), "ok");
  EXPECT_EQ((*second)->Abort(Soon()).ToString(), "ok");
  EXPECT_THAT(place.Everything(), ElementsAre("file"));
}

// The bytes that are read back decide.
TEST(PosixSink, ALeftoverWithOtherBytesIsNotTaken) {
  PosixPlace place;
  const auto sink = place.Open().value();
  const std::string part(4096, 'p');
  const Piece piece = PieceOf(part);
  {
    Result<std::unique_ptr<Upload>> upload = sink->Begin("file", part.size(), part.size(), Soon());
    ASSERT_TRUE(upload.ok());
    ASSERT_EQ((*upload)->PutPart(0, {&piece, 1}, Crc(part), Soon()).ToString(), "ok");
  }
  ASSERT_EQ(place.Everything().size(), 1u);
  std::fstream(place.path() + "/" + place.Everything()[0]).seekp(100) << "q";
  Result<std::unique_ptr<Upload>> upload = sink->Begin("file", part.size(), part.size(), Soon());
  ASSERT_TRUE(upload.ok());
  EXPECT_FALSE((*upload)->Has(0, Crc(part)));
  EXPECT_EQ((*upload)->Finish(Crc(part), Soon()).code(), Code::kInvalidArgument);
}

TEST(PosixSink, AFullDiskLeavesNothingAndIsWrittenAgainWhenThereIsRoom) {
  PosixPlace place;
  const std::string mounted = place.path() + "/disk";
  std::filesystem::create_directory(mounted);
  // Mounted only for this process, so that nothing remains if it dies.
  if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      mount("none", mounted.c_str(), "tmpfs", 0, "size=1m") != 0)
    GTEST_SKIP() << "a small tmpfs cannot be mounted: " << std::strerror(errno);
  {
    const auto sink = OpenSink(mounted).value();
    Pages much(2 << 20), little(600 << 10);
    const Status status = PutWhole(sink.get(), "much", much.piece());
    EXPECT_EQ(status.code(), Code::kNoSpace) << status.ToString();
    EXPECT_THAT(status.message(), HasSubstr("needed 2097152 bytes, available"));
    EXPECT_THAT(status.message(), HasSubstr("the file system has 1048576"));
    EXPECT_EQ(PutWhole(sink.get(), "one", little.piece()).ToString(), "ok");
    EXPECT_EQ(PutWhole(sink.get(), "two", little.piece()).code(), Code::kNoSpace);
    EXPECT_EQ(sink->Put("two", little.view(), PutMode::kReplace, Soon()).code(), Code::kNoSpace);
    EXPECT_EQ(sink->Put("two", little.view(), PutMode::kIfAbsent, Soon()).code(), Code::kNoSpace);
    const ListPage list = sink->List("", "", Soon()).value();
    ASSERT_EQ(list.files.size(), 1u);
    EXPECT_EQ(list.files[0].name, "one");
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(mounted), {}), 1) << "nothing is left";
    ASSERT_EQ(sink->Delete("one", Soon()).ToString(), "ok");
    EXPECT_EQ(PutWhole(sink.get(), "two", little.piece()).ToString(), "ok");
  }
  EXPECT_EQ(umount(mounted.c_str()), 0);
}

}  // namespace
}  // namespace ropeteam::storage::test

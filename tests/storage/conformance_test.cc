// SPDX-License-Identifier: Apache-2.0
//
// The promises of storage/sink.h, tested on every kind of sink in this binary.

#include "tests/storage/conformance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <set>
#include <thread>

#include "tests/storage/bytes.h"

namespace ropeteam::storage::test {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::UnorderedElementsAre;

Deadline Past() { return In(std::chrono::seconds(-1)); }

class SinkTest : public testing::TestWithParam<SinkKind> {
 protected:
  void SetUp() override {
    const std::string absent = GetParam().absent();
    if (!absent.empty()) GTEST_SKIP() << GetParam().name << ": " << absent;
    place_ = GetParam().make();
    ASSERT_NE(place_, nullptr);
    sink_ = NewSink();
    other_ = NewSink();
  }
  std::unique_ptr<Sink> NewSink() {
    Result<std::unique_ptr<Sink>> sink = place_->Open();
    EXPECT_TRUE(sink.ok()) << sink.status().ToString();
    return sink.ok() ? std::move(*sink) : nullptr;
  }
  std::unique_ptr<Upload> BeginOf(const std::string& name, uint64_t bytes) {
    Result<std::unique_ptr<Upload>> upload = sink_->Begin(name, bytes, GetParam().part_bytes, Soon());
    EXPECT_TRUE(upload.ok()) << upload.status().ToString();
    return upload.ok() ? std::move(*upload) : nullptr;
  }
  static std::string_view PartOf(const Upload& upload, const std::string& file, uint32_t index) {
    return std::string_view(file).substr(index * upload.part_bytes(), upload.PartLength(index));
  }
  static Status PutOnePart(Upload* upload, const std::string& file, uint32_t index) {
    const std::string_view part = PartOf(*upload, file, index);
    const Piece piece = PieceOf(part);
    return upload->PutPart(index, {&piece, 1}, Crc(part), Soon());
  }
  static void PutParts(Upload* upload, const std::string& file) {
    for (uint32_t i = 0; i < upload->part_count(); ++i) {
      const Status status = PutOnePart(upload, file, i);
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
  }
  void Upload1(const std::string& name, const std::string& file) {
    std::unique_ptr<Upload> upload = BeginOf(name, file.size());
    ASSERT_NE(upload, nullptr);
    PutParts(upload.get(), file);
    const Status status = upload->Finish(Crc(file), Soon());
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  void PutOk(const std::string& name, std::string_view bytes) {
    const Status status = sink_->Put(name, bytes, PutMode::kReplace, Soon());
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  // The file's bytes as `other_` reads them, or the name of the error code.
  std::string Seen(const std::string& name) {
    const Result<FileInfo> info = other_->Stat(name, Soon());
    if (!info.ok()) return CodeName(info.status().code());
    EXPECT_EQ(info->name, name);
    std::string bytes(info->bytes, '\0');
    const Target target{reinterpret_cast<std::byte*>(bytes.data()), bytes.size()};
    const Status status = other_->Read(name, 0, {&target, 1}, Soon());
    if (info->crc32c) {
      EXPECT_EQ(*info->crc32c, Crc(bytes));
    }
    return status.ok() ? bytes : CodeName(status.code());
  }
  std::string Absent() const { return CodeName(Code::kNotFound); }
  // Lists all pages of a folder; a file that is listed twice fails the test.
  void ListAll(const std::string& folder, std::map<std::string, uint64_t>* files,
               std::set<std::string>* folders, size_t* pages = nullptr) {
    std::string page;
    size_t count = 0;
    do {
      const Result<ListPage> list = other_->List(folder, page, Soon());
      ASSERT_TRUE(list.ok()) << list.status().ToString();
      for (const FileInfo& file : list->files) {
        EXPECT_TRUE(files->emplace(file.name, file.bytes).second) << file.name << " is listed twice";
      }
      for (const std::string& name : list->folders) {
        EXPECT_TRUE(folders->insert(name).second) << name << " is listed twice";
      }
      page = list->next;
      ASSERT_LT(++count, 1000u) << "the listing does not end";
    } while (!page.empty());
    if (pages != nullptr) *pages = count;
  }
  std::vector<std::string> FilesIn(const std::string& folder) {
    std::map<std::string, uint64_t> files;
    std::set<std::string> folders;
    ListAll(folder, &files, &folders);
    std::vector<std::string> names;
    for (const auto& [name, bytes] : files) names.push_back(name);
    return names;
  }

  std::unique_ptr<SinkPlace> place_;
  std::unique_ptr<Sink> sink_, other_;
};

TEST_P(SinkTest, DescribesItselfInOneLine) {
  EXPECT_FALSE(sink_->Describe().empty());
  EXPECT_EQ(sink_->Describe().find('\n'), std::string::npos);
}

TEST_P(SinkTest, PartsInAnyOrderFromManyThreadsMakeTheFile) {
  const std::string file = Bytes(7 * GetParam().part_bytes + 777, 1);
  std::unique_ptr<Upload> upload = BeginOf("job/step/rank-0.safetensors", file.size());
  ASSERT_NE(upload, nullptr);
  ASSERT_EQ(upload->part_bytes(), GetParam().part_bytes);
  ASSERT_EQ(upload->part_count(), 8u);
  std::vector<uint32_t> order = {7, 2, 5, 0, 6, 1, 4, 3};
  std::atomic<size_t> next{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (size_t i; (i = next++) < order.size();) {
        const Status status = PutOnePart(upload.get(), file, order[i]);
        EXPECT_TRUE(status.ok()) << status.ToString();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Seen("job/step/rank-0.safetensors"), Absent());
  EXPECT_THAT(FilesIn("job/step"), IsEmpty());
  const Status status = upload->Finish(Crc(file), Soon());
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_TRUE(Seen("job/step/rank-0.safetensors") == file);
  EXPECT_THAT(FilesIn("job/step"), ElementsAre("job/step/rank-0.safetensors"));
  EXPECT_THAT(place_->Everything(), ElementsAre("job/step/rank-0.safetensors"));
}

TEST_P(SinkTest, NothingIsSeenBeforeFinishAndFinishReplaces) {
  PutOk("a/file", "old");
  const std::string file = Bytes(GetParam().part_bytes + 1, 2);
  std::unique_ptr<Upload> upload = BeginOf("a/file", file.size());
  ASSERT_NE(upload, nullptr);
  EXPECT_EQ(Seen("a/file"), "old");
  PutParts(upload.get(), file);
  EXPECT_EQ(Seen("a/file"), "old");
  const Status status = upload->Finish(Crc(file), Soon());
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_TRUE(Seen("a/file") == file);
  EXPECT_THAT(FilesIn("a"), ElementsAre("a/file"));
}

TEST_P(SinkTest, AFileOfNoBytesIsAFile) {
  std::unique_ptr<Upload> upload = BeginOf("empty", 0);
  ASSERT_NE(upload, nullptr);
  ASSERT_EQ(upload->part_count(), 1u);
  EXPECT_EQ(upload->PutPart(0, {}, 0, Soon()).ToString(), "ok");
  EXPECT_EQ(upload->Finish(0, Soon()).ToString(), "ok");
  PutOk("empty too", "");
  for (const char* name : {"empty", "empty too"}) {
    EXPECT_EQ(Seen(name), "");
    EXPECT_EQ(other_->Read(name, 0, {}, Soon()).ToString(), "ok");
    std::byte byte{};
    const Target target{&byte, 1};
    EXPECT_EQ(other_->Read(name, 0, {&target, 1}, Soon()).code(), Code::kCorrupt);
  }
}

TEST_P(SinkTest, PiecesOfAnyLengthAtAnyAlignmentAreGathered) {
  const uint64_t part = GetParam().part_bytes;
  const std::string file = Bytes(2 * part + 4099, 3);
  const std::vector<size_t> lengths = {1, 7, 0, 512, 511, 4096, 4095, 4097, 64, 3, 16384, 8191, 20000};
  std::unique_ptr<Upload> upload = BeginOf("gathered", file.size());
  ASSERT_NE(upload, nullptr);
  for (uint32_t i = 0; i < upload->part_count(); ++i) {
    std::string_view rest = PartOf(*upload, file, i);
    const uint32_t crc = Crc(rest);
    // Every piece has its own memory with its own alignment.
    std::vector<std::string> memory;
    std::vector<Piece> pieces;
    for (size_t k = i; !rest.empty(); ++k) {
      const size_t length = std::min(rest.size(), lengths[k % lengths.size()]);
      memory.push_back(std::string(k % 9, '#') + std::string(rest.substr(0, length)) + "#");
      rest.remove_prefix(length);
    }
    rest = PartOf(*upload, file, i);
    for (size_t k = i; !rest.empty(); ++k) {
      const size_t length = std::min(rest.size(), lengths[k % lengths.size()]);
      pieces.push_back(PieceOf(std::string_view(memory[k - i]).substr(k % 9, length)));
      rest.remove_prefix(length);
    }
    const Status status = upload->PutPart(i, pieces, crc, Soon());
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  EXPECT_EQ(upload->Finish(Crc(file), Soon()).ToString(), "ok");
  EXPECT_TRUE(Seen("gathered") == file);
}

TEST_P(SinkTest, APartWithOtherBytesThanItsChecksumIsCorrupt) {
  const std::string file = Bytes(2 * GetParam().part_bytes, 4);
  std::unique_ptr<Upload> upload = BeginOf("file", file.size());
  ASSERT_NE(upload, nullptr);
  ASSERT_EQ(PutOnePart(upload.get(), file, 0).ToString(), "ok");
  std::string wrong(PartOf(*upload, file, 1));
  const uint32_t crc = Crc(wrong);
  wrong[wrong.size() / 2] = static_cast<char>(wrong[wrong.size() / 2] ^ 1);
  const Piece piece = PieceOf(wrong);
  EXPECT_EQ(upload->PutPart(1, {&piece, 1}, crc, Soon()).code(), Code::kCorrupt);
  EXPECT_FALSE(upload->Finish(Crc(file), Soon()).ok());
  EXPECT_EQ(Seen("file"), Absent());
  EXPECT_THAT(FilesIn(""), IsEmpty());
}

TEST_P(SinkTest, APartThatWasCorruptIsPutAgain) {
  const std::string file = Bytes(2 * GetParam().part_bytes, 5);
  std::unique_ptr<Upload> upload = BeginOf("file", file.size());
  ASSERT_NE(upload, nullptr);
  ASSERT_EQ(PutOnePart(upload.get(), file, 1).ToString(), "ok");
  const Piece piece = PieceOf(PartOf(*upload, file, 0));
  EXPECT_EQ(upload->PutPart(0, {&piece, 1}, ~Crc(PartOf(*upload, file, 0)), Soon()).code(), Code::kCorrupt);
  EXPECT_EQ(PutOnePart(upload.get(), file, 0).ToString(), "ok");
  EXPECT_EQ(upload->Finish(Crc(file), Soon()).ToString(), "ok");
  EXPECT_TRUE(Seen("file") == file);
}

TEST_P(SinkTest, TheChecksumOfTheWholeFileIsCompared) {
  if (!GetParam().checks_whole) GTEST_SKIP() << GetParam().name << " does not check whole files";
  const std::string file = Bytes(GetParam().part_bytes + 9, 6);
  std::unique_ptr<Upload> upload = BeginOf("file", file.size());
  ASSERT_NE(upload, nullptr);
  PutParts(upload.get(), file);
  EXPECT_EQ(upload->Finish(Crc(file) ^ 1, Soon()).code(), Code::kCorrupt);
  EXPECT_EQ(Seen("file"), Absent());
}

TEST_P(SinkTest, FinishWithoutEveryPartIsRefused) {
  const std::string file = Bytes(2 * GetParam().part_bytes, 7);
  std::unique_ptr<Upload> upload = BeginOf("file", file.size());
  ASSERT_NE(upload, nullptr);
  ASSERT_EQ(PutOnePart(upload.get(), file, 1).ToString(), "ok");
  EXPECT_FALSE(upload->Finish(Crc(file), Soon()).ok());
  EXPECT_EQ(Seen("file"), Absent());
}

TEST_P(SinkTest, PartsThatAreNotOfTheFileAreRefused) {
  const std::string file = Bytes(GetParam().part_bytes + 10, 8);
  std::unique_ptr<Upload> upload = BeginOf("file", file.size());
  ASSERT_NE(upload, nullptr);
  const std::string eleven(11, 'x'), nine(9, 'x');
  for (const std::string& bytes : {eleven, nine}) {
    const Piece piece = PieceOf(bytes);
    EXPECT_EQ(upload->PutPart(1, {&piece, 1}, Crc(bytes), Soon()).code(), Code::kInvalidArgument);
    EXPECT_EQ(upload->PutPart(2, {&piece, 1}, Crc(bytes), Soon()).code(), Code::kInvalidArgument);
  }
  PutParts(upload.get(), file);
  EXPECT_EQ(upload->Finish(Crc(file), Soon()).ToString(), "ok");
  EXPECT_TRUE(Seen("file") == file);
}

TEST_P(SinkTest, AFileIsNeverCutIntoMorePartsThanTheLimit) {
  Result<std::unique_ptr<Upload>> upload = sink_->Begin("file", (uint64_t{kPartsMax} << 12) + 1, 1, Soon());
  ASSERT_TRUE(upload.ok()) << upload.status().ToString();
  EXPECT_LE((*upload)->part_count(), kPartsMax);
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < (*upload)->part_count(); ++i) bytes += (*upload)->PartLength(i);
  EXPECT_EQ(bytes, (uint64_t{kPartsMax} << 12) + 1);
  EXPECT_EQ((*upload)->Abort(Soon()).ToString(), "ok");
}

TEST_P(SinkTest, ReadFillsAllTargetsFromAnyOffset) {
  const std::string file = Bytes(GetParam().part_bytes * 3 + 12345, 9);
  Upload1("file", file);
  const std::vector<size_t> lengths = {1, 4096, 0, 3, 70000, 511, 100, 8192, 4097};
  for (const uint64_t offset : {uint64_t{0}, uint64_t{1}, uint64_t{511}, uint64_t{4096}, uint64_t{65537}}) {
    for (const bool whole : {false, true}) {
      // One buffer with a byte between any two targets, so that a write beside a target is noticed.
      std::string memory(file.size() + 4096, '#');
      std::vector<Target> targets;
      std::deque<uint32_t> checksums;
      uint64_t left = file.size() - offset, at = 0;
      for (size_t k = 0; left > 0 && (whole || k < lengths.size()); ++k) {
        const uint64_t length = std::min<uint64_t>(left, lengths[k % lengths.size()]);
        targets.push_back({reinterpret_cast<std::byte*>(memory.data()) + at, length});
        if (k % 2 == 0) targets.back().crc32c = &checksums.emplace_back(~0u);
        at += length + 1;
        left -= length;
      }
      const Status status = other_->Read("file", offset, targets, Soon());
      ASSERT_TRUE(status.ok()) << status.ToString();
      uint64_t from = offset;
      for (const Target& target : targets) {
        const char* data = reinterpret_cast<const char*>(target.data);
        ASSERT_TRUE(std::string_view(data, target.bytes) == std::string_view(file).substr(from, target.bytes))
            << "offset " << offset << " at " << from;
        ASSERT_EQ(data[target.bytes], '#');
        if (target.crc32c != nullptr) {
          ASSERT_EQ(*target.crc32c, Crc32c(data, target.bytes)) << "offset " << offset << " at " << from;
        }
        from += target.bytes;
      }
    }
  }
}

TEST_P(SinkTest, ReadPastTheEndIsCorruptAndOfNothingIsNotFound) {
  const std::string file = Bytes(GetParam().part_bytes + 100, 10);
  Upload1("a/file", file);
  std::string memory(file.size() + 1, '\0');
  const Target whole{reinterpret_cast<std::byte*>(memory.data()), file.size()};
  const Target more{reinterpret_cast<std::byte*>(memory.data()), file.size() + 1};
  const Target one{reinterpret_cast<std::byte*>(memory.data()), 1};
  EXPECT_EQ(other_->Read("a/file", 0, {&whole, 1}, Soon()).ToString(), "ok");
  EXPECT_EQ(other_->Read("a/file", 0, {&more, 1}, Soon()).code(), Code::kCorrupt);
  EXPECT_EQ(other_->Read("a/file", 1, {&whole, 1}, Soon()).code(), Code::kCorrupt);
  EXPECT_EQ(other_->Read("a/file", file.size(), {&one, 1}, Soon()).code(), Code::kCorrupt);
  EXPECT_EQ(other_->Read("a/file", uint64_t{1} << 40, {&one, 1}, Soon()).code(), Code::kCorrupt);
  const Target both[] = {one, whole};
  EXPECT_EQ(other_->Read("a/file", 0, both, Soon()).code(), Code::kCorrupt);
  for (const char* absent : {"a/fil", "a/file/below", "a", "b", "b/c"}) {
    EXPECT_EQ(other_->Read(absent, 0, {&one, 1}, Soon()).code(), Code::kNotFound) << absent;
    EXPECT_EQ(other_->Stat(absent, Soon()).status().code(), Code::kNotFound) << absent;
  }
}

TEST_P(SinkTest, PutReplaces) {
  PutOk("a/b/small", "one");
  EXPECT_EQ(Seen("a/b/small"), "one");
  PutOk("a/b/small", "");
  EXPECT_EQ(Seen("a/b/small"), "");
  const std::string large = Bytes(300'001, 11);
  PutOk("a/b/small", large);
  EXPECT_TRUE(Seen("a/b/small") == large);
  EXPECT_THAT(place_->Everything(), ElementsAre("a/b/small"));
  const Status status = sink_->Put("big", std::string(kPutBytesMax + 1, 'x'), PutMode::kReplace, Soon());
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(Seen("big"), Absent());
}

TEST_P(SinkTest, AReaderSeesOneOfTheWritersWhole) {
  constexpr size_t kLength = 30'000;
  PutOk("file", std::string(kLength, 'a'));
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (int i = 0; i < 40; ++i)
      EXPECT_TRUE(
          sink_->Put("file", std::string(kLength, static_cast<char>('a' + i % 26)), PutMode::kReplace, Soon())
              .ok());
    done = true;
  });
  size_t reads = 0;
  do {
    std::string bytes(kLength, '\0');
    const Target target{reinterpret_cast<std::byte*>(bytes.data()), bytes.size()};
    const Status status = other_->Read("file", 0, {&target, 1}, Soon());
    // A store without rename hides the file while replacing it.
    if (status.code() == Code::kNotFound) continue;
    EXPECT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(bytes, std::string(kLength, bytes[0]));
    ++reads;
  } while (!done);
  writer.join();
  EXPECT_EQ(Seen("file"), std::string(kLength, 'n'));
}

TEST_P(SinkTest, OfManyPutsIfAbsentExactlyOneWins) {
  if (!GetParam().put_if_absent) {
    EXPECT_EQ(sink_->Put("lock", "x", PutMode::kIfAbsent, Soon()).code(), Code::kUnsupported);
    EXPECT_THAT(place_->Everything(), IsEmpty());
    return;
  }
  constexpr int kWriters = 8;
  for (int round = 0; round < 10; ++round) {
    const std::string name = "locks/" + std::to_string(round);
    std::atomic<int> ready{0}, won{0}, lost{0};
    std::atomic<int> winner{-1};
    std::vector<std::thread> threads;
    for (int t = 0; t < kWriters; ++t) {
      threads.emplace_back([&, t] {
        Sink* sink = t % 2 == 0 ? sink_.get() : other_.get();
        const std::string mine(1000, static_cast<char>('A' + t));
        for (++ready; ready < kWriters;) std::this_thread::yield();
        const Status status = sink->Put(name, mine, PutMode::kIfAbsent, Soon());
        if (status.ok()) {
          ++won;
          winner = t;
        } else {
          EXPECT_EQ(status.code(), Code::kAlreadyExists) << status.ToString();
          // A loser sees all of the winner's bytes.
          EXPECT_EQ(Seen(name).size(), 1000u);
          ++lost;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(won, 1);
    ASSERT_EQ(lost, kWriters - 1);
    EXPECT_EQ(Seen(name), std::string(1000, static_cast<char>('A' + winner)));
  }
  EXPECT_EQ(place_->Everything().size(), 10u);
  ASSERT_EQ(sink_->Delete("locks/0", Soon()).ToString(), "ok");
  EXPECT_EQ(sink_->Put("locks/0", "again", PutMode::kIfAbsent, Soon()).ToString(), "ok");
  EXPECT_EQ(sink_->Put("locks/0", "third", PutMode::kIfAbsent, Soon()).code(), Code::kAlreadyExists);
  EXPECT_EQ(Seen("locks/0"), "again");
}

TEST_P(SinkTest, StatTellsTheSize) {
  const std::string file = Bytes(GetParam().part_bytes + 4321, 12);
  Upload1("a/.metadata", file);
  const Result<FileInfo> info = other_->Stat("a/.metadata", Soon());
  ASSERT_TRUE(info.ok()) << info.status().ToString();
  EXPECT_EQ(info->name, "a/.metadata");
  EXPECT_EQ(info->bytes, file.size());
  if (info->crc32c) {
    EXPECT_EQ(*info->crc32c, Crc(file));
  }
}

TEST_P(SinkTest, ListShowsFilesAndFoldersOfOneFolderOnly) {
  for (const char* name : {"top", "job/.metadata", "job/one", "job/step-1/x", "job/step-1/y/z",
                           "job/step-2/x", "job2/x", "job/\xc3\xa9t\xc3\xa9 #1+%41&?"})
    PutOk(name, std::string(name).substr(0, 3));
  std::map<std::string, uint64_t> files;
  std::set<std::string> folders;
  ListAll("job", &files, &folders);
  EXPECT_EQ(files, (std::map<std::string, uint64_t>{
                       {"job/.metadata", 3}, {"job/one", 3}, {"job/\xc3\xa9t\xc3\xa9 #1+%41&?", 3}}));
  EXPECT_THAT(folders, UnorderedElementsAre("job/step-1", "job/step-2"));
  files.clear();
  folders.clear();
  ListAll("", &files, &folders);
  EXPECT_EQ(files, (std::map<std::string, uint64_t>{{"top", 3}}));
  EXPECT_THAT(folders, UnorderedElementsAre("job", "job2"));
  EXPECT_THAT(FilesIn("jo"), IsEmpty());
  EXPECT_THAT(FilesIn("job/step-3/none"), IsEmpty());
  EXPECT_EQ(Seen("job/\xc3\xa9t\xc3\xa9 #1+%41&?"), "job");
}

TEST_P(SinkTest, ListComesInPages) {
  std::set<std::string> expected;
  for (size_t i = 0; i < GetParam().page_files + 3; ++i) {
    const std::string name = "many/file-" + std::to_string(i);
    PutOk(name, "x");
    expected.insert(name);
  }
  PutOk("many/sub/x", "x");
  std::map<std::string, uint64_t> files;
  std::set<std::string> folders;
  size_t pages = 0;
  ListAll("many", &files, &folders, &pages);
  EXPECT_GE(pages, 2u);
  EXPECT_THAT(folders, ElementsAre("many/sub"));
  std::set<std::string> listed;
  for (const auto& [name, bytes] : files) listed.insert(name);
  EXPECT_EQ(listed, expected);
}

TEST_P(SinkTest, DeleteIsIdempotentAndTakesThatFileOnly) {
  for (const char* name : {"a/file", "a/file2", "a/fil", "a/file3/x"}) PutOk(name, "x");
  EXPECT_EQ(sink_->Delete("a/file", Soon()).ToString(), "ok");
  EXPECT_EQ(Seen("a/file"), Absent());
  EXPECT_EQ(sink_->Delete("a/file", Soon()).ToString(), "ok");
  for (const char* absent : {"b/none", "a/file/below", "a/file3"})
    EXPECT_EQ(sink_->Delete(absent, Soon()).ToString(), "ok") << absent;
  for (const char* name : {"a/file2", "a/fil", "a/file3/x"}) EXPECT_EQ(Seen(name), "x") << name;
}

TEST_P(SinkTest, DeleteFolderTakesEmptyFoldersAndNoFile) {
  PutOk("job/step-1/a", "x");
  PutOk("job/step-1/sub/b", "x");
  PutOk("job/step-2/a", "x");
  EXPECT_EQ(sink_->DeleteFolder("job/step-1", Soon()).ToString(), "ok");
  EXPECT_EQ(Seen("job/step-1/a"), "x");
  EXPECT_EQ(Seen("job/step-1/sub/b"), "x");
  ASSERT_EQ(sink_->Delete("job/step-1/sub/b", Soon()).ToString(), "ok");
  std::map<std::string, uint64_t> files;
  std::set<std::string> folders;
  if (GetParam().keeps_folders) {
    EXPECT_EQ(sink_->DeleteFolder("job/step-1", Soon()).ToString(), "ok");
    ListAll("job/step-1", &files, &folders);
    EXPECT_THAT(folders, ElementsAre("job/step-1/sub")) << "a file is left beside it";
    files.clear();
    folders.clear();
  }
  ASSERT_EQ(sink_->Delete("job/step-1/a", Soon()).ToString(), "ok");
  if (GetParam().keeps_folders) {
    ListAll("job", &files, &folders);
    EXPECT_THAT(folders, ElementsAre("job/step-1", "job/step-2"));
  }
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(sink_->DeleteFolder("job/step-1", Soon()).ToString(), "ok");
    files.clear();
    folders.clear();
    ListAll("job", &files, &folders);
    EXPECT_THAT(folders, ElementsAre("job/step-2"));
  }
  EXPECT_EQ(Seen("job/step-2/a"), "x");
  PutOk("job/step-1/again", "x");
  EXPECT_EQ(Seen("job/step-1/again"), "x");
}

TEST_P(SinkTest, AnUploadThatWasDestroyedIsBegunAgain) {
  const std::string file = Bytes(3 * GetParam().part_bytes + 5, 13);
  {
    std::unique_ptr<Upload> upload = BeginOf("a/file", file.size());
    ASSERT_NE(upload, nullptr);
    EXPECT_FALSE(upload->Has(1, Crc(PartOf(*upload, file, 1))));
    ASSERT_EQ(PutOnePart(upload.get(), file, 1).ToString(), "ok");
    ASSERT_EQ(PutOnePart(upload.get(), file, 3).ToString(), "ok");
  }
  EXPECT_EQ(Seen("a/file"), Absent());
  EXPECT_THAT(FilesIn("a"), IsEmpty());
  sink_ = NewSink();
  std::unique_ptr<Upload> upload = BeginOf("a/file", file.size());
  ASSERT_NE(upload, nullptr);
  for (uint32_t i = 0; i < upload->part_count(); ++i) {
    const uint32_t crc = Crc(PartOf(*upload, file, i));
    const bool has = upload->Has(i, crc);
    EXPECT_EQ(has, GetParam().resumes && i % 2 == 1) << i;
    EXPECT_FALSE(upload->Has(i, crc ^ 1)) << i;
    if (!has) {
      ASSERT_EQ(PutOnePart(upload.get(), file, i).ToString(), "ok");
    }
  }
  EXPECT_EQ(upload->Finish(Crc(file), Soon()).ToString(), "ok");
  EXPECT_TRUE(Seen("a/file") == file);
}

TEST_P(SinkTest, AnUploadOfAnotherSizeTakesNothingFromTheOld) {
  const std::string file = Bytes(2 * GetParam().part_bytes, 14), other = Bytes(3 * GetParam().part_bytes, 15);
  {
    std::unique_ptr<Upload> upload = BeginOf("file", file.size());
    ASSERT_NE(upload, nullptr);
    PutParts(upload.get(), file);
  }
  std::unique_ptr<Upload> upload = BeginOf("file", other.size());
  ASSERT_NE(upload, nullptr);
  for (uint32_t i = 0; i < 3; ++i) EXPECT_FALSE(upload->Has(i, Crc(PartOf(*upload, other, i))));
  PutParts(upload.get(), other);
  EXPECT_EQ(upload->Finish(Crc(other), Soon()).ToString(), "ok");
  EXPECT_TRUE(Seen("file") == other);
}

TEST_P(SinkTest, TwoUploadsOfOneNameNeverMix) {
  const std::string one = Bytes(2 * GetParam().part_bytes, 16), two = Bytes(2 * GetParam().part_bytes, 17);
  std::unique_ptr<Upload> first = BeginOf("file", one.size());
  std::swap(sink_, other_);
  std::unique_ptr<Upload> second = BeginOf("file", two.size());
  ASSERT_NE(first, nullptr);
  ASSERT_NE(second, nullptr);
  PutParts(first.get(), one);
  PutParts(second.get(), two);
  const bool first_ok = first->Finish(Crc(one), Soon()).ok();
  const bool second_ok = second->Finish(Crc(two), Soon()).ok();
  EXPECT_TRUE(first_ok || second_ok);
  EXPECT_TRUE(Seen("file") == (second_ok ? two : one));
}

TEST_P(SinkTest, AnAbortedUploadLeavesNothing) {
  const std::string file = Bytes(2 * GetParam().part_bytes, 18);
  std::unique_ptr<Upload> upload = BeginOf("file", file.size());
  ASSERT_NE(upload, nullptr);
  PutParts(upload.get(), file);
  EXPECT_EQ(upload->Abort(Soon()).ToString(), "ok");
  EXPECT_THAT(place_->Everything(), IsEmpty());
  EXPECT_FALSE(upload->Finish(Crc(file), Soon()).ok());
  EXPECT_EQ(Seen("file"), Absent());
  Upload1("file", file);
  EXPECT_TRUE(Seen("file") == file);
}

TEST_P(SinkTest, UnfinishedUploadsAreAbortedByAge) {
  const std::string file = Bytes(2 * GetParam().part_bytes, 19);
  PutOk("job/whole", "x");
  std::unique_ptr<Upload> left = BeginOf("job/left", file.size());
  std::unique_ptr<Upload> below = BeginOf("job/step/below", file.size());
  std::unique_ptr<Upload> elsewhere = BeginOf("elsewhere/file", file.size());
  for (const auto& upload : {&left, &below, &elsewhere}) {
    ASSERT_NE(upload->get(), nullptr);
    ASSERT_EQ(PutOnePart(upload->get(), file, 0).ToString(), "ok");
  }
  const auto abort = [&](const std::string& folder, std::chrono::seconds age) {
    const Result<uint64_t> aborted = other_->AbortUploads(folder, age, Soon());
    EXPECT_TRUE(aborted.ok()) << aborted.status().ToString();
    return aborted.ok() ? *aborted : ~uint64_t{0};
  };
  EXPECT_EQ(abort("job", std::chrono::hours(1)), 0u);
  EXPECT_EQ(abort("absent/folder", std::chrono::seconds(0)), 0u);
  EXPECT_EQ(abort("job", std::chrono::seconds(0)), 2u);
  for (const auto& upload : {&left, &below}) {
    EXPECT_EQ(PutOnePart(upload->get(), file, 1).code(), Code::kNotFound);
    EXPECT_FALSE((*upload)->Finish(Crc(file), Soon()).ok());
    EXPECT_EQ((*upload)->Abort(Soon()).ToString(), "ok");
  }
  EXPECT_THAT(FilesIn("job"), ElementsAre("job/whole"));
  EXPECT_THAT(FilesIn("job/step"), IsEmpty());
  // The upload elsewhere continues. An aborted one can be begun again.
  EXPECT_EQ(PutOnePart(elsewhere.get(), file, 1).ToString(), "ok");
  EXPECT_EQ(elsewhere->Finish(Crc(file), Soon()).ToString(), "ok");
  EXPECT_TRUE(Seen("elsewhere/file") == file);
  Upload1("job/left", file);
  EXPECT_TRUE(Seen("job/left") == file);
  EXPECT_EQ(abort("", std::chrono::seconds(0)), 0u);
}

TEST_P(SinkTest, NamesThatLeaveThePrefixAreRefusedByEveryCall) {
  for (const std::string& bad :
       {std::string("../x"), std::string("/x"), std::string("a/../../x"), std::string("a//b"),
        std::string("a/"), std::string("./a"), std::string("a\0b", 3), std::string("a\nb"),
        std::string(256, 'x'), std::string()}) {
    std::byte byte{};
    const Target target{&byte, 1};
    std::vector<Code> codes = {
        sink_->Begin(bad, 10, 10, Soon()).status().code(),
        sink_->Put(bad, "x", PutMode::kReplace, Soon()).code(),
        sink_->Put(bad, "x", PutMode::kIfAbsent, Soon()).code(),
        sink_->Read(bad, 0, {&target, 1}, Soon()).code(),
        sink_->Stat(bad, Soon()).status().code(),
        sink_->Delete(bad, Soon()).code(),
        sink_->DeleteFolder(bad, Soon()).code(),
    };
    if (!bad.empty()) {
      codes.push_back(sink_->List(bad, "", Soon()).status().code());
      codes.push_back(sink_->AbortUploads(bad, std::chrono::seconds(0), Soon()).status().code());
    }
    for (size_t i = 0; i < codes.size(); ++i)
      EXPECT_EQ(codes[i], Code::kInvalidArgument) << "\"" << bad << "\" in call " << i;
  }
  EXPECT_THAT(place_->Everything(), IsEmpty());
}

TEST_P(SinkTest, ACallWhoseDeadlineHasPassedDoesNothing) {
  PutOk("file", "old");
  const std::string file = Bytes(GetParam().part_bytes, 20);
  std::unique_ptr<Upload> upload = BeginOf("parts", file.size());
  ASSERT_NE(upload, nullptr);
  const Piece piece = PieceOf(file);
  EXPECT_EQ(upload->PutPart(0, {&piece, 1}, Crc(file), Past()).code(), Code::kDeadlineExceeded);
  PutParts(upload.get(), file);
  EXPECT_EQ(upload->Finish(Crc(file), Past()).code(), Code::kDeadlineExceeded);
  EXPECT_EQ(Seen("parts"), Absent());
  EXPECT_EQ(sink_->Put("file", "new", PutMode::kReplace, Past()).code(), Code::kDeadlineExceeded);
  EXPECT_EQ(sink_->Delete("file", Past()).code(), Code::kDeadlineExceeded);
  EXPECT_EQ(sink_->Begin("x", 1, 1, Past()).status().code(), Code::kDeadlineExceeded);
  EXPECT_EQ(Seen("file"), "old");
  std::byte byte{};
  const Target target{&byte, 1};
  EXPECT_EQ(sink_->Read("file", 0, {&target, 1}, Past()).code(), Code::kDeadlineExceeded);
  EXPECT_EQ(sink_->Stat("file", Past()).status().code(), Code::kDeadlineExceeded);
  EXPECT_EQ(sink_->List("", "", Past()).status().code(), Code::kDeadlineExceeded);
  EXPECT_EQ(upload->Finish(Crc(file), Soon()).ToString(), "ok");
  EXPECT_TRUE(Seen("parts") == file);
}

TEST_P(SinkTest, AnUploadAsksBeforeItTakesBytes) {
  std::atomic<size_t> asked{0};
  sink_->SetYield([&](size_t bytes) { asked += bytes; });
  const std::string file = Bytes(GetParam().part_bytes * 2 + 12345, 22);
  std::unique_ptr<Upload> upload = BeginOf("file", file.size());
  ASSERT_NE(upload, nullptr);
  ASSERT_TRUE(PutOnePart(upload.get(), file, 0).ok());
  EXPECT_GE(asked, upload->PartLength(0));
}

TEST_P(SinkTest, StopAbortsWhatRunsAndWhatComes) {
  PutOk("file", "x");
  const std::string file = Bytes(2 * GetParam().part_bytes, 21);
  std::unique_ptr<Upload> upload = BeginOf("parts", file.size());
  ASSERT_NE(upload, nullptr);
  std::atomic<bool> putting{false};
  std::thread thread([&] {
    Status status;
    while ((status = PutOnePart(upload.get(), file, 0)).ok()) putting = true;
    EXPECT_EQ(status.code(), Code::kAborted) << status.ToString();
  });
  while (!putting) std::this_thread::yield();
  sink_->Stop();
  thread.join();
  EXPECT_EQ(PutOnePart(upload.get(), file, 1).code(), Code::kAborted);
  EXPECT_EQ(upload->Finish(Crc(file), Soon()).code(), Code::kAborted);
  EXPECT_EQ(sink_->Put("file", "y", PutMode::kReplace, Soon()).code(), Code::kAborted);
  EXPECT_EQ(sink_->Begin("more", 1, 1, Soon()).status().code(), Code::kAborted);
  EXPECT_EQ(sink_->Stat("file", Soon()).status().code(), Code::kAborted);
  EXPECT_EQ(sink_->List("", "", Soon()).status().code(), Code::kAborted);
  EXPECT_EQ(sink_->Delete("file", Soon()).code(), Code::kAborted);
  EXPECT_EQ(sink_->DeleteFolder("a", Soon()).code(), Code::kAborted);
  EXPECT_EQ(sink_->AbortUploads("", std::chrono::seconds(0), Soon()).status().code(), Code::kAborted);
  EXPECT_EQ(Seen("file"), "x");
  EXPECT_EQ(Seen("parts"), Absent());
}

INSTANTIATE_TEST_SUITE_P(Sinks, SinkTest, testing::ValuesIn(SinkKinds()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ropeteam::storage::test

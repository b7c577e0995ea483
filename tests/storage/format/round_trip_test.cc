// SPDX-License-Identifier: Apache-2.0
//
// Random shards to files and back: the stream must be bit-identical, and every checksum combined from the
// chunks' checksums must be that of the bytes.

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "core/shard/file_names.h"
#include "shard_builder.h"
#include "storage/format/checksums.h"
#include "storage/format/json.h"
#include "storage/format/names.h"
#include "storage/format/safetensors.h"

namespace ropeteam::storage {
namespace {

class RandomShard {
 public:
  explicit RandomShard(uint64_t seed) : random_(seed) {}

  uint64_t Below(uint64_t limit) { return random_() % limit; }

  NamedBytes Objects() {
    const uint64_t sizes[] = {0, 1, 5, 40, 400, 3000};
    const uint64_t count = sizes[Below(6)] == 0 ? Below(3) : Below(sizes[1 + Below(5)]) + 1;
    NamedBytes named;
    for (uint64_t i = 0; i < count; ++i) AddObject(&named);
    if (!index_.empty() && Below(8) != 0) {
      // At any position, as a C program may put it.
      const auto at = named.begin() + static_cast<ptrdiff_t>(Below(named.size() + 1));
      named.insert(at, {".ropeteam/index", R"({"version":1,"objects":{)" + index_ + "}}"});
    }
    return named;
  }

 private:
  std::string Name() {
    static const char* const kNames[] = {"w",
                                         "layers.0.weight",
                                         "__metadata__",
                                         "ropeteam.order",
                                         "a b",
                                         "x.pt",
                                         "d/x.pt",
                                         "d",
                                         "x.json",
                                         ".metadata",
                                         "../up",
                                         "x.json/y.pt",
                                         "/root.pt",
                                         "q\"uote\\",
                                         "new\nline",
                                         "bad\xff",
                                         "bad\xff.pt",
                                         "caf\xc3\xa9",
                                         "%ff",
                                         "ropeteam.object.0"};
    std::string name = kNames[Below(std::size(kNames))];
    while (!used_.insert(name).second) {
      // Unusual names: a random byte at a random position, or a number.
      if (Below(4) == 0) {
        name.insert(Below(name.size() + 1), 1, static_cast<char>(1 + Below(255)));
      } else {
        name = std::to_string(used_.size()) + name;
      }
      if (name.size() > 200) name = std::to_string(used_.size());
    }
    return name;
  }

  uint64_t Length() {
    switch (Below(6)) {
      case 0:
        return 0;
      case 1:
        return 1;
      case 2:
        return 64 * Below(10);
      case 3:
        return Below(10000);
      default:
        return Below(200);
    }
  }

  void AddObject(NamedBytes* named) {
    static const char* const kDtypes[] = {"float32", "bfloat16", "complex64", "bool", "nonsense"};
    const std::string name = Name();
    uint64_t length = Length();
    if (Below(2) == 0 && IsUtf8(name)) {
      index_ += index_.empty() ? "" : ",";
      AppendJsonString(&index_, name);
      if (Below(3) == 0) {
        index_ += R"(:{"kind":"json"})";
        if (Below(4) != 0) {
          std::string text = "\"";
          for (uint64_t i = 0; i < length; ++i) text += static_cast<char>('a' + Below(26));
          named->emplace_back(name, text + "\\n\"");
          return;
        }
      } else {
        const uint64_t elements = Below(300);
        if (Below(8) != 0) length = elements * 4;
        index_ += R"(:{"kind":"tensor","dtype":")" + std::string(kDtypes[Below(5)]) + R"(","shape":[)" +
                  std::to_string(elements) + "]}";
      }
    }
    named->emplace_back(name, RandomBytes(&random_, length));
  }

  std::mt19937_64 random_;
  std::set<std::string> used_ = {".ropeteam/index"};
  std::string index_;
};

TEST(RoundTrip, RandomShardsComeBackToTheBit) {
  uint64_t rank_files = 0, files_seen = 0, texts = 0, mapped = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    RandomShard random(seed);
    const NamedBytes named = random.Objects();
    const TestShard shard(named, uint64_t{64} << random.Below(8));
    const uint32_t rank = static_cast<uint32_t>(random.Below(2) == 0 ? 0 : random.Below(200000));
    std::set<std::string> taken;
    for (const auto& [name, bytes] : named)
      if (random.Below(5) == 0) taken.insert(name);

    const ShardStream stream = shard.Stream();
    const Result<std::vector<FilePlan>> files = LayOut(rank, shard.objects(), stream, taken, nullptr);
    ASSERT_TRUE(files.ok()) << files.status().ToString();
    const RankEntry entry = EntryOf(rank, shard, *files);
    std::set<std::string> paths;
    std::vector<std::string> contents;
    for (const FilePlan& file : *files) {
      EXPECT_TRUE(CheckFileName(file.path).ok()) << file.path;
      EXPECT_TRUE(TakeFileNames({file.path}, &paths).empty()) << file.path;
      contents.push_back(FileBytes(file, stream));
      ASSERT_EQ(contents.back().size(), file.bytes);
    }
    const std::string head = entry.HasRankFile() ? (*files)[0].head : "";
    const Result<RestorePlan> plan = PlanRestore(entry, head);
    ASSERT_TRUE(plan.ok()) << plan.status().ToString();
    ASSERT_EQ(plan->objects, shard.objects());
    ASSERT_EQ(plan->manifest_offset, shard.manifest_offset());
    ASSERT_EQ(Rebuild(*plan, contents), shard.bytes());
    rank_files += entry.HasRankFile() ? 1 : 0;
    files_seen += files->size();
    texts += plan->texts.empty() ? 0 : 1;
    mapped += head.find("ropeteam.object.") != std::string::npos ? 1 : 0;
  }
  // The seeds cover the intended cases.
  EXPECT_GT(rank_files, 100u);
  EXPECT_GT(files_seen, rank_files + 100);
  EXPECT_GT(texts, 50u);
  EXPECT_GT(mapped, 50u);
}

TEST(RoundTrip, TheSameStreamGivesTheSameFiles) {
  RandomShard random(7);
  const NamedBytes named = random.Objects();
  const TestShard one(named, 4096);
  const TestShard other(named, 4096);
  const auto a = LayOut(1, one.objects(), one.Stream(), {}, nullptr);
  const auto b = LayOut(1, other.objects(), other.Stream(), {}, nullptr);
  ASSERT_TRUE(a.ok() && b.ok());
  ASSERT_EQ(a->size(), b->size());
  for (size_t i = 0; i < a->size(); ++i) {
    EXPECT_EQ((*a)[i].path, (*b)[i].path);
    EXPECT_EQ((*a)[i].head, (*b)[i].head);
    EXPECT_EQ((*a)[i].ranges, (*b)[i].ranges);
  }
}

TEST(RoundTrip, ManyObjectsStayOneRangeAndOneRun) {
  NamedBytes named;
  for (int i = 0; i < 50000; ++i) named.emplace_back("layer." + std::to_string(i), std::string(64, 'x'));
  const TestShard shard(named, 1 << 16);
  const auto files = LayOut(0, shard.objects(), shard.Stream(), {}, nullptr);
  ASSERT_TRUE(files.ok());
  const auto plan = PlanRestore(EntryOf(0, shard, *files), (*files)[0].head);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ((*files)[0].ranges.size(), 1u);
  EXPECT_EQ(plan->pieces.size(), 1u);
  EXPECT_NE((*files)[0].head.find(R"("ropeteam.order":"t50000")"), std::string::npos);
}

TEST(RoundTrip, AFileAndTheTensorBehindItAreTwoPieces) {
  // The file ends at the same offset at which the tensor begins in another file.
  const TestShard shard({{"a.pt", std::string(kSafetensorsAlignmentBytes, 'a')}, {"w", "w"}}, 4096);
  const auto files = LayOut(0, shard.objects(), shard.Stream(), {}, nullptr);
  ASSERT_TRUE(files.ok());
  const auto plan = PlanRestore(EntryOf(0, shard, *files), (*files)[0].head);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->pieces, (std::vector<RestorePiece>{{0, 4096, 1, 0}, {4096, 1, 0, 4096}}));
}

TEST(Checksums, AreThoseOfTheBytesInEveryCut) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    RandomShard random(1000 + seed);
    const TestShard shard(random.Objects(), uint64_t{64} << random.Below(10));
    std::vector<int> reads;
    const ShardStream counted = shard.Stream(&reads);
    const ShardStream stream = shard.Stream();
    const auto files = LayOut(0, shard.objects(), stream, {}, nullptr);
    ASSERT_TRUE(files.ok());
    std::vector<uint64_t> part_bytes;
    for (size_t i = 0; i < files->size(); ++i)
      part_bytes.push_back(1 + random.Below(random.Below(2) ? 300 : 20000));
    PartChecksums checksums(*files, counted, part_bytes);
    std::vector<std::pair<size_t, uint32_t>> parts;
    for (size_t i = 0; i < files->size(); ++i)
      for (uint32_t part = 0; part < checksums.part_count(i); ++part) parts.emplace_back(i, part);
    // In random order, as several threads put them.
    for (size_t i = parts.size(); i > 1; --i) std::swap(parts[i - 1], parts[random.Below(i)]);
    for (const auto& [file, part] : parts) {
      const FilePlan& plan = (*files)[file];
      const uint64_t begin = part * part_bytes[file];
      const std::string bytes =
          FileBytes(plan, begin, std::min(plan.bytes, begin + part_bytes[file]), stream);
      const Result<uint32_t> crc = checksums.Part(file, part, nullptr);
      ASSERT_TRUE(crc.ok()) << crc.status().ToString();
      ASSERT_EQ(*crc, Crc32c(bytes.data(), bytes.size())) << plan.path << " part " << part;
    }
    for (size_t i = 0; i < files->size(); ++i) {
      const std::string bytes = FileBytes((*files)[i], stream);
      const Result<uint32_t> crc = checksums.File(i, nullptr);
      ASSERT_TRUE(crc.ok());
      ASSERT_EQ(*crc, Crc32c(bytes.data(), bytes.size())) << (*files)[i].path;
    }
    for (size_t chunk = 0; chunk < reads.size(); ++chunk) ASSERT_LE(reads[chunk], 1) << chunk;
  }
}

TEST(Checksums, WholeChunksAreNotRead) {
  constexpr uint64_t kChunk = 4096;
  const TestShard shard({{"w", std::string(100 * kChunk, 'w')}}, kChunk);
  std::vector<int> reads;
  const ShardStream stream = shard.Stream(&reads);
  const auto files = LayOut(0, shard.objects(), stream, {}, nullptr);
  ASSERT_TRUE(files.ok());
  // The header is as long as one chunk, so parts of ten chunks cut no chunk.
  PartChecksums whole(*files, stream, {10 * kChunk});
  ASSERT_TRUE(whole.File(0, nullptr).ok());
  EXPECT_EQ(std::count(reads.begin(), reads.end(), 0), static_cast<ptrdiff_t>(reads.size()));
  // With half a chunk more, every second part cuts a chunk, which is read once for both parts.
  PartChecksums cut(*files, stream, {10 * kChunk + kChunk / 2});
  ASSERT_TRUE(cut.File(0, nullptr).ok());
  EXPECT_EQ(std::count(reads.begin(), reads.end(), 1), 5);
  EXPECT_EQ(std::count(reads.begin(), reads.end(), 0), static_cast<ptrdiff_t>(reads.size()) - 5);
}

TEST(Checksums, AnyFlippedBitInACutChunkIsFoundAndTheChunkNamed) {
  // Two files and a text share the chunks, with pieces, padding, the JSON value and the shard's manifest.
  TestShard shard({{"a.pt", std::string(100, 'a')},
                   {"w", std::string(70, 'w')},
                   {"j", "{}"},
                   {"b.pt", std::string(30, 'b')},
                   {".ropeteam/index", R"({"version":1,"objects":{"j":{"kind":"json"}}})"}},
                  256);
  const ShardStream stream = shard.Stream();
  const auto files = LayOut(0, shard.objects(), stream, {}, nullptr);
  ASSERT_TRUE(files.ok());
  std::set<uint64_t> touched;
  for (const FilePlan& file : *files)
    for (const FileRange& range : file.ranges)
      for (uint64_t at = range.stream_offset; at < range.stream_offset + range.length; ++at)
        touched.insert(at / 256);
  for (uint64_t at = 0; at < shard.bytes().size(); ++at) {
    shard.bytes()[at] ^= 0x10;
    PartChecksums checksums(*files, stream, std::vector<uint64_t>(files->size(), 4096));
    std::optional<uint64_t> bad;
    Status status;
    for (size_t i = 0; i < files->size() && status.ok(); ++i) status = checksums.File(i, &bad).status();
    if (touched.count(at / 256) != 0) {
      ASSERT_EQ(status.code(), Code::kCorrupt) << at;
      ASSERT_EQ(bad, at / 256);
    } else {
      ASSERT_TRUE(status.ok()) << at;
    }
    shard.bytes()[at] ^= 0x10;
  }
}

TEST(Checksums, ABadChunkIsReadAgainOnceItWasRepaired) {
  TestShard shard({{"a.pt", std::string(100, 'a')}}, 256);
  const ShardStream stream = shard.Stream();
  const auto files = LayOut(0, shard.objects(), stream, {}, nullptr);
  ASSERT_TRUE(files.ok());
  PartChecksums checksums(*files, stream, {1000});
  shard.bytes()[3] ^= 1;
  EXPECT_EQ(checksums.Part(0, 0, nullptr).status().code(), Code::kCorrupt);
  shard.bytes()[3] ^= 1;
  EXPECT_TRUE(checksums.Part(0, 0, nullptr).ok());
}

TEST(Checksums, PaddingThatIsNotZeroIsRefused) {
  TestShard shard({{"a.pt", std::string(100, 'a')}, {"b.pt", "b"}}, 4096);
  shard.bytes()[101] = 'x';
  shard.Seal();
  const ShardStream stream = shard.Stream();
  const auto files = LayOut(0, shard.objects(), stream, {}, nullptr);
  ASSERT_TRUE(files.ok());
  PartChecksums checksums(*files, stream, {1000, 1000});
  EXPECT_EQ(checksums.File(0, nullptr).status().code(), Code::kInternal);
}

}  // namespace
}  // namespace ropeteam::storage

// SPDX-License-Identifier: Apache-2.0
#include "storage/format/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "shard_builder.h"
#include "storage/format/names.h"
#include "storage/format/safetensors.h"

namespace ropeteam::storage {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr uint64_t kChunk = 4096;

std::vector<FilePlan> Files(const TestShard& shard, uint32_t rank = 3,
                            const std::set<std::string>& taken = {}) {
  Result<std::vector<FilePlan>> files = LayOut(rank, shard.objects(), shard.Stream(), taken, nullptr);
  EXPECT_TRUE(files.ok()) << files.status().ToString();
  return files.ok() ? *files : std::vector<FilePlan>();
}
// A header's JSON without trailing spaces.
std::string Json(const FilePlan& file) {
  const std::string json = file.head.substr(8);
  return json.substr(0, json.find_last_not_of(' ') + 1);
}
std::vector<std::string> PathsOf(const std::vector<FilePlan>& files) {
  std::vector<std::string> paths;
  for (const FilePlan& file : files) paths.push_back(file.path);
  return paths;
}
std::string Index(const std::string& objects) { return R"({"version":1,"objects":{)" + objects + "}}"; }

TEST(LayOut, AnExampleToTheByte) {
  const std::string index =
      R"({"version":1,"objects":{"w":{"kind":"tensor","dtype":"bfloat16","shape":[2,3]},)"
      R"("data":{"kind":"json"}}})";
  const TestShard shard({{"w", "abcdefghijkl"},
                         {"__3_0.distcp", "file"},
                         {"data", R"({"position":1})"},
                         {"raw", std::string(64, 'r')},
                         {"more", "mm"},
                         {".ropeteam/index", index}},
                        kChunk);
  const std::vector<FilePlan> files = Files(shard);
  ASSERT_EQ(files.size(), 2u);
  EXPECT_EQ(files[0].path, "rank-00003.safetensors");
  EXPECT_EQ(Json(files[0]), R"({"__metadata__":{"ropeteam.version":"1","ropeteam.order":"t1 f1 j1 t2 j1",)"
                            R"("data":"{\"position\":1}",".ropeteam/index":"{\"version\":1,\"objects\":{)"
                            R"(\"w\":{\"kind\":\"tensor\",\"dtype\":\"bfloat16\",\"shape\":[2,3]},)"
                            R"(\"data\":{\"kind\":\"json\"}}}"},)"
                            R"("w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},)"
                            R"("raw":{"dtype":"U8","shape":[64],"data_offsets":[12,76]},)"
                            R"("more":{"dtype":"U8","shape":[2],"data_offsets":[76,78]}})");
  EXPECT_EQ(files[0].head.size(), kSafetensorsAlignmentBytes);
  uint64_t json_bytes = 0;
  std::memcpy(&json_bytes, files[0].head.data(), 8);
  EXPECT_EQ(json_bytes, files[0].head.size() - 8);
  EXPECT_EQ(files[0].bytes, files[0].head.size() + 78);
  // "raw" has a multiple of 64 bytes, so "more" follows it without a gap: one range.
  EXPECT_EQ(files[0].ranges, (std::vector<FileRange>{{4096, 0, 12}, {4108, 192, 66}}));
  EXPECT_EQ(files[1].path, "__3_0.distcp");
  EXPECT_EQ(FileBytes(files[1], shard.Stream()), "file");
}

TEST(LayOut, ManyObjectsThatPackTightlyAreOneRange) {
  NamedBytes named;
  for (int i = 0; i < 1000; ++i) named.emplace_back("w" + std::to_string(i), std::string(128, 'x'));
  const TestShard shard(named, kChunk);
  EXPECT_EQ(Files(shard)[0].ranges.size(), 1u);
}

TEST(LayOut, ARankWithoutObjectsHasNoFiles) { EXPECT_TRUE(Files(TestShard({}, kChunk)).empty()); }

TEST(LayOut, ARankOfFilesAloneHasNoFileOfItsOwn) {
  const TestShard shard({{".metadata", "m"}, {"__0_0.distcp", ""}, {"sub/x.pt", "pt"}}, kChunk);
  EXPECT_EQ(PathsOf(Files(shard)), (std::vector<std::string>{".metadata", "__0_0.distcp", "sub/x.pt"}));
}

TEST(LayOut, NamesThatAnotherRankHasTakenGoToTheRanksFolder) {
  const TestShard shard({{"a.pt", "1"}, {"b.pt", "2"}}, kChunk);
  EXPECT_EQ(PathsOf(Files(shard, 7, {"b.pt", "c.pt"})),
            (std::vector<std::string>{"a.pt", "rank-00007/b.pt"}));
}

TEST(LayOut, AFileAndAFolderOfOneNameDoNotBothBecomeFiles) {
  const TestShard one({{"a.json", "1"}, {"a.json/b.pt", "2"}}, kChunk);
  EXPECT_EQ(PathsOf(Files(one)), (std::vector<std::string>{"rank-00003.safetensors", "a.json"}));
  const TestShard other({{"a.json/b.pt", "2"}, {"a.json", "1"}}, kChunk);
  EXPECT_EQ(PathsOf(Files(other)), (std::vector<std::string>{"rank-00003.safetensors", "a.json/b.pt"}));
}

TEST(LayOut, NamesOfOursAndNamesThatLeaveTheFolderAreOrdinaryObjects) {
  const TestShard shard({{"ropeteam-manifest.json", "{}"}, {"../x.pt", "x"}, {"rank-00001.safetensors", "y"}},
                        kChunk);
  const std::vector<FilePlan> files = Files(shard);
  ASSERT_EQ(files.size(), 1u);
  EXPECT_THAT(Json(files[0]), HasSubstr(R"("../x.pt":{"dtype":"U8","shape":[1])"));
}

TEST(LayOut, TensorsAreNeverFilesAndJsonValuesOnlyAsJson) {
  const TestShard shard({{"t.pt", "12345678"},
                         {"j.pt", "{}"},
                         {"j.json", "[1]"},
                         {".ropeteam/index", Index(R"("t.pt":{"kind":"tensor","dtype":"float64","shape":[]},)"
                                                   R"("j.pt":{"kind":"json"},"j.json":{"kind":"json"})")}},
                        kChunk);
  const std::vector<FilePlan> files = Files(shard);
  EXPECT_EQ(PathsOf(files), (std::vector<std::string>{"rank-00003.safetensors", "j.json"}));
  EXPECT_THAT(Json(files[0]), HasSubstr(R"("t.pt":{"dtype":"F64","shape":[],"data_offsets":[0,8]})"));
  EXPECT_THAT(Json(files[0]), HasSubstr(R"("j.pt":"{}")"));
}

TEST(LayOut, TheStepsMetadataAreAJsonValueWithoutAnIndex) {
  const TestShard shard({{"x.pt", "1"}, {"ropeteam.metadata", R"({"loss": 0.25})"}}, kChunk);
  const std::vector<FilePlan> files = Files(shard);
  EXPECT_EQ(PathsOf(files), (std::vector<std::string>{"rank-00003.safetensors", "x.pt"}));
  EXPECT_THAT(Json(files[0]), HasSubstr(R"("ropeteam.object.1":"{\"loss\": 0.25}")"));
  const RankEntry entry = EntryOf(3, shard, files);
  const Result<RestorePlan> plan = PlanRestore(entry, files[0].head);
  ASSERT_TRUE(plan.ok()) << plan.status().ToString();
  EXPECT_EQ(Rebuild(*plan, {FileBytes(files[0], shard.Stream()), FileBytes(files[1], shard.Stream())}),
            shard.bytes());
}

TEST(LayOut, DtypesThatNotEveryReaderKnowsAreBytesWithADescription) {
  const TestShard shard(
      {{"c", std::string(16, 'c')},
       {"short", "1"},
       {"neg", ""},
       {"wrap", ""},
       {"long", ""},
       {"e", ""},
       {".ropeteam/index",
        Index(
            R"("c":{"kind":"tensor","dtype":"complex64","shape":[2]},)"
            R"("short":{"kind":"tensor","dtype":"float32","shape":[1]},)"
            R"("neg":{"kind":"tensor","dtype":"float32","shape":[-1]},)"
            R"("wrap":{"kind":"tensor","dtype":"uint8","shape":[9223372036854775807,9223372036854775807,0]},)"
            R"("long":{"kind":"tensor","dtype":"int8","shape":[0,9223372036854775808]},)"
            R"("e":{"kind":"tensor","dtype":"float32","shape":[0,9]})")}},
      kChunk);
  const std::string json = Json(Files(shard)[0]);
  EXPECT_THAT(json, HasSubstr(R"("c":{"dtype":"U8","shape":[16],"data_offsets":[0,16]})"));
  EXPECT_THAT(json, HasSubstr(R"("short":{"dtype":"U8","shape":[1],"data_offsets":[16,17]})"));
  EXPECT_THAT(json, HasSubstr(R"("neg":{"dtype":"U8","shape":[0],"data_offsets":[17,17]})"));
  EXPECT_THAT(json, HasSubstr(R"("wrap":{"dtype":"U8","shape":[0],"data_offsets":[17,17]})"));
  EXPECT_THAT(json, HasSubstr(R"("long":{"dtype":"U8","shape":[0],"data_offsets":[17,17]})"));
  EXPECT_THAT(json, HasSubstr(R"("e":{"dtype":"F32","shape":[0,9],"data_offsets":[17,17]})"));
  EXPECT_THAT(json, HasSubstr(R"("ropeteam.dtypes":"{\"c\":{\"dtype\":\"complex64\",\"shape\":[2]},)"
                              R"(\"short\":{\"dtype\":\"float32\",\"shape\":[1]},)"));
}

TEST(LayOut, EveryTorchDtypeThatReadersKnowIsWrittenAsItself) {
  const std::vector<std::pair<const char*, const char*>> dtypes = {{"float64", "F64"},
                                                                   {"float32", "F32"},
                                                                   {"float16", "F16"},
                                                                   {"bfloat16", "BF16"},
                                                                   {"float8_e4m3fn", "F8_E4M3"},
                                                                   {"float8_e5m2", "F8_E5M2"},
                                                                   {"int64", "I64"},
                                                                   {"int32", "I32"},
                                                                   {"int16", "I16"},
                                                                   {"int8", "I8"},
                                                                   {"uint64", "U64"},
                                                                   {"uint32", "U32"},
                                                                   {"uint16", "U16"},
                                                                   {"uint8", "U8"},
                                                                   {"bool", "BOOL"}};
  for (const auto& [torch, ours] : dtypes) EXPECT_STREQ(SafetensorsDtype(torch), ours);
  for (const char* other :
       {"complex64", "float8_e8m0fnu", "float8_e4m3fnuz", "float4_e2m1fn_x2", "quint8", ""})
    EXPECT_EQ(SafetensorsDtype(other), nullptr) << other;
}

TEST(LayOut, NamesThatTheHeaderCannotTakeAreMapped) {
  const TestShard shard(
      {{"plain", "p"}, {"__metadata__", "m"}, {"w\xff%\"", "w"}, {"ropeteam.object.0", "o"}}, kChunk);
  const std::string json = Json(Files(shard)[0]);
  EXPECT_THAT(
      json,
      HasSubstr(R"("ropeteam.names":"{\"ropeteam.object.1\":\"__metadata__\",)"
                R"(\"ropeteam.object.2\":\"w%ff%25%22\",\"ropeteam.object.3\":\"ropeteam.object.0\"}")"));
  EXPECT_THAT(json, HasSubstr(R"("ropeteam.object.2":{"dtype":"U8","shape":[1],"data_offsets":[2,3]})"));
}

TEST(LayOut, JsonThatIsLargeOrNotUtf8IsBytes) {
  const std::string index = Index(R"("big":{"kind":"json"},"fits":{"kind":"json"},"bad":{"kind":"json"})");
  const TestShard shard({{"big", std::string(kTextBytesMax + 1, '1')},
                         {"fits", std::string(kTextBytesMax, '1')},
                         {"bad", "\"\xff\""},
                         {".ropeteam/index", index}},
                        kChunk);
  const std::string json = Json(Files(shard)[0]);
  EXPECT_THAT(json, HasSubstr(R"("ropeteam.order":"t1 j1 t1 j1")"));
  EXPECT_THAT(json, HasSubstr(R"("big":{"dtype":"U8","shape":[65537])"));
  EXPECT_THAT(json, HasSubstr(R"("bad":{"dtype":"U8","shape":[3])"));
}

TEST(LayOut, JsonValuesTogetherAreBounded) {
  NamedBytes named;
  std::string index;
  const size_t count = kTextsBytesMax / kTextBytesMax + 3;
  for (size_t i = 0; i < count; ++i) {
    named.emplace_back("j" + std::to_string(i), std::string(kTextBytesMax, '1'));
    index += (i == 0 ? "" : ",") + ("\"j" + std::to_string(i)) + R"(":{"kind":"json"})";
  }
  named.emplace_back(".ropeteam/index", Index(index));
  const TestShard shard(named, 1 << 20);
  EXPECT_THAT(Json(Files(shard)[0]), HasSubstr(R"("ropeteam.order":"j64 t4")"));
}

TEST(LayOut, AnIndexThatIsNotOneLeavesEverythingBytes) {
  for (const char* index :
       {"", "not json", "[]", R"({"version":3,"objects":{"w":{"kind":"tensor","dtype":"int8","shape":[1]}}})",
        R"({"objects":{"w":{"kind":"tensor","dtype":"int8","shape":[1]}}})", "\xff",
        R"({"version":1,"objects":{"w":{"kind":"tensor","dtype":"int8","shape":[1]}})"}) {
    const TestShard shard({{"w", "w"}, {".ropeteam/index", index}}, kChunk);
    const std::string json = Json(Files(shard)[0]);
    EXPECT_THAT(json, HasSubstr(R"("w":{"dtype":"U8","shape":[1])")) << index;
    EXPECT_THAT(json, Not(HasSubstr("I8"))) << index;
  }
}

TEST(LayOut, AnIndexMayPutItsVersionLastAndSayMore) {
  const TestShard shard(
      {{"w", "w"},
       {".ropeteam/index",
        R"({"objects":{"w":{"kind":"tensor","dtype":"int8","shape":[1],"device":{"a":[1]}}},"x":[{}],"version":1})"}},
      kChunk);
  EXPECT_THAT(Json(Files(shard)[0]), HasSubstr(R"("w":{"dtype":"I8","shape":[1])"));
}

TEST(LayOut, AnIndexOfVersion2SaysAlsoWhatIsElsewhere) {
  const TestShard shard(
      {{"w", "w"},
       {".ropeteam/index",
        R"({"version":2,"world_size":4,"objects":{)"
        R"("w":{"kind":"tensor","dtype":"int8","shape":[1],"global":[4],"runs":[[3,1]]},)"
        R"("v":{"kind":"tensor","dtype":"int8","shape":[9],"global":[9],"runs":[[0,9]],"at":[2,"u"]}}})"}},
      kChunk);
  const std::string json = Json(Files(shard)[0]);
  EXPECT_THAT(json, HasSubstr(R"("w":{"dtype":"I8","shape":[1],"data_offsets":[0,1]})"));
  EXPECT_THAT(json, Not(HasSubstr(R"("v":{)")));
  EXPECT_THAT(json, HasSubstr(R"("ropeteam.order":"t1 j1")"));
}

TEST(LayOut, AHeaderOverTheLimitIsRefusedWithTheNumbers) {
  NamedBytes named;
  // Each byte takes six in the header's JSON ("\u0001"), so that the test needs few objects.
  for (int i = 0; i < 65000; ++i)
    named.emplace_back(std::string(249, '\x01') + std::to_string(100000 + i), "");
  const TestShard shard(named, kChunk);
  const Result<std::vector<FilePlan>> files = LayOut(3, shard.objects(), shard.Stream(), {}, nullptr);
  ASSERT_FALSE(files.ok());
  EXPECT_EQ(files.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(files.status().message(), HasSubstr("rank 3 of 65000 objects"));
  EXPECT_THAT(files.status().message(), HasSubstr("limit 100000000"));
}

TEST(LayOut, TheChunkOfABrokenIndexIsNamed) {
  TestShard shard({{"w", std::string(3 * kChunk, 'w')}, {".ropeteam/index", Index("")}}, kChunk);
  shard.bytes()[3 * kChunk + 5] ^= 1;
  std::optional<uint64_t> bad;
  const Result<std::vector<FilePlan>> files = LayOut(3, shard.objects(), shard.Stream(), {}, &bad);
  ASSERT_FALSE(files.ok());
  EXPECT_EQ(files.status().code(), Code::kCorrupt);
  EXPECT_EQ(bad, 3u);
}

TEST(LayOut, ObjectsThatAreNotPackedAsCorePacksAreRefused) {
  const TestShard shard({{"a", "a"}, {"b", "b"}}, kChunk);
  const auto refused = [&](std::vector<StreamObject> objects) {
    const Result<std::vector<FilePlan>> files = LayOut(0, objects, shard.Stream(), {}, nullptr);
    return !files.ok() && files.status().code() == Code::kInvalidArgument;
  };
  EXPECT_FALSE(refused(shard.objects()));
  EXPECT_TRUE(refused({{"a", 64, 1}}));
  EXPECT_TRUE(refused({{"a", 0, 1}, {"b", 65, 1}}));
  EXPECT_TRUE(refused({{"a", 0, 1}, {"b", 128, 1}}));
  EXPECT_TRUE(refused({{"a", 0, UINT64_MAX}}));
  EXPECT_TRUE(refused({{"", 0, 1}}));
  EXPECT_TRUE(refused({{std::string("a\0", 2), 0, 1}}));
  EXPECT_TRUE(refused({{std::string(256, 'a'), 0, 1}}));
}

TEST(Stream, CopiesAreCheckedAndEachChunkIsReadOnce) {
  NamedBytes named;
  for (int i = 0; i < 300; ++i)
    named.emplace_back(std::to_string(i), std::string(100, static_cast<char>('a' + i % 26)));
  TestShard shard(named, 1024);
  std::vector<StreamRange> ranges;
  for (int i = 0; i < 300; i += 3) ranges.push_back({shard.objects()[i].offset, shard.objects()[i].length});
  std::vector<int> reads;
  const ShardStream stream = shard.Stream(&reads);
  const Result<std::vector<std::string>> copies = CopyChecked(stream, ranges, nullptr);
  ASSERT_TRUE(copies.ok()) << copies.status().ToString();
  for (size_t i = 0; i < ranges.size(); ++i) EXPECT_EQ((*copies)[i], named[3 * i].second);
  for (const int read : reads) EXPECT_LE(read, 1);

  shard.bytes()[700] ^= 4;
  std::optional<uint64_t> bad;
  EXPECT_EQ(CopyChecked(stream, ranges, &bad).status().code(), Code::kCorrupt);
  EXPECT_EQ(bad, 0u);
}

TEST(Stream, RangesThatOverlapOrLeaveTheStreamAreRefused) {
  const TestShard shard({{"a", std::string(500, 'a')}}, 1024);
  const auto code = [&](std::vector<StreamRange> ranges) {
    return CopyChecked(shard.Stream(), ranges, nullptr).status().code();
  };
  EXPECT_EQ(code({{0, 100}, {50, 10}}), Code::kInvalidArgument);
  EXPECT_EQ(code({{100, 100}, {0, 10}}), Code::kInvalidArgument);
  EXPECT_EQ(code({{0, shard.bytes().size() + 1}}), Code::kInvalidArgument);
  EXPECT_EQ(code({{UINT64_MAX, 2}}), Code::kInvalidArgument);
  EXPECT_EQ(CopyChecked(shard.Stream(), std::vector<StreamRange>{{448, 52}, {512, 0}}, nullptr).status(),
            OkStatus());
}

TEST(Stream, PaddingThatIsNotZeroIsToldOnlyOfAChunkThatIsWhole) {
  TestShard shard({{"j", "{}"}, {".ropeteam/index", Index(R"("j":{"kind":"json"})")}}, kChunk);
  shard.bytes()[10] = 'x';
  std::optional<uint64_t> bad;
  EXPECT_EQ(LayOut(0, shard.objects(), shard.Stream(), {}, &bad).status().code(), Code::kCorrupt);
  EXPECT_EQ(bad, 0u);
  shard.Seal();
  const Status status = LayOut(0, shard.objects(), shard.Stream(), {}, nullptr).status();
  EXPECT_EQ(status.code(), Code::kInternal);
  EXPECT_THAT(status.message(), HasSubstr("offset 10 "));
}

TEST(Stream, LimitsAreCores) {
  EXPECT_EQ(kStreamAlignmentBytes, kObjectAlignmentBytes);
  EXPECT_EQ(kStreamSizeMax, kStreamBytesMax);
  EXPECT_EQ(kStreamObjectsMax, kObjectsMax);
  EXPECT_EQ(kStreamNameBytesMax, kNameBytesMax);
  EXPECT_EQ(storage::kMetadataObjectName, ropeteam::kMetadataObjectName);
}

}  // namespace
}  // namespace ropeteam::storage

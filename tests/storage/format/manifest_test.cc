// SPDX-License-Identifier: Apache-2.0
#include "storage/format/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "core/base/checksum.h"
#include "core/base/ids.h"
#include "storage/format/json.h"
#include "storage/format/names.h"

namespace ropeteam::storage {
namespace {

using ::testing::HasSubstr;

StepHead Head(uint32_t world) { return {"train", 100, 3, world, 4 << 20, 1795332624, R"({"loss":0.25})"}; }
RankEntry Rank(uint32_t rank) {
  return {rank,
          (1 << 20) + 5000,
          0x00c0ffee00c0ffee,
          {{RankFileName(rank), (1 << 20) + 4096, 0x0000abcd, 4096, 0xe3069283},
           {"__" + std::to_string(rank) + "_0.distcp", 7, 1, 0, 0}}};
}
Result<std::string> Write(const StepHead& head, const std::vector<RankEntry>& ranks) {
  StepManifestWriter writer(head);
  for (const RankEntry& rank : ranks) ROPETEAM_RETURN_IF_ERROR(writer.Add(rank));
  return writer.Finish();
}
struct Parsed {
  StepHead head;
  std::vector<RankEntry> ranks;
};
Result<Parsed> Parse(std::string_view text) {
  Parsed parsed;
  Result<StepHead> head = ParseStepManifest(text, [&](RankEntry&& rank) {
    parsed.ranks.push_back(std::move(rank));
    return OkStatus();
  });
  if (!head.ok()) return head.status();
  parsed.head = *head;
  return parsed;
}
// The text with `from` replaced and a correct checksum, as another program would write it.
std::string Edited(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  text.resize(text.rfind("\"manifest_crc32c\""));
  const std::string crc = Hex(Crc32c(text.data(), text.size()), 8);
  return text + "\"manifest_crc32c\": \"" + crc + "\"\n}\n";
}

TEST(StepManifest, AnExampleToTheByte) {
  const Result<std::string> text = Write(Head(2), {Rank(0), {1, 28, 1, {}}});
  ASSERT_TRUE(text.ok()) << text.status().ToString();
  EXPECT_EQ(*text, R"({
"format": "ropeteam-step",
"version": 1,
"job": "train",
"step": 100,
"incarnation": 3,
"world_size": 2,
"chunk_bytes": 4194304,
"time": "2026-11-22T07:30:24Z",
"user": {"loss":0.25},
"ranks": [
{"rank": 0, "stream_bytes": 1053576, "digest": "00c0ffee00c0ffee", "files": [
  {"path": "rank-00000.safetensors", "bytes": 1052672, "crc32c": "0000abcd", "header_bytes": 4096, "header_crc32c": "e3069283"},
  {"path": "__0_0.distcp", "bytes": 7, "crc32c": "00000001"}]},
{"rank": 1, "stream_bytes": 28, "digest": "0000000000000001", "files": []}
],
"manifest_crc32c": "1ba8c166"
}
)");
}

TEST(StepManifest, ComesBack) {
  std::vector<RankEntry> ranks;
  for (uint32_t i = 0; i < 20; ++i) ranks.push_back(Rank(i));
  // Each rank that shares a file lists it.
  ranks[3].files.push_back({"config \"x\"\xc3\xa9.json", 9, 4, 0, 0});
  ranks[5].files.push_back(ranks[3].files.back());
  ranks[7].files.push_back({RankFolderPath(7, "config.json"), 9, 5, 0, 0});
  StepHead head = Head(20);
  head.job = "a/b \"c\"\n";
  head.step = UINT64_MAX;
  head.incarnation = kIncarnationMax - 1;
  const Result<std::string> text = Write(head, ranks);
  ASSERT_TRUE(text.ok()) << text.status().ToString();
  const Result<Parsed> parsed = Parse(*text);
  ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
  EXPECT_EQ(parsed->head, head);
  EXPECT_EQ(parsed->ranks, ranks);
}

TEST(StepManifest, UserMetadataKeepsItsValuesOnOneLine) {
  StepHead head = Head(1);
  head.user =
      " { \"a\" : [ 1, 2.50, -0.125e3, true, null, {} ],\n \"\\u00e9\\n\\\"\" : \"\\ud83d\\ude00\", "
      "\"big\":1e400 } ";
  // 1e400 does not fit into a double, and the JSON parser in use accepts only numbers that do.
  EXPECT_EQ(Write(head, {Rank(0)}).status().code(), Code::kInvalidArgument);
  head.user.replace(head.user.find("1e400"), 5, "18446744073709551616");
  const Result<std::string> text = Write(head, {Rank(0)});
  ASSERT_TRUE(text.ok()) << text.status().ToString();
  const std::string expected =
      "{\"a\":[1,2.50,-0.125e3,true,null,{}],\"\xc3\xa9\\n\\\"\":\"\xf0\x9f\x98\x80\",\"big\":"
      "18446744073709551616}";
  EXPECT_THAT(*text, HasSubstr("\n\"user\": " + expected + ",\n"));
  const Result<Parsed> parsed = Parse(*text);
  ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
  EXPECT_EQ(parsed->head.user, expected);
}

TEST(StepManifest, UserMetadataThatIsNoObjectIsRefused) {
  for (const std::string& user :
       {std::string(), std::string("[]"), std::string("1"), std::string("{\"loss\": NaN}"),
        std::string("{} {}"), std::string("{\"a\": \"\xff\"}"), std::string(70, '[') + std::string(70, ']'),
        "{\"a\":" + std::string(100, '[') + std::string(100, ']') + "}",
        "{\"a\":\"" + std::string(kUserMetadataBytesMax, 'a') + "\"}"}) {
    StepHead head = Head(1);
    head.user = user;
    EXPECT_EQ(Write(head, {Rank(0)}).status().code(), Code::kInvalidArgument) << user.substr(0, 80);
  }
}

TEST(StepManifest, EveryFlippedBitIsFound) {
  const std::string text = *Write(Head(2), {Rank(0), Rank(1)});
  for (size_t i = 0; i < text.size() * 8; ++i) {
    std::string bad = text;
    bad[i / 8] = static_cast<char>(bad[i / 8] ^ (1 << (i % 8)));
    ASSERT_EQ(Parse(bad).status().code(), Code::kCorrupt) << i;
  }
  for (size_t length = 0; length < text.size(); ++length)
    ASSERT_EQ(Parse(std::string_view(text).substr(0, length)).status().code(), Code::kCorrupt) << length;
  EXPECT_EQ(Parse(text + "\n").status().code(), Code::kCorrupt);
}

TEST(StepManifest, ANewerVersionIsNamed) {
  const std::string text = *Write(Head(1), {Rank(0)});
  // A newer version may have anything after its version number.
  const Status status =
      Parse(Edited(text, "\"version\": 1,", "\"version\": 2, \"new\": [[[[[[[]]]]]]],")).status();
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr("version 2"));
  EXPECT_THAT(status.message(), HasSubstr("up to 1"));
  EXPECT_EQ(Parse(Edited(text, "\"version\": 1", "\"version\": 0")).status().code(), Code::kCorrupt);
}

TEST(StepManifest, WhatIsWrongIsRefusedWithItsPlace) {
  std::vector<RankEntry> ranks = {Rank(0), Rank(1), Rank(2)};
  ranks[1].files.push_back({"shared.json", 9, 4, 0, 0});
  ranks[2].files.push_back({"shared.json", 9, 4, 0, 0});
  const std::string text = *Write(Head(3), ranks);
  struct Case {
    const char* from;
    const char* to;
    const char* place;
  };
  const Case cases[] = {
      {"\"format\": \"ropeteam-step\",\n", "", "version"},
      {"ropeteam-step", "other-step", "format"},
      {"\"version\": 1,\n", "", "job comes before the version"},
      {"\"job\": \"train\",\n", "", "missing"},
      {"\"job\": \"train\"", "\"job\": 1", "job is not a text"},
      {"\"job\": \"train\"", "\"job\": \"\"", "job"},
      {"\"job\": \"train\"", "\"job\": {}", "job"},
      {"\"step\": 100", "\"step\": -1", "step is not"},
      {"\"step\": 100", "\"step\": 1.0", "step is not"},
      {"\"step\": 100", "\"step\": 18446744073709551616", "step is not"},
      {"\"step\": 100", "\"step\": 100, \"step\": 100", "step appears twice"},
      {"\"step\": 100", "\"step\": 100, \"stop\": 100", "stop is not known"},
      {"\"world_size\": 3", "\"world_size\": 4", "3 entries, world_size is 4"},
      {"\"world_size\": 3", "\"world_size\": 2", "3 entries, world_size is 2"},
      {"\"world_size\": 3", "\"world_size\": 131073", "limit 131072"},
      {"\"chunk_bytes\": 4194304", "\"chunk_bytes\": 4194303", "chunk_bytes"},
      {"\"chunk_bytes\": 4194304", "\"chunk_bytes\": 0", "chunk_bytes"},
      {"2026-11-22", "2026-02-30", "time"},
      {"07:30:24", "23:60:24", "time"},
      {"07:30:24Z", "07:30:24+", "time"},
      {"{\"loss\":0.25}", "[]", "user"},
      {"{\"loss\":0.25}", "7", "user"},
      {"\"rank\": 1", "\"rank\": 2", "ranks[1] is rank 2, expected 1"},
      {"\"rank\": 1", "\"rank\": 0", "ranks[1] is rank 0"},
      {"\"digest\": \"00c0ffee00c0ffee\"", "\"digest\": \"00C0FFEE00C0FFEE\"", "ranks[0].digest"},
      {"\"digest\": \"00c0ffee00c0ffee\"", "\"digest\": \"0\"", "ranks[0].digest"},
      {"\"stream_bytes\": 1053576", "\"stream_bytes\": 1048583", "ranks[0].files[1].bytes"},
      {"\"stream_bytes\": 1053576", "\"stream_bytes\": 0", "ranks[0].stream_bytes"},
      {"\"stream_bytes\": 1053576", "\"stream_bytes\": 70368744177665", "limit 70368744177664"},
      {"__0_0.distcp", "../a.distcp", "ranks[0].files[1].path"},
      {"__0_0.distcp", "/etc/passwd", "ranks[0].files[1].path"},
      {"__0_0.distcp", "a\\u0000b", "ranks[0].files[1].path"},
      {"__0_0.distcp", "ropeteam-manifest.json", "ranks[0].files[1].path"},
      {"__0_0.distcp", "rank-00000.safetensors", "ranks[0].files[1].path"},
      {"__0_0.distcp", "rank-00001.safetensors", "ranks[0].files[1].path"},
      {"__0_0.distcp", "rank-00001/a.pt", "ranks[0].files[1].path"},
      {"__0_0.distcp", "rank-00000/rank-00000/a.pt", "ranks[0].files[1].path"},
      {"\"rank-00000.safetensors\"", "\"a.safetensors\"", "ranks[0].files[0].path"},
      {", \"header_bytes\": 4096, \"header_crc32c\": \"e3069283\"", "", "ranks[0].files[0].path"},
      {", \"header_crc32c\": \"e3069283\"", "", "ranks[0].files[0]"},
      {"\"header_bytes\": 4096", "\"header_bytes\": 0", "ranks[0].files[0]"},
      {"\"header_bytes\": 4096", "\"header_bytes\": 4097", "ranks[0].files[0].header_bytes"},
      {"\"header_bytes\": 4096", "\"header_bytes\": 100004096", "ranks[0].files[0].header_bytes"},
      {"\"bytes\": 7, \"crc32c\": \"00000001\"", "\"bytes\": 7", "ranks[0].files[1]"},
      {"\"bytes\": 7", "\"bytes\": 18446744073709551615", "ranks[0].files[1].bytes"},
      {"\"bytes\": 7", "\"bytes\": 70368744177664", "ranks[0].files[1].bytes"},
      {"\"bytes\": 9", "\"bytes\": 8", "other bytes"},
      {"__1_0.distcp", "__0_0.distcp\", \"path\": \"x", "ranks[1].files[1].path appears twice"},
      {"__1_0.distcp", "shared.json", "a path only once"},
      {"__1_0.distcp\", \"bytes\": 7, \"crc32c\": \"00000001\"",
       "shared.json\", \"bytes\": 9, \"crc32c\": \"00000004\"", "a path only once"},
      {"\"crc32c\": \"00000004\"", "\"crc32c\": \"00000005\"", "other bytes"},
      {"__0_0.distcp\", \"bytes\": 7",
       "rank-00000.safetensors\", \"header_bytes\": 4096, \"header_crc32c\": \"e3069283\", \"bytes\": 4096",
       "ranks[0].files[1].path"},
      {"\"files\": [\n", "\"files\": [[],\n", "ranks[0].files[0] is an array"},
      {"\"ranks\": [\n", "\"ranks\": [1,\n", "ranks[0] is a single value"},
      {"\"ranks\": [\n", "\"ranks\": [{},\n", "ranks[0] lacks"},
      {"{\n\"format\"", "[\n\"format\"", "does not begin"},
      {"\"step\": 100,", "\"step\": 100", "not JSON"},
      {"train", "\xff", "not JSON"},
  };
  for (const Case& a : cases) {
    const Status status = Parse(Edited(text, a.from, a.to)).status();
    EXPECT_EQ(status.code(), Code::kCorrupt) << a.to;
    EXPECT_THAT(status.message(), HasSubstr(a.place)) << a.to;
    EXPECT_THAT(status.message(), HasSubstr("ropeteam-manifest.json: "));
  }
}

TEST(StepManifest, TheWriterRefusesWhatTheReaderWould) {
  const auto code = [](const StepHead& head, const std::vector<RankEntry>& ranks) {
    return Write(head, ranks).status().code();
  };
  EXPECT_EQ(code(Head(2), {Rank(0)}), Code::kInvalidArgument);
  EXPECT_EQ(code(Head(1), {Rank(0), Rank(1)}), Code::kInvalidArgument);
  EXPECT_EQ(code(Head(2), {Rank(1), Rank(0)}), Code::kInvalidArgument);
  EXPECT_EQ(code(Head(0), {}), Code::kInvalidArgument);
  RankEntry rank = Rank(0);
  rank.files[1].path = "../x.pt";
  EXPECT_EQ(code(Head(1), {rank}), Code::kInvalidArgument);
  StepHead head = Head(1);
  head.job = "\xff";
  EXPECT_EQ(code(head, {Rank(0)}), Code::kInvalidArgument);
  head = Head(1);
  head.time_s = UINT64_MAX;
  EXPECT_EQ(code(head, {Rank(0)}), Code::kInvalidArgument);
}

TEST(StepManifest, AStatusOfTheCallerEndsTheReading) {
  const std::string text = *Write(Head(3), {Rank(0), Rank(1), Rank(2)});
  int told = 0;
  const Result<StepHead> head = ParseStepManifest(
      text, [&](RankEntry&&) { return ++told == 2 ? Error(Code::kAborted, "enough") : OkStatus(); });
  EXPECT_EQ(head.status().code(), Code::kAborted);
  EXPECT_EQ(told, 2);
  EXPECT_TRUE(ParseStepManifest(text, {}).ok());
}

TEST(StepManifest, TheLargestWorldFits) {
  StepManifestWriter writer(Head(kStepRanksMax));
  for (uint32_t i = 0; i < kStepRanksMax; ++i) ASSERT_TRUE(writer.Add(Rank(i)).ok());
  const Result<std::string> text = writer.Finish();
  ASSERT_TRUE(text.ok()) << text.status().ToString();
  EXPECT_LT(text->size(), kStepManifestBytesMax);
  uint32_t next = 0;
  const Result<StepHead> head = ParseStepManifest(*text, [&](RankEntry&& rank) {
    return rank == Rank(next++) ? OkStatus() : Error(Code::kInternal, "another rank");
  });
  EXPECT_TRUE(head.ok()) << head.status().ToString();
  EXPECT_EQ(next, kStepRanksMax);
}

}  // namespace
}  // namespace ropeteam::storage

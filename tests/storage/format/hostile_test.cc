// SPDX-License-Identifier: Apache-2.0
//
// Headers and manifests from other programs, or damaged, with thousands of changes. Nothing may crash, and
// nothing with another meaning than the written one may be accepted.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "shard_builder.h"
#include "storage/format/json.h"
#include "storage/format/names.h"
#include "storage/format/rank_file.h"
#include "storage/format/safetensors.h"

namespace ropeteam::storage {
namespace {

using ::testing::HasSubstr;

struct Good {
  Good()
      : shard({{"w", std::string(24, 'w')},
               {"a.pt", "file a"},
               {"data", R"({"position":1})"},
               {"bad\xff", "raw"},
               {"b.json", "{}"},
               {"empty", ""},
               {".ropeteam/index",
                R"({"version":1,"objects":{"w":{"kind":"tensor","dtype":"float32","shape":[2,3]},)"
                R"("data":{"kind":"json"}}})"}},
              4096) {
    const ShardStream stream = shard.Stream();
    files = *LayOut(2, shard.objects(), stream, {}, nullptr);
    entry = EntryOf(2, shard, files);
    for (const FilePlan& file : files) contents.push_back(FileBytes(file, stream));
  }
  TestShard shard;
  std::vector<FilePlan> files;
  RankEntry entry;
  std::vector<std::string> contents;
};

// A header with this JSON and correct padding. Changes the entry to match.
std::string HeadOf(const std::string& json, RankEntry* entry, uint64_t data_bytes) {
  std::string head = std::string(8, '\0') + json;
  head.resize((head.size() + 4095) / 4096 * 4096, ' ');
  const uint64_t length = head.size() - 8;
  head.replace(0, 8, reinterpret_cast<const char*>(&length), 8);
  FileEntry& file = entry->files[0];
  file.header_bytes = head.size();
  file.header_crc32c = Crc32c(head.data(), head.size());
  file.bytes = head.size() + data_bytes;
  return head;
}
std::string JsonOf(const std::string& head) {
  const std::string json = head.substr(8);
  return json.substr(0, json.find_last_not_of(' ') + 1);
}

TEST(Hostile, AHeaderWithAnyByteChangedIsRefused) {
  const Good good;
  const std::string& head = good.files[0].head;
  std::mt19937_64 random(1);
  for (size_t i = 0; i < 3000; ++i) {
    std::string bad = head;
    const size_t at = i < 1500 ? i % head.size() : random() % head.size();
    bad[at] = static_cast<char>(bad[at] ^ (1 << random() % 8));
    const Result<RestorePlan> plan = PlanRestore(good.entry, bad);
    ASSERT_EQ(plan.status().code(), Code::kCorrupt);
  }
  for (const std::string& bad :
       {std::string(), head.substr(0, 8), head.substr(0, head.size() - 1), head + " "})
    EXPECT_EQ(PlanRestore(good.entry, bad).status().code(), Code::kCorrupt);
}

// Edits as a program would that recomputes the checksums.
std::string Mutate(std::string text, std::mt19937_64* random) {
  const std::string pieces[] = {"{",
                                "}",
                                "[",
                                "]",
                                ",",
                                ":",
                                "\"",
                                "0",
                                "1",
                                "-1",
                                "18446744073709551616",
                                "null",
                                "ropeteam.object.3",
                                "ropeteam.order",
                                "t1",
                                "j1",
                                "f1",
                                " ",
                                "\\u0000",
                                "\xff",
                                "%",
                                "\"w\"",
                                "\"U8\"",
                                "__metadata__",
                                "70368744177664",
                                "9223372036854775807",
                                "true"};
  for (uint64_t edits = 1 + (*random)() % 3; edits > 0; --edits) {
    const size_t at = (*random)() % text.size();
    const std::string& piece = pieces[(*random)() % std::size(pieces)];
    switch ((*random)() % 6) {
      case 0:
        text[at] = static_cast<char>((*random)());
        break;
      case 1:
        text.erase(at, 1 + (*random)() % 4);
        break;
      case 2:
        text.insert(at, piece);
        break;
      case 3:
        text.replace(at, std::min(piece.size(), text.size() - at), piece);
        break;
      case 4:  // repeat a piece of the text
        text.insert(at, text.substr((*random)() % text.size(), (*random)() % 60));
        break;
      default:  // change a digit
        for (size_t i = 0; i < text.size(); ++i) {
          char& c = text[(at + i) % text.size()];
          if (c >= '0' && c <= '9') {
            c = static_cast<char>('0' + (*random)() % 10);
            break;
          }
        }
    }
    if (text.empty()) text = " ";
  }
  return text;
}

TEST(Hostile, AHeaderWrittenByAnotherIsWithinTheFilesOrRefused) {
  const Good good;
  const std::string json = JsonOf(good.files[0].head);
  const uint64_t data_bytes = good.files[0].bytes - good.files[0].head.size();
  std::mt19937_64 random(2);
  int accepted = 0;
  for (int i = 0; i < 6000; ++i) {
    RankEntry entry = good.entry;
    const std::string head = HeadOf(Mutate(json, &random), &entry, data_bytes);
    const Result<RestorePlan> plan = PlanRestore(entry, head);
    if (!plan.ok()) {
      ASSERT_TRUE(plan.status().code() == Code::kCorrupt || plan.status().code() == Code::kUnsupported);
      ASSERT_LT(plan.status().message().size(), 1000u);
      continue;
    }
    ++accepted;
    // An accepted plan uses only existing bytes, each once, in a stream that core would pack the same way.
    uint64_t of_files = 0, end = 0;
    for (const RestorePiece& piece : plan->pieces) {
      ASSERT_GE(piece.stream_offset, end);
      end = piece.stream_offset + piece.length;
      ASSERT_LE(end, plan->manifest_offset);
      const uint64_t source =
          piece.file == RestorePiece::kTexts ? plan->texts.size() : entry.files.at(piece.file).bytes;
      ASSERT_LE(piece.length, source);
      ASSERT_LE(piece.source_offset, source - piece.length);
      if (piece.file != RestorePiece::kTexts) of_files += piece.length;
    }
    ASSERT_LT(plan->manifest_offset, entry.stream_bytes);
    uint64_t expected = data_bytes;
    for (size_t k = 1; k < entry.files.size(); ++k) expected += entry.files[k].bytes;
    ASSERT_EQ(of_files, expected);
    std::vector<std::string> contents = good.contents;
    contents[0] = head + contents[0].substr(good.files[0].head.size());
    const std::string stream = Rebuild(*plan, contents);
    ASSERT_NE(stream, "core packs otherwise");
    // If the meaning differs, the stream differs, and the shard's digest refuses it. If the stream is the
    // same, the header describes the same objects.
    if (stream == good.shard.bytes()) {
      ASSERT_EQ(plan->objects, good.shard.objects());
    }
  }
  EXPECT_GT(accepted, 50);  // renamed tensors and other values: many edits pass the JSON parser
}

TEST(Hostile, WhatIsWrongWithAHeaderIsNamed) {
  const Good good;
  const std::string json = JsonOf(good.files[0].head);
  const uint64_t data_bytes = good.files[0].bytes - good.files[0].head.size();
  struct Case {
    std::string from, to, what;
  };
  const std::vector<Case> cases = {
      {"\"data_offsets\":[0,24]", "\"data_offsets\":[1,24]", "w has the data 1 to 24"},
      {"\"data_offsets\":[0,24]", "\"data_offsets\":[0,23]", "w has 23 bytes"},
      {"\"data_offsets\":[0,24]", "\"data_offsets\":[24,0]", "w has the data"},
      {"\"data_offsets\":[0,24]", "\"data_offsets\":[0]", "w lacks"},
      {"\"data_offsets\":[0,24]", "\"data_offsets\":[0,24,24]", "w.data_offsets[2]"},
      {"\"data_offsets\":[0,24]", "\"data_offsets\":[0,18446744073709551615]", "w has the data"},
      {"\"data_offsets\":[0,24]", "\"offsets\":[0,24]", "w.offsets is not known"},
      {"\"shape\":[2,3]", "\"shape\":[2,3],\"shape\":[2,3]", "w.shape appears twice"},
      {"\"shape\":[2,3]", "\"shape\":[4294967296,4294967296,6]", "w has 24 bytes"},
      {"\"shape\":[2,3]", "\"shape\":[[2,3]]", "nested deeper than 3"},
      {"\"shape\":[2,3]", "\"shape\":[-2,-3]", "w.shape[0]"},
      {"\"dtype\":\"F32\"", "\"dtype\":\"F31\"", "dtype F31"},
      {"\"dtype\":\"F32\"", "\"dtype\":7", "w.dtype"},
      {"\"w\":{", "\"empty\":{", "two objects of the name empty"},
      {"\"w\":{", "\"\":{", "name of 0 bytes"},
      {"\"w\":{", "\"a\\u0000b\":{", "none of them 0"},
      {"\"w\":{", "\"" + std::string(256, 'x') + "\":{", "256 bytes, limit 255"},
      {"\"w\":{", "\"a.pt\":{", "two objects of the name a.pt"},
      {"\"w\":{", "\"ropeteam.w\":{", "the name ropeteam.w"},
      {"t1 f1 j1 t1 f1 t1 j1", "t1 f1 j1 t1 f1 t2 j1", "more tensors than"},
      {"t1 f1 j1 t1 f1 t1 j1", "t1 f1 j1 t1 f2 t1 j1", "more files than"},
      {"t1 f1 j1 t1 f1 t1 j1", "t1 f1 j1 t1 f1 t1 j2", "more JSON values than"},
      {"t1 f1 j1 t1 f1 t1 j1", "t1 f1 j1 t1 f1 t1", "leaves out"},
      {"t1 f1 j1 t1 f1 t1 j1", "t1 f1 j1 t1 f1 t1 j1 ", "not a list of runs"},
      {"t1 f1 j1 t1 f1 t1 j1", "t1 f1 j1 t1 f1 t1 j01", "not a list of runs"},
      {"t1 f1 j1 t1 f1 t1 j1", "t1 f1 j1 t1 f1 t1 x1", "not a list of runs"},
      {"t1 f1 j1 t1 f1 t1 j1", "t1 f1 j1 t1 f1 t1 j", "not a list of runs"},
      {"t1 f1 j1 t1 f1 t1 j1", "t0 t1 f1 j1 t1 f1 t1 j1", "not a list of runs"},
      {"t1 f1 j1 t1 f1 t1 j1", "t1 f1 j1 f1 t2 j1", "ropeteam.object.3"},
      {"bad%ff", "bad%FF", "ropeteam.object.3"},
      {"bad%ff", "bad%f", "ropeteam.object.3"},
      {"bad%ff", "plain", "ropeteam.object.3"},
      {"\\\"ropeteam.object.3\\\":\\\"bad%ff\\\"", "", "ropeteam.object.3"},
      {"\\\"bad%ff\\\"}", "\\\"bad%ff\\\",\\\"ropeteam.object.9\\\":\\\"x%ff\\\"}", "names 1 of 2"},
      {"{\\\"ropeteam.object.3\\\":\\\"bad%ff\\\"}", "[]", "ropeteam.names: not an object of texts"},
      {"\"ropeteam.version\":\"1\",", "", "lacks ropeteam.version"},
      {"\"data\":\"{\\\"position\\\":1}\"", "\"data\":1", "__metadata__.data is not a text"},
      {"{\"__metadata__\":", "{\"__metadata__\":{},\"__metadata__\":",
       "__metadata__ is not the first entry, or appears twice"},
      {"{\"__metadata__\":", "[{\"__metadata__\":", "does not begin with {"},
      {"\"w\":{", "\"w\":[", "w is not an object"},
  };
  for (const Case& a : cases) {
    RankEntry entry = good.entry;
    std::string edited = json;
    const size_t at = edited.find(a.from);
    ASSERT_NE(at, std::string::npos) << a.from;
    const std::string head = HeadOf(edited.replace(at, a.from.size(), a.to), &entry, data_bytes);
    const Status status = PlanRestore(entry, head).status();
    EXPECT_EQ(status.code(), Code::kCorrupt) << a.to;
    EXPECT_THAT(status.message(), HasSubstr("rank 2: ")) << a.to;
    EXPECT_THAT(status.message(), HasSubstr(a.what)) << a.to;
  }
  RankEntry entry = good.entry;
  std::string newer = json;
  newer.replace(newer.find("\"ropeteam.version\":\"1\""), 22, "\"ropeteam.version\":\"2\"");
  const Status status = PlanRestore(entry, HeadOf(newer, &entry, data_bytes)).status();
  EXPECT_EQ(status.code(), Code::kUnsupported);
}

TEST(Hostile, AnEntryThatDoesNotFitItsFilesIsRefused) {
  const Good good;
  const std::string& head = good.files[0].head;
  const auto code = [&](const std::function<void(RankEntry*)>& change, std::string_view given) {
    RankEntry entry = good.entry;
    change(&entry);
    return PlanRestore(entry, given).status().code();
  };
  EXPECT_TRUE(PlanRestore(good.entry, head).ok());
  EXPECT_EQ(code([](RankEntry* e) { e->files.pop_back(); }, head), Code::kCorrupt);
  EXPECT_EQ(code([](RankEntry* e) { e->files.push_back({"c.pt", 1, 1, 0, 0}); }, head), Code::kCorrupt);
  EXPECT_EQ(code([](RankEntry* e) { std::swap(e->files[0], e->files[1]); }, head), Code::kCorrupt);
  EXPECT_EQ(code([](RankEntry* e) { e->files[0].bytes += 1; }, head), Code::kCorrupt);
  EXPECT_EQ(code([](RankEntry* e) { e->files[1].path = "../a.pt"; }, head), Code::kCorrupt);
  EXPECT_EQ(code([](RankEntry* e) { e->files[1].path = "b.json"; }, head), Code::kCorrupt);
  EXPECT_EQ(code([](RankEntry* e) { e->stream_bytes = 300; }, head), Code::kCorrupt);
  EXPECT_EQ(code([](RankEntry* e) { e->files.erase(e->files.begin()); }, head), Code::kCorrupt);
  EXPECT_EQ(code([](RankEntry* e) { e->rank = 3; }, head), Code::kCorrupt);
  const uint64_t objects_end = good.shard.manifest_offset();
  EXPECT_EQ(code([&](RankEntry* e) { e->stream_bytes = objects_end; }, head), Code::kCorrupt);
  EXPECT_EQ(code([&](RankEntry* e) { e->stream_bytes = objects_end + 1; }, head), Code::kOk);
  std::string longer = head;
  ++longer[1];
  EXPECT_EQ(
      code([&](RankEntry* e) { e->files[0].header_crc32c = Crc32c(longer.data(), longer.size()); }, longer),
      Code::kCorrupt);
}

TEST(Hostile, AManifestWrittenByAnotherIsCheckedInFull) {
  StepManifestWriter writer({"train", 100, 3, 2, 4096, 1, R"({"a":[1,{"b":null}]})"});
  const Good good;
  RankEntry first = good.entry;
  first.rank = 0;
  first.files[0].path = RankFileName(0);
  RankEntry second = good.entry;
  second.rank = 1;
  second.files[0].path = RankFileName(1);
  ASSERT_TRUE(writer.Add(first).ok() && writer.Add(second).ok());
  const std::string text = *writer.Finish();
  const std::string body = text.substr(0, text.rfind("\"manifest_crc32c\""));
  std::mt19937_64 random(3);
  int accepted = 0;
  for (int i = 0; i < 6000; ++i) {
    const std::string edited = Mutate(body, &random);
    const std::string crc = Hex(Crc32c(edited.data(), edited.size()), 8);
    std::vector<RankEntry> ranks;
    const Result<StepHead> head =
        ParseStepManifest(edited + "\"manifest_crc32c\": \"" + crc + "\"\n}\n", [&](RankEntry&& rank) {
          ranks.push_back(std::move(rank));
          return OkStatus();
        });
    if (!head.ok()) {
      ASSERT_TRUE(head.status().code() == Code::kCorrupt || head.status().code() == Code::kUnsupported);
      ASSERT_LT(head.status().message().size(), 2000u);
      continue;
    }
    ++accepted;
    // An accepted manifest can be written again and reads back the same.
    StepManifestWriter again(*head);
    for (const RankEntry& rank : ranks) ASSERT_TRUE(again.Add(rank).ok());
    const Result<std::string> written = again.Finish();
    ASSERT_TRUE(written.ok()) << written.status().ToString();
    size_t next = 0;
    const Result<StepHead> back = ParseStepManifest(*written, [&](RankEntry&& rank) {
      return rank == ranks[next++] ? OkStatus() : Error(Code::kInternal, "other");
    });
    ASSERT_TRUE(back.ok()) << back.status().ToString();
    ASSERT_EQ(*back, *head);
  }
  EXPECT_GT(accepted, 50);
}

TEST(Hostile, DeepAndEndlessJsonIsRefusedInBoundedTime) {
  const std::string deep(1 << 20, '[');
  RankEntry entry{0, 1000, 0, {{RankFileName(0), 0, 0, 0, 0}}};
  const std::string json = "{\"__metadata__\":" + deep;
  EXPECT_EQ(PlanRestore(entry, HeadOf(json, &entry, 0)).status().code(), Code::kCorrupt);
  const std::string body = "{\"format\":\"ropeteam-step\",\"version\":1,\"user\":{\"a\":" + deep;
  const std::string text =
      body + "\"manifest_crc32c\": \"" + Hex(Crc32c(body.data(), body.size()), 8) + "\"\n}\n";
  const Status status = ParseStepManifest(text, {}).status();
  EXPECT_EQ(status.code(), Code::kCorrupt);
  EXPECT_THAT(status.message(), HasSubstr("nested deeper than 64"));
}

TEST(Hostile, AnOrderHasOneText) {
  const auto kinds = [](std::string_view text) {
    OrderReader reader(text);
    std::string read;
    for (char kind = reader.Next(); kind != 0; kind = reader.Next()) read += kind;
    return reader.done() ? read : "refused";
  };
  EXPECT_EQ(kinds(""), "");
  EXPECT_EQ(kinds("t2 f1 t1 j3"), "ttftjjj");
  for (const char* bad : {"t1 t1", "t", "t0", "t01", "t-1", "t+1", "x1", " t1", "t1 ", "t1  f1", "t1,f1",
                          "t1000001", "t18446744073709551616", "1t", "t1f1"})
    EXPECT_EQ(kinds(bad), "refused") << bad;
}

TEST(Hostile, NamesEscapeInOneWay) {
  for (int c = 1; c < 256; ++c) {
    const std::string name = std::string("a") + static_cast<char>(c) + "b";
    const std::string escaped = EscapeName(name);
    EXPECT_TRUE(IsUtf8(escaped));
    EXPECT_EQ(UnescapeName(escaped), name);
  }
  for (const char* bad : {"%", "%4", "%zz", "%41", "a\xff", "\"", "%FF", "\n"})
    EXPECT_FALSE(UnescapeName(bad)) << bad;
}

}  // namespace
}  // namespace ropeteam::storage

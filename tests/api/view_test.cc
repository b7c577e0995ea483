// SPDX-License-Identifier: Apache-2.0
//
// What a view reads, and what it does if bytes in the arena do not match.

#include "tests/api/api_fixture.h"

namespace ropeteam::test {
namespace {

constexpr uint64_t kChunk = 64 * 1024;

// Not "o" + …: g++ 12 mistakes that for an overlapping copy (-Wrestrict, its bug 105329).
std::string Name(size_t i) { return std::string("o").append(std::to_string(i)); }

class ViewTest : public ApiTest, public ::testing::WithParamInterface<bool> {
 protected:
  ViewTest() {
    daemon_.Configure([](FakeConfig& config) { config.scattered = GetParam(); });
    handle_ = Open();
    const std::vector<uint64_t> lengths = {0, 1, 100, 3 * kChunk + 17, kChunk, 5};
    SaveHandle save = Begin(handle_.get(), 12, 6 * kChunk, lengths.size());
    for (size_t i = 0; i < lengths.size(); ++i) {
      bytes_.push_back(RandomBytes(lengths[i], i));
      Put(save.get(), Name(i), bytes_.back());
    }
    EXPECT_OK(ropeteam_save_commit(save.get()));
  }
  uint64_t OffsetOf(const std::string& name) { return daemon_.shard(12, kRank).manifest.Find(name)->offset; }

  Handle handle_;
  std::vector<std::string> bytes_;
};

INSTANTIATE_TEST_SUITE_P(Chunks, ViewTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Scattered" : "Contiguous"; });

TEST_P(ViewTest, ListsObjectsInTheirOrderAndReadsThemWhole) {
  const ViewHandle view = OpenView(handle_.get(), 12);
  ASSERT_EQ(ropeteam_view_count(view.get()), bytes_.size());
  for (size_t i = 0; i < bytes_.size(); ++i) {
    ropeteam_object_t object{sizeof(object), nullptr, 0};
    ASSERT_OK(ropeteam_view_object(view.get(), i, &object));
    EXPECT_EQ(object.name, Name(i));
    EXPECT_EQ(object.length, bytes_[i].size());
    EXPECT_EQ(ReadAll(view.get(), object.name), bytes_[i]);
  }
  EXPECT_EQ(daemon_.counts().repairs, 0);
  ExpectNoProblems();
}

TEST_P(ViewTest, ReadsAnyRange) {
  const ViewHandle view = OpenView(handle_.get(), 12);
  const std::string& whole = bytes_[3];
  const std::vector<uint64_t> edges = {
      0,           1, 63, 64, kChunk - 200, kChunk - 64, kChunk, kChunk + 1, 2 * kChunk + 3, whole.size() - 1,
      whole.size()};
  for (const uint64_t begin : edges) {
    for (const uint64_t end : edges) {
      if (end < begin) continue;
      std::string part(end - begin + 2, '#');
      ASSERT_OK(ropeteam_view_read(view.get(), "o3", begin, part.data() + 1, end - begin, kTimeoutMs));
      EXPECT_EQ(part, std::string("#").append(whole, begin, end - begin).append("#")) << begin << " " << end;
    }
  }
}

// The range's runs of the object's bytes, joined.
std::string RunsOf(const std::string& bytes, const ropeteam_range_t& range) {
  std::string runs;
  for (uint64_t i = 0; i < std::max<uint64_t>(range.count, 1); ++i)
    runs.append(bytes, range.offset + i * range.stride, range.length);
  return runs;
}

TEST_P(ViewTest, ReadsRangesOfManyObjectsInOneCall) {
  const ViewHandle view = OpenView(handle_.get(), 12);
  const uint64_t half = kChunk / 2;
  std::string rows(2 * kChunk, '#'), columns(1000 * 100, '#'), gaps(3 * half, '#'), small(100, '#');
  const ropeteam_range_t ranges[] = {
      {"o3", kChunk / 4, half, 4, half, rows.data(), half},  // consecutive runs
      {"o3", 7, 100, 1000, 190, columns.data(), 100},        // columns
      {"o4", 0, 10, 3, 1000, gaps.data(), half},             // to separate places
      {"o2", 0, 100, 0, 0, small.data(), 0},                 // a whole object
      {"o0", 0, 0, 5, 0, nullptr, 0},
      {"o5", 5, 0, 1, 0, nullptr, 0},  // nothing
  };
  ASSERT_OK(ropeteam_view_read_ranges(view.get(), ranges, std::size(ranges), kTimeoutMs));
  EXPECT_EQ(rows, RunsOf(bytes_[3], ranges[0]));
  EXPECT_EQ(columns, RunsOf(bytes_[3], ranges[1]));
  std::string expected(gaps.size(), '#');
  for (uint64_t i = 0; i < 3; ++i) expected.replace(i * half, 10, bytes_[4], i * 1000, 10);
  EXPECT_EQ(gaps, expected);
  EXPECT_EQ(small, bytes_[2]);
  ASSERT_OK(ropeteam_view_read_ranges(view.get(), nullptr, 0, kTimeoutMs));
  EXPECT_EQ(daemon_.counts().repairs, 0);
}

TEST_P(ViewTest, BadChunksUnderManyRunsAreRepairedByOneRequestWithEachOnce) {
  const ViewHandle view = OpenView(handle_.get(), 12);
  daemon_.Flip(12, kRank, OffsetOf("o3") + 5000);
  daemon_.Flip(12, kRank, OffsetOf("o3") + 2 * kChunk);
  std::string columns(1000 * 100, '#');
  const ropeteam_range_t range = {"o3", 7, 100, 1000, 190, columns.data(), 100};
  ASSERT_OK(ropeteam_view_read_ranges(view.get(), &range, 1, kTimeoutMs));
  EXPECT_EQ(columns, RunsOf(bytes_[3], range));
  EXPECT_EQ(daemon_.counts().repairs, 1);
  ExpectNoProblems();  // a chunk that is named twice is good the second time, which is a problem
}

TEST_P(ViewTest, APartialViewBringsTheRangesThatAreAskedForAndNoMore) {
  daemon_.Configure([](FakeConfig& config) { config.partial = true; });
  const ViewHandle view = OpenPartial(handle_.get(), 12);
  EXPECT_EQ(ropeteam_view_count(view.get()), bytes_.size());
  const uint64_t manifest = daemon_.counts().packed_bytes;
  std::string rows(kChunk + 100, '#'), columns(1000 * 100, '#'), small(100, '#');
  const ropeteam_range_t ranges[] = {
      {"o3", 5, rows.size(), 1, 0, rows.data(), 0},
      {"o2", 0, 100, 0, 0, small.data(), 0},
      {"o3", 7, 100, 1000, 190, columns.data(), 100},  // some cross two chunks
      {"o5", 5, 0, 1, 0, nullptr, 0},
  };
  ASSERT_OK(ropeteam_view_read_ranges(view.get(), ranges, std::size(ranges), kTimeoutMs));
  EXPECT_EQ(rows, RunsOf(bytes_[3], ranges[0]));
  EXPECT_EQ(small, bytes_[2]);
  EXPECT_EQ(columns, RunsOf(bytes_[3], ranges[2]));
  EXPECT_EQ(daemon_.counts().packed_bytes - manifest, rows.size() + columns.size() + small.size());
  EXPECT_EQ(ReadAll(view.get(), "o3"), bytes_[3]);
  EXPECT_EQ(daemon_.counts().view_closes, 0);
  ExpectNoProblems();
}

// 50,000 pieces that no stride can combine. They are more parts than one read can have, because the fake
// daemon has few chunks.
TEST_P(ViewTest, APartialViewReadsInAsManyPartsAsItTakes) {
  daemon_.Configure([](FakeConfig& config) { config.partial = true; });
  const ViewHandle view = OpenPartial(handle_.get(), 12);
  const int opened = daemon_.counts().view_reads;
  std::string whole(bytes_[3].size(), '#');
  std::vector<ropeteam_range_t> ranges;
  for (uint64_t i = 0; i < 50000; ++i) ranges.push_back({"o3", 3 * i, 3, 1, 0, whole.data() + 3 * i, 0});
  ASSERT_OK(ropeteam_view_read_ranges(view.get(), ranges.data(), ranges.size(), kTimeoutMs));
  EXPECT_EQ(whole.substr(0, 150000), bytes_[3].substr(0, 150000));
  EXPECT_EQ(daemon_.counts().view_reads - opened, 2);  // 13 parts of at most 4,096 pieces
  ExpectNoProblems();
}

TEST_P(ViewTest, APartialViewWhoseRangesCannotBeHadOrAreBadBecomesWhole) {
  daemon_.Configure([](FakeConfig& config) { config.partial = true; });
  for (const bool bad : {false, true}) {
    const ViewHandle view = OpenPartial(handle_.get(), 12);
    daemon_.Configure([bad](FakeConfig& config) {
      config.bad_ranges = bad;
      if (!bad) config.refuse[local::Type::kViewRead] = {Code::kUnavailable, "no holder is in reach"};
    });
    EXPECT_EQ(ReadAll(view.get(), "o3"), bytes_[3]);
    daemon_.Configure([](FakeConfig& config) { config.bad_ranges = false, config.refuse.clear(); });
    const int reads = daemon_.counts().view_reads;
    EXPECT_EQ(ReadAll(view.get(), "o2"), bytes_[2]);
    EXPECT_EQ(daemon_.counts().view_reads, reads);
  }
  EXPECT_TRUE(daemon_.WaitFor([](const FakeCounts& counts) { return counts.view_closes == 4; }));
  ExpectNoProblems();
}

TEST_P(ViewTest, AMapMakesAPartialViewWhole) {
  daemon_.Configure([](FakeConfig& config) { config.partial = true; });
  const ViewHandle view = OpenPartial(handle_.get(), 12);
  const void* data = nullptr;
  uint64_t length = 0;
  ASSERT_OK(ropeteam_view_map(view.get(), "o3", &data, &length, kTimeoutMs));
  EXPECT_EQ(std::string(static_cast<const char*>(data), length), bytes_[3]);
  ExpectNoProblems();
}

TEST_P(ViewTest, ARangeThatIsInvalidReadsNothing) {
  const ViewHandle view = OpenView(handle_.get(), 12);
  std::string target(400, '#');
  const auto fails = [&](ropeteam_range_t range, ropeteam_status_t status, const char* words) {
    const ropeteam_range_t ranges[] = {{"o2", 0, 100, 0, 0, target.data(), 0}, range};
    EXPECT_FAILS(ropeteam_view_read_ranges(view.get(), ranges, 2, kTimeoutMs), status, words);
  };
  char* const data = target.data();
  fails({"o9", 0, 1, 1, 0, data, 0}, ROPETEAM_NOT_FOUND, "'o9'");
  fails({"o2", 0, 101, 1, 0, data, 0}, ROPETEAM_INVALID_ARGUMENT, "which has 100");
  fails({"o2", 0, 10, 4, 31, data, 10}, ROPETEAM_INVALID_ARGUMENT,
        "4 runs of 10 bytes from byte 0 on, 31 apart");
  fails({"o2", 0, 10, UINT64_MAX, UINT64_MAX, data, 10}, ROPETEAM_INVALID_ARGUMENT, "which has 100");
  fails({"o2", 0, 10, 4, 9, data, 10}, ROPETEAM_INVALID_ARGUMENT, "overlap");
  fails({"o2", 0, 10, 4, 10, data, 9}, ROPETEAM_INVALID_ARGUMENT, "overlap");
  fails({"o2", 0, 1, 1, 0, nullptr, 0}, ROPETEAM_INVALID_ARGUMENT, "NULL");
  EXPECT_FAILS(ropeteam_view_read_ranges(view.get(), nullptr, 1, kTimeoutMs), ROPETEAM_INVALID_ARGUMENT,
               "NULL");
  const ropeteam_range_t one = {"o2", 0, 1, 1, 0, data, 0};
  EXPECT_FAILS(ropeteam_view_read_ranges(view.get(), &one, ROPETEAM_RANGES_MAX + 1, kTimeoutMs),
               ROPETEAM_INVALID_ARGUMENT, "1000001 ranges, limit 1000000");
  EXPECT_EQ(target, std::string(400, '#'));
}

TEST_P(ViewTest, MapsObjectsInPlaceAndContiguous) {
  const ViewHandle view = OpenView(handle_.get(), 12);
  for (size_t i = 0; i < bytes_.size(); ++i) {
    const void* data = nullptr;
    uint64_t length = 99;
    ASSERT_OK(ropeteam_view_map(view.get(), Name(i).c_str(), &data, &length, kTimeoutMs));
    ASSERT_EQ(length, bytes_[i].size());
    ASSERT_NE(data, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 64, 0u);
    EXPECT_EQ(std::string(static_cast<const char*>(data), length), bytes_[i]);
    const void* again = nullptr;
    ASSERT_OK(ropeteam_view_map(view.get(), Name(i).c_str(), &again, &length, kTimeoutMs));
    EXPECT_EQ(again, data);
  }
}

TEST_P(ViewTest, AFlippedByteIsRepairedInsideAWholeRead) {
  const ViewHandle view = OpenView(handle_.get(), 12);
  daemon_.Flip(12, kRank, OffsetOf("o3") + kChunk + 100);
  EXPECT_EQ(ReadAll(view.get(), "o3"), bytes_[3]);
  EXPECT_EQ(daemon_.counts().repairs, 1);
  ExpectNoProblems();
}

TEST_P(ViewTest, AFlippedByteInAPartlyReadChunkIsRepairedThoughItIsOutsideTheRange) {
  const ViewHandle view = OpenView(handle_.get(), 12);
  daemon_.Flip(12, kRank, kChunk + 5000);
  std::string part(10, '\0');
  const uint64_t offset = kChunk + 100 - OffsetOf("o3");
  ASSERT_OK(ropeteam_view_read(view.get(), "o3", offset, part.data(), part.size(), kTimeoutMs));
  EXPECT_EQ(part, bytes_[3].substr(offset, 10));
  EXPECT_EQ(daemon_.counts().repairs, 1);
}

TEST_P(ViewTest, SeveralBadChunksAreRepairedByOneRequest) {
  const ViewHandle view = OpenView(handle_.get(), 12);
  for (uint64_t chunk = 0; chunk < 3; ++chunk) daemon_.Flip(12, kRank, chunk * kChunk + 1000);
  EXPECT_EQ(ReadAll(view.get(), "o3"), bytes_[3]);
  EXPECT_EQ(daemon_.counts().repairs, 1);
  ExpectNoProblems();
}

TEST_P(ViewTest, AFlippedByteIsRepairedBeforeAMap) {
  const ViewHandle view = OpenView(handle_.get(), 12);
  daemon_.Flip(12, kRank, OffsetOf("o3") + 2 * kChunk);
  const void* data = nullptr;
  uint64_t length = 0;
  ASSERT_OK(ropeteam_view_map(view.get(), "o3", &data, &length, kTimeoutMs));
  EXPECT_EQ(std::string(static_cast<const char*>(data), length), bytes_[3]);
  EXPECT_EQ(daemon_.counts().repairs, 1);
}

TEST_P(ViewTest, AFlippedByteInTheManifestIsRepairedAtTheOpen) {
  daemon_.Flip(12, kRank, daemon_.shard(12, kRank).meta.manifest_offset + 3);
  const ViewHandle view = OpenView(handle_.get(), 12);
  ASSERT_NE(view, nullptr);
  EXPECT_EQ(ropeteam_view_count(view.get()), bytes_.size());
  EXPECT_EQ(daemon_.counts().repairs, 1);
}

TEST_P(ViewTest, WhatCannotBeRepairedIsCorruptInTheDaemonsWords) {
  const ViewHandle view = OpenView(handle_.get(), 12);
  daemon_.Flip(12, kRank, OffsetOf("o3") + kChunk);
  daemon_.Configure([](FakeConfig& config) {
    config.refuse[local::Type::kViewRepair] = {Code::kCorrupt, "chunk 1: tried this node, node b, storage"};
  });
  std::string bytes(bytes_[3].size(), '\0');
  EXPECT_FAILS(ropeteam_view_read(view.get(), "o3", 0, bytes.data(), bytes.size(), kTimeoutMs),
               ROPETEAM_CORRUPT, "tried this node, node b, storage");
  const void* data = nullptr;
  uint64_t length = 5;
  EXPECT_FAILS(ropeteam_view_map(view.get(), "o3", &data, &length, kTimeoutMs), ROPETEAM_CORRUPT, "node b");
  EXPECT_EQ(data, nullptr);
  EXPECT_EQ(length, 5u);
  // The other objects are still readable.
  EXPECT_EQ(ReadAll(view.get(), "o2"), bytes_[2]);
}

TEST_P(ViewTest, RepairsThatRepairNothingEndAfterThreeAttempts) {
  const ViewHandle view = OpenView(handle_.get(), 12);
  daemon_.Flip(12, kRank, OffsetOf("o3") + kChunk);
  daemon_.Configure([](FakeConfig& config) { config.ignore_repairs = true; });
  std::string bytes(bytes_[3].size(), '\0');
  EXPECT_FAILS(ropeteam_view_read(view.get(), "o3", 0, bytes.data(), bytes.size(), kTimeoutMs),
               ROPETEAM_CORRUPT, "after 3 repairs");
  EXPECT_EQ(daemon_.counts().repairs, 3);
}

TEST_P(ViewTest, AViewIsClosedAtTheDaemonToo) {
  { const ViewHandle view = OpenView(handle_.get(), 12); }
  EXPECT_TRUE(daemon_.WaitFor([](const FakeCounts& counts) { return counts.view_closes == 1; }));
}

TEST_P(ViewTest, ThreadsReadOneView) {
  const ViewHandle view = OpenView(handle_.get(), 12);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) EXPECT_EQ(ReadAll(view.get(), "o3"), bytes_[3]);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

using ViewCallsTest = ApiTest;

TEST_F(ViewCallsTest, WhatNobodyHoldsIsNotFound) {
  const Handle handle = Open();
  ropeteam_view_t* view = nullptr;
  EXPECT_FAILS(ropeteam_view_open(handle.get(), 5, kRank, kTimeoutMs, &view), ROPETEAM_NOT_FOUND,
               "no holder");
  ropeteam_step_t step{sizeof(step), 42, 0, 0, 0, 0};
  EXPECT_FAILS(ropeteam_latest(handle.get(), &step, kTimeoutMs), ROPETEAM_NOT_FOUND, "no step");
  EXPECT_EQ(step.step, 42u);
}

TEST_F(ViewCallsTest, TheNewestStepIsAskedForByLevel) {
  const Handle handle = Open();
  SaveOne(handle.get(), 1, "bytes");
  ropeteam_step_t step{sizeof(step), 0, 0, 0, 0, 0};
  EXPECT_OK(ropeteam_latest(handle.get(), &step, kTimeoutMs));
  EXPECT_EQ(daemon_.last_latest().level, ROPETEAM_COMMITTED);
  EXPECT_OK(ropeteam_latest_at(handle.get(), ROPETEAM_PERSISTED, &step, kTimeoutMs));
  EXPECT_EQ(daemon_.last_latest().level, ROPETEAM_PERSISTED);
  EXPECT_EQ(step.step, 1u);
  EXPECT_FAILS(ropeteam_latest_at(handle.get(), static_cast<ropeteam_level_t>(0), &step, kTimeoutMs),
               ROPETEAM_INVALID_ARGUMENT, "level 0, limits 1 and 4");
}

TEST_F(ViewCallsTest, StepsOnStorageAreListedAndOutliveTheHandle) {
  Handle handle = Open();
  const Incarnation incarnation = (uint64_t{77} << kIncarnationNumberBits) + 3;
  daemon_.Configure([&](FakeConfig& config) {
    config.stored = {{20, incarnation, "step-20", "", 8, 1'800'000'000, 12345, R"({"loss":0.25})"},
                     {10, incarnation, "step-10", "it lacks a file", 0, 0, 0, ""}};
  });
  ropeteam_storage_list_t* list = nullptr;
  EXPECT_FAILS(ropeteam_storage_list(handle.get(), ROPETEAM_STORAGE_STEPS_MAX + 1, kTimeoutMs, &list),
               ROPETEAM_INVALID_ARGUMENT, "201 steps, limit 200");
  EXPECT_EQ(list, nullptr);
  ASSERT_OK(ropeteam_storage_list(handle.get(), 1, kTimeoutMs, &list));
  EXPECT_EQ(ropeteam_storage_list_count(list), 1u);
  ropeteam_storage_list_close(list);
  ASSERT_OK(ropeteam_storage_list(handle.get(), 0, kTimeoutMs, &list));
  handle.reset();
  ASSERT_EQ(ropeteam_storage_list_count(list), 2u);
  ropeteam_storage_step_t step{};
  EXPECT_FAILS(ropeteam_storage_list_step(list, 0, &step), ROPETEAM_INVALID_ARGUMENT, "size is 0");
  step.size = sizeof(step);
  EXPECT_FAILS(ropeteam_storage_list_step(list, 2, &step), ROPETEAM_INVALID_ARGUMENT,
               "step 2 of a list of 2");
  ASSERT_OK(ropeteam_storage_list_step(list, 0, &step));
  EXPECT_EQ(step.step, 20u);
  EXPECT_EQ(step.incarnation, 3u);
  EXPECT_STREQ(step.folder, "step-20");
  EXPECT_STREQ(step.problem, "");
  EXPECT_STREQ(step.metadata, R"({"loss":0.25})");
  EXPECT_EQ(step.time_s, 1'800'000'000u);
  EXPECT_EQ(step.bytes, 12345u);
  EXPECT_EQ(step.world_size, 8u);
  ASSERT_OK(ropeteam_storage_list_step(list, 1, &step));
  EXPECT_STREQ(step.problem, "it lacks a file");
  ropeteam_storage_list_close(list);
}

TEST_F(ViewCallsTest, ObjectsAndRangesThatAreNotThereAreRefused) {
  const Handle handle = Open();
  SaveOne(handle.get(), 1, "bytes");
  const ViewHandle view = OpenView(handle.get(), 1);
  ropeteam_object_t object{sizeof(object), nullptr, 0};
  char byte = 0;
  EXPECT_FAILS(ropeteam_view_find(view.get(), "y", &object), ROPETEAM_NOT_FOUND,
               "'y' among the 1 of step 1 rank 3");
  EXPECT_FAILS(ropeteam_view_object(view.get(), 1, &object), ROPETEAM_INVALID_ARGUMENT,
               "object 1 of a view of 1");
  EXPECT_FAILS(ropeteam_view_read(view.get(), "y", 0, &byte, 1, 0), ROPETEAM_NOT_FOUND, "'y'");
  EXPECT_FAILS(ropeteam_view_read(view.get(), "x", 5, &byte, 1, 0), ROPETEAM_INVALID_ARGUMENT, "which has 5");
  EXPECT_FAILS(ropeteam_view_read(view.get(), "x", UINT64_MAX, &byte, 2, 0), ROPETEAM_INVALID_ARGUMENT,
               "which has 5");
  EXPECT_FAILS(ropeteam_view_read(view.get(), "x", 0, nullptr, 2, 0), ROPETEAM_INVALID_ARGUMENT, "NULL");
  EXPECT_OK(ropeteam_view_read(view.get(), "x", 5, nullptr, 0, 0));
  // Good bytes on this node are read even with a timeout of 0.
  EXPECT_OK(ropeteam_view_read(view.get(), "x", 4, &byte, 1, 0));
  EXPECT_EQ(byte, 's');
}

TEST_F(ViewCallsTest, OtherRanksShardsCanBeRead) {
  const Handle other = Open(5);
  SaveOne(other.get(), 1, "of rank 5");
  const Handle handle = Open();
  const ViewHandle view = OpenView(handle.get(), 1, 5);
  EXPECT_EQ(ReadAll(view.get(), "x"), "of rank 5");
}

TEST_F(ViewCallsTest, TheLimitOfOpenViewsIsNamed) {
  const Handle handle = Open();
  SaveOne(handle.get(), 1, "bytes");
  std::vector<ViewHandle> views;
  for (int i = 0; i < ROPETEAM_VIEWS_OPEN_MAX; ++i) views.push_back(OpenView(handle.get(), 1));
  ropeteam_view_t* view = nullptr;
  EXPECT_FAILS(ropeteam_view_open(handle.get(), 1, kRank, kTimeoutMs, &view), ROPETEAM_INVALID_ARGUMENT,
               "limit 1024");
  views.pop_back();
  EXPECT_NE(OpenView(handle.get(), 1), nullptr);
}

TEST_F(ViewCallsTest, AViewGrantedTooLateIsClosed) {
  const Handle handle = Open();
  SaveOne(handle.get(), 1, "bytes");
  daemon_.Configure([](FakeConfig& config) { config.hold.insert(local::Type::kViewOpen); });
  ropeteam_view_t* view = nullptr;
  EXPECT_FAILS(ropeteam_view_open(handle.get(), 1, kRank, 0, &view), ROPETEAM_DEADLINE_EXCEEDED, "no answer");
  daemon_.Release();
  // The next waiting call receives the grant and returns it.
  EXPECT_OK(ropeteam_wait(handle.get(), 1, ROPETEAM_LOCAL, kTimeoutMs));
  EXPECT_TRUE(daemon_.WaitFor([](const FakeCounts& counts) { return counts.view_closes == 1; }));
}

}  // namespace
}  // namespace ropeteam::test

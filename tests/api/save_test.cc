// SPDX-License-Identifier: Apache-2.0
//
// What a save writes into the arena and reports to the daemon.

#include "tests/api/api_fixture.h"

namespace ropeteam::test {
namespace {

class SaveTest : public ApiTest, public ::testing::WithParamInterface<bool> {
 protected:
  SaveTest() {
    daemon_.Configure([](FakeConfig& config) { config.scattered = GetParam(); });
    handle_ = Open();
  }
  Handle handle_;
};

INSTANTIATE_TEST_SUITE_P(Chunks, SaveTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Scattered" : "Contiguous"; });

TEST_P(SaveTest, UnevenObjectsLieAlignedWithZerosBetween) {
  const std::vector<uint64_t> lengths = {0, 1, 63, 64, 65, 4095, 65536, 65537, 200001, 0, 3};
  SaveHandle save = Begin(handle_.get(), 7, 400000, lengths.size());
  for (size_t i = 0; i < lengths.size(); ++i) {
    Put(save.get(), "object" + std::to_string(i), RandomBytes(lengths[i], i));
  }
  ASSERT_OK(ropeteam_save_commit(save.get()));
  ASSERT_TRUE(daemon_.Has(7, kRank));
  for (size_t i = 0; i < lengths.size(); ++i) {
    EXPECT_EQ(daemon_.ObjectBytes(7, kRank, "object" + std::to_string(i)), RandomBytes(lengths[i], i)) << i;
  }
  ExpectNoProblems();
}

TEST_P(SaveTest, AnEmptyShardIsItsManifest) {
  SaveHandle save = Begin(handle_.get(), 1);
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.shard(1, kRank).manifest.objects().size(), 0u);
  EXPECT_EQ(daemon_.shard(1, kRank).meta.manifest_offset, 0u);
  ExpectNoProblems();
}

TEST_P(SaveTest, AnObjectOverManyChunksIsAnnouncedWhileItIsCopied) {
  const std::string bytes = RandomBytes(20 * 65536 + 5, 1);
  SaveHandle save = Begin(handle_.get(), 2, bytes.size(), 1);
  Put(save.get(), "big", bytes);
  // Before the commit, every full chunk is announced, in several frames.
  EXPECT_TRUE(daemon_.WaitFor([](const FakeCounts& counts) { return counts.filled_chunks == 20; }));
  EXPECT_EQ(daemon_.counts().filled_frames, 5);
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.ObjectBytes(2, kRank, "big"), bytes);
  ExpectNoProblems();
}

TEST_P(SaveTest, AFullChunkIsAnnouncedByTheCallThatFilledIt) {
  SaveHandle save = Begin(handle_.get(), 2, 1 << 20, 1);
  Put(save.get(), "a", RandomBytes(65536, 1));
  EXPECT_TRUE(daemon_.WaitFor([](const FakeCounts& counts) { return counts.filled_chunks == 1; }));
}

TEST_P(SaveTest, TenThousandObjectsOfUnevenSizes) {
  SaveHandle save = Begin(handle_.get(), 3, 10000 * 150, 10000);
  for (int i = 0; i < 10000; ++i) {
    Put(save.get(), "layer." + std::to_string(i),
        RandomBytes(static_cast<uint64_t>(i % 300), static_cast<uint64_t>(i)));
  }
  ASSERT_OK(ropeteam_save_commit(save.get()));
  ASSERT_EQ(daemon_.shard(3, kRank).manifest.objects().size(), 10000u);
  for (int i = 0; i < 10000; i += 997) {
    EXPECT_EQ(daemon_.ObjectBytes(3, kRank, "layer." + std::to_string(i)),
              RandomBytes(static_cast<uint64_t>(i % 300), static_cast<uint64_t>(i)));
  }
  ExpectNoProblems();
}

TEST_P(SaveTest, ReservedMemoryIsContiguousAlignedAndChecksummedAtTheCommit) {
  const uint64_t length = 5 * 65536 + 77;
  SaveHandle save = Begin(handle_.get(), 4, length + 200000, 5);
  Put(save.get(), "before", RandomBytes(1000, 1));
  void* pointer = nullptr;
  ASSERT_OK(ropeteam_save_reserve(save.get(), "inside", length, &pointer));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(pointer) % 64, 0u);
  // Put into the chunk in which the reserved object ends, before the reserved bytes are written.
  Put(save.get(), "after", RandomBytes(100000, 2));
  void* small = nullptr;
  ASSERT_OK(ropeteam_save_reserve(save.get(), "small", 1, &small));
  Put(save.get(), "last", RandomBytes(3, 3));
  const std::string bytes = RandomBytes(length, 4);
  std::memcpy(pointer, bytes.data(), length);
  std::memcpy(small, "s", 1);
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.ObjectBytes(4, kRank, "before"), RandomBytes(1000, 1));
  EXPECT_EQ(daemon_.ObjectBytes(4, kRank, "inside"), bytes);
  EXPECT_EQ(daemon_.ObjectBytes(4, kRank, "after"), RandomBytes(100000, 2));
  EXPECT_EQ(daemon_.ObjectBytes(4, kRank, "small"), "s");
  EXPECT_EQ(daemon_.ObjectBytes(4, kRank, "last"), RandomBytes(3, 3));
  ExpectNoProblems();
}

TEST_P(SaveTest, ASaveThatOutgrowsItsReservationAsksForMore) {
  SaveHandle save = Begin(handle_.get(), 5, 10, 1);
  Put(save.get(), "a", RandomBytes(300000, 1));
  Put(save.get(), std::string(255, 'n'), RandomBytes(100000, 2));
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_GE(daemon_.counts().extends, 2);
  EXPECT_EQ(daemon_.ObjectBytes(5, kRank, "a"), RandomBytes(300000, 1));
  EXPECT_EQ(daemon_.ObjectBytes(5, kRank, std::string(255, 'n')), RandomBytes(100000, 2));
  ExpectNoProblems();
}

TEST_P(SaveTest, PartsLieOneBehindTheOtherAsOneObject) {
  // Headers of 64 bytes, empty parts, parts of many chunks, and lengths that leave no part aligned.
  std::vector<std::string> pieces = {"", RandomBytes(64, 1), RandomBytes(5 * 65536 + 77, 2), "",
                                     RandomBytes(1, 3)};
  for (uint64_t i = 0; i < 400; ++i) pieces.push_back(RandomBytes(i % 7 == 0 ? 64 : i * 13 % 999, i));
  std::string all;
  for (const std::string& piece : pieces) all += piece;
  std::vector<ropeteam_part_t> parts = PartsOf(pieces);
  parts[0].data = nullptr;
  SaveHandle save = Begin(handle_.get(), 6, all.size() + 1000, 4);
  Put(save.get(), "before", "b");
  EXPECT_OK(ropeteam_save_put_parts(save.get(), "parts", parts.data(), parts.size()));
  // The call itself announces full chunks, as any put does.
  EXPECT_TRUE(daemon_.WaitFor([](const FakeCounts& counts) { return counts.filled_chunks >= 5; }));
  EXPECT_OK(ropeteam_save_put_parts(save.get(), "nothing", nullptr, 0));
  Put(save.get(), "after", "a");
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.shard(6, kRank).manifest.objects().size(), 4u);
  EXPECT_EQ(daemon_.ObjectBytes(6, kRank, "parts"), all);
  EXPECT_EQ(daemon_.ObjectBytes(6, kRank, "nothing"), "");
  EXPECT_EQ(daemon_.ObjectBytes(6, kRank, "before") + daemon_.ObjectBytes(6, kRank, "after"), "ba");
  ExpectNoProblems();
}

TEST_P(SaveTest, ManyObjectsInOneCallAreTheSameAsOneByOne) {
  std::vector<std::string> names;
  std::vector<std::string> bytes;
  for (uint64_t i = 0; i < 60; ++i) {
    names.push_back("object-" + std::to_string(i));
    bytes.push_back(RandomBytes(i % 9 == 0 ? 0 : i % 5 == 0 ? 2 * 65536 + i : i * 37 % 999, i));
  }
  std::vector<ropeteam_named_part_t> objects;
  for (size_t i = 0; i < names.size(); ++i)
    objects.push_back({names[i].c_str(), {bytes[i].data(), bytes[i].size(), nullptr, 0}});
  // The second save has the same objects, so it reuses the first one's manifest.
  for (uint64_t step : {6, 7}) {
    SaveHandle save = Begin(handle_.get(), step, 10, 1);
    Put(save.get(), "before", "b");
    EXPECT_OK(ropeteam_save_put_many(save.get(), nullptr, 0));
    EXPECT_OK(ropeteam_save_put_many(save.get(), objects.data(), objects.size()));
    // Full chunks are announced at once, as for a put.
    EXPECT_TRUE(daemon_.WaitFor([](const FakeCounts& counts) { return counts.filled_chunks >= 5; }));
    Put(save.get(), "after", "a");
    ASSERT_OK(ropeteam_save_commit(save.get()));
    EXPECT_EQ(daemon_.shard(step, kRank).manifest.objects().size(), 62u);
    for (size_t i = 0; i < names.size(); ++i) EXPECT_EQ(daemon_.ObjectBytes(step, kRank, names[i]), bytes[i]);
    EXPECT_EQ(daemon_.ObjectBytes(step, kRank, "before") + daemon_.ObjectBytes(step, kRank, "after"), "ba");
  }
  ExpectNoProblems();
}

TEST_P(SaveTest, ManyObjectsOfWhichOneIsRefusedEndTheSave) {
  const auto put = [&](const SaveHandle& save, std::vector<ropeteam_named_part_t> objects) {
    return ropeteam_save_put_many(save.get(), objects.data(), objects.size());
  };
  const ropeteam_part_t part = {"xyz", 3, nullptr, 0};
  SaveHandle save = Begin(handle_.get(), 6, 1000, 1);
  EXPECT_FAILS(ropeteam_save_put_many(save.get(), nullptr, 1), ROPETEAM_INVALID_ARGUMENT, "is NULL");
  EXPECT_FAILS(put(save, {{"a", part}, {"", part}}), ROPETEAM_INVALID_ARGUMENT, "name is empty");
  EXPECT_FAILS(put(save, {{"a", part}, {"b", {nullptr, 3, nullptr, 0}}}), ROPETEAM_INVALID_ARGUMENT, "is NULL");
  EXPECT_OK(put(save, {{"a", part}}));
  EXPECT_FAILS(put(save, {{"b", part}, {"a", part}}), ROPETEAM_INVALID_ARGUMENT, "a");
  EXPECT_FAILS(ropeteam_save_commit(save.get()), ROPETEAM_INVALID_ARGUMENT, "a");
  SaveHandle large = Begin(handle_.get(), 7, 1000, 1);
  EXPECT_FAILS(put(large, {{"a", part}, {"b", {"", 64 * 65536, nullptr, 0}}}), ROPETEAM_NO_SPACE, "");
  EXPECT_FAILS(ropeteam_save_commit(large.get()), ROPETEAM_NO_SPACE, "");
  ExpectNoProblems();
}

TEST_P(SaveTest, AnObjectGrowsByWhatIsAppended) {
  const auto append = [](const SaveHandle& save, const std::string& bytes) {
    return ropeteam_save_append(save.get(), bytes.data(), bytes.size());
  };
  // The second save begins like the first, so it reuses the first one's manifest as far as they match.
  for (uint64_t step : {7, 8}) {
    SaveHandle save = Begin(handle_.get(), step, 10, 1);
    EXPECT_FAILS(append(save, "x"), ROPETEAM_INVALID_ARGUMENT, "without objects");
    Put(save.get(), "before", "b");
    Put(save.get(), "grows", "");
    std::string all;
    for (uint64_t i = 0; i < 300; ++i) {
      const std::string piece = RandomBytes(i * 37 % 999, step * 1000 + i);
      EXPECT_OK(append(save, piece));
      all += piece;
    }
    // Full chunks are announced at once, as for a put.
    EXPECT_TRUE(daemon_.WaitFor([](const FakeCounts& counts) { return counts.filled_chunks >= 2; }));
    EXPECT_FAILS(ropeteam_save_append(save.get(), all.data(), 64 * 65536), ROPETEAM_NO_SPACE, "");
    EXPECT_FAILS(ropeteam_save_append(save.get(), all.data(), UINT64_MAX), ROPETEAM_INVALID_ARGUMENT,
                 "limit");
    EXPECT_FAILS(ropeteam_save_append(save.get(), nullptr, 1), ROPETEAM_INVALID_ARGUMENT, "is NULL");
    Put(save.get(), "after", "a");
    Put(save.get(), ROPETEAM_METADATA, "{}");
    EXPECT_FAILS(append(save, " "), ROPETEAM_INVALID_ARGUMENT, "metadata");
    void* pointer = nullptr;
    ASSERT_OK(ropeteam_save_reserve(save.get(), "reserved", 70000, &pointer));
    EXPECT_OK(append(save, "more"));
    std::memset(pointer, 'r', 70000);
    ASSERT_OK(ropeteam_save_commit(save.get()));
    EXPECT_FAILS(append(save, "x"), ROPETEAM_INVALID_ARGUMENT, "committed");
    EXPECT_EQ(daemon_.ObjectBytes(step, kRank, "grows"), all);
    EXPECT_EQ(daemon_.ObjectBytes(step, kRank, "reserved"), std::string(70000, 'r') + "more");
    EXPECT_EQ(daemon_.ObjectBytes(step, kRank, "before") + daemon_.ObjectBytes(step, kRank, "after"), "ba");
  }
  ExpectNoProblems();
}

TEST_P(SaveTest, PartsThatAreRefusedLeaveTheSaveAsItWas) {
  SaveHandle save = Begin(handle_.get(), 6, 1000, 1);
  const std::vector<std::string> pieces = {"one", "two", "three"};
  std::vector<ropeteam_part_t> parts = PartsOf(pieces);
  const auto put = [&](const char* name) {
    return ropeteam_save_put_parts(save.get(), name, parts.data(), parts.size());
  };
  parts[1].data = nullptr;
  EXPECT_FAILS(put("x"), ROPETEAM_INVALID_ARGUMENT, "is NULL");
  parts[1] = {pieces[1].data(), 3, nullptr, 6};
  EXPECT_FAILS(put("x"), ROPETEAM_INVALID_ARGUMENT, "part 1 of 3 has flags 0x6");
  parts[1] = {pieces[1].data(), UINT64_MAX - 4, nullptr, 0};
  EXPECT_FAILS(put("x"), ROPETEAM_INVALID_ARGUMENT, "an object of 18446744073709551615 bytes, limit");
  parts[1] = {pieces[1].data(), 64 * 65536, nullptr, 0};
  EXPECT_FAILS(put("x"), ROPETEAM_NO_SPACE, "");
  parts[1] = {pieces[1].data(), 3, nullptr, 0};
  EXPECT_FAILS(ropeteam_save_put_parts(save.get(), "x", nullptr, 1), ROPETEAM_INVALID_ARGUMENT, "is NULL");
  EXPECT_FAILS(ropeteam_save_put_parts(save.get(), "x", parts.data(), ROPETEAM_PARTS_MAX + 1),
               ROPETEAM_INVALID_ARGUMENT, "an object of 1000001 parts, limit 1000000");
  EXPECT_OK(put("x"));
  EXPECT_FAILS(put("x"), ROPETEAM_INVALID_ARGUMENT, "x");
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.ObjectBytes(6, kRank, "x"), "onetwothree");
  ExpectNoProblems();
}

TEST_P(SaveTest, MetadataThatAreTooLongLeaveTheSaveAsItWas) {
  SaveHandle save = Begin(handle_.get(), 5, 10000, 2);
  const std::string longest = "{\"note\": \"" + std::string(ROPETEAM_METADATA_MAX - 12, 'x') + "\"}";
  const std::string too_long = longest + " ";
  const char* words = "step 5: metadata of 4097 bytes, limit 4096";
  EXPECT_FAILS(ropeteam_save_put(save.get(), ROPETEAM_METADATA, too_long.data(), too_long.size()),
               ROPETEAM_INVALID_ARGUMENT, words);
  void* pointer = nullptr;
  EXPECT_FAILS(ropeteam_save_reserve(save.get(), ROPETEAM_METADATA, too_long.size(), &pointer),
               ROPETEAM_INVALID_ARGUMENT, words);
  Put(save.get(), ROPETEAM_METADATA, longest);
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.ObjectBytes(5, kRank, ROPETEAM_METADATA), longest);
  ExpectNoProblems();
}

TEST_P(SaveTest, ARefusedExtensionLeavesTheSaveAsItWas) {
  SaveHandle save = Begin(handle_.get(), 5, 1000, 2);
  Put(save.get(), "a", RandomBytes(1000, 1));
  const std::string too_much(65536 * 64, 'x');
  EXPECT_FAILS(ropeteam_save_put(save.get(), "b", too_much.data(), too_much.size()), ROPETEAM_NO_SPACE,
               "needed");
  Put(save.get(), "b", RandomBytes(500, 2));
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.ObjectBytes(5, kRank, "a"), RandomBytes(1000, 1));
  EXPECT_EQ(daemon_.ObjectBytes(5, kRank, "b"), RandomBytes(500, 2));
  ExpectNoProblems();
}

TEST_P(SaveTest, UnneededChunksOfAnEstimateAreGivenBack) {
  SaveHandle save = Begin(handle_.get(), 6, 2000000, 1);
  EXPECT_LT(daemon_.chunks_free(), 40u);
  Put(save.get(), "a", "x");
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.chunks_free(), 63u);
}

// Each later save reuses the previous manifest as far as the two match.
TEST_P(SaveTest, SavesThatDifferFromTheOneBeforeHaveAManifestOfTheirOwn) {
  using Objects = std::vector<std::pair<std::string, uint64_t>>;
  const std::vector<Objects> steps = {
      {{"a", 100}, {"b", 70000}, {"c", 5}},            // the first
      {{"a", 100}, {"b", 70000}, {"c", 5}},            // alike
      {{"a", 100}, {"b", 70000}},                      // shorter
      {{"a", 100}, {"b", 70000}, {"c", 5}, {"d", 1}},  // longer
      {{"a", 100}, {"b", 70001}, {"c", 5}, {"d", 1}},  // another length in the middle
      {{"a", 100}, {"c", 5}, {"b", 70001}},            // another order
      {},                                              // nothing
      {{"c", 5}},
  };
  for (uint64_t step = 0; step < steps.size(); ++step) {
    SaveHandle save = Begin(handle_.get(), step, 70106, steps[step].size());
    for (const auto& [name, length] : steps[step]) Put(save.get(), name, RandomBytes(length, step));
    ASSERT_OK(ropeteam_save_commit(save.get()));
    ASSERT_EQ(daemon_.shard(step, kRank).manifest.objects().size(), steps[step].size());
    for (const auto& [name, length] : steps[step]) {
      EXPECT_EQ(daemon_.ObjectBytes(step, kRank, name), RandomBytes(length, step)) << step << name;
    }
  }
  ExpectNoProblems();
}

TEST_P(SaveTest, NamesTwiceAreRefusedAlsoInASaveLikeTheOneBefore) {
  for (uint64_t step = 1; step < 3; ++step) {
    SaveHandle save = Begin(handle_.get(), step, 2, 2);
    Put(save.get(), "a", "1");
    EXPECT_FAILS(ropeteam_save_put(save.get(), "a", "1", 1), ROPETEAM_INVALID_ARGUMENT, "twice");
    Put(save.get(), "b", "2");
    ASSERT_OK(ropeteam_save_commit(save.get()));
    EXPECT_EQ(daemon_.shard(step, kRank).manifest.objects().size(), 2u);
  }
}

TEST_P(SaveTest, ASaveAfterAnAbortedOneIsItsOwn) {
  for (uint64_t step = 0; step < 3; ++step) {
    SaveHandle save = Begin(handle_.get(), step, 200, 2);
    Put(save.get(), "a", RandomBytes(100, step));
    if (step == 1) continue;  // closed, and so aborted
    Put(save.get(), "b", RandomBytes(100 + step, step));
    ASSERT_OK(ropeteam_save_commit(save.get()));
    EXPECT_EQ(daemon_.ObjectBytes(step, kRank, "b"), RandomBytes(100 + step, step));
  }
  ExpectNoProblems();
}

using SaveCallsTest = ApiTest;

TEST_F(SaveCallsTest, AFullArenaRefusesAtBeginWithTheDaemonsWords) {
  const Handle handle = Open();
  const ropeteam_save_options_t options{sizeof(options), 65 * 65536, 1, 0};
  auto* const untouched = reinterpret_cast<ropeteam_save_t*>(0x40);
  ropeteam_save_t* save = untouched;
  EXPECT_FAILS(ropeteam_save_begin(handle.get(), 1, &options, &save), ROPETEAM_NO_SPACE, "limit 64");
  EXPECT_EQ(save, untouched);
}

TEST_F(SaveCallsTest, AStepSavedTwiceIsRefused) {
  const Handle handle = Open();
  SaveOne(handle.get(), 1, "bytes");
  const ropeteam_save_options_t options{sizeof(options), 5, 1, 0};
  ropeteam_save_t* save = nullptr;
  EXPECT_FAILS(ropeteam_save_begin(handle.get(), 1, &options, &save), ROPETEAM_ALREADY_EXISTS, "has saved");
}

TEST_F(SaveCallsTest, AnAbortFreesTheChunks) {
  const Handle handle = Open();
  SaveHandle save = Begin(handle.get(), 1, 500000, 1);
  Put(save.get(), "a", RandomBytes(200000, 1));
  ASSERT_OK(ropeteam_save_abort(save.get()));
  // The next request is handled after the abort.
  SaveHandle next = Begin(handle.get(), 2, 60 * 65536, 1);
  EXPECT_EQ(daemon_.counts().aborts, 1);
  EXPECT_FALSE(daemon_.Has(1, kRank));
}

TEST_F(SaveCallsTest, ClosingAnOpenSaveAbortsIt) {
  const Handle handle = Open();
  { SaveHandle save = Begin(handle.get(), 1, 500000, 1); }
  EXPECT_TRUE(daemon_.WaitFor([](const FakeCounts& counts) { return counts.aborts == 1; }));
  EXPECT_EQ(daemon_.chunks_free(), 64u);
}

TEST_F(SaveCallsTest, ClosingACommittedSaveKeepsIt) {
  const Handle handle = Open();
  SaveOne(handle.get(), 1, "bytes");
  EXPECT_EQ(daemon_.counts().aborts, 0);
  EXPECT_TRUE(daemon_.Has(1, kRank));
}

TEST_F(SaveCallsTest, NothingCanBeAddedAfterCommitOrAbort) {
  const Handle handle = Open();
  SaveHandle committed = Begin(handle.get(), 1);
  ASSERT_OK(ropeteam_save_commit(committed.get()));
  void* pointer = nullptr;
  EXPECT_FAILS(ropeteam_save_put(committed.get(), "a", "x", 1), ROPETEAM_INVALID_ARGUMENT,
               "step 1 has been committed");
  EXPECT_FAILS(ropeteam_save_reserve(committed.get(), "a", 1, &pointer), ROPETEAM_INVALID_ARGUMENT,
               "committed");
  EXPECT_FAILS(ropeteam_save_commit(committed.get()), ROPETEAM_INVALID_ARGUMENT, "committed");
  EXPECT_FAILS(ropeteam_save_abort(committed.get()), ROPETEAM_INVALID_ARGUMENT, "committed");
  SaveHandle aborted = Begin(handle.get(), 2);
  ASSERT_OK(ropeteam_save_abort(aborted.get()));
  EXPECT_FAILS(ropeteam_save_put(aborted.get(), "a", "x", 1), ROPETEAM_INVALID_ARGUMENT,
               "step 2 has been aborted");
  EXPECT_FAILS(ropeteam_save_commit(aborted.get()), ROPETEAM_INVALID_ARGUMENT, "aborted");
  EXPECT_TRUE(daemon_.Has(1, kRank));
  EXPECT_FALSE(daemon_.Has(2, kRank));
}

TEST_F(SaveCallsTest, ARefusedCommitAbortsTheSave) {
  const Handle handle = Open();
  SaveHandle save = Begin(handle.get(), 1, 1000, 1);
  daemon_.Configure([](FakeConfig& config) {
    config.refuse[local::Type::kSaveCommit] = {Code::kStale, "incarnation 1 is superseded by incarnation 2"};
  });
  EXPECT_FAILS(ropeteam_save_commit(save.get()), ROPETEAM_STALE, "superseded by incarnation 2");
  EXPECT_TRUE(daemon_.WaitFor([](const FakeCounts& counts) { return counts.aborts == 1; }));
  EXPECT_EQ(daemon_.chunks_free(), 64u);
  EXPECT_FAILS(ropeteam_save_put(save.get(), "a", "x", 1), ROPETEAM_STALE, "superseded");
}

TEST_F(SaveCallsTest, FourSavesMayBeOpenAndAFifthIsRefused) {
  const Handle handle = Open();
  std::vector<SaveHandle> saves;
  for (uint64_t step = 0; step < 4; ++step) saves.push_back(Begin(handle.get(), step));
  const ropeteam_save_options_t options{sizeof(options), 0, 0, 0};
  ropeteam_save_t* save = nullptr;
  EXPECT_FAILS(ropeteam_save_begin(handle.get(), 9, &options, &save), ROPETEAM_INVALID_ARGUMENT, "limit 4");
  // A commit frees a place, even before the save is closed.
  ASSERT_OK(ropeteam_save_commit(saves[1].get()));
  SaveHandle fifth = Begin(handle.get(), 9);
  EXPECT_NE(fifth, nullptr);
}

TEST_F(SaveCallsTest, NamesTwiceAreRefusedAndTheSaveGoesOn) {
  const Handle handle = Open();
  SaveHandle save = Begin(handle.get(), 1, 100, 2);
  Put(save.get(), "a", "first");
  EXPECT_FAILS(ropeteam_save_put(save.get(), "a", "second", 6), ROPETEAM_INVALID_ARGUMENT, "twice");
  Put(save.get(), "b", "third");
  ASSERT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.ObjectBytes(1, kRank, "a"), "first");
  EXPECT_EQ(daemon_.shard(1, kRank).manifest.objects().size(), 2u);
}

TEST_F(SaveCallsTest, SavesOfOneHandleRunInParallel) {
  const Handle handle = Open();
  std::vector<std::thread> threads;
  for (uint64_t step = 0; step < 4; ++step) {
    threads.emplace_back([&, step] {
      const std::string bytes = RandomBytes(500000, step);
      SaveHandle save = Begin(handle.get(), step, bytes.size(), 1);
      Put(save.get(), "x", bytes);
      EXPECT_OK(ropeteam_save_commit(save.get()));
      EXPECT_OK(ropeteam_wait(handle.get(), step, ROPETEAM_REPLICATED, kTimeoutMs));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (uint64_t step = 0; step < 4; ++step)
    EXPECT_EQ(daemon_.ObjectBytes(step, kRank, "x"), RandomBytes(500000, step));
  ExpectNoProblems();
}

TEST_F(SaveCallsTest, ThreadsShareOneSave) {
  const Handle handle = Open();
  SaveHandle save = Begin(handle.get(), 1, 4 * 100 * 5000, 400);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < 100; ++i)
        Put(save.get(), std::to_string(t * 100 + i), RandomBytes(5000, t * 100 + i));
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_OK(ropeteam_save_commit(save.get()));
  for (uint64_t i = 0; i < 400; ++i)
    EXPECT_EQ(daemon_.ObjectBytes(1, kRank, std::to_string(i)), RandomBytes(5000, i));
  ExpectNoProblems();
}

}  // namespace
}  // namespace ropeteam::test

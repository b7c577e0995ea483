// SPDX-License-Identifier: Apache-2.0
//
// Callers' mistakes that need an open handle: each gives a clear error and changes nothing. c_api_test.c has
// those that need no handle.

#include "tests/api/api_fixture.h"

namespace ropeteam::test {
namespace {

class BadInputTest : public ApiTest {
 protected:
  BadInputTest() : handle_(Open()) {}
  Handle handle_;
};

TEST_F(BadInputTest, NamesOverTheLimitEmptyOrNull) {
  SaveHandle save = Begin(handle_.get(), 1, 100, 1);
  void* pointer = nullptr;
  EXPECT_FAILS(ropeteam_save_put(save.get(), nullptr, "x", 1), ROPETEAM_INVALID_ARGUMENT, "name is NULL");
  EXPECT_FAILS(ropeteam_save_put(save.get(), "", "x", 1), ROPETEAM_INVALID_ARGUMENT, "empty");
  EXPECT_FAILS(ropeteam_save_put(save.get(), std::string(256, 'n').c_str(), "x", 1),
               ROPETEAM_INVALID_ARGUMENT, "more than 255 bytes");
  EXPECT_FAILS(ropeteam_save_reserve(save.get(), "", 1, &pointer), ROPETEAM_INVALID_ARGUMENT, "empty");
  EXPECT_OK(ropeteam_save_put(save.get(), std::string(255, 'n').c_str(), "x", 1));
  EXPECT_EQ(pointer, nullptr);
}

TEST_F(BadInputTest, NullDataIsForEmptyObjectsOnly) {
  SaveHandle save = Begin(handle_.get(), 1, 100, 1);
  EXPECT_FAILS(ropeteam_save_put(save.get(), "a", nullptr, 1), ROPETEAM_INVALID_ARGUMENT, "NULL");
  EXPECT_OK(ropeteam_save_put(save.get(), "a", nullptr, 0));
  EXPECT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.shard(1, kRank).manifest.objects().size(), 1u);
}

TEST_F(BadInputTest, ReserveOfNothing) {
  SaveHandle save = Begin(handle_.get(), 1, 100, 1);
  void* pointer = nullptr;
  EXPECT_FAILS(ropeteam_save_reserve(save.get(), "a", 0, &pointer), ROPETEAM_INVALID_ARGUMENT, "0 bytes");
  EXPECT_FAILS(ropeteam_save_reserve(save.get(), "a", 1, nullptr), ROPETEAM_INVALID_ARGUMENT, "NULL");
  // The name is still free after both errors.
  EXPECT_OK(ropeteam_save_reserve(save.get(), "a", 1, &pointer));
}

TEST_F(BadInputTest, LengthsOverTheFormatsLimit) {
  SaveHandle save = Begin(handle_.get(), 1, 100, 1);
  void* pointer = nullptr;
  EXPECT_FAILS(ropeteam_save_reserve(save.get(), "a", UINT64_MAX, &pointer), ROPETEAM_INVALID_ARGUMENT,
               "limit 4294967296");
  EXPECT_FAILS(ropeteam_save_reserve(save.get(), "a", (1ull << 32) - 10, &pointer), ROPETEAM_INVALID_ARGUMENT,
               "limit");
  for (const uint64_t bytes : {uint64_t{UINT64_MAX}, uint64_t{1} << 33}) {
    const ropeteam_save_options_t options{sizeof(options), bytes, 1, 0};
    ropeteam_save_t* other = nullptr;
    EXPECT_FAILS(ropeteam_save_begin(handle_.get(), 2, &options, &other), ROPETEAM_INVALID_ARGUMENT,
                 "65536 chunks");
  }
  const ropeteam_save_options_t options{sizeof(options), 1, 1000001, 0};
  ropeteam_save_t* other = nullptr;
  EXPECT_FAILS(ropeteam_save_begin(handle_.get(), 2, &options, &other), ROPETEAM_INVALID_ARGUMENT,
               "limit 1000000");
}

TEST_F(BadInputTest, TimeoutsOutsideTheirLimits) {
  ropeteam_step_t step{sizeof(step), 0, 0, 0, 0, 0};
  ropeteam_view_t* view = nullptr;
  for (const int64_t timeout_ms : {int64_t{-1}, int64_t{ROPETEAM_TIMEOUT_MAX_MS} + 1, INT64_MIN, INT64_MAX}) {
    EXPECT_FAILS(ropeteam_wait(handle_.get(), 1, ROPETEAM_LOCAL, timeout_ms), ROPETEAM_INVALID_ARGUMENT,
                 "limits 0 and 86400000");
    EXPECT_FAILS(ropeteam_drop(handle_.get(), 1, timeout_ms), ROPETEAM_INVALID_ARGUMENT, "timeout of");
    EXPECT_FAILS(ropeteam_persist(handle_.get(), 1, timeout_ms), ROPETEAM_INVALID_ARGUMENT, "timeout of");
    const ropeteam_policy_t policy{sizeof(policy), 500, 5};
    EXPECT_FAILS(ropeteam_set_policy(handle_.get(), &policy, timeout_ms), ROPETEAM_INVALID_ARGUMENT,
                 "timeout of");
    EXPECT_FAILS(ropeteam_latest(handle_.get(), &step, timeout_ms), ROPETEAM_INVALID_ARGUMENT, "timeout of");
    EXPECT_FAILS(ropeteam_view_open(handle_.get(), 1, 0, timeout_ms, &view), ROPETEAM_INVALID_ARGUMENT,
                 "timeout of");
  }
  SaveOne(handle_.get(), 1, "bytes");
  const ViewHandle open = OpenView(handle_.get(), 1);
  char byte = 0;
  const void* data = nullptr;
  uint64_t length = 0;
  EXPECT_FAILS(ropeteam_view_read(open.get(), "x", 0, &byte, 1, -5), ROPETEAM_INVALID_ARGUMENT,
               "timeout of -5");
  EXPECT_FAILS(ropeteam_view_map(open.get(), "x", &data, &length, -5), ROPETEAM_INVALID_ARGUMENT,
               "timeout of -5");
}

TEST_F(BadInputTest, LevelsThatAreNone) {
  for (const int level : {0, 5, -1}) {
    EXPECT_FAILS(ropeteam_wait(handle_.get(), 1, static_cast<ropeteam_level_t>(level), 0),
                 ROPETEAM_INVALID_ARGUMENT, "limits 1 and 4");
  }
}

TEST_F(BadInputTest, StructsOfTheWrongSize) {
  ropeteam_info_t info{};
  ropeteam_step_t step{};
  EXPECT_FAILS(ropeteam_info(handle_.get(), &info), ROPETEAM_INVALID_ARGUMENT, "ropeteam_info_t.size is 0");
  EXPECT_FAILS(ropeteam_latest(handle_.get(), &step, 0), ROPETEAM_INVALID_ARGUMENT,
               "ropeteam_step_t.size is 0");
  ropeteam_save_options_t options{offsetof(ropeteam_save_options_t, agreement) - 1, 0, 0, 0};
  ropeteam_save_t* save = nullptr;
  EXPECT_FAILS(ropeteam_save_begin(handle_.get(), 1, &options, &save), ROPETEAM_INVALID_ARGUMENT,
               "size is 23");
  options.size = size_t{0xdeadbeef};  // never set
  EXPECT_FAILS(ropeteam_save_begin(handle_.get(), 1, &options, &save), ROPETEAM_INVALID_ARGUMENT,
               "limits 24 and 4096");
}

struct NewerSaveOptions {
  ropeteam_save_options_t known;
  uint64_t unknown;
};
struct NewerInfo {
  ropeteam_info_t known;
  uint64_t unknown;
};

TEST_F(BadInputTest, StructsOfANewerCaller) {
  NewerSaveOptions options{{sizeof(NewerSaveOptions), 0, 0, 0}, 0};
  ropeteam_save_t* save = nullptr;
  ASSERT_OK(ropeteam_save_begin(handle_.get(), 1, &options.known, &save));
  ropeteam_save_close(save);
  options.unknown = 1;
  EXPECT_FAILS(ropeteam_save_begin(handle_.get(), 2, &options.known, &save), ROPETEAM_UNSUPPORTED,
               "value at byte 32");
  NewerInfo info{{}, 77};
  info.known.size = sizeof(info);
  ASSERT_OK(ropeteam_info(handle_.get(), &info.known));
  EXPECT_EQ(info.known.size, sizeof(info));
  EXPECT_EQ(info.known.rank, kRank);
  EXPECT_EQ(info.unknown, 0u);
}

TEST_F(BadInputTest, StructsOfAnOlderCallerAreTakenWithoutTheNewerFields) {
  // The caller was compiled before `agreement` existed. Bytes beyond its struct must not be read.
  ropeteam_save_options_t options{offsetof(ropeteam_save_options_t, agreement), 0, 0, 77};
  ropeteam_save_t* save = nullptr;
  ASSERT_OK(ropeteam_save_begin(handle_.get(), 1, &options, &save));
  ropeteam_save_close(save);
  EXPECT_EQ(daemon_.counts().agreement, 0u);
  options.size = sizeof(options);
  ASSERT_OK(ropeteam_save_begin(handle_.get(), 2, &options, &save));
  ropeteam_save_close(save);
  EXPECT_EQ(daemon_.counts().agreement, 77u);
}

TEST_F(BadInputTest, NullOutputsAndHandles) {
  ropeteam_save_options_t options{sizeof(options), 0, 0, 0};
  EXPECT_FAILS(ropeteam_save_begin(handle_.get(), 1, &options, nullptr), ROPETEAM_INVALID_ARGUMENT, "NULL");
  EXPECT_FAILS(ropeteam_save_begin(handle_.get(), 1, nullptr, nullptr), ROPETEAM_INVALID_ARGUMENT,
               "ropeteam_save_options_t is NULL");
  EXPECT_FAILS(ropeteam_info(handle_.get(), nullptr), ROPETEAM_INVALID_ARGUMENT, "NULL");
  EXPECT_FAILS(ropeteam_latest(handle_.get(), nullptr, 0), ROPETEAM_INVALID_ARGUMENT, "NULL");
  EXPECT_FAILS(ropeteam_view_open(handle_.get(), 1, 0, 0, nullptr), ROPETEAM_INVALID_ARGUMENT, "NULL");
  EXPECT_EQ(daemon_.Received(local::Type::kSaveBegin), 0);
}

TEST_F(BadInputTest, TheLastErrorIsThisThreadsAndStaysAfterASuccess) {
  EXPECT_FAILS(ropeteam_wait(handle_.get(), 1, ROPETEAM_LOCAL, -1), ROPETEAM_INVALID_ARGUMENT,
               "timeout of -1");
  std::thread([] { EXPECT_STREQ(ropeteam_last_error(), ""); }).join();
  ropeteam_info_t info{};
  info.size = sizeof(info);
  ASSERT_OK(ropeteam_info(handle_.get(), &info));
  EXPECT_THAT(ropeteam_last_error(), ::testing::HasSubstr("timeout of -1"));
}

}  // namespace
}  // namespace ropeteam::test

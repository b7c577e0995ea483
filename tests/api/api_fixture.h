// SPDX-License-Identifier: Apache-2.0
//
// A fake daemon, a handle of rank 3 of 8 connected to it, and helpers for tests of saves and views.

#ifndef ROPETEAM_TESTS_API_API_FIXTURE_H_
#define ROPETEAM_TESTS_API_API_FIXTURE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "api/include/ropeteam/ropeteam.h"
#include "tests/api/fake_daemon.h"

namespace ropeteam::test {

inline constexpr uint32_t kRank = 3;
inline constexpr uint32_t kWorld = 8;
// Far longer than any call here takes: a test that reaches it has failed.
inline constexpr int64_t kTimeoutMs = 10000;

#define EXPECT_OK(expression) EXPECT_EQ(expression, ROPETEAM_OK) << ropeteam_last_error()
#define ASSERT_OK(expression) ASSERT_EQ(expression, ROPETEAM_OK) << ropeteam_last_error()
// Checks the status, and that the error contains these words.
#define EXPECT_FAILS(expression, status, words)                      \
  do {                                                               \
    EXPECT_EQ(expression, status) << ropeteam_last_error();          \
    EXPECT_THAT(ropeteam_last_error(), ::testing::HasSubstr(words)); \
  } while (0)

inline std::string RandomBytes(uint64_t length, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::string bytes(length, '\0');
  for (uint64_t i = 0; i < length; i += 8) {
    const uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, std::min<uint64_t>(8, length - i));
  }
  return bytes;
}

inline ropeteam_open_options_t OptionsFor(const std::string& socket, uint32_t rank = kRank) {
  ropeteam_open_options_t options{};
  options.size = sizeof(options);
  options.socket = socket.c_str();
  options.rank = rank;
  options.world_size = kWorld;
  options.incarnation_token = "run";
  options.timeout_ms = kTimeoutMs;
  return options;
}

struct CloseHandle {
  void operator()(ropeteam_t* handle) const { ropeteam_close(handle); }
  void operator()(ropeteam_save_t* save) const { ropeteam_save_close(save); }
  void operator()(ropeteam_view_t* view) const { ropeteam_view_close(view); }
};
using Handle = std::unique_ptr<ropeteam_t, CloseHandle>;
using SaveHandle = std::unique_ptr<ropeteam_save_t, CloseHandle>;
using ViewHandle = std::unique_ptr<ropeteam_view_t, CloseHandle>;

class ApiTest : public ::testing::Test {
 protected:
  explicit ApiTest(uint64_t chunk_bytes = 64 * 1024, uint64_t chunks = 64, uint64_t tail_bytes = 0)
      : daemon_(chunk_bytes, chunks, tail_bytes) {}

  // Null if it fails; tests assert where they need the handle.
  Handle Open(uint32_t rank = kRank) {
    const ropeteam_open_options_t options = OptionsFor(daemon_.socket(), rank);
    ropeteam_t* handle = nullptr;
    EXPECT_OK(ropeteam_open(&options, &handle));
    return Handle(handle);
  }
  SaveHandle Begin(ropeteam_t* handle, uint64_t step, uint64_t bytes = 0, uint64_t objects = 0) {
    const ropeteam_save_options_t options{sizeof(options), bytes, objects, 0};
    ropeteam_save_t* save = nullptr;
    EXPECT_OK(ropeteam_save_begin(handle, step, &options, &save));
    return SaveHandle(save);
  }
  ViewHandle OpenView(ropeteam_t* handle, uint64_t step, uint32_t rank = kRank) {
    ropeteam_view_t* view = nullptr;
    EXPECT_OK(ropeteam_view_open(handle, step, rank, kTimeoutMs, &view));
    return ViewHandle(view);
  }
  ViewHandle OpenPartial(ropeteam_t* handle, uint64_t step, uint32_t rank = kRank) {
    const ropeteam_view_options_t options{sizeof(options), 1};
    ropeteam_view_t* view = nullptr;
    EXPECT_OK(ropeteam_view_open_with(handle, step, rank, &options, kTimeoutMs, &view));
    return ViewHandle(view);
  }
  void Put(ropeteam_save_t* save, const std::string& name, const std::string& bytes) {
    EXPECT_OK(ropeteam_save_put(save, name.c_str(), bytes.data(), bytes.size()));
  }
  // The pieces as parts of host memory. `pieces` must outlive the result.
  static std::vector<ropeteam_part_t> PartsOf(const std::vector<std::string>& pieces) {
    std::vector<ropeteam_part_t> parts;
    for (const std::string& piece : pieces) parts.push_back({piece.data(), piece.size(), nullptr, 0});
    return parts;
  }
  std::string ReadAll(ropeteam_view_t* view, const std::string& name) {
    ropeteam_object_t object{sizeof(object), nullptr, 0};
    EXPECT_OK(ropeteam_view_find(view, name.c_str(), &object));
    std::string bytes(object.length, '\0');
    EXPECT_OK(ropeteam_view_read(view, name.c_str(), 0, bytes.data(), bytes.size(), kTimeoutMs));
    return bytes;
  }
  // Saves and commits a step with one object "x" of these bytes.
  void SaveOne(ropeteam_t* handle, uint64_t step, const std::string& bytes) {
    const SaveHandle save = Begin(handle, step, bytes.size(), 1);
    Put(save.get(), "x", bytes);
    EXPECT_OK(ropeteam_save_commit(save.get()));
  }
  void ExpectNoProblems() { EXPECT_THAT(daemon_.Problems(), ::testing::IsEmpty()); }

  FakeDaemon daemon_;
};

}  // namespace ropeteam::test

#endif  // ROPETEAM_TESTS_API_API_FIXTURE_H_

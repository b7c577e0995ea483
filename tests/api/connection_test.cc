// SPDX-License-Identifier: Apache-2.0
//
// The connection to the daemon: sockets without a daemon; a daemon that dies, is silent or returns; fork.

#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>

#include "tests/api/api_fixture.h"

namespace ropeteam::test {
namespace {

using std::chrono::steady_clock;

int64_t MsSince(steady_clock::time_point begin) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(steady_clock::now() - begin).count();
}

class ConnectionTest : public ApiTest {
 protected:
  ropeteam_status_t TryOpen(const std::string& socket, int64_t timeout_ms = kTimeoutMs) {
    ropeteam_open_options_t options = OptionsFor(socket);
    options.timeout_ms = timeout_ms;
    ropeteam_t* handle = nullptr;
    const ropeteam_status_t status = ropeteam_open(&options, &handle);
    EXPECT_EQ(handle != nullptr, status == ROPETEAM_OK);
    ropeteam_close(handle);
    return status;
  }
};

TEST_F(ConnectionTest, HelloSaysWhoIsThereAndInfoWhatCameBack) {
  const Handle handle = Open();
  const local::Hello hello = daemon_.last_hello();
  EXPECT_EQ(hello.kind, local::ClientKind::kRank);
  EXPECT_EQ(hello.rank, kRank);
  EXPECT_EQ(hello.world_size, kWorld);
  EXPECT_EQ(hello.incarnation_token, "run");
  EXPECT_NE(hello.token, 0u);
  EXPECT_GT(hello.timeout_ms, 0u);
  EXPECT_LE(hello.timeout_ms, static_cast<uint64_t>(kTimeoutMs));
  ropeteam_info_t info{};
  info.size = sizeof(info);
  ASSERT_OK(ropeteam_info(handle.get(), &info));
  EXPECT_EQ(info.rank, kRank);
  EXPECT_EQ(info.world_size, kWorld);
  EXPECT_EQ(info.incarnation, 1u);
  EXPECT_EQ(info.chunk_bytes, 65536u);
  EXPECT_EQ(info.arena_bytes, 64u * 65536);
}

// The kernel says who called listen().
TEST_F(ConnectionTest, ASocketThatAnotherUserServesIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to listen as another user";
  const std::string path = daemon_.socket() + ".impostor";
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  ASSERT_LT(path.size(), sizeof(address.sun_path));
  path.copy(address.sun_path, path.size());
  ASSERT_EQ(bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  constexpr uid_t kNobody = 65534;
  ASSERT_EQ(seteuid(kNobody), 0);
  const int listening = listen(listener, 1);
  ASSERT_EQ(seteuid(0), 0);
  ASSERT_EQ(listening, 0);
  EXPECT_FAILS(TryOpen(path), ROPETEAM_INVALID_ARGUMENT, "is served by uid 65534");
  close(listener);
  unlink(path.c_str());
}

TEST_F(ConnectionTest, AnswersThatComeInSingleBytesAreUnderstood) {
  daemon_.Configure([](FakeConfig& config) { config.byte_by_byte = true; });
  const Handle handle = Open();
  SaveOne(handle.get(), 1, RandomBytes(300000, 1));
  const ViewHandle view = OpenView(handle.get(), 1);
  EXPECT_EQ(ReadAll(view.get(), "x"), RandomBytes(300000, 1));
}

// ---- not our daemon

TEST_F(ConnectionTest, NoSocketIsUnavailable) {
  EXPECT_FAILS(TryOpen(daemon_.socket() + ".not"), ROPETEAM_UNAVAILABLE, "no daemon at the socket");
}

TEST_F(ConnectionTest, AFileIsNoSocket) {
  const std::string path = daemon_.socket() + ".file";
  std::ofstream(path) << "text";
  EXPECT_FAILS(TryOpen(path), ROPETEAM_INVALID_ARGUMENT, "is not a socket");
  ::unlink(path.c_str());
}

TEST_F(ConnectionTest, ADatagramSocketIsOfAnotherType) {
  const std::string path = daemon_.socket() + ".dgram";
  const int fd = ::socket(AF_UNIX, SOCK_DGRAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  ASSERT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_FAILS(TryOpen(path), ROPETEAM_INVALID_ARGUMENT, "another type");
  ::close(fd);
  ::unlink(path.c_str());
}

TEST_F(ConnectionTest, APathTooLongForASocketIsRefusedWithTheLimit) {
  EXPECT_FAILS(TryOpen("/tmp/" + std::string(200, 'x')), ROPETEAM_INVALID_ARGUMENT, "205 bytes, limit 107");
  EXPECT_FAILS(TryOpen(""), ROPETEAM_INVALID_ARGUMENT, "empty");
}

TEST_F(ConnectionTest, ASocketThatNobodyHoldsAnyLongerIsUnavailable) {
  const std::string path = daemon_.socket() + ".old";
  const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  ASSERT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ::close(fd);
  EXPECT_FAILS(TryOpen(path), ROPETEAM_UNAVAILABLE, "no daemon at the socket");
  ::unlink(path.c_str());
}

TEST_F(ConnectionTest, AnotherProtocolVersionIsNamedWithOurs) {
  daemon_.Configure([](FakeConfig& config) { config.hello_version = 7; });
  EXPECT_FAILS(TryOpen(daemon_.socket()), ROPETEAM_UNSUPPORTED,
               "speaks local protocol 7, this library " + std::to_string(local::kLocalProtocolVersion));
}

TEST_F(ConnectionTest, ADaemonThatRefusesOurVersionIsHeard) {
  daemon_.Configure([](FakeConfig& config) {
    config.refuse[local::Type::kHello] = {Code::kUnsupported, "this daemon speaks 2, you 1"};
  });
  EXPECT_FAILS(TryOpen(daemon_.socket()), ROPETEAM_UNSUPPORTED, "speaks 2, you 1");
}

TEST_F(ConnectionTest, GarbageIsNoDaemon) {
  daemon_.Configure([](FakeConfig& config) { config.garbage = true; });
  EXPECT_FAILS(TryOpen(daemon_.socket()), ROPETEAM_UNSUPPORTED, "is not a ropeteamd");
}

TEST_F(ConnectionTest, SilenceEndsAtTheDeadline) {
  daemon_.Configure([](FakeConfig& config) { config.silent = true; });
  const auto begin = steady_clock::now();
  EXPECT_FAILS(TryOpen(daemon_.socket(), 50), ROPETEAM_DEADLINE_EXCEEDED, "no answer from the daemon");
  EXPECT_GE(MsSince(begin), 50);
}

TEST_F(ConnectionTest, AnArenaThatCannotBeMappedIsRefused) {
  daemon_.Configure([](FakeConfig& config) { config.hello_without_descriptor = true; });
  EXPECT_FAILS(TryOpen(daemon_.socket()), ROPETEAM_INVALID_ARGUMENT, "no descriptor");
  daemon_.Configure([](FakeConfig& config) {
    config.hello_without_descriptor = false;
    config.hello_arena_bytes_extra = 1 << 20;
  });
  EXPECT_FAILS(TryOpen(daemon_.socket()), ROPETEAM_INVALID_ARGUMENT, "in a file of");
}

TEST_F(ConnectionTest, ARefusedRankHearsWhy) {
  daemon_.Configure([](FakeConfig& config) {
    config.refuse[local::Type::kHello] = {Code::kStale, "token 'a' is superseded by token 'b'"};
  });
  EXPECT_FAILS(TryOpen(daemon_.socket()), ROPETEAM_STALE, "superseded by token 'b'");
}

// ---- a daemon that dies

TEST_F(ConnectionTest, DeathWakesEveryCallThatWaits) {
  const Handle handle = Open();
  SaveOne(handle.get(), 1, "bytes");
  daemon_.Configure([](FakeConfig& config) {
    config.hold.insert(local::Type::kWait);
    config.die_at[local::Type::kLatest] = 1;
  });
  const auto begin = steady_clock::now();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      EXPECT_FAILS(ropeteam_wait(handle.get(), 1, ROPETEAM_COMMITTED, 60000), ROPETEAM_UNAVAILABLE, "daemon");
    });
  }
  EXPECT_TRUE(daemon_.WaitFor([&](const FakeCounts&) { return true; }));
  while (daemon_.Received(local::Type::kWait) < 4) std::this_thread::yield();
  ropeteam_step_t step{sizeof(step), 0, 0, 0, 0, 0};
  EXPECT_FAILS(ropeteam_latest(handle.get(), &step, 60000), ROPETEAM_UNAVAILABLE, "daemon");
  for (std::thread& thread : threads) thread.join();
  EXPECT_LT(MsSince(begin), 30000);
}

TEST_F(ConnectionTest, DeathInTheMiddleOfALongPutEndsIt) {
  const Handle handle = Open();
  SaveHandle save = Begin(handle.get(), 1, 60 * 65536, 1);
  daemon_.Configure([](FakeConfig& config) { config.die_at[local::Type::kSaveFilled] = 2; });
  const std::string bytes = RandomBytes(59 * 65536, 1);
  // The daemon may die during the put or just after it. The commit notices it at the latest.
  ropeteam_status_t status = ropeteam_save_put(save.get(), "a", bytes.data(), bytes.size());
  if (status == ROPETEAM_OK) status = ropeteam_save_commit(save.get());
  EXPECT_EQ(status, ROPETEAM_UNAVAILABLE) << ropeteam_last_error();
  EXPECT_FAILS(ropeteam_save_put(save.get(), "b", "x", 1), ROPETEAM_UNAVAILABLE, "daemon");
  EXPECT_FAILS(ropeteam_save_commit(save.get()), ROPETEAM_UNAVAILABLE, "daemon");
  // The next save connects to the new daemon, with the same token.
  const uint64_t token = daemon_.last_hello().token;
  save = Begin(handle.get(), 2, 100, 1);
  Put(save.get(), "a", "again");
  EXPECT_OK(ropeteam_save_commit(save.get()));
  EXPECT_EQ(daemon_.last_hello().token, token);
  EXPECT_EQ(daemon_.counts().connections, 2);
}

TEST_F(ConnectionTest, DeathInTheMiddleOfACommitIsUnavailable) {
  const Handle handle = Open();
  SaveHandle save = Begin(handle.get(), 1, 100, 1);
  Put(save.get(), "a", "x");
  daemon_.Configure([](FakeConfig& config) { config.die_at[local::Type::kSaveCommit] = 1; });
  EXPECT_FAILS(ropeteam_save_commit(save.get()), ROPETEAM_UNAVAILABLE, "daemon");
}

TEST_F(ConnectionTest, ASaveBeginFindsNoDaemonAtOnce) {
  const Handle handle = Open();
  daemon_.Kill();
  const auto begin = steady_clock::now();
  const ropeteam_save_options_t options{sizeof(options), 10, 1, 0};
  ropeteam_save_t* save = nullptr;
  for (int i = 0; i < 10; ++i) {
    EXPECT_FAILS(ropeteam_save_begin(handle.get(), 1, &options, &save), ROPETEAM_UNAVAILABLE, "no daemon");
  }
  EXPECT_LT(MsSince(begin), 900);
}

TEST_F(ConnectionTest, AnOpenViewFailsWithItsDaemonAndANewOneReadsTheSame) {
  const Handle handle = Open();
  SaveOne(handle.get(), 1, RandomBytes(200000, 1));
  const ViewHandle view = OpenView(handle.get(), 1);
  daemon_.Kill();
  char byte = 0;
  EXPECT_FAILS(ropeteam_view_read(view.get(), "x", 0, &byte, 1, kTimeoutMs), ROPETEAM_UNAVAILABLE, "gone");
  daemon_.Start();
  EXPECT_FAILS(ropeteam_view_read(view.get(), "x", 0, &byte, 1, kTimeoutMs), ROPETEAM_UNAVAILABLE, "gone");
  const ViewHandle next = OpenView(handle.get(), 1);
  EXPECT_EQ(ReadAll(next.get(), "x"), RandomBytes(200000, 1));
}

TEST_F(ConnectionTest, AWaitReachesADaemonThatComesBackWithinItsDeadline) {
  const Handle handle = Open();
  SaveOne(handle.get(), 1, "bytes");
  daemon_.Kill();
  EXPECT_FAILS(ropeteam_wait(handle.get(), 1, ROPETEAM_LOCAL, 0), ROPETEAM_UNAVAILABLE, "no daemon");
  std::thread waiter([&] { EXPECT_OK(ropeteam_wait(handle.get(), 1, ROPETEAM_LOCAL, kTimeoutMs)); });
  daemon_.Start();
  waiter.join();
}

TEST_F(ConnectionTest, APolicyIsSaidAgainToADaemonThatComesBack) {
  const Handle handle = Open();
  SaveOne(handle.get(), 1, "bytes");
  ropeteam_policy_t policy{sizeof(policy), 500, 0};
  EXPECT_OK(ropeteam_set_policy(handle.get(), &policy, kTimeoutMs));
  policy = {sizeof(policy), 0, 5};
  EXPECT_OK(ropeteam_set_policy(handle.get(), &policy, kTimeoutMs));
  policy.keep_on_storage = 101;
  EXPECT_FAILS(ropeteam_set_policy(handle.get(), &policy, kTimeoutMs), ROPETEAM_INVALID_ARGUMENT,
               "has set 100");
  EXPECT_EQ(daemon_.last_hello().keep_on_storage, 0u);
  daemon_.Kill();
  daemon_.Start();
  EXPECT_OK(ropeteam_wait(handle.get(), 1, ROPETEAM_LOCAL, kTimeoutMs));
  EXPECT_EQ(daemon_.last_hello().persist_every, 500u);
  EXPECT_EQ(daemon_.last_hello().keep_on_storage, 5u);
}

TEST_F(ConnectionTest, ThreadsThatReconnectTogetherMakeOneConnection) {
  const Handle handle = Open();
  SaveOne(handle.get(), 1, "bytes");
  daemon_.Kill();
  daemon_.Start();
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] { EXPECT_OK(ropeteam_wait(handle.get(), 1, ROPETEAM_LOCAL, kTimeoutMs)); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(daemon_.counts().connections, 2);
}

TEST_F(ConnectionTest, AWaitOfZeroAsksOnce) {
  const Handle handle = Open();
  SaveOne(handle.get(), 1, "bytes");
  EXPECT_OK(ropeteam_wait(handle.get(), 1, ROPETEAM_COMMITTED, 0));
  EXPECT_EQ(daemon_.last_wait().timeout_ms, 0u);
  EXPECT_EQ(daemon_.last_wait().level, 3);
}

TEST_F(ConnectionTest, ASilentDaemonIsWaitedForUntilTheDeadlineAndOneSecond) {
  const Handle handle = Open();
  SaveOne(handle.get(), 1, "bytes");
  daemon_.Configure([](FakeConfig& config) { config.silent = true; });
  const auto begin = steady_clock::now();
  EXPECT_FAILS(ropeteam_wait(handle.get(), 1, ROPETEAM_LOCAL, 100), ROPETEAM_DEADLINE_EXCEEDED, "no answer");
  EXPECT_GE(MsSince(begin), 100);
  EXPECT_LT(MsSince(begin), 5000);
  // Late answers to that call do not affect the next one.
  daemon_.Configure([](FakeConfig& config) { config.silent = false; });
  EXPECT_OK(ropeteam_wait(handle.get(), 1, ROPETEAM_LOCAL, kTimeoutMs));
}

TEST_F(ConnectionTest, ADaemonThatIsSilentAtABeginIsLeft) {
  const Handle handle = Open();
  daemon_.Configure([](FakeConfig& config) { config.hold.insert(local::Type::kSaveBegin); });
  const ropeteam_save_options_t options{sizeof(options), 10, 1, 0};
  ropeteam_save_t* save = nullptr;
  EXPECT_FAILS(ropeteam_save_begin(handle.get(), 1, &options, &save), ROPETEAM_UNAVAILABLE,
               "did not answer within 5000 ms");
  EXPECT_TRUE(daemon_.WaitFor([](const FakeCounts& counts) { return counts.disconnects == 1; }));
  // Now a begin gets no answer to its hello, which times out sooner.
  daemon_.Configure([](FakeConfig& config) { config.silent = true; });
  const auto begin = steady_clock::now();
  EXPECT_FAILS(ropeteam_save_begin(handle.get(), 1, &options, &save), ROPETEAM_UNAVAILABLE, "no answer");
  EXPECT_LT(MsSince(begin), 4000);
}

// ---- closing

TEST_F(ConnectionTest, CloseEndsTheConnectionAndLeavesOpenSavesAndViewsHarmless) {
  Handle handle = Open();
  SaveOne(handle.get(), 1, "bytes");
  SaveHandle save = Begin(handle.get(), 2, 100, 1);
  ViewHandle view = OpenView(handle.get(), 1);
  handle.reset();
  EXPECT_TRUE(daemon_.WaitFor([](const FakeCounts& counts) { return counts.disconnects == 1; }));
  EXPECT_FAILS(ropeteam_save_commit(save.get()), ROPETEAM_INVALID_ARGUMENT, "handle has been closed");
  char byte = 0;
  EXPECT_FAILS(ropeteam_view_read(view.get(), "x", 0, &byte, 1, 0), ROPETEAM_INVALID_ARGUMENT,
               "handle has been closed");
  save.reset();
  view.reset();
}

TEST_F(ConnectionTest, CloseWakesACallThatWaits) {
  const ropeteam_open_options_t options = OptionsFor(daemon_.socket());
  ropeteam_t* handle = nullptr;
  ASSERT_OK(ropeteam_open(&options, &handle));
  SaveHandle save = Begin(handle, 1, 100, 1);
  daemon_.Configure([](FakeConfig& config) { config.hold.insert(local::Type::kSaveCommit); });
  std::thread committer(
      [&] { EXPECT_FAILS(ropeteam_save_commit(save.get()), ROPETEAM_INVALID_ARGUMENT, "closed"); });
  while (daemon_.Received(local::Type::kSaveCommit) < 1) std::this_thread::yield();
  ropeteam_close(handle);
  committer.join();
}

// ---- fork

TEST_F(ConnectionTest, AForkedChildIsRefusedAndDoesNotKeepTheConnection) {
  Handle handle = Open();
  SaveOne(handle.get(), 1, "bytes");
  SaveHandle save = Begin(handle.get(), 2, 100, 1);
  ViewHandle view = OpenView(handle.get(), 1);
  int to_child[2];
  ASSERT_EQ(::pipe(to_child), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::close(to_child[1]);
    const ropeteam_save_options_t options{sizeof(options), 10, 1, 0};
    ropeteam_save_t* other = nullptr;
    char byte = 0;
    bool good = ropeteam_save_begin(handle.get(), 3, &options, &other) == ROPETEAM_INVALID_ARGUMENT;
    good = good && std::strstr(ropeteam_last_error(), "fork()") != nullptr;
    good = good && ropeteam_save_put(save.get(), "a", "x", 1) == ROPETEAM_INVALID_ARGUMENT;
    good = good && ropeteam_view_read(view.get(), "x", 0, &byte, 1, 0) == ROPETEAM_INVALID_ARGUMENT;
    ropeteam_view_close(view.get());
    ropeteam_save_close(save.get());
    ropeteam_close(handle.get());
    // Stays alive until the parent's connection has ended.
    while (::read(to_child[0], &byte, 1) < 0) {
    }
    ::_exit(good ? 0 : 1);
  }
  ::close(to_child[0]);
  // The child has not affected the parent's save.
  Put(save.get(), "a", "parent");
  EXPECT_OK(ropeteam_save_commit(save.get()));
  save.reset();
  view.reset();
  handle.reset();
  // The connection ends although the child lives and may have copies of descriptors.
  EXPECT_TRUE(daemon_.WaitFor([](const FakeCounts& counts) { return counts.disconnects == 1; }));
  ::close(to_child[1]);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  ExpectNoProblems();
}

// The rank has ended; its forked child lives on with copies of its descriptors. The daemon must notice the
// end at once.
TEST_F(ConnectionTest, AForkedChildDoesNotKeepTheConnectionOfADeadParent) {
  int to_grandchild[2];
  ASSERT_EQ(::pipe(to_grandchild), 0);
  const pid_t rank = ::fork();
  ASSERT_GE(rank, 0);
  if (rank == 0) {
    const ropeteam_open_options_t options = OptionsFor(daemon_.socket());
    ropeteam_t* handle = nullptr;
    if (ropeteam_open(&options, &handle) != ROPETEAM_OK) ::_exit(1);
    const pid_t worker = ::fork();
    if (worker == 0) {
      ::close(to_grandchild[1]);
      char byte = 0;
      ::_exit(::read(to_grandchild[0], &byte, 1) == 0 ? 0 : 1);  // until the test ends
    }
    ::_exit(worker > 0 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(rank, &status, 0), rank);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(daemon_.WaitFor([](const FakeCounts& counts) { return counts.disconnects == 1; }));
  ::close(to_grandchild[0]);
  ::close(to_grandchild[1]);
}

TEST_F(ConnectionTest, SigpipeIsNeverRaised) {
  struct sigaction before {};
  struct sigaction fatal {};
  fatal.sa_handler = SIG_DFL;
  ASSERT_EQ(::sigaction(SIGPIPE, &fatal, &before), 0);
  const Handle handle = Open();
  const SaveHandle save = Begin(handle.get(), 1, 20 * 65536, 1);
  daemon_.Kill();
  // Sends without checking first. A dead daemon holds no save, so the abort succeeds.
  EXPECT_OK(ropeteam_save_abort(save.get()));
  ::sigaction(SIGPIPE, &before, nullptr);
}

TEST_F(ConnectionTest, NothingIsWrittenByADeadDaemonsGrant) {
  const Handle handle = Open();
  const SaveHandle save = Begin(handle.get(), 1, 20 * 65536, 3);
  daemon_.Kill();
  // The next daemon may have granted these chunks to another save.
  daemon_.Start();
  const std::string bytes = RandomBytes(10 * 65536, 1);
  EXPECT_FAILS(ropeteam_save_put(save.get(), "a", bytes.data(), 100), ROPETEAM_UNAVAILABLE, "gone");
  EXPECT_FAILS(ropeteam_save_put(save.get(), "b", bytes.data(), bytes.size()), ROPETEAM_UNAVAILABLE, "gone");
  void* pointer = nullptr;
  EXPECT_FAILS(ropeteam_save_reserve(save.get(), "c", 10, &pointer), ROPETEAM_UNAVAILABLE, "gone");
  EXPECT_FAILS(ropeteam_save_commit(save.get()), ROPETEAM_UNAVAILABLE, "gone");
  EXPECT_EQ(daemon_.ChunksUntouched(), 64u);
}

// ---- the environment

class EnvironmentTest : public ApiTest {
 protected:
  ~EnvironmentTest() override {
    for (const char* name : kNames) ::unsetenv(name);
  }
  EnvironmentTest() {
    for (const char* name : kNames) ::unsetenv(name);
    ::setenv("ROPETEAM_SOCKET", daemon_.socket().c_str(), 1);
    ::setenv("RANK", "6", 1);
    ::setenv("WORLD_SIZE", "12", 1);
  }
  ropeteam_status_t OpenFromEnvironment() {
    ropeteam_open_options_t options{};
    options.size = sizeof(options);
    options.rank = ROPETEAM_RANK_FROM_ENV;
    ropeteam_t* handle = nullptr;
    const ropeteam_status_t status = ropeteam_open(&options, &handle);
    ropeteam_close(handle);
    return status;
  }
  static constexpr const char* kNames[] = {
      "ROPETEAM_SOCKET", "RANK",          "WORLD_SIZE",          "ROPETEAM_INCARNATION_TOKEN",
      "SLURM_JOB_ID",    "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID"};
};

TEST_F(EnvironmentTest, SocketRankAndWorldComeFromTheLauncher) {
  ASSERT_OK(OpenFromEnvironment());
  EXPECT_EQ(daemon_.last_hello().rank, 6u);
  EXPECT_EQ(daemon_.last_hello().world_size, 12u);
  EXPECT_EQ(daemon_.last_hello().incarnation_token, "");
}

TEST_F(EnvironmentTest, TheTokenIsRopeteamsOrSlurmsButNotSlurmsUnderTorchrun) {
  ::setenv("SLURM_JOB_ID", "77", 1);
  ::setenv("SLURM_STEP_ID", "0", 1);
  ASSERT_OK(OpenFromEnvironment());
  EXPECT_EQ(daemon_.last_hello().incarnation_token, "slurm.77.0.0");
  ::setenv("SLURM_RESTART_COUNT", "2", 1);
  ASSERT_OK(OpenFromEnvironment());
  EXPECT_EQ(daemon_.last_hello().incarnation_token, "slurm.77.0.2");
  ::setenv("TORCHELASTIC_RUN_ID", "none", 1);
  ASSERT_OK(OpenFromEnvironment());
  EXPECT_EQ(daemon_.last_hello().incarnation_token, "");
  ::setenv("ROPETEAM_INCARNATION_TOKEN", "mine", 1);
  ASSERT_OK(OpenFromEnvironment());
  EXPECT_EQ(daemon_.last_hello().incarnation_token, "mine");
}

TEST_F(EnvironmentTest, WhatIsMissingOrNoNumberIsNamed) {
  ::setenv("RANK", "6x", 1);
  EXPECT_FAILS(OpenFromEnvironment(), ROPETEAM_INVALID_ARGUMENT, "RANK is '6x'");
  ::setenv("RANK", "-1", 1);
  EXPECT_FAILS(OpenFromEnvironment(), ROPETEAM_INVALID_ARGUMENT, "RANK is '-1'");
  ::setenv("RANK", "12", 1);
  EXPECT_FAILS(OpenFromEnvironment(), ROPETEAM_INVALID_ARGUMENT, "rank 12, world_size 12");
  ::setenv("RANK", "6", 1);
  ::unsetenv("WORLD_SIZE");
  EXPECT_FAILS(OpenFromEnvironment(), ROPETEAM_INVALID_ARGUMENT, "WORLD_SIZE");
  ::setenv("WORLD_SIZE", "140000", 1);
  EXPECT_FAILS(OpenFromEnvironment(), ROPETEAM_INVALID_ARGUMENT, "world_size 140000, limits 1 and 131072");
  ::unsetenv("ROPETEAM_SOCKET");
  EXPECT_FAILS(OpenFromEnvironment(), ROPETEAM_INVALID_ARGUMENT, "ROPETEAM_SOCKET is not set");
}

}  // namespace
}  // namespace ropeteam::test

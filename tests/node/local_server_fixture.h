// SPDX-License-Identifier: Apache-2.0
//
// The daemon's side of the local protocol over a real socket and a real Engine of a job of one node. Tests
// send raw frames from the other end. There is one thread: the client's bytes are sent before the loop runs.

#ifndef ROPETEAM_TESTS_NODE_LOCAL_SERVER_FIXTURE_H_
#define ROPETEAM_TESTS_NODE_LOCAL_SERVER_FIXTURE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/bytes.h"
#include "core/store/store.h"
#include "node/local_server.h"

namespace ropeteam {

using local::Type;
using ::testing::HasSubstr;

inline constexpr TimeUs kGiveUpUs = 20'000'000;
inline constexpr uint64_t kChunk = 4096;

struct Received {
  Type type{};
  uint64_t request = 0;
  std::string payload;
};

inline std::string FrameBytes(local::Type type, uint64_t request, const std::string& payload) {
  local::FrameHeader header;
  header.type = type;
  header.request = request;
  header.length = static_cast<uint32_t>(payload.size());
  return std::string(reinterpret_cast<const char*>(&header), sizeof(header)) + payload;
}

// Does not wait: bytes that the socket does not take are lost. `descriptor` is sent along if it is not
// negative. Returns the number of bytes sent, or -1 with errno.
inline ssize_t SendBytes(int socket, std::string bytes, int descriptor = -1) {
  iovec part{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &descriptor, sizeof(int));
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

class LocalServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char path[] = "/dev/shm/ropeteam-test-XXXXXX";
    ASSERT_NE(mkdtemp(path), nullptr);
    directory_ = path;
    ASSERT_TRUE(loop_.Init().ok());
    memory_.resize(Store::MemoryFor(chunks_, kChunk) + 4096);
    void* aligned = memory_.data();
    size_t space = memory_.size();
    ASSERT_NE(std::align(4096, Store::MemoryFor(chunks_, kChunk), aligned, space), nullptr);
    const std::span<std::byte> arena(static_cast<std::byte*>(aligned), Store::MemoryFor(chunks_, kChunk));
    Result<std::unique_ptr<Store>> store = Store::Format(arena, kChunk, {"job", "node-0"});
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    store_ = std::move(*store);
    EngineConfig config;
    config.self = 7;
    config.job = "job";
    config.node = "node-0";
    engine_ = std::make_unique<Engine>(config, store_.get());
    engine_->OnLease(0, UINT64_MAX);

    LocalServer::Config server;
    server.socket_path = directory_ + "/private/s.sock";
    server.arena_fd = STDIN_FILENO;  // any descriptor: only a client maps it
    server.hello.job = "job";
    server.hello.node = "node-0";
    server.hello.chunk_bytes = kChunk;
    server.facts.version = "0.0.test";
    server.facts.node = "node-0";
    server.transport = [] { return Transport::Counters(); };
    server.device_buffers = device_buffers_;
    server.rejoin = rejoin_;
    server.drain = drain_;
    server.hello.transport = "test";
    if (off_loop_) server.off_loop = [this](auto work, auto done) { works_.emplace_back(work, done); };
    server.list_storage = [this](uint32_t steps_max, TimeUs, LocalServer::StorageListDone done) {
      listings_.emplace_back(steps_max, std::move(done));
    };
    server_ = std::make_unique<LocalServer>(
        &loop_, server, [this](const auto& input) { Drive(input); },
        [](Step) { return std::vector<ShardObjects>(); });
    ASSERT_TRUE(server_->Listen().ok());
    View view;
    view.epoch = 1;
    view.leader = 7;
    view.settings.replicas = 0;
    view.members.resize(1);
    view.members[0].id = 7;
    view.members[0].name = "node-0";
    Drive([&](Engine& engine, TimeUs now) { engine.OnView(now, view); });
  }
  void TearDown() override {
    server_.reset();
    (void)rmdir((directory_ + "/private").c_str());
    (void)rmdir(directory_.c_str());
  }

  void Drive(const std::function<void(Engine&, TimeUs)>& input) {
    input(*engine_, EventLoop::Now());
    while (!engine_->outbox().empty()) {
      const Outbox outbox = std::exchange(engine_->outbox(), Outbox());
      for (const Answer& answer : outbox.answers) server_->OnAnswer(answer);
    }
  }

  UniqueFd Connect() {
    UniqueFd socket_fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, server_->socket_path().c_str(), sizeof(address.sun_path) - 1);
    EXPECT_EQ(connect(socket_fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    return socket_fd;
  }
  // `descriptor` is sent along if it is not negative.
  static void Send(const UniqueFd& client, Type type, uint64_t request, const std::string& payload,
                   int descriptor = -1) {
    const std::string bytes = FrameBytes(type, request, payload);
    ASSERT_EQ(SendBytes(client.get(), bytes, descriptor), static_cast<ssize_t>(bytes.size()));
  }
  static std::string RankHello(uint32_t rank = 0, uint32_t world = 1) {
    local::Hello hello;
    hello.rank = rank;
    hello.world_size = world;
    hello.token = 42 + rank;
    hello.timeout_ms = 5000;
    return Encode(hello);
  }
  static std::string AdminHello() {
    local::Hello hello;
    hello.kind = local::ClientKind::kAdmin;
    return Encode(hello);
  }

  // Receives the next frame; type 0 at the end of the connection.
  Received Receive(const UniqueFd& client) {
    std::string bytes;
    const TimeUs give_up = EventLoop::Now() + kGiveUpUs;
    while (EventLoop::Now() < give_up) {
      char buffer[4096];
      const size_t wanted = bytes.size() < sizeof(local::FrameHeader)
                                ? sizeof(local::FrameHeader) - bytes.size()
                                : sizeof(local::FrameHeader) + HeaderOf(bytes).length - bytes.size();
      if (wanted == 0)
        return {HeaderOf(bytes).type, HeaderOf(bytes).request, bytes.substr(sizeof(local::FrameHeader))};
      const ssize_t count = recv(client.get(), buffer, std::min(wanted, sizeof(buffer)), 0);
      if (count > 0) bytes.append(buffer, static_cast<size_t>(count));
      if (count == 0) return {};
      if (count < 0) Turn();
    }
    ADD_FAILURE() << "no answer";
    return {};
  }
  static local::FrameHeader HeaderOf(const std::string& bytes) {
    local::FrameHeader header;
    std::memcpy(&header, bytes.data(), sizeof(header));
    return header;
  }
  local::Reply ReceiveReply(const UniqueFd& client) {
    const Received received = Receive(client);
    EXPECT_EQ(received.type, Type::kReply);
    local::Reply reply;
    EXPECT_TRUE(Decode(received.payload, reply));
    return reply;
  }
  // One turn of the loop: reads what is readable, and runs the Engine's due timers.
  void Turn() {
    loop_.SetTimer(EventLoop::Now() + 1000, [this] { loop_.Stop(); });
    loop_.Run();
    if (server_->NextTimer() <= EventLoop::Now()) server_->OnTimer(EventLoop::Now());
    if (engine_->NextTimer() <= EventLoop::Now())
      Drive([](Engine& engine, TimeUs now) { engine.OnTimer(now); });
  }

  // Of the server's configuration; before SetUp().
  DeviceBuffers* device_buffers_ = nullptr;
  uint64_t chunks_ = 64;
  bool off_loop_ = false;
  std::function<Status(const std::string& coordinator, bool force)> rejoin_;
  std::function<void(TimeUs within_us)> drain_;
  std::vector<std::pair<std::function<void()>, std::function<void()>>> works_;  // for another thread so far
  std::vector<std::pair<uint32_t, LocalServer::StorageListDone>> listings_;     // requested so far
  std::string directory_;
  EventLoop loop_;
  std::vector<std::byte> memory_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<LocalServer> server_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_TESTS_NODE_LOCAL_SERVER_FIXTURE_H_

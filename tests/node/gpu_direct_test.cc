// SPDX-License-Identifier: Apache-2.0
//
// Device memory from a rank's put to its replica on another node: libropeteam on the fake CUDA driver, its
// local sessions, two nodes with their own engines, stores and control planes, and a transport that reads the
// memory exported by the fake driver. Only the card and the GPU are simulated.

#include <sys/socket.h>
#include <sys/un.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <thread>

#include "core/base/log.h"
#include "node/node.h"
#include "tests/api/api_fixture.h"
#include "tests/api/fake_cuda.h"
#include "tests/node/dmabuf_transport.h"
#include "transport/inproc/inproc_transport.h"

namespace ropeteam {
namespace {

using test::Handle;
using test::RandomBytes;
using test::SaveHandle;
using test::ViewHandle;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

constexpr uint64_t kChunk = 64 * 1024;
constexpr uint32_t kChunks = 24;
constexpr std::chrono::seconds kGiveUp(30);
constexpr int64_t kTimeoutMs = 30000;

// Names the fake libcuda before it is first looked for.
const int set_library = ::setenv("ROPETEAM_LIBCUDA", ROPETEAM_FAKE_CUDA, 1);

template <typename Condition>
bool Eventually(Condition condition) {
  const auto give_up = std::chrono::steady_clock::now() + kGiveUp;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > give_up) return false;
    std::this_thread::yield();
  }
  return true;
}

// One node as in ropeteamd, without membership and a real fabric.
class Host {
 public:
  Host(const std::shared_ptr<InprocFabric>& fabric, const std::string& directory, uint32_t ordinal,
       bool reads_device_memory) {
    Options options;
    options.job = "job";
    options.node = "node-" + std::to_string(ordinal);
    options.ordinal = ordinal;
    options.nodes = 2;
    options.chunk_bytes = kChunk;
    options.socket = directory + "/" + options.node + ".sock";
    options.check_threads = 1;
    socket_ = options.socket;
    EXPECT_TRUE(loop_.Init().ok());
    arena_ = ArenaFile::Open({directory, options.job, options.node, 32 << 20, kChunk, false}).value();
    const auto open = [&](const FabricConfig&) -> Result<FabricChoice> {
      Result<std::unique_ptr<Transport>> transport = fabric->CreateTransport(options.node);
      if (!transport.ok()) return transport.status();
      FabricChoice choice;
      choice.transport = std::move(*transport);
      if (reads_device_memory)
        choice.transport = std::make_unique<DmabufTransport>(std::move(choice.transport), control_);
      return choice;
    };
    Result<std::unique_ptr<Node>> node = Node::Create(
        options, nullptr, &loop_, arena_.get(), [](NodeId, const std::string&) {}, open);
    EXPECT_TRUE(node.ok()) << node.status().ToString();
    node_ = std::move(*node);
    EXPECT_TRUE(node_->Listen().ok());
    thread_ = std::thread([this] { loop_.Run(); });
  }
  ~Host() {
    loop_.Stop();
    thread_.join();
    node_.reset();
    EXPECT_EQ(control_->registered(), 0u);
  }
  void OnView(const View& view) {
    loop_.Post([this, view] {
      node_->OnLease(UINT64_MAX);
      node_->OnView(view);
    });
  }
  const Member& self() const { return node_->self(); }
  const std::string& socket() const { return socket_; }
  DmabufControl& device() { return *control_; }

 private:
  std::string socket_;
  const std::shared_ptr<DmabufControl> control_ = std::make_shared<DmabufControl>();
  EventLoop loop_;
  std::unique_ptr<ArenaFile> arena_;
  std::unique_ptr<Node> node_;
  std::thread thread_;
};

class GpuDirect : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(set_library, 0);
    fake_cuda_reset();
    SetLogSink(
        [this](LogLevel, std::string_view line) {
          const std::lock_guard lock(log_mutex_);
          log_.emplace_back(line);
        },
        LogLevel::kInfo);
    char path[] = "/dev/shm/ropeteam-test-XXXXXX";  // for the arenas, too
    ASSERT_NE(mkdtemp(path), nullptr);
    directory_ = path;
  }
  void StartNodes(bool reads_device_memory = true) {
    View view;
    view.epoch = 1;
    for (uint32_t i = 0; i < 2; ++i) {
      hosts_.push_back(std::make_unique<Host>(fabric_, directory_, i, reads_device_memory));
      view.members.push_back(hosts_[i]->self());
    }
    view.leader = view.members[0].id;
    for (const auto& host : hosts_) host->OnView(view);
    for (uint32_t rank = 0; rank < 2; ++rank) handles_[rank] = Open(rank);
  }
  void TearDown() override {
    fake_cuda_reset();
    for (Handle& handle : handles_) handle.reset();
    hosts_.clear();
    for (void* pointer : allocated_) fake_cuda_free(pointer);
    std::filesystem::remove_all(directory_);
    SetLogSink(nullptr, LogLevel::kWarning);
  }

  Handle Open(uint32_t rank) {
    ropeteam_open_options_t options = test::OptionsFor(hosts_[rank]->socket(), rank);
    options.world_size = 2;
    options.timeout_ms = kTimeoutMs;
    ropeteam_t* handle = nullptr;
    EXPECT_OK(ropeteam_open(&options, &handle));
    return Handle(handle);
  }
  char* Upload(const std::string& bytes) {
    void* pointer = fake_cuda_alloc(0, bytes.size(), FAKE_CUDA_DEVICE);
    allocated_.push_back(pointer);
    fake_cuda_write(pointer, bytes.data(), bytes.size());
    return static_cast<char*>(pointer);
  }
  SaveHandle Begin(uint32_t rank, uint64_t step, uint64_t bytes) {
    const ropeteam_save_options_t options{sizeof(options), bytes, 1, 0};
    ropeteam_save_t* save = nullptr;
    EXPECT_OK(ropeteam_save_begin(handles_[rank].get(), step, &options, &save));
    return SaveHandle(save);
  }
  // Rank 0 saves the bytes at `device`. The copies to the arena wait until the network card has been told to
  // read `puts_first` chunks.
  void Save(uint64_t step, const char* device, uint64_t bytes, uint64_t puts_first) {
    const SaveHandle save = Begin(0, step, bytes);
    if (puts_first != 0) fake_cuda_hold_copies(1);
    EXPECT_OK(ropeteam_save_put_cuda(save.get(), "x", device, bytes, nullptr));
    EXPECT_TRUE(Eventually([&] { return hosts_[0]->device().puts() >= puts_first; }));
    fake_cuda_hold_copies(0);
    EXPECT_OK(ropeteam_save_commit(save.get()));
  }
  // Checks node 1's copy of rank 0's shard: rank 1 reads it there.
  void ExpectReplica(uint64_t step, const std::string& bytes) {
    EXPECT_OK(ropeteam_wait(handles_[0].get(), step, ROPETEAM_REPLICATED, kTimeoutMs));
    ropeteam_view_t* view = nullptr;
    ASSERT_OK(ropeteam_view_open(handles_[1].get(), step, 0, kTimeoutMs, &view));
    const ViewHandle open(view);
    std::string read(bytes.size(), '\0');
    EXPECT_OK(ropeteam_view_read(view, "x", 0, read.data(), read.size(), kTimeoutMs));
    EXPECT_TRUE(read == bytes);
  }
  // To the daemon this looks like the death of the rank's process.
  void CutRank(uint32_t rank) {
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      const int fd = std::atoi(entry.path().filename().c_str());
      sockaddr_un peer{};
      socklen_t length = sizeof(peer);
      if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0) continue;
      if (peer.sun_family == AF_UNIX && hosts_[rank]->socket() == peer.sun_path) shutdown(fd, SHUT_RDWR);
    }
  }
  std::vector<std::string> Log() {
    const std::lock_guard lock(log_mutex_);
    return log_;
  }

  std::mutex log_mutex_;
  std::vector<std::string> log_;
  std::string directory_;
  const std::shared_ptr<InprocFabric> fabric_ = InprocFabric::Create();
  std::vector<std::unique_ptr<Host>> hosts_;
  Handle handles_[2];
  std::vector<void*> allocated_;
};

TEST_F(GpuDirect, EveryWholeChunkGoesFromDeviceMemoryToTheReplica) {
  StartNodes();
  const std::string bytes = RandomBytes(kChunks * kChunk + 1000, 1);
  const char* device = Upload(bytes);
  Save(1, device, bytes.size(), kChunks);
  ExpectReplica(1, bytes);
  EXPECT_EQ(hosts_[0]->device().puts(), kChunks);
  for (uint64_t step = 2; step < 5; ++step) {
    Save(step, device, bytes.size(), step * kChunks);
    ExpectReplica(step, bytes);
  }
  EXPECT_EQ(hosts_[0]->device().registrations(), 1u);
  EXPECT_EQ(hosts_[0]->device().registered(), 1u);
  EXPECT_THAT(Log(), Contains(HasSubstr("device memory is put to replicas directly")));
  handles_[0].reset();
  EXPECT_TRUE(Eventually([&] { return hosts_[0]->device().registered() == 0; }));
}

TEST_F(GpuDirect, MemoryThatChangesUnderALatePutIsPutAgainFromTheArena) {
  StartNodes();
  const std::string bytes = RandomBytes(kChunks * kChunk, 2);
  char* device = Upload(bytes);
  fabric_->Hold("node-1");
  // The commit waits a second for the puts and then returns. After that the program may change the memory.
  Save(1, device, bytes.size(), 1);
  const std::string next = RandomBytes(bytes.size(), 3);
  fake_cuda_write(device, next.data(), next.size());
  fabric_->Release("node-1");
  ExpectReplica(1, bytes);
  EXPECT_THAT(Log(), Contains(AllOf(HasSubstr("did not match on node-1"), HasSubstr("from device memory"))));
}

TEST_F(GpuDirect, WhatTheCardRefusesToRegisterGoesThroughTheArenaAndTheLogSaysWhy) {
  StartNodes();
  hosts_[0]->device().Refuse(Error(Code::kIo, "device mlx5_0 refuses the dmabuf"));
  const std::string bytes = RandomBytes(kChunks * kChunk, 4);
  Save(1, Upload(bytes), bytes.size(), 0);
  ExpectReplica(1, bytes);
  EXPECT_EQ(hosts_[0]->device().registrations(), 1u);
  EXPECT_EQ(hosts_[0]->device().puts(), 0u);
  EXPECT_THAT(Log(), Contains(AllOf(HasSubstr("goes through the arena"), HasSubstr("mlx5_0 refuses"))));
}

TEST_F(GpuDirect, ATransportThatReadsNoneIsGivenNone) {
  StartNodes(/*reads_device_memory=*/false);
  const std::string bytes = RandomBytes(kChunks * kChunk, 5);
  Save(1, Upload(bytes), bytes.size(), 0);
  ExpectReplica(1, bytes);
  EXPECT_EQ(fake_cuda_count(FAKE_CUDA_EXPORTS), 0u);
}

TEST_F(GpuDirect, WhatTheCardCannotReadIsReplicatedFromTheArenaAndNotTriedAgain) {
  StartNodes();
  hosts_[0]->device().FailPuts(Code::kIo);
  const std::string bytes = RandomBytes(kChunks * kChunk, 6);
  const char* device = Upload(bytes);
  Save(1, device, bytes.size(), 1);
  ExpectReplica(1, bytes);
  hosts_[0]->device().FailPuts(Code::kOk);
  const uint64_t puts = hosts_[0]->device().puts();
  Save(2, device, bytes.size(), 0);
  ExpectReplica(2, bytes);
  EXPECT_EQ(hosts_[0]->device().puts(), puts);
  EXPECT_THAT(Log(), Contains(HasSubstr("cannot be read by the transport")));
}

TEST_F(GpuDirect, ARankThatDiesWithPutsInFlightLeavesItsMemoryToThemAndNothingElse) {
  StartNodes();
  const std::string bytes = RandomBytes(kChunks * kChunk, 7);
  char* device = Upload(bytes);
  fabric_->Hold("node-1");
  fake_cuda_hold_copies(1);
  SaveHandle save = Begin(0, 1, bytes.size());
  EXPECT_OK(ropeteam_save_put_cuda(save.get(), "x", device, bytes.size(), nullptr));
  ASSERT_TRUE(Eventually([&] { return hosts_[0]->device().puts() != 0; }));
  CutRank(0);
  ASSERT_TRUE(Eventually([&] {
    for (const std::string& line : Log())
      if (line.find("aborted: its rank has gone") != std::string::npos) return true;
    return false;
  }));
  const uint64_t puts = hosts_[0]->device().puts();
  EXPECT_EQ(hosts_[0]->device().registered(), 1u);  // the card may still be reading it
  fabric_->Release("node-1");
  EXPECT_TRUE(Eventually([&] { return hosts_[0]->device().registered() == 0; }));
  EXPECT_EQ(hosts_[0]->device().puts(), puts);  // none was begun for the dead rank
  fake_cuda_hold_copies(0);
  save.reset();
  // The next incarnation works normally.
  for (uint32_t rank = 0; rank < 2; ++rank) handles_[rank].reset();
  for (uint32_t rank = 0; rank < 2; ++rank) handles_[rank] = Open(rank);
  Save(1, device, bytes.size(), puts + kChunks);
  ExpectReplica(1, bytes);
}

TEST_F(GpuDirect, AnAbortWaitsUntilTheCardHasLetGo) {
  StartNodes();
  const std::string bytes = RandomBytes(kChunks * kChunk, 8);
  char* device = Upload(bytes);
  fake_cuda_hold_copies(1);
  const SaveHandle save = Begin(0, 1, bytes.size());
  EXPECT_OK(ropeteam_save_put_cuda(save.get(), "x", device, bytes.size(), nullptr));
  ASSERT_TRUE(Eventually([&] { return hosts_[0]->device().puts() != 0; }));
  fake_cuda_hold_copies(0);
  EXPECT_OK(ropeteam_save_abort(save.get()));
  const uint64_t puts = hosts_[0]->device().puts();
  Save(2, device, bytes.size(), puts + kChunks);
  ExpectReplica(2, bytes);
}

}  // namespace
}  // namespace ropeteam

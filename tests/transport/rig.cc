// SPDX-License-Identifier: Apache-2.0

#include "tests/transport/rig.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "tests/transport/hex.h"

extern char** environ;

#if defined(__SANITIZE_ADDRESS__)
// libfabric 1.17 leaks a stranger's connection that is still in its handshake when the endpoint closes (376
// bytes). It does not leak while the endpoint is open: after 3,000 such connections the process has the same
// size.
extern "C" __attribute__((visibility("default"))) const char* __lsan_default_suppressions() {
  return "leak:libfabric.so\n";
}
#endif

namespace ropeteam::test {
namespace {

// The eight bytes of the pattern at `word` times eight.
uint64_t PatternWord(uint32_t seed, uint64_t word) {
  uint64_t x = (word + 1) * 0x9e3779b97f4a7c15 + seed * 0xbf58476d1ce4e5b9;
  x ^= x >> 29;
  return x * 0x94d049bb133111eb;
}

// Calls `on_piece(offset, bytes, length)` for the pattern from `position` on, in pieces of up to eight bytes.
template <typename F>
bool ForPattern(uint32_t seed, uint64_t position, uint64_t length, F on_piece) {
  for (uint64_t done = 0; done < length;) {
    const uint64_t at = position + done, skew = at % 8;
    const uint64_t word = PatternWord(seed, at / 8), piece = std::min(8 - skew, length - done);
    if (!on_piece(done, reinterpret_cast<const uint8_t*>(&word) + skew, piece)) return false;
    done += piece;
  }
  return true;
}

class InprocPeer final : public RemotePeer {
 public:
  InprocPeer(std::shared_ptr<InprocFabric> fabric, Memory* memory, const std::string& peer_name)
      : fabric_(std::move(fabric)) {
    name = peer_name;
    auto made = fabric_->CreateTransport(name);
    EXPECT_TRUE(made.ok()) << made.status().ToString();
    transport_ = std::move(made).value();
    region_ = transport_->RegisterRegion(memory->data(), memory->length()).value();
    address = transport_->LocalAddress();
    key = transport_->ExportRegion(region_);
  }
  void Stop() override { fabric_->Hold(name); }
  void Continue() override { fabric_->Release(name); }
  void Kill() override {
    fabric_->Kill(name);
    transport_.reset();
  }
  void Deregister() override { EXPECT_TRUE(transport_->DeregisterRegion(region_).ok()); }
  void Bombard(const std::string&, const std::string&) override { FAIL() << "it has no loop of its own"; }

 private:
  std::shared_ptr<InprocFabric> fabric_;
  std::unique_ptr<Transport> transport_;
  RegionId region_ = 0;
};

class InprocRig final : public Rig {
 public:
  std::unique_ptr<Transport> NewTransport() override {
    return fabric_->CreateTransport("node" + std::to_string(next_++)).value();
  }
  std::unique_ptr<RemotePeer> NewPeer(Memory* memory, const std::string& name) override {
    return std::make_unique<InprocPeer>(fabric_, memory,
                                        name.empty() ? "peer" + std::to_string(next_++) : name);
  }
  bool shares_bandwidth() const override { return false; }
  bool names_refusals() const override { return true; }
  bool has_processes() const override { return false; }
  std::string describes() const override { return "inproc"; }

 private:
  std::shared_ptr<InprocFabric> fabric_ = InprocFabric::Create();
  int next_ = 0;
};

// Runs transport_test_peer as a process. It prints its address and key and takes commands on its standard
// input.
class ProcessPeer final : public RemotePeer {
 public:
  ProcessPeer(const std::string& kind, Memory* memory, const std::string& former_name) {
    int to_child[2], from_child[2];
    EXPECT_EQ(pipe2(to_child, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(from_child, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, to_child[0], 0);
    posix_spawn_file_actions_adddup2(&actions, from_child[1], 1);
    constexpr int kMemoryFd = 3;
    posix_spawn_file_actions_adddup2(&actions, memory->fd(), kMemoryFd);
    std::string arguments[] = {ROPETEAM_TEST_PEER, kind, std::to_string(memory->length()), former_name};
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    EXPECT_EQ(posix_spawn(&pid_, ROPETEAM_TEST_PEER, &actions, nullptr, argv.data(), environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(to_child[0]);
    close(from_child[1]);
    commands_ = to_child[1];
    answers_ = fdopen(from_child[0], "r");
    address = FromHex(ReadWord());
    key = FromHex(ReadWord());
    name = ReadWord();
    EXPECT_FALSE(name.empty()) << "the peer process did not start";
  }
  ~ProcessPeer() override {
    // At the end of its input the process ends by itself, and removes its files.
    if (pid_ > 0) kill(pid_, SIGCONT);
    close(commands_);
    constexpr int kTriesMax = 1'000;
    for (int i = 0; i < kTriesMax && pid_ > 0; i++) {
      if (waitpid(pid_, nullptr, WNOHANG) == pid_) pid_ = -1;
      if (pid_ > 0) usleep(1'000);
    }
    Kill();
    fclose(answers_);
  }
  void Stop() override {
    ASSERT_GT(pid_, 0);  // kill(-1, …) would stop every process
    kill(pid_, SIGSTOP);
    int status = 0;
    waitpid(pid_, &status, WUNTRACED);
  }
  void Continue() override {
    ASSERT_GT(pid_, 0);
    kill(pid_, SIGCONT);
  }
  void Kill() override {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  void Deregister() override {
    EXPECT_EQ(write(commands_, "deregister\n", 11), 11);
    EXPECT_EQ(ReadWord(), "deregistered");
  }
  void Bombard(const std::string& to_address, const std::string& to_key) override {
    const std::string command = "bombard " + ToHex(to_address) + " " + ToHex(to_key) + "\n";
    EXPECT_EQ(write(commands_, command.data(), command.size()), static_cast<ssize_t>(command.size()));
  }

 private:
  std::string ReadWord() {
    char word[4096] = "";
    return fscanf(answers_, "%4095s", word) == 1 ? word : "";
  }
  pid_t pid_ = -1;
  int commands_ = -1;
  FILE* answers_ = nullptr;
};

class ProcessRig final : public Rig {
 public:
  explicit ProcessRig(const TransportKind* kind) : kind_(kind) {}
  std::unique_ptr<Transport> NewTransport() override {
    auto made = kind_->make("");
    EXPECT_TRUE(made.ok()) << made.status().ToString();
    return std::move(made).value();
  }
  std::unique_ptr<RemotePeer> NewPeer(Memory* memory, const std::string& name) override {
    return std::make_unique<ProcessPeer>(kind_->name, memory, name);
  }
  bool cancels_one_peer() const override { return kind_->cancels_one_peer; }
  bool shares_bandwidth() const override { return kind_->shares_bandwidth; }
  bool names_refusals() const override { return kind_->names_refusals; }
  bool serves_stopped() const override { return kind_->serves_stopped; }
  bool refuses_revoked() const override { return kind_->refuses_revoked; }
  bool reconnects() const override { return kind_->reconnects; }
  bool fences() const override { return kind_->fences; }
  std::string deaf() const override { return kind_->deaf; }
  uint64_t gone_within_us() const override { return kind_->gone_within_ms * 1'000; }
  std::string describes() const override { return kind_->describes; }

 private:
  const TransportKind* const kind_;
};

}  // namespace

Memory::Memory(uint64_t length) : length_(length) {
  fd_ = memfd_create("ropeteam-test", MFD_CLOEXEC);
  EXPECT_EQ(ftruncate(fd_, static_cast<off_t>(std::max<uint64_t>(length, 1))), 0);
  void* mapped = mmap(nullptr, std::max<uint64_t>(length, 1), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  EXPECT_NE(mapped, MAP_FAILED);
  data_ = static_cast<uint8_t*>(mapped);
}

Memory::~Memory() {
  munmap(data_, std::max<uint64_t>(length_, 1));
  close(fd_);
}

void Memory::Fill(uint32_t seed) {
  ForPattern(seed, 0, length_, [this](uint64_t offset, const uint8_t* bytes, uint64_t length) {
    std::memcpy(data_ + offset, bytes, length);
    return true;
  });
}

bool Memory::Holds(uint32_t seed, uint64_t offset, uint64_t length, uint64_t source_offset) {
  const uint8_t* base = data_ + offset;
  return ForPattern(seed, source_offset, length, [base](uint64_t at, const uint8_t* bytes, uint64_t piece) {
    return std::memcmp(base + at, bytes, piece) == 0;
  });
}

bool Memory::HoldsOutside(uint32_t seed, uint64_t offset, uint64_t length) {
  return Holds(seed, 0, offset, 0) &&
         Holds(seed, offset + length, length_ - offset - length, offset + length);
}

Endpoint::Endpoint(Result<std::unique_ptr<Transport>> made, uint64_t length) : memory(length) {
  EXPECT_TRUE(made.ok()) << made.status().ToString();
  transport = std::move(made).value();
  region = transport->RegisterRegion(memory.data(), length).value();
}

void Endpoint::Meet(const Endpoint& other) {
  peer = transport->Connect(other.transport->LocalAddress()).value();
  remote = transport->ImportRegion(peer, other.transport->ExportRegion(other.region)).value();
}

std::unique_ptr<Rig> Rig::Make(const std::string& kind) {
  if (kind == "inproc") return std::make_unique<InprocRig>();
  return std::make_unique<ProcessRig>(FindKind(kind));
}

std::vector<std::string> TransportKinds() {
  const std::vector<std::string> absent = AbsentKindNames();
  std::vector<std::string> kinds = {"inproc"};
  for (const TransportKind& kind : AllKinds())
    if (std::find(absent.begin(), absent.end(), kind.name) == absent.end()) kinds.push_back(kind.name);
  return kinds;
}

std::vector<std::string> AbsentKindNames() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> found;
    for (const TransportKind& kind : AllKinds())
      if (!kind.absent().empty()) found.push_back(kind.name);
    return found;
  }();
  return names;
}

bool PollUntil(Rig* rig, const std::vector<Transport*>& transports, Completions* completions,
               const std::function<bool()>& done, uint64_t limit_ms) {
  const uint64_t end = NowUs() + limit_ms * 1000;
  while (!done()) {
    if (NowUs() > end) return false;
    for (Transport* transport : transports) {
      Completion batch[64];
      const size_t count = transport->Poll(batch, 64);
      if (completions != nullptr) {
        auto& list = (*completions)[transport];
        list.insert(list.end(), batch, batch + count);
      }
    }
    if (rig != nullptr) rig->PollPeers();
  }
  return true;
}

bool InGuest() { return getenv("SOFT_ROCE") != nullptr; }

int RdmaObjects(const std::string& kind) {
  FILE* pipe = popen(("rdma resource show " + kind + " 2>/dev/null").c_str(), "r");
  if (pipe == nullptr) return -1;
  const std::string mine = " pid " + std::to_string(getpid()) + " ";
  char line[512];
  int count = 0, lines = 0;
  for (; fgets(line, sizeof line, pipe) != nullptr; lines++)
    if (std::string(line).find(mine) != std::string::npos) count++;
  pclose(pipe);
  return lines == 0 ? -1 : count;
}

uint64_t NowUs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000 + static_cast<uint64_t>(now.tv_nsec) / 1'000;
}

uint64_t MemoryAvailable() {
  std::ifstream file("/proc/meminfo");
  std::string word;
  uint64_t kib = 0;
  while (file >> word)
    if (word == "MemAvailable:") file >> kib;
  return kib * 1024;
}

}  // namespace ropeteam::test

// SPDX-License-Identifier: Apache-2.0
//
// A peer process for the transport tests. It listens, registers the shared memory at descriptor 3, prints
// "address key name" (the first two in hex), and makes progress as a daemon does.
//
//   transport_test_peer KIND LENGTH NAME
//
// On its standard input:
//   deregister            releases the region and answers "deregistered"
//   bombard ADDRESS KEY   (in hex) from now on puts the whole region to that region, again and again; if the
//                         peer is gone, connects again
// The process ends at the end of its input.

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>

#include "tests/transport/hex.h"
#include "tests/transport/kinds.h"

namespace {

using ropeteam::Completion;
using ropeteam::OperationKind;
using ropeteam::Transport;
using ropeteam::test::FromHex;
using ropeteam::test::ToHex;

constexpr int kMemoryFd = 3;
constexpr uint64_t kPutsAtATime = 4;

// Carries out "bombard". Loop thread only, except Aim().
class Bombardment {
 public:
  Bombardment(Transport* transport, ropeteam::RegionId region, uint64_t length)
      : transport_(transport), region_(region), length_(length) {}

  // Any thread.
  void Aim(const std::string& address, const std::string& key) {
    const std::lock_guard lock(mutex_);
    address_ = address;
    key_ = key;
  }
  void Step() {
    const std::lock_guard lock(mutex_);
    if (address_.empty() || disconnecting_) return;
    if (peer_ == 0) {
      peer_ = transport_->Connect(address_).value();
      remote_ = transport_->ImportRegion(peer_, key_).value();
    }
    for (; outstanding_ < kPutsAtATime; outstanding_++)
      if (!transport_->Put(peer_, region_, 0, remote_, 0, length_, 0).ok()) return;
  }
  void OnCompletion(const Completion& completion) {
    if (completion.kind == OperationKind::kDisconnect) {
      peer_ = 0;
      disconnecting_ = false;
      return;
    }
    outstanding_--;
    if (completion.code != ropeteam::Code::kPeerGone || disconnecting_) return;
    disconnecting_ = true;
    transport_->Disconnect(peer_);
  }

 private:
  Transport* const transport_;
  const ropeteam::RegionId region_;
  const uint64_t length_;
  std::mutex mutex_;
  std::string address_, key_;  // guarded by mutex_
  ropeteam::PeerId peer_ = 0;
  ropeteam::RemoteRegionId remote_ = 0;
  uint64_t outstanding_ = 0;
  bool disconnecting_ = false;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const ropeteam::test::TransportKind* kind = ropeteam::test::FindKind(argv[1]);
  if (kind == nullptr) return 2;
  const uint64_t length = std::strtoull(argv[2], nullptr, 10);
  void* memory = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, kMemoryFd, 0);
  if (memory == MAP_FAILED) return 3;
  auto made = kind->make(argv[3]);
  if (!made.ok()) {
    fprintf(stderr, "%s\n", made.status().ToString().c_str());
    return 4;
  }
  Transport& transport = **made;
  const ropeteam::RegionId region = transport.RegisterRegion(memory, length).value();
  printf("%s %s %s\n", ToHex(transport.LocalAddress()).c_str(), ToHex(transport.ExportRegion(region)).c_str(),
         kind->name_of(transport).c_str());
  fflush(stdout);

  Bombardment bombardment(&transport, region, length);
  std::atomic<bool> ended{false};
  std::thread commands([&] {
    char line[4096], address[2048], key[2048];
    while (fgets(line, sizeof line, stdin) != nullptr) {
      if (sscanf(line, "bombard %2047s %2047s", address, key) == 2) {
        bombardment.Aim(FromHex(address), FromHex(key));
        transport.Wake();
      }
      if (std::strcmp(line, "deregister\n") != 0) continue;
      const bool done = transport.DeregisterRegion(region).ok();
      printf("%s\n", done ? "deregistered" : "failed");
      fflush(stdout);
    }
    ended = true;
    transport.Wake();
  });
  while (!ended) {
    bombardment.Step();
    Completion completions[16];
    const size_t count = transport.Poll(completions, 16);
    for (size_t i = 0; i < count; i++) bombardment.OnCompletion(completions[i]);
    if (count == 0) transport.Wait(UINT64_MAX);
  }
  commands.join();
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
//
// A peer process for the transport tests: listens, registers the shared memory that it finds at descriptor 3,
// prints "address key name" (the first two in hex), and makes progress the way a daemon does, until it is
// killed.
//
//   transport_test_peer KIND LENGTH NAME
//
// On its standard input: "deregister" gives the region up and answers "deregistered"; the end of it ends the
// process.

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "tests/transport/kinds.h"

namespace {

constexpr int kMemoryFd = 3;

void PrintHex(const std::string& bytes) {
  for (char c : bytes) printf("%02x", static_cast<unsigned>(static_cast<uint8_t>(c)));
  printf(" ");
}

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
  ropeteam::Transport& transport = **made;
  const ropeteam::RegionId region = transport.RegisterRegion(memory, length).value();
  PrintHex(transport.LocalAddress());
  PrintHex(transport.ExportRegion(region));
  printf("%s\n", kind->name_of(transport).c_str());
  fflush(stdout);

  std::atomic<bool> ended{false};
  std::thread commands([&] {
    char line[64];
    while (fgets(line, sizeof line, stdin) != nullptr) {
      if (std::strcmp(line, "deregister\n") != 0) continue;
      const bool done = transport.DeregisterRegion(region).ok();
      printf("%s\n", done ? "deregistered" : "failed");
      fflush(stdout);
    }
    ended = true;
    transport.Wake();
  });
  while (!ended) {
    ropeteam::Completion completions[16];
    if (transport.Poll(completions, 16) == 0) transport.Wait(UINT64_MAX);
  }
  commands.join();
  return 0;
}

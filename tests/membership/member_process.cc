// SPDX-License-Identifier: Apache-2.0
//
// One member as a process of its own. standalone_test and standalone_bench kill, stop and restart it:
//   member_process ADDRESS NAME ORDINAL ID EXPECTED [embed]
// ADDRESS is the coordinator's address or etcd's URL.
// It prints one line per event: "listening" once started, "registered", "view EPOCH MEMBERS" and "members
// MEMBERS", "refused CODE". After "refused stale" it rejoins with its id + 1. At the end of its input it
// prints "cpu MICROSECONDS", the processor time since its first view, and ends in good order.

#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "membership/etcd/etcd.h"
#include "membership/membership.h"
#include "tests/membership/standalone_cluster.h"

namespace ropeteam {
namespace {

long CpuUs() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1'000'000 + usage.ru_utime.tv_usec +
         usage.ru_stime.tv_usec;
}

int Run(int argc, char** argv) {
  if (argc < 6) return 2;
  MembershipConfig config = StandaloneConfig(argv[1]);
  config.nodes_expected = static_cast<uint32_t>(std::atoi(argv[5]));
  if (argc > 6 && std::strcmp(argv[6], "embed") == 0) config.coordinator_listen = argv[1];
  Member self = StandaloneMember(argv[2], static_cast<uint32_t>(std::atoi(argv[3])),
                                 std::strtoull(argv[4], nullptr, 10));
  std::atomic<long> cpu_at_first_view{-1};
  std::unique_ptr<Membership> membership;
  if (const Result<EtcdConfig> etcd = ParseEtcdUrl(argv[1]); etcd.ok()) {
    config.coordinator_addresses.clear();
    config.coordinator_listen = OwnHost() + ":0";
    membership = CreateEtcdMembership(config, *etcd);
  } else {
    membership = CreateStandaloneMembership(config);
  }
  Membership::Callbacks callbacks;
  callbacks.on_view = [&](const View& view) {
    if (cpu_at_first_view == -1) cpu_at_first_view = CpuUs();
    std::printf("view %llu %zu\n", static_cast<unsigned long long>(view.epoch), view.members.size());
    std::printf("members %zu\n", view.members.size());
    std::fflush(stdout);
  };
  callbacks.on_contact = [&](const Contact& contact) {
    if (contact.registered) std::printf("registered\n");
    std::fflush(stdout);
  };
  callbacks.on_refused = [&](const Status& status) {
    std::printf("refused %s\n", CodeName(status.code()));
    std::fflush(stdout);
    if (status.code() != Code::kStale) return;
    ++self.id;
    if (Status rejoined = membership->Rejoin(self); !rejoined.ok())
      std::printf("%s\n", rejoined.ToString().c_str());
  };
  if (Status status = membership->Start(self, callbacks); !status.ok()) {
    std::printf("%s\n", status.ToString().c_str());
    return 1;
  }
  std::printf("listening\n");
  std::fflush(stdout);
  char byte = 0;
  while (read(STDIN_FILENO, &byte, 1) > 0) {
  }
  std::printf("cpu %ld\n", CpuUs() - cpu_at_first_view);
  std::fflush(stdout);
  membership->Stop();
  return 0;
}

}  // namespace
}  // namespace ropeteam

int main(int argc, char** argv) { return ropeteam::Run(argc, argv); }

// SPDX-License-Identifier: Apache-2.0
//
// A member of a job over tcp that gets every chunk of another member, and then tries to put a few bytes into each. It has
// the job's key, so it may do what an attacker may do who has taken over a member's data connection:
//
//   grasping_member JOB KEY_FILE COORDINATOR DATA_TRANSPORT CHUNK_BYTES CHUNKS VICTIM OUTPUT [put]
//
// VICTIM is a node's name. The chunks that were read are written to the file OUTPUT, at their places; the others are
// zeros there. With `put` it puts bytes of 0xee. It prints "read CHUNK" and "written CHUNK" for each chunk that it
// reached, and "done".

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "membership/credentials/credentials.h"
#include "membership/credentials/job_key.h"
#include "membership/membership.h"
#include "node/data_plane.h"
#include "transport/tcp/tcp_transport.h"

namespace ropeteam {
namespace {

constexpr NodeId kSelf = 0x6a5b;
constexpr uint64_t kPutBytes = 8;

class Grasp {
 public:
  Grasp(uint64_t chunk_bytes, uint64_t chunks)
      : chunk_bytes_(chunk_bytes), memory_(chunk_bytes * chunks), plane_(MakePlane(memory_)) {
    DataPlane::Callbacks callbacks;
    callbacks.on_done = [this](const std::vector<TransferDone>& done) {
      const std::lock_guard lock(mutex_);
      for (const TransferDone& each : done) done_[each.tag] = each.code;
      changed_.notify_all();
    };
    callbacks.on_fenced = [](NodeId) {};
    callbacks.on_link = [](NodeId, bool, const std::string&) {};
    plane_->Start(std::move(callbacks));
  }

  const std::string& address() const { return plane_->address(); }
  std::vector<std::byte>& memory() { return memory_; }
  void OnView(const View& view) {
    std::vector<Member> others;
    for (const Member& member : view.members)
      if (member.id != kSelf) others.push_back(member);
    plane_->SetMembers(others);
    const std::lock_guard lock(mutex_);
    view_ = view;
    changed_.notify_all();
  }
  NodeId WaitFor(const std::string& name) {
    std::unique_lock lock(mutex_);
    for (;; changed_.wait(lock)) {
      if (!view_) continue;
      for (const Member& member : view_->members)
        if (member.name == name) return member.id;
    }
  }
  // The codes of all chunks. The victim may learn of this member later than this one of the victim.
  std::vector<Code> Try(NodeId victim, bool get, uint64_t length) {
    std::vector<Code> codes;
    for (uint64_t at = 0; at < memory_.size(); at += chunk_bytes_) {
      Code code = Code::kPeerGone;
      while (code == Code::kPeerGone || code == Code::kLinkFailed) {
        const uint64_t tag = ++tag_;
        plane_->Submit({{tag, victim, get, at, at, length, 0}});
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return done_.contains(tag); });
        code = done_.at(tag);
        if (code == Code::kPeerGone) usleep(10'000);
      }
      codes.push_back(code);
    }
    return codes;
  }

 private:
  static std::unique_ptr<DataPlane> MakePlane(std::vector<std::byte>& memory) {
    return DataPlane::Create(CreateTcpTransport({}).value(), memory, 0).value();
  }

  const uint64_t chunk_bytes_;
  std::vector<std::byte> memory_;
  const std::unique_ptr<DataPlane> plane_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, Code> done_;
  std::optional<View> view_;
  uint64_t tag_ = 0;
};

void Print(const char* what, const std::vector<Code>& codes) {
  for (size_t chunk = 0; chunk < codes.size(); ++chunk) {
    if (codes[chunk] == Code::kOk) std::printf("%s %zu\n", what, chunk);
    if (codes[chunk] != Code::kOk && codes[chunk] != Code::kInvalidArgument)
      std::printf("failed %zu %s\n", chunk, CodeName(codes[chunk]));
  }
}

int Run(int argc, char** argv) {
  if (argc < 9) return 2;
  const std::string job = argv[1];
  const uint64_t chunk_bytes = std::strtoull(argv[5], nullptr, 10);
  Grasp grasp(chunk_bytes, std::strtoull(argv[6], nullptr, 10));
  MembershipConfig config;
  config.job = job;
  config.credentials =
      Credentials::FromJobKey(ReadOrMakeJobKeyFile(argv[2]).value(), job, "grasping", argv[2]).value();
  config.coordinator_addresses = {argv[3]};
  config.protocol_version = kProtocolVersion;
  config.protocol_oldest = kProtocolOldest;
  config.chunk_bytes = chunk_bytes;
  config.data_transport = argv[4];
  Member self;
  self.id = kSelf;
  self.name = "grasping";
  self.ordinal = 99;
  self.control_address = "127.0.0.1:9";  // nobody listens there
  self.data_address = grasp.address();
  const std::unique_ptr<Membership> membership = CreateStandaloneMembership(config);
  Membership::Callbacks callbacks;
  callbacks.on_view = [&](const View& view) { grasp.OnView(view); };
  callbacks.on_refused = [](const Status& status) {
    std::printf("refused: %s\n", status.ToString().c_str());
    std::exit(1);
  };
  if (Status status = membership->Start(self, callbacks); !status.ok()) {
    std::printf("%s\n", status.ToString().c_str());
    return 1;
  }
  const NodeId victim = grasp.WaitFor(argv[7]);
  Print("read", grasp.Try(victim, true, chunk_bytes));
  std::ofstream(argv[8], std::ios::binary)
      .write(reinterpret_cast<const char*>(grasp.memory().data()),
             static_cast<std::streamsize>(grasp.memory().size()));
  if (argc > 9 && std::strcmp(argv[9], "put") == 0) {
    std::fill(grasp.memory().begin(), grasp.memory().end(), std::byte{0xee});
    Print("written", grasp.Try(victim, false, kPutBytes));
  }
  std::printf("done\n");
  membership->Stop();
  return 0;
}

}  // namespace
}  // namespace ropeteam

int main(int argc, char** argv) { return ropeteam::Run(argc, argv); }

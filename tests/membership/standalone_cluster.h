// SPDX-License-Identifier: Apache-2.0
//
// Real members over gRPC on loopback, in this process and in others. Tests can wait for a condition with a
// deadline instead of only for time to pass.

#ifndef ROPETEAM_TESTS_MEMBERSHIP_STANDALONE_CLUSTER_H_
#define ROPETEAM_TESTS_MEMBERSHIP_STANDALONE_CLUSTER_H_

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "membership/membership.h"

namespace ropeteam {

// A loopback host of this process only, and an unused port on it.
std::string OwnHost(int number = 1);
std::string FreeAddress();

MembershipConfig StandaloneConfig(const std::string& address);
Member StandaloneMember(const std::string& name, uint32_t ordinal, NodeId id);

// A member in this process that records its callbacks.
class TestMember {
 public:
  TestMember(const MembershipConfig& config, const Member& self)
      : TestMember(CreateStandaloneMembership(config), self) {}
  TestMember(std::unique_ptr<Membership> membership, const Member& self)
      : self_(self), membership_(std::move(membership)) {}
  ~TestMember() { Stop(); }

  Status Start();
  void Stop() { membership_->Stop(); }
  Membership& membership() { return *membership_; }
  const Member& self() const { return self_; }

  // False: it did not become true in time. `condition` sees the last view (epoch 0 before the first).
  bool WaitFor(const std::function<bool(const View&)>& condition, int ms = kWaitMs);
  bool WaitForNames(const std::vector<std::string>& names, int ms = kWaitMs);
  bool WaitForRefusal(Status* status, int ms = kWaitMs);
  bool WaitForLease(const std::function<bool(TimeUs valid_until)>& condition, int ms = kWaitMs);
  bool HasLease();
  View LastView();
  size_t ViewCount();
  // Whether epochs grew, and every view contained its leader and this member.
  bool orderly();

  // Far more than any operation should take, so a slow machine is not a failure.
  static constexpr int kWaitMs = 20'000;

 private:
  const Member self_;
  std::unique_ptr<Membership> membership_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<View> views_;
  std::vector<Status> refusals_;
  TimeUs lease_until_ = 0;
  bool orderly_ = true;
};

// A member in a process of its own (member_process.cc).
class MemberProcess {
 public:
  MemberProcess(const std::string& address, const std::string& name, uint32_t ordinal, NodeId id,
                uint32_t expected, bool embed = false);
  ~MemberProcess();  // Kill()

  void Signal(int signal);
  void Kill();  // SIGKILL, and reaped
  // Ends it in good order and returns the "cpu" that it reports, in microseconds; -1: it reported none.
  long Finish();
  // Waits until it has printed a line with this prefix.
  bool WaitForLine(const std::string& prefix, int ms = TestMember::kWaitMs);

 private:
  void Collect();

  pid_t pid_ = -1;
  int input_ = -1;
  int output_ = -1;
  std::thread collector_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> lines_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_TESTS_MEMBERSHIP_STANDALONE_CLUSTER_H_

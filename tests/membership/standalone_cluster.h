// SPDX-License-Identifier: Apache-2.0
//
// Real members over gRPC on loopback, in this process and in others, for tests that wait for what they
// expect, with a deadline, and never just for time to pass.

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

// A loopback host of this process's own, and a port on it that nobody else has.
std::string OwnHost(int number = 1);
std::string FreeAddress();

MembershipConfig StandaloneConfig(const std::string& address);
Member StandaloneMember(const std::string& name, uint32_t ordinal, NodeId id);

// A member in this process that remembers what it was told.
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

  // False when it does not become true in time. `condition` sees the last view (epoch 0 before the first).
  bool WaitFor(const std::function<bool(const View&)>& condition, int ms = kWaitMs);
  bool WaitForNames(const std::vector<std::string>& names, int ms = kWaitMs);
  bool WaitForRefusal(Status* status, int ms = kWaitMs);
  bool WaitForLease(const std::function<bool(TimeUs valid_until)>& condition, int ms = kWaitMs);
  bool HasLease();
  View LastView();
  size_t ViewCount();
  // Of the views, as they came: whether epochs grew and every view had this member.
  bool orderly();

  // Far more than anything should take, so that a slow machine is not a failure.
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
  // Ends it in order and returns the "cpu" it reports, in microseconds; -1 when it did not.
  long Finish();
  // Until it has said a line that begins so.
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

// SPDX-License-Identifier: Apache-2.0
//
// Registers more memory than the process may lock, on every transport in this build. If a device pins memory,
// the error says how much is needed, the limit and what to set. If nothing is pinned, the limit does not
// matter.

#include <gmock/gmock.h>
#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/transport/rig.h"

namespace ropeteam::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kLimitBytes = kMiB, kRegionBytes = 16 * kMiB;

// Until the end of the scope, this thread may lock only kLimitBytes and lacks the privilege to lock more.
class LockedMemoryLimit {
 public:
  LockedMemoryLimit() {
    getrlimit(RLIMIT_MEMLOCK, &old_limit_);
    rlimit low = old_limit_;
    low.rlim_cur = kLimitBytes;
    Capabilities(SYS_capget, old_);
    __user_cap_data_struct without[2] = {old_[0], old_[1]};
    without[0].effective &= ~(1u << CAP_IPC_LOCK);
    lowered_ = setrlimit(RLIMIT_MEMLOCK, &low) == 0 && Capabilities(SYS_capset, without);
  }
  ~LockedMemoryLimit() {
    setrlimit(RLIMIT_MEMLOCK, &old_limit_);
    Capabilities(SYS_capset, old_);
  }
  bool lowered() const { return lowered_; }

 private:
  static bool Capabilities(long call, __user_cap_data_struct* data) {
    __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
    return syscall(call, &header, data) == 0;
  }
  rlimit old_limit_{};
  __user_cap_data_struct old_[2] = {};
  bool lowered_ = false;
};

class LockedMemoryTest : public testing::TestWithParam<std::string> {};

TEST_P(LockedMemoryTest, BeyondTheLimitTheMessageSaysWhatToSet) {
  auto rig = Rig::Make(GetParam());
  auto transport = rig->NewTransport();
  Memory memory(kRegionBytes);
  Result<RegionId> region = Error(Code::kInternal, "not tried");
  {
    const LockedMemoryLimit limit;
    if (!limit.lowered())
      GTEST_SKIP() << "the locked-memory limit cannot be set to " << kLimitBytes << " bytes";
    region = transport->RegisterRegion(memory.data(), memory.length());
  }
  if (!transport->capabilities().rdma) {
    EXPECT_TRUE(region.ok()) << region.status().ToString();
    return;
  }
  ASSERT_FALSE(region.ok());
  EXPECT_EQ(region.status().code(), Code::kNoSpace);
  EXPECT_THAT(
      region.status().message(),
      AllOf(HasSubstr("register 16777216 bytes"), HasSubstr("is 1048576 bytes"), HasSubstr("needed are "),
            HasSubstr("ulimit -l unlimited"), HasSubstr("LimitMEMLOCK=infinity")));
  EXPECT_EQ(transport->counters().registrations, 0u);
  const auto again = transport->RegisterRegion(memory.data(), memory.length());
  EXPECT_TRUE(again.ok()) << again.status().ToString();
}

INSTANTIATE_TEST_SUITE_P(Every, LockedMemoryTest, testing::ValuesIn(TransportKinds()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace ropeteam::test

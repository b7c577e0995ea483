// SPDX-License-Identifier: Apache-2.0
//
// A file system that fails on request.

#ifndef ROPETEAM_TESTS_STORAGE_POSIX_FAULTS_H_
#define ROPETEAM_TESTS_STORAGE_POSIX_FAULTS_H_

#include <array>
#include <functional>
#include <memory>
#include <mutex>

#include "storage/posix/syscalls.h"

namespace ropeteam::storage::test {

enum class Call {
  kCreate,  // openat() with O_CREAT
  kMakeFolder,
  kUnlink,
  kRename,
  kLink,
  kSyncFile,
  kSyncFolder,
  kClose,
  kReserve,
  kWrite,
  kRead,
  kWriteBack,
  kCount
};
const char* NameOf(Call call);

// Must outlive the sinks over it. Thread-safe.
class Faults {
 public:
  explicit Faults(posix::Syscalls below = posix::RealSyscalls()) : below_(std::move(below)) {}
  posix::Syscalls calls();

  // From the `skip`th call of this kind on, `times` calls fail with `error`.
  void Fail(Call call, int error, int skip = 0, int times = 1 << 30);
  // From the `skip`th of all counted calls on, nothing takes effect, as if the process had been killed.
  void DieAfter(int skip);
  void Heal();
  // Whether a fault has happened since the last Heal().
  bool struck() const;
  // Replaces every write or read that does not fail.
  using Move = std::function<ssize_t(int fd, const iovec* pieces, int count, off_t at)>;
  void ReplaceWrites(Move write);
  void ReplaceReads(Move read);

 private:
  struct Rule {
    int error = 0, skip = 0, times = 0;
  };
  int ErrorOf(Call call);

  const posix::Syscalls below_;
  mutable std::mutex mutex_;
  std::array<Rule, static_cast<size_t>(Call::kCount)> rules_{};
  int dies_after_ = -1;
  bool struck_ = false;
  Move write_, read_;
};

}  // namespace ropeteam::storage::test

#endif  // ROPETEAM_TESTS_STORAGE_POSIX_FAULTS_H_

// SPDX-License-Identifier: Apache-2.0
//
// A directory for a test, and posix sinks over it with replaceable system calls.

#ifndef ROPETEAM_TESTS_STORAGE_POSIX_PLACE_H_
#define ROPETEAM_TESTS_STORAGE_POSIX_PLACE_H_

#include <memory>
#include <string>
#include <vector>

#include "storage/posix/syscalls.h"
#include "tests/storage/conformance.h"

namespace ropeteam::storage::test {

inline constexpr size_t kTestPage = 20;  // entries per page of List()

class PosixPlace final : public SinkPlace {
 public:
  // A directory below `parent`; empty: the tests' usual place.
  explicit PosixPlace(posix::Syscalls calls = posix::RealSyscalls(), const std::string& parent = "");
  ~PosixPlace() override;
  Result<std::unique_ptr<Sink>> Open() override;
  std::vector<std::string> Everything() override;
  const std::string& path() const { return path_; }

 private:
  const posix::Syscalls calls_;
  std::string path_;
};

}  // namespace ropeteam::storage::test

#endif  // ROPETEAM_TESTS_STORAGE_POSIX_PLACE_H_

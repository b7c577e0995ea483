// SPDX-License-Identifier: Apache-2.0
//
// The suite that every sink passes: conformance_test.cc holds what storage/sink.h promises, and nothing that only one
// store does. A kind of sink is added by one SinkKind in a file of the sink's own test folder,
//
//     const bool registered = RegisterSinkKind({.name = "s3", .make = …});
//
// and a test binary made of that file, conformance.cc and conformance_test.cc.

#ifndef ROPETEAM_TESTS_STORAGE_CONFORMANCE_H_
#define ROPETEAM_TESTS_STORAGE_CONFORMANCE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "storage/sink.h"

namespace ropeteam::storage::test {

// A fresh and empty place (a directory, a bucket of a server of its own) which is gone with this object.
class SinkPlace {
 public:
  virtual ~SinkPlace() = default;
  // Every call opens one more sink of the same place, as another process would. Sinks do not outlive the place.
  virtual Result<std::unique_ptr<Sink>> Open() = 0;
  // The names of all files that the store holds here, unfinished ones too. An upload that has begun may count or not.
  virtual std::vector<std::string> Everything() = 0;
};

struct SinkKind {
  std::string name;  // of the tests: "posix_tmpfs"
  // Why it cannot run on this machine, for a printed skip; empty: it can.
  std::function<std::string()> absent = [] { return std::string(); };
  std::function<std::unique_ptr<SinkPlace>()> make;
  uint64_t part_bytes = 64 << 10;  // a part size that the store takes as it is; S3: 5 MiB
  size_t page_files = 1000;        // so many files may fit on one page of List(); one more may not
  bool put_if_absent = true;       // false: Put(kIfAbsent) answers kUnsupported
  bool resumes = true;             // Has() knows what a destroyed Upload has put
  bool checks_whole = true;        // Finish() compares the checksum of the whole file
  bool keeps_folders = true;       // a folder stays after its last file, until DeleteFolder()
};

inline void PrintTo(const SinkKind& kind, std::ostream* out) { *out << kind.name; }

// At static initialisation. Always true.
bool RegisterSinkKind(SinkKind kind);
const std::vector<SinkKind>& SinkKinds();

}  // namespace ropeteam::storage::test

#endif  // ROPETEAM_TESTS_STORAGE_CONFORMANCE_H_

// SPDX-License-Identifier: Apache-2.0
//
// The suite that every sink passes: conformance_test.cc tests the promises of storage/sink.h, and nothing
// that is particular to one store. To add a kind of sink, register a SinkKind in a file of the sink's own
// test folder,
//
//     const bool registered = RegisterSinkKind({.name = "s3", .make = …});
//
// and build a test binary from that file, conformance.cc and conformance_test.cc.

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

// A new, empty place (a directory, a bucket of a server of its own). It is removed with this object.
class SinkPlace {
 public:
  virtual ~SinkPlace() = default;
  // Opens one more sink of the same place, as another process would. Sinks must not outlive the place.
  virtual Result<std::unique_ptr<Sink>> Open() = 0;
  // The names of all files that the store holds here, including unfinished ones. A begun upload may be listed
  // or not.
  virtual std::vector<std::string> Everything() = 0;
};

struct SinkKind {
  std::string name;  // in test names: "posix_tmpfs"
  // Why it cannot run on this machine, for a printed skip; empty: it can.
  std::function<std::string()> absent = [] { return std::string(); };
  std::function<std::unique_ptr<SinkPlace>()> make;
  uint64_t part_bytes = 64 << 10;  // a part size that the store does not change; S3: 5 MiB
  size_t page_files = 1000;        // the most files that one page of List() may have
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

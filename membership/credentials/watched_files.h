// SPDX-License-Identifier: Apache-2.0
//
// Certificate files that may be replaced while they are in use. gRPC's own file watcher uses files without a check: a key
// that does not belong to the certificate, or a file that is missing for a moment, ends the identity in use. So gRPC watches
// two memory files instead, and a thread copies the operator's files there once they have been checked.
//
// The memory files are never closed. gRPC destroys its watcher on a thread of its own, some time after its last user,
// and the watcher names the files by descriptor number. Once a number is closed, it may become a pipe or a directory,
// and grpc_load_file() of gRPC 1.51 aborts the process when it loads one. The next WatchedFiles takes over the files
// of one that ended: a process has as many pairs as it had WatchedFiles at the same time.

#ifndef ROPETEAM_MEMBERSHIP_CREDENTIALS_WATCHED_FILES_H_
#define ROPETEAM_MEMBERSHIP_CREDENTIALS_WATCHED_FILES_H_

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "membership/credentials/tls_files.h"

namespace ropeteam {

class WatchedFiles {
 public:
  // Reads and checks the files; they are looked at again every `interval`. Errors as ReadTlsFiles(), and kIo.
  static Result<std::unique_ptr<WatchedFiles>> Open(const TlsFiles& files,
                                                    std::chrono::milliseconds interval);
  ~WatchedFiles();  // ends the thread

  // Certificate and private key in one, and the roots: paths below /proc/self, which can be read as long as the process
  // runs. After this object they keep their last contents, until another WatchedFiles fills them.
  std::string identity_path() const { return PathOf(memory_.identity); }
  std::string roots_path() const { return PathOf(memory_.roots); }
  // "certificate of node-3 expires 2027-01-31", of those in use. Any thread.
  std::string Describe() const;

  WatchedFiles(const WatchedFiles&) = delete;
  WatchedFiles& operator=(const WatchedFiles&) = delete;

 private:
  struct Stamp {  // of a file, to tell that it was replaced
    uint64_t inode = 0;
    int64_t seconds = 0, nanoseconds = 0, bytes = 0;
    friend bool operator==(const Stamp&, const Stamp&) = default;
  };
  using Stamps = std::array<Stamp, 3>;
  struct MemoryFile {
    int fd = -1;
    size_t bytes = 0;
  };
  struct MemoryFiles {
    MemoryFile identity, roots;
  };
  struct Spares;

  explicit WatchedFiles(const TlsFiles& files);
  static std::string PathOf(const MemoryFile& file) { return "/proc/self/fd/" + std::to_string(file.fd); }
  static Status Fill(MemoryFile* file, const char* name, std::string text);
  Stamps Look() const;
  Status Take(CheckedTls checked);
  void Watch(std::chrono::milliseconds interval);
  void WarnOfExpiry();

  const TlsFiles files_;
  MemoryFiles memory_;
  Stamps stamps_;
  std::chrono::steady_clock::time_point warned_at_{};

  mutable std::mutex mutex_;
  std::condition_variable ending_;
  bool end_ = false;                                  // guarded by mutex_
  CheckedTls in_use_;                                 // guarded by mutex_; without the PEM texts
  std::chrono::steady_clock::time_point taken_at_{};  // guarded by mutex_
  std::thread thread_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_CREDENTIALS_WATCHED_FILES_H_

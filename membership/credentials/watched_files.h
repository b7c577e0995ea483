// SPDX-License-Identifier: Apache-2.0
//
// Certificate files that may be replaced during use. gRPC's own file watcher uses files without a check: a key that
// does not belong to the certificate, or a file that is missing for a moment, ends the identity in use. So gRPC watches
// two memory files instead. A thread checks the operator's files and then copies them there.
//
// The memory files are never closed. gRPC destroys its watcher on its own thread, some time after the last use, and the
// watcher refers to the files by descriptor number. A closed number may become a pipe or a directory, and
// grpc_load_file() of gRPC 1.51 aborts the process if it loads one. The next WatchedFiles takes over the files of an
// ended one, so a process has as many pairs as it had WatchedFiles at the same time.

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
  // Reads and checks the files, now and again every `interval`. Errors as ReadTlsFiles(), and kIo.
  static Result<std::unique_ptr<WatchedFiles>> Open(const TlsFiles& files,
                                                    std::chrono::milliseconds interval);
  ~WatchedFiles();  // ends the thread

  // The certificate and private key in one file, and the roots. The paths are below /proc/self and readable as long as
  // the process runs. After this object ends, they keep their last contents until another WatchedFiles fills them.
  std::string identity_path() const { return PathOf(memory_.identity); }
  std::string roots_path() const { return PathOf(memory_.roots); }
  // "certificate of node-3 expires 2027-01-31", for those in use. Any thread.
  std::string Describe() const;

  WatchedFiles(const WatchedFiles&) = delete;
  WatchedFiles& operator=(const WatchedFiles&) = delete;

 private:
  struct Stamp {  // of a file, to detect its replacement
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

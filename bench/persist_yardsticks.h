// SPDX-License-Identifier: Apache-2.0
//
// What writing to storage and coming back from it is measured against: dd of the same bytes with the same flags, and a
// client of S3 that others have made, against the same server. Not thread-safe; failures throw BenchError.

#ifndef ROPETEAM_BENCH_PERSIST_YARDSTICKS_H_
#define ROPETEAM_BENCH_PERSIST_YARDSTICKS_H_

#include <cstdint>
#include <string>

#include "bench/child.h"
#include "bench/measure.h"

namespace ropeteam::bench {

// A new directory in `parent`, removed at the end with all that is in it.
class ScratchDirectory {
 public:
  explicit ScratchDirectory(const std::string& parent);
  ~ScratchDirectory();
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// "ext4", "tmpfs", …; a number in hex for what is rarer.
std::string FileSystemOf(const std::string& directory);

// dd without the page cache and with an fsync() at the end where it writes. Returns the seconds that dd itself says.
double DdWriteSeconds(const std::string& from, const std::string& to);
double DdReadSeconds(const std::string& from);

// The source tree around this program, or `given`: the server and the client of S3 are parts of it.
class S3Tools {
 public:
  explicit S3Tools(const std::string& given);
  // Why they cannot run; empty when they can.
  const std::string& lacking() const { return lacking_; }
  std::string python() const { return root_ + "/.venv/bin/python"; }
  std::string server() const { return root_ + "/tests/storage/s3/server/strict_s3.py"; }
  std::string client() const { return root_ + "/bench/persist_client.py"; }

 private:
  std::string root_;
  std::string lacking_;
};

// The strict server of the tests with one bucket. Sets the key pair in this process's environment.
class S3Server {
 public:
  enum class Kind {
    kKeep,     // what it is sent
    kDiscard,  // verify it and forget it
    kElsewhere  // the same, and leave this machine's processors to whoever wants them, as a server elsewhere does
  };
  S3Server(const S3Tools& tools, Kind kind);
  // For --storage.
  std::string url() const;
  const std::string& port() const { return port_; }

 private:
  Child child_;
  std::string port_;
};

class S3Client {
 public:
  // Moves the bytes of `file`, which lies in memory.
  S3Client(const S3Tools& tools, const S3Server& server, const std::string& file,
           const std::string& checksum);
  double PutSeconds() { return Ask("put yardstick"); }
  // Of what was put; `check` compares it, off the clock.
  double GetSeconds(bool check) { return Ask(check ? "get yardstick check" : "get yardstick"); }

 private:
  double Ask(const std::string& command);
  Child child_;
};

// A copy of the bytes in /dev/shm: a file that is read at the speed of memory.
class MemoryFile {
 public:
  explicit MemoryFile(const Buffer& bytes);
  const std::string& path() const { return path_; }

 private:
  ScratchDirectory directory_;
  std::string path_;
};

}  // namespace ropeteam::bench

#endif  // ROPETEAM_BENCH_PERSIST_YARDSTICKS_H_

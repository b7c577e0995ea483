// SPDX-License-Identifier: Apache-2.0
//
// The baselines of writing to storage and restoring from it: dd of the same bytes with the same flags, and a
// third-party S3 client with the same server. Not thread-safe; failures throw BenchError.

#ifndef ROPETEAM_BENCH_PERSIST_YARDSTICKS_H_
#define ROPETEAM_BENCH_PERSIST_YARDSTICKS_H_

#include <cstdint>
#include <string>

#include "bench/child.h"
#include "bench/measure.h"

namespace ropeteam::bench {

// A new directory in `parent`, removed with its content by the destructor.
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

// "ext4", "tmpfs", …; for others the type's number in hex.
std::string FileSystemOf(const std::string& directory);

// Run dd without the page cache; a write ends with fsync(). Return the seconds that dd prints.
double DdWriteSeconds(const std::string& from, const std::string& to);
double DdReadSeconds(const std::string& from);

// The S3 server and client of the source tree `given`; empty: of the tree around this program.
class S3Tools {
 public:
  explicit S3Tools(const std::string& given);
  // Why they cannot run; empty if they can.
  const std::string& lacking() const { return lacking_; }
  std::string python() const { return root_ + "/.venv/bin/python"; }
  std::string server() const { return root_ + "/tests/storage/s3/server/strict_s3.py"; }
  std::string client() const { return root_ + "/bench/persist_client.py"; }

 private:
  std::string root_;
  std::string lacking_;
};

// The tests' strict S3 server, with one bucket. Sets the key pair in this process's environment.
class S3Server {
 public:
  enum class Kind {
    kKeep,      // keep objects
    kDiscard,   // verify objects, then discard them
    kElsewhere  // as kDiscard, but run only on idle processors, to resemble a server on another machine
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
  // Uploads and downloads the bytes of `file`, which is in memory.
  S3Client(const S3Tools& tools, const S3Server& server, const std::string& file,
           const std::string& checksum);
  double PutSeconds() { return Ask("put yardstick"); }
  // Gets the object that was put; `check` compares its bytes, outside the measured time.
  double GetSeconds(bool check) { return Ask(check ? "get yardstick check" : "get yardstick"); }

 private:
  double Ask(const std::string& command);
  Child child_;
};

// A copy of the bytes in a file in /dev/shm, which is read at the speed of memory.
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

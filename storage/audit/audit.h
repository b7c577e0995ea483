// SPDX-License-Identifier: Apache-2.0
//
// One JSON line for every file that was written to storage or deleted there:
//
//     {"time":"2026-11-22T11:00:00Z","event":"write","job":"train","name":"train/step-…/rank-00000.safetensors",
//      "bytes":1052672,"crc32c":"0000abcd","cause":"persist","node":"node-0"}
//
//     event       cause
//     write       persist: a shard's file · manifest · damaged: the mark of a step in which damage was found
//     delete      what the sink was wrapped for: retention
//     abort       unfinished: uploads that were begun and never finished; `files` is their number, `name` the folder
//
// A call whose answer was lost has "outcome":"unknown". An existing file that is used has no line.

#ifndef ROPETEAM_STORAGE_AUDIT_AUDIT_H_
#define ROPETEAM_STORAGE_AUDIT_AUDIT_H_

#include <memory>
#include <mutex>
#include <string>

#include "core/base/status.h"
#include "storage/sink.h"

namespace ropeteam::storage {

// Thread-safe. Several processes may append to one file: a line is one write.
class AuditLog {
 public:
  // Creates the file if it is missing, and appends to it. An error has the path and the system's reason.
  static Result<std::shared_ptr<AuditLog>> Open(const std::string& path, std::string job, std::string node);
  ~AuditLog();

  struct Entry {
    const char* event = "";
    const char* cause = "";
    std::string name;  // below the sink's URL
    std::string more;  // JSON members, each with a comma before it
    Status status;
  };
  // Writes nothing if the call had no effect. A line that cannot be written is lost. The first lost line is logged, and
  // again the first one after a successful write.
  void Add(const Entry& entry);

  AuditLog(const AuditLog&) = delete;
  AuditLog& operator=(const AuditLog&) = delete;

 private:
  AuditLog(int fd, std::string path, std::string job, std::string node);
  const int fd_;
  const std::string path_, job_, node_;
  std::mutex mutex_;
  bool torn_ = false;  // the last line is not whole; guarded by mutex_
  bool told_ = false;  // the loss of lines was logged; guarded by mutex_
};

// Forwards to `below`, and records writes and deletions in `log`. `deleted`: the cause of deletions, a literal.
std::unique_ptr<Sink> AuditedSink(std::shared_ptr<Sink> below, std::shared_ptr<AuditLog> log,
                                  const char* deleted);

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_AUDIT_AUDIT_H_

// SPDX-License-Identifier: Apache-2.0
//
// A Sink is a store of files for committed steps: a directory, or a bucket of an object store. It handles files by
// their names below its URL, and has no notion of steps, shards or checkpoints. Its callers decide which files exist
// and when they count. An unfinished file is never visible under its name. There are no transactions over several
// files.
//
// A sink does not: cache, compress, limit the rate, access a caller's memory from its own threads, or decide which
// files are deleted.
//
// Calls block until they are done or until their deadline. Many calls may run at the same time, from any thread, unless
// noted otherwise. A sink retries transient errors (a 503, a reset connection) within the deadline, with growing,
// jittered pauses. So a returned error was already retried, and the caller decides whether to try again later. A posix
// call that does not return from the kernel (a dead NFS server) runs past its deadline: callers must not wait for such
// a thread.
//
// Codes: kNotFound: no such file. kAlreadyExists: see PutMode. kNoSpace: the disk or quota is full. kInvalidArgument: a
// name or a size outside the rules, here or of the store. kCorrupt: the bytes do not match the checksum. kUnavailable,
// kLinkFailed, kDeadlineExceeded: transient. kIo: the operating system or the store refused this process, perhaps until
// an operator changes something (no rights, expired credentials, no such bucket, a read error of the disk); it says
// nothing about the file's bytes. kAborted: Stop() was called. kUnsupported: this store cannot do that. The message has
// the file's name in the store (a path, an s3:// URL), and what was refused and by whom.

#ifndef ROPETEAM_STORAGE_SINK_H_
#define ROPETEAM_STORAGE_SINK_H_

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"

namespace ropeteam::storage {

using Deadline = std::chrono::steady_clock::time_point;

// A file's bytes are gathered from memory and scattered to it, without a copy in between. The memory belongs to the
// caller. The sink reads or writes it only during the call.
struct Piece {
  const std::byte* data = nullptr;
  size_t bytes = 0;
};
struct Target {
  std::byte* data = nullptr;
  size_t bytes = 0;
  // If not null, it is set to the CRC32C of the bytes when the call returns kOk. The sink computes it while it copies
  // them to `data`, so they are not read from memory again.
  uint32_t* crc32c = nullptr;
};

inline constexpr size_t kFileNameBytesMax = 900;  // S3's keys have 1,024 bytes; the rest is for the prefix
inline constexpr size_t kFileNamePartBytesMax = 255;   // between two slashes: NAME_MAX of Linux file systems
inline constexpr mode_t kFileModeDefault = 0640;       // of new files, where the store is a directory
inline constexpr uint64_t kPutBytesMax = 64ull << 20;  // of Put(): the rest goes in parts
// The most parts of an upload: S3's limit.
inline constexpr uint32_t kPartsMax = 10000;

// kInvalidArgument: the name is empty, absolute or too long, has a part that is empty, "." or "..", or has a control
// character. Every name is checked here first.
Status CheckFileName(std::string_view name);

struct FileInfo {
  std::string name;  // below the sink's URL, as given to the put
  uint64_t bytes = 0;
  std::optional<uint32_t> crc32c;  // of the whole file, if the store keeps one
};

// One page of the direct contents of a folder, in no particular order.
struct ListPage {
  std::vector<FileInfo> files;       // without crc32c
  std::vector<std::string> folders;  // names below the sink's URL, without a slash at the end
  // On the first page: names of files that Read() and Stat() do not see, because they are being written in place, or their
  // writer died meanwhile. An older file of that name may have been there before. Stores that never write in place have none.
  std::vector<std::string> unfinished;
  std::string next;  // for the next page; empty: this is the last one
};

enum class PutMode : uint8_t {
  kReplace = 0,
  kIfAbsent = 1,  // kAlreadyExists, and nothing is written, where a file of this name is
};

// A large file during its writing. It is not visible under its name before Finish() has returned kOk. If Finish() fails
// with kDeadlineExceeded, kLinkFailed or kUnavailable, it may be visible; Stat() shows it.
//
// The file is cut into part_count() parts of part_bytes() each, the last one shorter. Parts may be put in any order and
// in parallel, each from its own thread. Call Finish() and Abort() only when no PutPart() is running. Destroying an
// Upload leaves its parts on the store, for the next Begin() with the same name and size.
class Upload {
 public:
  virtual ~Upload() = default;

  uint64_t part_bytes() const { return part_bytes_; }
  uint32_t part_count() const {
    return bytes_ == 0 ? 1 : static_cast<uint32_t>((bytes_ + part_bytes_ - 1) / part_bytes_);
  }
  uint64_t PartLength(uint32_t index) const {
    const uint64_t begin = index * part_bytes_;
    return bytes_ - begin < part_bytes_ ? bytes_ - begin : part_bytes_;
  }

  // An earlier attempt, possibly of another process, has already put this part with this checksum.
  virtual bool Has(uint32_t index, uint32_t crc32c) const = 0;
  // `pieces` are the part's bytes. `crc32c` is their checksum from the time when they left the program that made them.
  // The store checks it if it can, otherwise the sink does. kCorrupt: the bytes in memory, or those that arrived,
  // differ. kNotFound: another process has aborted this upload; begin again.
  virtual Status PutPart(uint32_t index, std::span<const Piece> pieces, uint32_t crc32c,
                         Deadline deadline) = 0;
  // Every part must have been put, or Has() must have been true for it. After kOk the file is durable: it survives a
  // power loss of its machine. `crc32c`: of the whole file, checked by the store if it can. Replaces a file of this
  // name.
  virtual Status Finish(uint32_t crc32c, Deadline deadline) = 0;
  // Removes all its parts.
  virtual Status Abort(Deadline deadline) = 0;

  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

 protected:
  Upload(uint64_t bytes, uint64_t part_bytes) : bytes_(bytes), part_bytes_(part_bytes) {}
  const uint64_t bytes_;
  const uint64_t part_bytes_;
};

class Sink {
 public:
  virtual ~Sink() = default;  // no call may be running

  // One line for messages: "s3://bucket/prefix at https://…, region …, credentials of …"; it has no secret.
  virtual std::string Describe() const = 0;

  // `part_bytes_wanted` is rounded to a size that the store accepts (S3: 5 MiB to 5 GiB, and at most kPartsMax of
  // them).
  virtual Result<std::unique_ptr<Upload>> Begin(const std::string& name, uint64_t bytes,
                                                uint64_t part_bytes_wanted, Deadline deadline) = 0;
  // Puts a small file in one piece; durable after kOk. With kIfAbsent, at most one of several writers gets kOk. A
  // writer that gets kDeadlineExceeded, kLinkFailed or kUnavailable may have succeeded: read the file to find out.
  virtual Status Put(const std::string& name, std::string_view bytes, PutMode mode, Deadline deadline) = 0;
  // Fills all targets from `offset` on. kCorrupt: the file ends before that.
  virtual Status Read(const std::string& name, uint64_t offset, std::span<const Target> targets,
                      Deadline deadline) = 0;
  virtual Result<FileInfo> Stat(const std::string& name, Deadline deadline) = 0;
  // A missing folder is an empty one. `folder` "": the URL itself. `page`: ListPage::next, or empty.
  virtual Result<ListPage> List(const std::string& folder, const std::string& page, Deadline deadline) = 0;
  // kOk also if the file does not exist.
  virtual Status Delete(const std::string& name, Deadline deadline) = 0;
  // Removes the folder and the folders in it, if the store has folders and no file is left in them. Otherwise does
  // nothing.
  virtual Status DeleteFolder(const std::string& folder, Deadline deadline) = 0;
  // Aborts unfinished uploads of files in this folder and below that were begun more than `age` ago. Returns their
  // number.
  virtual Result<uint64_t> AbortUploads(const std::string& folder, std::chrono::seconds age,
                                        Deadline deadline) = 0;

  // Sets a function that is called before the next few bytes of an upload are read from the caller's memory, on the
  // reading thread, with their number. It may block for a while to let more urgent work go first; this counts against
  // the call's deadline. Set it once, before the first upload. A sink without large uploads may ignore it.
  using Yield = std::function<void(size_t bytes)>;
  virtual void SetYield(Yield yield) { (void)yield; }

  // Running and later calls return kAborted soon. For the end of the process.
  virtual void Stop() = 0;

  Sink(const Sink&) = delete;
  Sink& operator=(const Sink&) = delete;

 protected:
  Sink() = default;
};

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_SINK_H_

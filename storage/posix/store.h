// SPDX-License-Identifier: Apache-2.0
//
// The state shared by all calls of one posix sink: the directory and the access to folders below it, the capabilities
// of its file system, the messages for its errors, and a bounded number of buffers for bytes that O_DIRECT cannot use
// in place.

#ifndef ROPETEAM_STORAGE_POSIX_STORE_H_
#define ROPETEAM_STORAGE_POSIX_STORE_H_

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "storage/posix/syscalls.h"
#include "storage/sink.h"

namespace ropeteam::storage::posix {

// Bytes between two checks of the deadline and Stop(), and of one system call. Several calls in flight keep a disk or a
// network at full speed, and delay a save by only 2 or 3 ms.
inline constexpr size_t kIoBytesMax = 1 << 20;
// A buffer for bytes that O_DIRECT cannot use in place, one per call. A sink has this many; a call that needs one more
// waits. 16 MiB: two sinks of one process stay below 32 MiB.
inline constexpr size_t kBounceBytes = 2 << 20;
inline constexpr size_t kBouncesMax = 8;
// Parts begin at multiples of this, so that O_DIRECT can write each of them. File systems that want more are written
// through the page cache.
inline constexpr size_t kPartAlignment = 4096;
// A shorter run is copied together with its neighbours: a system call costs more than the copy.
inline constexpr size_t kDirectRunMin = 64 << 10;
// Entries in a page of List(): 1 to 3 MB of names. Each page reads the folder once.
inline constexpr size_t kListPageEntries = 10'000;

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.Release()) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd() { Reset(); }
  int get() const { return fd_; }
  bool ok() const { return fd_ >= 0; }
  int Release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  void Reset();

 private:
  int fd_ = -1;
};

// Detected at the first write, with a test file in the root.
struct Abilities {
  bool rename = false;
  bool random_writes = false;  // at any offset, in any order
  bool link = false;
  bool rename_noreplace = false;
  bool locks = false;  // flock() keeps two uploads of this machine apart
};

class Store {
 public:
  Store(std::string root, Syscalls calls, size_t list_page_entries, mode_t file_mode);

  // The directory is there. Called once, first.
  Status Open();
  const Syscalls& calls() const { return calls_; }
  const std::string& root() const { return root_; }
  mode_t file_mode() const { return file_mode_; }
  // Whoever may read files may enter folders.
  mode_t folder_mode() const { return file_mode_ | (file_mode_ & 0444) >> 2; }
  size_t list_page_entries() const { return list_page_entries_; }
  std::string PathOf(std::string_view name) const { return root_ + "/" + std::string(name); }
  std::string Describe() const;

  // kAborted after Stop(), kDeadlineExceeded; `what` names the operation and the file.
  Status Check(Deadline deadline, const char* what, std::string_view name) const;
  void Stop();
  void SetYield(Sink::Yield yield) { yield_ = std::move(yield); }
  void Yield(size_t bytes) const {
    if (yield_) yield_(bytes);
  }
  bool stopped() const { return stopped_; }

  // Opens the folder; with `make`, creates all missing folders on the path. kNotFound: it, or one above, does not exist
  // or is a file. kUnavailable: the root does not exist, or is on another kind of file system than at Open().
  Result<Fd> OpenFolder(std::string_view folder, bool make) const;
  // Makes the folder and all folders above it, up to the root, durable.
  Status SyncFolders(std::string_view folder) const;

  // `name`: of the file that is to be written, for messages.
  Result<Abilities> FindAbilities(Deadline deadline, std::string_view name);
  // A file that counts has no marker: this is checked only if files may be written in place.
  bool may_write_in_place() const { return may_write_in_place_; }
  bool fuse() const { return fuse_; }
  DirectAlignment DirectAlignmentOf(int fd) const;
  bool direct_refused() const { return direct_refused_; }
  void RefuseDirect() { direct_refused_ = true; }

  // An error of the file system as a Status. `what`: "write", `path` as PathOf().
  Status Refused(int error, const char* what, const std::string& path) const;
  // kNoSpace with the numbers.
  Status NoSpace(int fd, uint64_t bytes, int error, const std::string& path) const;

  // An aligned buffer of kBounceBytes; waits for one.
  class Bounce {
   public:
    Bounce() = default;
    Bounce(Store* store, std::byte* data) : store_(store), data_(data) {}
    Bounce(Bounce&& other) noexcept : store_(other.store_), data_(other.data_) { other.data_ = nullptr; }
    Bounce& operator=(Bounce&& other) noexcept {
      std::swap(store_, other.store_);
      std::swap(data_, other.data_);
      return *this;
    }
    ~Bounce() {
      if (data_ != nullptr) store_->Return(data_);
    }
    std::byte* data() const { return data_; }

   private:
    Store* store_ = nullptr;
    std::byte* data_ = nullptr;
  };
  Result<Bounce> TakeBounce(Deadline deadline, const std::string& path);
  ~Store();

 private:
  Result<Fd> OpenRoot() const;
  int OpenBelow(int root, const std::string& folder) const;
  Result<Fd> MakeFolders(int root, const std::string& folder) const;
  Result<Abilities> Probe() const;
  void Return(std::byte* data);

  const std::string root_;
  const Syscalls calls_;
  const size_t list_page_entries_;
  const mode_t file_mode_;
  Sink::Yield yield_;
  std::atomic<bool> stopped_{false};
  std::atomic<bool> direct_refused_{false};
  std::atomic<bool> may_write_in_place_{false};
  mutable std::atomic<bool> has_openat2_{true};
  bool fuse_ = false;
  long type_ = 0;

  mutable std::mutex probe_mutex_;
  std::condition_variable probed_;
  bool probing_ = false;
  std::optional<Abilities> abilities_;

  std::mutex bounce_mutex_;
  std::condition_variable bounce_returned_;
  std::vector<std::byte*> bounces_;  // the free ones
  size_t bounces_made_ = 0;
};

// Recognises `errno` values that mean "this call does not exist here".
bool IsUnsupported(int error);

}  // namespace ropeteam::storage::posix

#endif  // ROPETEAM_STORAGE_POSIX_STORE_H_

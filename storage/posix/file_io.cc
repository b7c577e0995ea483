// SPDX-License-Identifier: Apache-2.0
#include "storage/posix/file_io.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "core/base/checksum.h"

namespace ropeteam::storage::posix {
namespace {

constexpr int kVectorMax = 64;  // of one pwritev(); IOV_MAX is 1,024 and takes 16 KiB of stack
// The pause after EAGAIN, which is temporary. Calls are repeated until the deadline.
constexpr std::chrono::milliseconds kAgainPause{5};
// After this many short direct writes, the rest is written without O_DIRECT.
constexpr int kShortDirectMax = 8;

// A position in a sequence of pieces or targets.
template <typename P>
class Walk {
 public:
  explicit Walk(std::span<const P> all) : all_(all) { Skip(); }
  bool done() const { return index_ == all_.size(); }
  const P& current() const { return all_[index_]; }
  auto data() const { return all_[index_].data + used_; }
  size_t run() const { return all_[index_].bytes - used_; }
  void Take(size_t bytes) {
    used_ += bytes;
    Skip();
  }
  // Sets `vector` to the next runs, at most `bytes_max` bytes.
  size_t Gather(iovec* vector, int* count, size_t bytes_max) const {
    size_t bytes = 0, used = used_;
    *count = 0;
    for (size_t i = index_; i < all_.size() && *count < kVectorMax && bytes < bytes_max; ++i, used = 0) {
      const size_t length = std::min(all_[i].bytes - used, bytes_max - bytes);
      if (length == 0) continue;
      vector[(*count)++] = {const_cast<std::byte*>(all_[i].data + used), length};
      bytes += length;
    }
    return bytes;
  }

 private:
  void Skip() {
    while (index_ < all_.size() && used_ == all_[index_].bytes) {
      ++index_;
      used_ = 0;
    }
  }
  std::span<const P> all_;
  size_t index_ = 0, used_ = 0;
};

size_t Down(size_t value, size_t alignment) { return value - value % alignment; }

bool FitsDirect(const void* data, size_t bytes, const DirectAlignment& alignment) {
  return reinterpret_cast<uintptr_t>(data) % alignment.memory == 0 && bytes >= kDirectRunMin;
}

// Advances `vector` by `bytes`.
void Advance(iovec** vector, int* count, size_t bytes) {
  while (bytes > 0) {
    const size_t step = std::min(bytes, (*vector)->iov_len);
    (*vector)->iov_base = static_cast<std::byte*>((*vector)->iov_base) + step;
    (*vector)->iov_len -= step;
    bytes -= step;
    if ((*vector)->iov_len == 0) {
      ++*vector;
      --*count;
    }
  }
}

class Mover {
 public:
  Mover(Store* store, OpenFile* file, Deadline deadline)
      : store_(*store), file_(*file), deadline_(deadline) {}

  bool direct() const { return file_.direct.ok() && !store_.direct_refused(); }
  Status Check(const char* what) const {
    if (store_.stopped()) return Error(Code::kAborted, "%s %s: this process stops", what, file_.path.c_str());
    if (std::chrono::steady_clock::now() > deadline_)
      return Error(Code::kDeadlineExceeded, "%s %s: the deadline has passed", what, file_.path.c_str());
    return OkStatus();
  }

  // Handles a call that failed with `error`. kOk: repeat the call, with O_DIRECT if `direct` is still true.
  Status Again(int error, const char* what, bool* direct) {
    if (error == EINTR) return OkStatus();
    if (error == EAGAIN) {
      ROPETEAM_RETURN_IF_ERROR(Check(what));
      std::this_thread::sleep_for(kAgainPause);
      return OkStatus();
    }
    if (!*direct || (error != EINVAL && error != EOPNOTSUPP)) return store_.Refused(error, what, file_.path);
    // The file system accepts O_DIRECT at open but not here. This sink does not use it again.
    store_.RefuseDirect();
    *direct = false;
    return OkStatus();
  }

  // Writes all bytes, also if the kernel accepts only some of them at a time.
  Status WriteAll(bool direct, iovec* vector, int count, size_t bytes, uint64_t at) {
    for (int short_writes = 0; bytes > 0;) {
      ssize_t written = store_.calls().pwritev((direct ? file_.direct : file_.plain).get(), vector, count,
                                               static_cast<off_t>(at));
      if (written < 0) {
        const int error = errno;
        if (error == ENOSPC || error == EDQUOT)
          return store_.NoSpace(file_.plain.get(), bytes, error, file_.path);
        ROPETEAM_RETURN_IF_ERROR(Again(error, "write", &direct));
        continue;
      }
      if (direct && static_cast<size_t>(written) < bytes) {
        // A short direct write may end inside a block. The next write must begin at the block's start.
        written = static_cast<ssize_t>(Down(static_cast<size_t>(written), file_.alignment.offset));
        if (++short_writes == kShortDirectMax) direct = false;
      } else if (written == 0) {
        return Error(Code::kIo, "write %s: the file system accepted none of %zu bytes at %llu",
                     file_.path.c_str(), bytes, static_cast<unsigned long long>(at));
      }
      Advance(&vector, &count, static_cast<size_t>(written));
      bytes -= static_cast<size_t>(written);
      at += static_cast<uint64_t>(written);
    }
    return OkStatus();
  }
  Status WriteAll(bool direct, const std::byte* data, size_t bytes, uint64_t at) {
    iovec one = {const_cast<std::byte*>(data), bytes};
    return WriteAll(direct, &one, 1, bytes, at);
  }

  // Reads at least `needed` bytes, fewer only at the end of the file. `bytes` is the size of the buffers.
  Result<size_t> ReadAll(bool direct, iovec* vector, int count, size_t bytes, size_t needed, uint64_t at) {
    size_t done = 0;
    while (done < needed) {
      ssize_t got = store_.calls().preadv((direct ? file_.direct : file_.plain).get(), vector, count,
                                          static_cast<off_t>(at + done));
      if (got < 0) {
        ROPETEAM_RETURN_IF_ERROR(Again(errno, "read", &direct));
        continue;
      }
      if (got == 0) break;
      // After a short direct read at an unaligned end, the rest is read through the page cache.
      if (direct && static_cast<size_t>(got) < bytes - done) direct = false;
      Advance(&vector, &count, static_cast<size_t>(got));
      done += static_cast<size_t>(got);
    }
    return done;
  }

  // Starts to write this window to disk, waits for the previous window, and drops that from the page cache.
  Status WriteBack(uint64_t at, size_t bytes) {
    if (bytes > 0) ROPETEAM_RETURN_IF_ERROR(Flush(at, bytes, SYNC_FILE_RANGE_WRITE));
    if (behind_bytes_ > 0) {
      ROPETEAM_RETURN_IF_ERROR(
          Flush(behind_at_, behind_bytes_,
                SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER));
      posix_fadvise(file_.plain.get(), static_cast<off_t>(behind_at_), static_cast<off_t>(behind_bytes_),
                    POSIX_FADV_DONTNEED);
    }
    behind_at_ = at;
    behind_bytes_ = bytes;
    return OkStatus();
  }

 private:
  Status Flush(uint64_t at, size_t bytes, unsigned flags) {
    if (store_.calls().sync_file_range(file_.plain.get(), static_cast<off_t>(at), static_cast<off_t>(bytes),
                                       flags) == 0)
      return OkStatus();
    const int error = errno;
    // These errors may be ignored, because fsync() comes at the end. Other errors must be returned: the
    // kernel reports a failed write only once.
    if (IsUnsupported(error) || error == ESPIPE || error == EINTR) return OkStatus();
    file_.lost = true;
    if (error == ENOSPC || error == EDQUOT)
      return store_.NoSpace(file_.plain.get(), bytes, error, file_.path);
    return store_.Refused(error, "write back", file_.path);
  }

  Store& store_;
  OpenFile& file_;
  const Deadline deadline_;
  uint64_t behind_at_ = 0;
  size_t behind_bytes_ = 0;
};

// Fills the buffer from the walk, until it is full or the next run can be written from its own memory.
size_t Fill(std::byte* buffer, Walk<Piece>* walk, const DirectAlignment& alignment, uint32_t* crc) {
  size_t filled = 0;
  do {
    const size_t bytes = std::min(walk->run(), kBounceBytes - filled);
    *crc = CopyCrc32c(buffer + filled, walk->data(), bytes, *crc);
    filled += bytes;
    walk->Take(bytes);
  } while (filled < kBounceBytes && !walk->done() &&
           !(filled % alignment.offset == 0 && FitsDirect(walk->data(), walk->run(), alignment)));
  return filled;
}

}  // namespace

void AddDirect(const Store& store, int folder, const char* base, int flags, OpenFile* file) {
  file->alignment = store.DirectAlignmentOf(file->plain.get());
  if (file->alignment.offset == 0) return;
  Fd direct(store.calls().openat(folder, base, flags | O_DIRECT, 0));
  if (!direct.ok()) return;
  // Another process may have put another file under this name meanwhile.
  struct stat one {};
  struct stat two {};
  if (fstat(file->plain.get(), &one) == 0 && fstat(direct.get(), &two) == 0 && one.st_ino == two.st_ino &&
      one.st_dev == two.st_dev)
    file->direct = std::move(direct);
}

Result<uint32_t> WritePieces(Store* store, OpenFile* file, std::span<const Piece> pieces, uint64_t at,
                             bool write_back, Deadline deadline) {
  Mover mover(store, file, deadline);
  Walk<Piece> walk(pieces);
  Store::Bounce bounce;
  uint32_t crc = 0;
  while (!walk.done()) {
    ROPETEAM_RETURN_IF_ERROR(mover.Check("write"));
    store->Yield(std::min(walk.run(), kIoBytesMax));
    const DirectAlignment& alignment = file->alignment;
    if (!mover.direct() || at % alignment.offset != 0) {
      iovec vector[kVectorMax];
      int count = 0;
      const size_t bytes = walk.Gather(vector, &count, kIoBytesMax);
      for (int i = 0; i < count; ++i) {
        crc = Crc32c(vector[i].iov_base, vector[i].iov_len, crc);
        walk.Take(vector[i].iov_len);
      }
      ROPETEAM_RETURN_IF_ERROR(mover.WriteAll(false, vector, count, bytes, at));
      if (write_back) ROPETEAM_RETURN_IF_ERROR(mover.WriteBack(at, bytes));
      at += bytes;
    } else if (FitsDirect(walk.data(), walk.run(), alignment)) {
      const size_t bytes = std::min(Down(walk.run(), alignment.offset), kIoBytesMax);
      crc = Crc32c(walk.data(), bytes, crc);
      ROPETEAM_RETURN_IF_ERROR(mover.WriteAll(true, walk.data(), bytes, at));
      walk.Take(bytes);
      at += bytes;
    } else {
      if (bounce.data() == nullptr) {
        Result<Store::Bounce> taken = store->TakeBounce(deadline, file->path);
        if (!taken.ok()) return taken.status();
        bounce = std::move(*taken);
      }
      const size_t bytes = Fill(bounce.data(), &walk, alignment, &crc);
      const size_t whole = Down(bytes, alignment.offset);
      ROPETEAM_RETURN_IF_ERROR(mover.WriteAll(true, bounce.data(), whole, at));
      // The rest ends inside a block: it is the end of the file.
      ROPETEAM_RETURN_IF_ERROR(mover.WriteAll(false, bounce.data() + whole, bytes - whole, at + whole));
      at += bytes;
    }
  }
  if (write_back) ROPETEAM_RETURN_IF_ERROR(mover.WriteBack(at, 0));
  return crc;
}

namespace {

Status Short(const OpenFile& file, uint64_t at) {
  return Error(Code::kCorrupt, "read %s: it ends at %llu bytes, more were expected", file.path.c_str(),
               static_cast<unsigned long long>(at));
}

// Takes `bytes` that were read: from `from`, or, if it is null, they are already in the targets.
void Take(Walk<Target>* walk, const std::byte* from, size_t bytes) {
  while (bytes > 0) {
    const size_t step = std::min(walk->run(), bytes);
    uint32_t* crc = walk->current().crc32c;
    if (from == nullptr) {
      if (crc != nullptr) *crc = Crc32c(walk->data(), step, *crc);
    } else {
      if (crc != nullptr) *crc = CopyCrc32c(walk->data(), from, step, *crc);
      if (crc == nullptr) std::memcpy(walk->data(), from, step);
      from += step;
    }
    walk->Take(step);
    bytes -= step;
  }
}

// Reads one aligned buffer and scatters it to the targets.
Status ReadBounced(Mover* mover, const OpenFile& file, std::byte* buffer, Walk<Target>* walk, uint64_t* at,
                   uint64_t left) {
  const size_t skip = static_cast<size_t>(*at % file.alignment.offset);
  const size_t room = kBounceBytes - skip;
  const size_t wanted = static_cast<size_t>(std::min<uint64_t>(left, room));
  const size_t bytes = Down(skip + wanted + file.alignment.offset - 1, file.alignment.offset);
  iovec vector = {buffer, bytes};
  Result<size_t> got = mover->ReadAll(true, &vector, 1, bytes, skip + wanted, *at - skip);
  if (!got.ok()) return got.status();
  if (*got < skip + wanted) return Short(file, *at - skip + *got);
  Take(walk, buffer + skip, wanted);
  *at += wanted;
  return OkStatus();
}

}  // namespace

Status ReadTargets(Store* store, OpenFile* file, std::span<const Target> targets, uint64_t at,
                   Deadline deadline) {
  Mover mover(store, file, deadline);
  Walk<Target> walk(targets);
  Store::Bounce bounce;
  uint64_t left = 0;
  for (const Target& target : targets) {
    left += target.bytes;
    if (target.crc32c != nullptr) *target.crc32c = 0;
  }
  const bool drop = left >= kDirectRunMin;  // small files are read again, so they may stay in the page cache
  const uint64_t end = at + left;
  if (drop && !mover.direct())
    posix_fadvise(file->plain.get(), static_cast<off_t>(at), static_cast<off_t>(left), POSIX_FADV_SEQUENTIAL);
  while (!walk.done()) {
    ROPETEAM_RETURN_IF_ERROR(mover.Check("read"));
    if (mover.direct()) {
      if (bounce.data() == nullptr) {
        Result<Store::Bounce> taken = store->TakeBounce(deadline, file->path);
        if (!taken.ok()) return taken.status();
        bounce = std::move(*taken);
      }
      ROPETEAM_RETURN_IF_ERROR(ReadBounced(&mover, *file, bounce.data(), &walk, &at, end - at));
      continue;
    }
    iovec vector[kVectorMax];
    int count = 0;
    const size_t bytes = walk.Gather(vector, &count, kIoBytesMax);
    Result<size_t> got = mover.ReadAll(false, vector, count, bytes, bytes, at);
    if (!got.ok()) return got.status();
    if (*got < bytes) return Short(*file, at + *got);
    if (drop)
      posix_fadvise(file->plain.get(), static_cast<off_t>(at), static_cast<off_t>(bytes),
                    POSIX_FADV_DONTNEED);
    Take(&walk, nullptr, bytes);
    at += bytes;
  }
  return OkStatus();
}

Result<uint32_t> ReadThrough(Store* store, OpenFile* file, uint64_t at, uint64_t bytes, Deadline deadline,
                             const std::function<Status(const Piece&)>& sink) {
  Result<Store::Bounce> bounce = store->TakeBounce(deadline, file->path);
  if (!bounce.ok()) return bounce.status();
  Mover mover(store, file, deadline);
  uint32_t crc = 0;
  for (uint64_t done = 0; done < bytes;) {
    ROPETEAM_RETURN_IF_ERROR(mover.Check("read"));
    const size_t length = static_cast<size_t>(std::min<uint64_t>(bytes - done, kBounceBytes));
    const bool direct = mover.direct() && (at + done) % file->alignment.offset == 0;
    // The length is rounded up to whole blocks, as O_DIRECT requires.
    iovec vector = {bounce->data(),
                    direct ? Down(length + file->alignment.offset - 1, file->alignment.offset) : length};
    Result<size_t> got = mover.ReadAll(direct, &vector, 1, vector.iov_len, length, at + done);
    if (!got.ok()) return got.status();
    if (*got < length) return Short(*file, at + done + *got);
    if (!direct)
      posix_fadvise(file->plain.get(), static_cast<off_t>(at + done), static_cast<off_t>(length),
                    POSIX_FADV_DONTNEED);
    crc = Crc32c(bounce->data(), length, crc);
    if (sink) ROPETEAM_RETURN_IF_ERROR(sink({bounce->data(), length}));
    done += length;
  }
  return crc;
}

}  // namespace ropeteam::storage::posix

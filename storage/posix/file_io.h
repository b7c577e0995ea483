// SPDX-License-Identifier: Apache-2.0
//
// Bytes between memory and one open file, with O_DIRECT: written straight from the caller's memory where addresses and
// offsets fit, through a bounce buffer where they do not, and read through one. Through the page cache where the file
// system has no O_DIRECT.
//
// Plain pwritev() from the caller's threads, not io_uring. Measured on ext4 over virtio (two cores, 1 GiB of random
// bytes into a new preallocated file, O_DIRECT, CRC32C of every byte, fsync at the end, medians of three):
//
//     pwritev of 4 MiB     1 thread  2.05 GB/s     2 threads  2.51 GB/s     4 threads  2.71 GB/s
//     io_uring, 1 thread   2 x 4 MiB 2.47 GB/s     4 x 4 MiB  2.58 GB/s     8 x 1 MiB  2.24 GB/s
//
// The sink itself against dd of the same bytes (from a tmpfs; bs=4M, oflag=direct, conv=fsync), in turn, medians of
// three; dd of zeros writes 2.2 GB/s:
//
//     write   dd 1.70   sink, 1 thread 2.65   2 threads 2.68   memory off by 8 bytes, 1 thread 2.02 GB/s
//
// Reads go through a bounce buffer in one huge page, whose bytes are copied and checked in one pass. A disk of a virtual
// machine is slow where memory is scattered in small pages, and the checksum needs a pass over the bytes anyway. Measured
// on the same kind of machine (512 MiB, 16 MiB parts, O_DIRECT, medians of six):
//
//     into the arena, then the checksum     1 thread 1.1 to 1.7   2 threads 1.8   8 threads 1.2 to 2.5 GB/s, by luck
//     through a buffer in small pages       2 threads 1.4         3 threads 1.2 GB/s
//     through a buffer in a huge page       1 thread 2.9   2 threads 3.2   3 to 8 threads 3.0 to 3.1 GB/s
//     dd bs=4M iflag=direct                 1.1 to 3.4 GB/s, by where its buffer happens to lie
//
// The checksum keeps the CPU busy beside the disk, and threads share that; a ring has one thread that computes it.

#ifndef ROPETEAM_STORAGE_POSIX_FILE_IO_H_
#define ROPETEAM_STORAGE_POSIX_FILE_IO_H_

#include <atomic>
#include <span>
#include <string>

#include "storage/posix/store.h"

namespace ropeteam::storage::posix {

struct OpenFile {
  std::string path;  // for messages
  Fd plain;
  Fd direct;  // the same file with O_DIRECT; none: not there
  DirectAlignment alignment;
  // Writing back has failed. The page cache may have dropped the bytes and forgotten the error, so that a later fsync
  // would say that all is well: the file must be thrown away.
  std::atomic<bool> lost{false};
};

// Opens `base` in `folder` a second time with O_DIRECT, for `flags` O_RDONLY or O_WRONLY, if the file system takes it.
void AddDirect(const Store& store, int folder, const char* base, int flags, OpenFile* file);

// Writes all pieces from `at` on and returns their checksum. With `write_back` what goes through the page cache is
// written and dropped while it goes, so that the cache does not grow. Any thread, ranges of several calls disjoint.
Result<uint32_t> WritePieces(Store* store, OpenFile* file, std::span<const Piece> pieces, uint64_t at,
                             bool write_back, Deadline deadline);

// Fills all targets from `at` on. kCorrupt: the file ends before that.
Status ReadTargets(Store* store, OpenFile* file, std::span<const Target> targets, uint64_t at,
                   Deadline deadline);

// The checksum of `bytes` bytes from `at` on, read through a bounce buffer, and given to `sink` piece by piece if it is
// not empty.
Result<uint32_t> ReadThrough(Store* store, OpenFile* file, uint64_t at, uint64_t bytes, Deadline deadline,
                             const std::function<Status(const Piece&)>& sink);

}  // namespace ropeteam::storage::posix

#endif  // ROPETEAM_STORAGE_POSIX_FILE_IO_H_

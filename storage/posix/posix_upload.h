// SPDX-License-Identifier: Apache-2.0
//
// Uploads of the posix sink, in two ways.
//
// One file (if the file system can rename, and write at any offset): all parts are written into one preallocated file
// with a hidden name, which Finish() syncs and renames. If flock() works, that name is derived from the file's name and
// size and from this boot of this machine, and the lock is held while the Upload exists. So the next Begin() on this
// machine finds the file of a dead process, and never one that is being written. Other machines, and file systems
// without locks, use a random name and start from the beginning.
//
// Loose parts (if it cannot, such as a mounted bucket without a cache): every part is a separate hidden file, written
// from its first byte to its last. Finish() reads them back, checks them, and writes the file in place (in_place.h).
//
// Has() reads the part back and computes its checksum: true means that the bytes are there now.

#ifndef ROPETEAM_STORAGE_POSIX_POSIX_UPLOAD_H_
#define ROPETEAM_STORAGE_POSIX_POSIX_UPLOAD_H_

#include <memory>
#include <string>

#include "storage/posix/store.h"
#include "storage/sink.h"

namespace ropeteam::storage::posix {

// `name` has been checked.
Result<std::unique_ptr<Upload>> BeginUpload(std::shared_ptr<Store> store, const std::string& name,
                                            uint64_t bytes, uint64_t part_bytes_wanted, Deadline deadline);

// A hidden file that only this Upload writes.
struct Unfinished {
  std::string base;     // its name in the folder
  Fd fd;                // read and write
  bool shared = false;  // the name can be another upload's later: look before renaming it
  bool found = false;   // it was there before, and not locked
};
// `key`: what an earlier attempt must have in common to be found again; empty: nothing is searched.
Result<Unfinished> OpenUnfinished(const Store& store, const Abilities& abilities, int folder,
                                  const std::string& name, const std::string& key);

}  // namespace ropeteam::storage::posix

#endif  // ROPETEAM_STORAGE_POSIX_POSIX_UPLOAD_H_

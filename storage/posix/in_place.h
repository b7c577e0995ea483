// SPDX-License-Identifier: Apache-2.0
//
// Writes a file under its own name, for file systems that cannot rename. A hidden marker file next to it says that it
// is unfinished, from before its first byte until after its fsync and close. If a file system may not be able to
// rename, a file with a marker is absent for Read(), Stat() and List() of every sink. Removing the marker is the
// commit. From the beginning on, the content of an older file of this name is not visible.
//
// The marker is locked during the write. A marker without a lock was left by a dead process, and the next writer takes
// it over; AbortUploads() removes it by age, with the file. Programs that do not check markers see a growing file.

#ifndef ROPETEAM_STORAGE_POSIX_IN_PLACE_H_
#define ROPETEAM_STORAGE_POSIX_IN_PLACE_H_

#include <functional>
#include <string>

#include "storage/posix/file_io.h"
#include "storage/posix/store.h"

namespace ropeteam::storage::posix {

// Writes the file with `write`. kUnavailable: another writer is writing it.
Status WriteInPlace(Store* store, const std::string& name, Deadline deadline,
                    const std::function<Status(OpenFile*)>& write);

// Whether the file of this name in `folder` counts. False: it has a marker.
bool Counts(const Store& store, int folder, const std::string& base);

// The file's lstat(), if it is a regular file that counts. kNotFound otherwise.
Result<struct stat> StatCounted(const Store& store, int folder, const std::string& name);

}  // namespace ropeteam::storage::posix

#endif  // ROPETEAM_STORAGE_POSIX_IN_PLACE_H_

// SPDX-License-Identifier: Apache-2.0
//
// Writing a file under its own name, for file systems that cannot rename. A hidden marker file beside it says that it is
// not finished, from before its first byte until after its fsync and close. A file with a marker
// is absent for Read(), Stat() and List() of every sink on a file system that is not known to rename. The
// removal of the marker is the commit. The content of an older file of this name is not visible from the beginning on.
//
// The marker is locked during the write. A marker without a lock is left by a dead process, and the next
// writer takes it over; AbortUploads() removes it by age, with the file. Programs that do not know of markers see a
// file that grows.

#ifndef ROPETEAM_STORAGE_POSIX_IN_PLACE_H_
#define ROPETEAM_STORAGE_POSIX_IN_PLACE_H_

#include <functional>
#include <string>

#include "storage/posix/file_io.h"
#include "storage/posix/store.h"

namespace ropeteam::storage::posix {

// Writes what `write` puts into the file. kUnavailable: another writer is at it.
Status WriteInPlace(Store* store, const std::string& name, Deadline deadline,
                    const std::function<Status(OpenFile*)>& write);

// Whether the file of this name in `folder` counts. False: a marker lies beside it.
bool Counts(const Store& store, int folder, const std::string& base);

// The file's lstat(), if it is a regular file that counts. kNotFound otherwise.
Result<struct stat> StatCounted(const Store& store, int folder, const std::string& name);

}  // namespace ropeteam::storage::posix

#endif  // ROPETEAM_STORAGE_POSIX_IN_PLACE_H_

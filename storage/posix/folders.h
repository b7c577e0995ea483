// SPDX-License-Identifier: Apache-2.0
//
// What the posix sink does with whole folders. Names have been checked.

#ifndef ROPETEAM_STORAGE_POSIX_FOLDERS_H_
#define ROPETEAM_STORAGE_POSIX_FOLDERS_H_

#include <string>

#include "storage/posix/store.h"

namespace ropeteam::storage::posix {

// In the order of names; `page` is the last name of the previous page. A file that stays is listed exactly once, even
// if others come and go, and no state is kept between pages. Each page reads the names of the whole folder.
Result<ListPage> ListFolder(const Store& store, const std::string& folder, const std::string& page,
                            Deadline deadline);
Status RemoveFolder(const Store& store, const std::string& folder, Deadline deadline);
// An upload's age is that of its file; if the file system keeps no time of birth, the time since the last write.
// Measured with this machine's clock.
Result<uint64_t> AbortOldUploads(const Store& store, const std::string& folder, std::chrono::seconds age,
                                 Deadline deadline);

}  // namespace ropeteam::storage::posix

#endif  // ROPETEAM_STORAGE_POSIX_FOLDERS_H_

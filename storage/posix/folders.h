// SPDX-License-Identifier: Apache-2.0
//
// What the posix sink does with whole folders. Names have been checked.

#ifndef ROPETEAM_STORAGE_POSIX_FOLDERS_H_
#define ROPETEAM_STORAGE_POSIX_FOLDERS_H_

#include <string>

#include "storage/posix/store.h"

namespace ropeteam::storage::posix {

// By name, `page` being the last name of the page before: a file that stays is listed exactly once whatever comes and
// goes meanwhile, and no state is kept between pages. Each page reads the names of the whole folder.
Result<ListPage> ListFolder(const Store& store, const std::string& folder, const std::string& page,
                            Deadline deadline);
Status RemoveFolder(const Store& store, const std::string& folder, Deadline deadline);
// An upload's age is that of its file, or of the last write to it where the file system keeps no time of birth; against
// the clock of this machine.
Result<uint64_t> AbortOldUploads(const Store& store, const std::string& folder, std::chrono::seconds age,
                                 Deadline deadline);

}  // namespace ropeteam::storage::posix

#endif  // ROPETEAM_STORAGE_POSIX_FOLDERS_H_

// SPDX-License-Identifier: Apache-2.0
//
// Deletes a step. Its manifest is deleted first: from then on the folder is not a step, so a half-deleted step is never
// offered. Then its files, parts of unfinished uploads, and the folder if it is empty.

#ifndef ROPETEAM_STORAGE_STEPS_REMOVE_H_
#define ROPETEAM_STORAGE_STEPS_REMOVE_H_

#include <chrono>
#include <cstdint>
#include <string>

#include "core/base/status.h"
#include "storage/format/names.h"
#include "storage/sink.h"

namespace ropeteam::storage {

// Blocks; each call of the sink has `call_timeout`; kStorageThreads files are deleted in parallel. `finished`: the folder
// has a manifest; its files are deleted, and files with names that only Ropeteam uses. Otherwise the folder has no
// manifest: the latter are deleted, and files with names of a program's files. Returns how many other files are there;
// they stay.
//
// May be called again after any error; once the manifest is gone, the step counts as unfinished. kCorrupt, kUnsupported,
// kNotFound: the manifest is not a good one of this job and step; kAborted: a manifest was written meanwhile. Nothing was
// deleted then.
Result<uint64_t> RemoveStep(Sink* sink, const std::string& job, const StepName& name, bool finished,
                            std::chrono::seconds call_timeout);

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_STEPS_REMOVE_H_

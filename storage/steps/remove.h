// SPDX-License-Identifier: Apache-2.0
//
// Deletes a step. Its manifest goes first: from then on it is no step, so that what is half deleted is never offered. Then
// its files, what is left of uploads, and the folder if nothing else lies in it.

#ifndef ROPETEAM_STORAGE_STEPS_REMOVE_H_
#define ROPETEAM_STORAGE_STEPS_REMOVE_H_

#include <chrono>
#include <cstdint>
#include <string>

#include "core/base/status.h"
#include "storage/format/names.h"
#include "storage/sink.h"

namespace ropeteam::storage {

// Blocks; each call of the sink has `call_timeout`; files go kStorageThreads at a time. `finished`: the folder has a manifest,
// and what it names goes with it, and files with names that only Ropeteam gives. Otherwise it has none: the latter go, and
// those named as a program's files are. Returns how many other files lie there; they stay.
//
// May be called again after any error; once the manifest is gone the step is not finished. kCorrupt, kUnsupported, kNotFound: the
// manifest is not a good one of this job and step; kAborted: there is one meanwhile. Nothing was deleted then.
Result<uint64_t> RemoveStep(Sink* sink, const std::string& job, const StepName& name, bool finished,
                            std::chrono::seconds call_timeout);

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_STEPS_REMOVE_H_

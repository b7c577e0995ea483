// SPDX-License-Identifier: Apache-2.0
//
// Deletes a step. Its manifest goes first: from then on it is no step, so that what is half deleted is never offered. Then
// the files that the manifest named, those with names that only Ropeteam gives, what is left of uploads, and the folder
// if nothing else lies in it.

#ifndef ROPETEAM_STORAGE_STEPS_REMOVE_H_
#define ROPETEAM_STORAGE_STEPS_REMOVE_H_

#include <chrono>
#include <string>

#include "core/base/status.h"
#include "storage/format/names.h"
#include "storage/sink.h"

namespace ropeteam::storage {

// Blocks; each call of the sink has `call_timeout`. May be called again after any error, until the manifest is gone; what is
// left then has no manifest (`ropeteam prune --unfinished` finds it). kCorrupt, kUnsupported, kNotFound: the manifest is
// not a good one of this job and step, and nothing was deleted.
Status RemoveStep(Sink* sink, const std::string& job, const StepName& name,
                  std::chrono::seconds call_timeout);

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_STEPS_REMOVE_H_

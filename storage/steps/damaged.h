// SPDX-License-Identifier: Apache-2.0
//
// The mark of a step in which damage was found: a text file in its folder, with the reason. A step that is marked is passed
// over by every reader, now and later; nothing of it is deleted.

#ifndef ROPETEAM_STORAGE_STEPS_DAMAGED_H_
#define ROPETEAM_STORAGE_STEPS_DAMAGED_H_

#include <chrono>
#include <string>

#include "core/base/status.h"
#include "storage/format/names.h"
#include "storage/sink.h"
#include "storage/steps/steps.h"

namespace ropeteam::storage {

// Bytes of a reason that are written and read: a sentence or two with a path.
inline constexpr size_t kDamageBytesMax = 4096;

// kOk also where the step has a mark, whose reason stays, and where it has no manifest: it is not a step then.
Status MarkDamaged(Sink* sink, const std::string& job, const StepName& name, const std::string& why,
                   std::chrono::seconds call_timeout);
// The reason; empty: there is no mark among the step's files (ListFileSizes()).
Result<std::string> DamageOf(Sink* sink, const std::string& job, const StepName& name, const FileSizes& sizes,
                             std::chrono::seconds call_timeout);

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_STEPS_DAMAGED_H_

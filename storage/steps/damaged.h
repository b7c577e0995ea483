// SPDX-License-Identifier: Apache-2.0
//
// Notes about a step in its folder, each a text file.
//
// The mark of a step in which damage was found, with the reason. A step that is marked is passed over by every reader, now
// and later; nothing of it is deleted.
//
// The note of how often a step was restored without a newer commit, and whether it is quarantined: then the daemons offer
// an older one. A quarantined step can be read, exported and verified as any other.

#ifndef ROPETEAM_STORAGE_STEPS_DAMAGED_H_
#define ROPETEAM_STORAGE_STEPS_DAMAGED_H_

#include <chrono>
#include <cstdint>
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

struct StepRestores {
  uint32_t revision = 0;  // counts up with every change; 0: nothing is noted
  uint32_t restores = 0;
  uint64_t counted = 0;  // the incarnation that restored it last
  bool quarantined = false;
  bool by_hand = false;
  friend bool operator==(const StepRestores&, const StepRestores&) = default;
};
// Replaces the note. kOk also where the step has no manifest.
Status NoteRestores(Sink* sink, const std::string& job, const StepName& name, const StepRestores& note,
                    std::chrono::seconds call_timeout);
// Of revision 0 where there is no note, or none that can be read: then the step is offered.
Result<StepRestores> RestoresOf(Sink* sink, const std::string& job, const StepName& name,
                                const FileSizes& sizes, std::chrono::seconds call_timeout);

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_STEPS_DAMAGED_H_

// SPDX-License-Identifier: Apache-2.0
//
// The sinks that steps and locks are read through. Two nodes that call a step bad condemn it, so only a proof may do that:
// a checksum, or our own parser that meets a newer format. A call that the store or the operating system refuses proves
// nothing about the bytes, whatever its code.

#ifndef ROPETEAM_NODE_STORAGE_READS_H_
#define ROPETEAM_NODE_STORAGE_READS_H_

#include <memory>

#include "storage/sink.h"

namespace ropeteam {

// Wraps `below`: where its Read(), Stat() or List() returns kInvalidArgument or kUnsupported, this one returns kIo with the
// same message. All other calls and codes are unchanged: a writer has to know what a store cannot do. Returns null for null.
std::shared_ptr<storage::Sink> SinkForReads(std::shared_ptr<storage::Sink> below);

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_STORAGE_READS_H_

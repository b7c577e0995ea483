// SPDX-License-Identifier: Apache-2.0
//
// The factory of a build without libibverbs.

#include "transport/fabrics.h"
#include "transport/verbs/verbs_transport.h"

namespace ropeteam {

Result<std::unique_ptr<Transport>> CreateVerbsTransport(const VerbsConfig&) {
  return Error(Code::kUnsupported, "transport verbs: this build is without libibverbs: %s",
               ROPETEAM_VERBS_MISSING);
}

FabricListing ListVerbsDevices() { return {"verbs", "", ROPETEAM_VERBS_MISSING, {}}; }

}  // namespace ropeteam

// SPDX-License-Identifier: Apache-2.0
//
// The factory of a build without UCX.

#include "transport/fabrics.h"
#include "transport/ucx/ucx_transport.h"

namespace ropeteam {

Result<std::unique_ptr<Transport>> CreateUcxTransport(const UcxConfig&) {
  return Error(Code::kUnsupported, "transport ucx: this build is without UCX: %s", ROPETEAM_UCX_MISSING);
}

FabricListing ListUcxDevices() { return {"ucx", "", ROPETEAM_UCX_MISSING, {}}; }

}  // namespace ropeteam

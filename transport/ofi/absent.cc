// SPDX-License-Identifier: Apache-2.0
//
// The factory of a build without libfabric.

#include "transport/fabrics.h"
#include "transport/ofi/ofi_transport.h"

namespace ropeteam {

Result<std::unique_ptr<Transport>> CreateOfiTransport(const OfiConfig& config) {
  return Error(Code::kUnsupported, "transport ofi with provider \"%s\": this build is without libfabric: %s",
               config.provider.c_str(), ROPETEAM_OFI_MISSING);
}

FabricListing ListOfiDevices() { return {"ofi", "", ROPETEAM_OFI_MISSING, {}}; }

void SetOfiEnvironment() {}

}  // namespace ropeteam

// SPDX-License-Identifier: Apache-2.0
//
// What the transports of this build see on this machine, for `ropeteamd --list-devices` and `ropeteam
// devices`.

#ifndef ROPETEAM_NODE_DEVICES_TEXT_H_
#define ROPETEAM_NODE_DEVICES_TEXT_H_

#include <string>
#include <vector>

#include "transport/fabrics.h"

namespace ropeteam {

// One block a transport: its library or why it is missing, then a line a device. With `json` one document:
// {"transports": [{"transport", "library", "missing", "devices": [{"name", …}]}]}, keys as the structs'
// fields.
std::string DevicesText(bool json);
std::string DevicesText(const std::vector<FabricListing>& listings, bool json);

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_DEVICES_TEXT_H_

// SPDX-License-Identifier: Apache-2.0
//
// Converts between membership/messages.h and its protobuf. Decoding checks every length and number, so that the state
// machines get valid values only. kInvalidArgument has the reason.

#ifndef ROPETEAM_MEMBERSHIP_STANDALONE_WIRE_H_
#define ROPETEAM_MEMBERSHIP_STANDALONE_WIRE_H_

#include <string>

#include "core/base/status.h"
#include "membership/messages.h"
#include "membership/standalone/membership.pb.h"

namespace ropeteam {

// The largest frame: a view of kNodesMax members with every string at its limit, and 64 bytes per member for numbers,
// tags and lengths.
inline constexpr size_t kFrameBytesMax =
    kNodesMax * (kNodeNameBytesMax + kDomainBytesMax + 2 * kAddressBytesMax + 64) + (64u << 10);

membership::v1::NodeFrame Encode(const NodeMessage& message);
membership::v1::CoordinatorFrame Encode(const CoordinatorMessage& message);
Result<NodeMessage> Decode(membership::v1::NodeFrame&& frame);
Result<CoordinatorMessage> Decode(membership::v1::CoordinatorFrame&& frame);

// A view as stored: the members' ids and join epochs. It takes 20 bytes per member, 330 KB for the largest job.
// `settle_us` replaces the view's own: it is the longest term of any coordinator so far.
std::string EncodeStoredView(const ViewState& state, TimeUs settle_us);
Result<ViewStatePtr> DecodeStoredView(const std::string& bytes);

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_STANDALONE_WIRE_H_

// SPDX-License-Identifier: Apache-2.0
//
// Between membership/messages.h and its protobuf. Decoding checks everything that a length or a number can be
// wrong in, so that the state machines see valid values only; kInvalidArgument says what was wrong.

#ifndef ROPETEAM_MEMBERSHIP_STANDALONE_WIRE_H_
#define ROPETEAM_MEMBERSHIP_STANDALONE_WIRE_H_

#include <string>

#include "core/base/status.h"
#include "membership/messages.h"
#include "membership/standalone/membership.pb.h"

namespace ropeteam {

// The largest frame: a view of kNodesMax members with every string at its limit, and 64 bytes each for
// numbers, tags and lengths.
inline constexpr size_t kFrameBytesMax =
    kNodesMax * (kNodeNameBytesMax + kDomainBytesMax + 2 * kAddressBytesMax + 64) + (64u << 10);

membership::v1::NodeFrame Encode(const NodeMessage& message);
membership::v1::CoordinatorFrame Encode(const CoordinatorMessage& message);
Result<NodeMessage> Decode(membership::v1::NodeFrame&& frame);
Result<CoordinatorMessage> Decode(membership::v1::CoordinatorFrame&& frame);

// A view as it is kept in a store: of the members the id and when each joined. 20 bytes a member: 330 KB for the largest
// job. `settle_us` takes the place of the view's own: the longest term of any coordinator so far.
std::string EncodeStoredView(const ViewState& state, TimeUs settle_us);
Result<ViewStatePtr> DecodeStoredView(const std::string& bytes);

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_STANDALONE_WIRE_H_

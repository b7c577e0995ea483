// SPDX-License-Identifier: Apache-2.0
//
// Messages of core/base/bytes.h as they are on a socket: those of the local protocol, in both directions, and
// those between engines. The first byte names the type, and the others are its encoding. Accepted bytes must
// be encoded to the same bytes again.

#include "api/client/local_protocol.h"
#include "core/base/bytes.h"
#include "tests/fuzz/engine_messages.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/values.h"

namespace ropeteam::fuzz {
namespace {

using LocalMessages =
    std::tuple<local::Hello, local::HelloReply, local::SaveBegin, local::SaveGrant, local::SaveExtend,
               local::SaveFilled, local::SaveCommit, local::SaveAbort, local::GpuBuffer, local::GpuBufferEnd,
               local::SaveDirect, local::SaveSettle, local::Wait, local::Persist, local::Latest,
               local::LatestReply, local::StorageList, local::StorageListReply, local::ViewOpen,
               local::ViewGrant, local::ViewRepair, local::ViewClose, local::Admin, local::AdminReply,
               local::Reply, local::ViewRead, local::ViewBytes>;
// The inputs of the corpus name a type by its place here, so a new one is appended.
using All = decltype(std::tuple_cat(std::tuple<Envelope>{}, LocalMessages{}, EngineMessages{},
                                    EngineQuestions{}, EngineReplies{},
                                    std::tuple<local::Drop, local::SetPolicy>{}));

void RunFrames(std::string_view input) {
  if (input.empty()) return;
  WithType<All>(static_cast<uint8_t>(input[0]), [&](auto message) {
    const std::string_view bytes = input.substr(1);
    if (Decode(bytes, message)) ROPETEAM_CHECK(Encode(message) == bytes);
  });
}

// Two messages of each type: one with empty lists, and one with elements in them.
std::vector<std::string> FramesSeeds() {
  std::vector<std::string> seeds;
  for (size_t i = 0; i < std::tuple_size_v<All>; ++i) {
    WithType<All>(i, [&](auto message) {
      seeds.push_back(std::string(1, static_cast<char>(i)) + Encode(message));
      FromBytes(std::string(64, '\1')).Get(message);
      seeds.push_back(std::string(1, static_cast<char>(i)) + Encode(message));
    });
  }
  return seeds;
}

const Target kFrames("frames", RunFrames, FramesSeeds);

}  // namespace
}  // namespace ropeteam::fuzz

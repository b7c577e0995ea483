// SPDX-License-Identifier: Apache-2.0
//
// The blobs (transport/blob.h) that two ucx transports exchange through the control plane. Their format is
// private to this folder and may change with its version.

#ifndef ROPETEAM_TRANSPORT_UCX_CODEC_H_
#define ROPETEAM_TRANSPORT_UCX_CODEC_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "core/base/status.h"
#include "transport/ucx/liveness.h"

namespace ropeteam::ucx {

struct WorkerAddress {
  uint64_t instance = 0;       // identifies one transport object: random, never 0
  ProcessIdentity process;     // the process it is in
  uint64_t hello_address = 0;  // of the hello (the instance number), which peers read …
  std::string hello_key;       // … with this packed key
  std::string cma;             // Cma::Address(); empty: cma is not available
  std::string name;            // ucp_worker_get_address()
};

struct RegionKey {
  uint64_t instance = 0;  // of the transport that registered it
  uint64_t base = 0;      // virtual address in that process
  uint64_t length = 0;
  std::string key;  // ucp_rkey_pack(); empty for a region of length 0
};

// kUnsupported: it is longer than a transport's address may be. The message says what to do.
Result<std::string> Encode(const WorkerAddress& address);
std::string Encode(const RegionKey& key);
// kInvalidArgument: the bytes are not of this kind.
Status Decode(std::string_view bytes, WorkerAddress* address);
Status Decode(std::string_view bytes, RegionKey* key);

}  // namespace ropeteam::ucx

#endif  // ROPETEAM_TRANSPORT_UCX_CODEC_H_

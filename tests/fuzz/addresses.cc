// SPDX-License-Identifier: Apache-2.0
//
// Addresses and keys that transports exchange through the control plane, and the datagrams of verbs. Accepted
// bytes must be encoded to the same bytes again.

#include "core/base/status.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/values.h"
#include "transport/blob.h"
#include "transport/ofi/codec.h"
#include "transport/tcp/codec.h"
#include "transport/ucx/codec.h"
#include "transport/verbs/codec.h"

namespace ropeteam::fuzz {
namespace {

using Blobs = std::tuple<ofi::EndpointAddress, ofi::RegionKey, ofi::RailsAddress, ofi::RailsKey,
                         ucx::WorkerAddress, ucx::RegionKey, verbs::TransportAddress, verbs::RegionKey,
                         verbs::Message, tcp::EndpointAddress, tcp::RegionKey>;

std::string BytesOf(std::string bytes) { return bytes; }
std::string BytesOf(Result<std::string> bytes) { return std::move(bytes).value(); }

// Input: a byte for the type, then the encoding without the checksum that ends every type.
void RunAddresses(std::string_view input) {
  if (input.empty()) return;
  WithType<Blobs>(static_cast<uint8_t>(input[0]), [&](auto blob) {
    std::string bytes(input.substr(1));
    const uint64_t checksum = BlobChecksum(bytes);
    bytes.append(reinterpret_cast<const char*>(&checksum), sizeof(checksum));
    if (Decode(bytes, &blob).ok()) ROPETEAM_CHECK(BytesOf(Encode(blob)) == bytes);
  });
}

std::vector<std::string> AddressesSeeds() {
  const verbs::PortAddress port{1, 2, 3, 1, 5};
  verbs::Message message;
  message.sender = message.receiver = message.connection = 7;
  message.queue_pair = message.datagram_queue_pair = 9;
  message.reads = 16;
  message.port = port;
  const Blobs blobs = {ofi::EndpointAddress{1, 2, 3, 4, "tcp;ofi_rxm", "name"},
                       ofi::RegionKey{1, 2, 3, 4},
                       ofi::RailsAddress{1, 2, "efa", {{1, 2, "a", 100}, {3, 4, "b", 200}}},
                       ofi::RailsKey{1, 2, 3, {4, 5}},
                       ucx::WorkerAddress{1, {2, 3, 4}, 5, "hello", "cma", "name"},
                       ucx::RegionKey{1, 2, 3, "key"},
                       verbs::TransportAddress{1, 2, {{port, 3, 4}, {port, 5, 6}}},
                       verbs::RegionKey{1, 2, 3, {4, 5}},
                       message,
                       tcp::EndpointAddress{1, {2, 3}, 4, {{ParseIpAddress("127.0.0.1:7").value(), 5}}},
                       tcp::RegionKey{1, 2, 3}};
  std::vector<std::string> seeds;
  std::apply(
      [&](const auto&... blob) {
        for (std::string bytes : {BytesOf(Encode(blob))...}) {
          bytes.resize(bytes.size() - sizeof(uint64_t));
          seeds.push_back(std::string(1, static_cast<char>(seeds.size())) + bytes);
        }
      },
      blobs);
  return seeds;
}

const Target kAddresses("addresses", RunAddresses, AddressesSeeds);

}  // namespace
}  // namespace ropeteam::fuzz

// SPDX-License-Identifier: Apache-2.0
//
// The bytes that two ofi transports hand each other through the control plane: an endpoint's address and a
// region's key. Both begin with a magic number and end with a checksum over all before it, so that bytes from
// elsewhere are refused in words. Little-endian; the format is private to this folder and may change with
// kVersion.

#ifndef ROPETEAM_TRANSPORT_OFI_CODEC_H_
#define ROPETEAM_TRANSPORT_OFI_CODEC_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"

namespace ropeteam::ofi {

struct EndpointAddress {
  uint64_t instance = 0;        // identifies one transport object: random, never 0
  uint64_t hello_address = 0;   // where the peer's hello (its instance number) can be read …
  uint64_t hello_key = 0;       // … and with which key
  uint32_t address_format = 0;  // fi_info::addr_format of `name`
  std::string provider;         // both ends must use the same
  std::string name;             // fi_getname()
};

struct RegionKey {
  uint64_t instance = 0;  // of the transport that registered it
  // What remote offsets are added to: a virtual address, or 0 where the provider wants offsets
  uint64_t base = 0;
  uint64_t key = 0;
  uint64_t length = 0;
};

// A transport over several endpoints: what differs between them, and once what does not.
struct RailsAddress {
  struct Rail {
    uint64_t hello_address = 0, hello_key = 0;
    std::string name;
    uint32_t link_mbps = 0;
  };
  uint64_t instance = 0;
  uint32_t address_format = 0;
  std::string provider;
  std::vector<Rail> rails;  // 1 to kRailsMax
};

struct RailsKey {
  uint64_t instance = 0;
  uint64_t base = 0;
  uint64_t length = 0;
  std::vector<uint64_t> keys;  // one a rail
};

// Endpoints of one transport: eight of EFA's, with names of 32 bytes, fit into an address.
inline constexpr size_t kRailsMax = 8;

std::string Encode(const EndpointAddress& address);
std::string Encode(const RegionKey& key);
std::string Encode(const RailsAddress& address);
std::string Encode(const RailsKey& key);
Status Decode(std::string_view bytes, EndpointAddress* address);
Status Decode(std::string_view bytes, RegionKey* key);
Status Decode(std::string_view bytes, RailsAddress* address);
Status Decode(std::string_view bytes, RailsKey* key);

}  // namespace ropeteam::ofi

#endif  // ROPETEAM_TRANSPORT_OFI_CODEC_H_

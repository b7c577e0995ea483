// SPDX-License-Identifier: Apache-2.0

#include "transport/ofi/codec.h"

#include <utility>

#include "transport/blob.h"

namespace ropeteam::ofi {
namespace {

constexpr uint32_t kAddressMagic = 0x61745452;       // "RTta"
constexpr uint32_t kKeyMagic = 0x6b745452;           // "RTtk"
constexpr uint32_t kRailsAddressMagic = 0x61725452;  // "RTra"
constexpr uint32_t kRailsKeyMagic = 0x6b725452;      // "RTrk"
constexpr uint32_t kVersion = 4;

}  // namespace

std::string Encode(const EndpointAddress& address) {
  BlobWriter writer(kAddressMagic, kVersion);
  writer.Number(address.instance);
  writer.Number(address.hello_address);
  writer.Number(address.hello_key);
  writer.Number(address.address_format);
  writer.Text(address.provider);
  writer.Text(address.name);
  std::string bytes = std::move(writer).Finish();
  ROPETEAM_CHECK(bytes.size() <= kBlobBytesMax);
  return bytes;
}

std::string Encode(const RegionKey& key) {
  BlobWriter writer(kKeyMagic, kVersion);
  writer.Number(key.instance);
  writer.Number(key.base);
  writer.Number(key.key);
  writer.Number(key.length);
  return std::move(writer).Finish();
}

Status Decode(std::string_view bytes, EndpointAddress* address) {
  BlobReader reader(bytes, kAddressMagic, kVersion, "ofi address");
  EndpointAddress decoded;
  decoded.instance = reader.Number<uint64_t>();
  decoded.hello_address = reader.Number<uint64_t>();
  decoded.hello_key = reader.Number<uint64_t>();
  decoded.address_format = reader.Number<uint32_t>();
  decoded.provider = reader.Text();
  decoded.name = reader.Text();
  ROPETEAM_RETURN_IF_ERROR(reader.Finish());
  if (decoded.instance == 0 || decoded.name.empty())
    return Error(Code::kInvalidArgument, "ofi address of %zu bytes is malformed", bytes.size());
  *address = std::move(decoded);
  return OkStatus();
}

Status Decode(std::string_view bytes, RegionKey* key) {
  BlobReader reader(bytes, kKeyMagic, kVersion, "ofi region key");
  RegionKey decoded;
  decoded.instance = reader.Number<uint64_t>();
  decoded.base = reader.Number<uint64_t>();
  decoded.key = reader.Number<uint64_t>();
  decoded.length = reader.Number<uint64_t>();
  ROPETEAM_RETURN_IF_ERROR(reader.Finish());
  *key = decoded;
  return OkStatus();
}

std::string Encode(const RailsAddress& address) {
  BlobWriter writer(kRailsAddressMagic, kVersion);
  writer.Number(address.instance);
  writer.Number(address.address_format);
  writer.Text(address.provider);
  writer.Number(static_cast<uint8_t>(address.rails.size()));
  for (const RailsAddress::Rail& rail : address.rails) {
    writer.Number(rail.hello_address);
    writer.Number(rail.hello_key);
    writer.Text(rail.name);
    writer.Number(rail.link_mbps);
  }
  return std::move(writer).Finish();
}

std::string Encode(const RailsKey& key) {
  BlobWriter writer(kRailsKeyMagic, kVersion);
  writer.Number(key.instance);
  writer.Number(key.base);
  writer.Number(key.length);
  writer.Number(static_cast<uint8_t>(key.keys.size()));
  for (const uint64_t each : key.keys) writer.Number(each);
  return std::move(writer).Finish();
}

Status Decode(std::string_view bytes, RailsAddress* address) {
  BlobReader reader(bytes, kRailsAddressMagic, kVersion, "ofi address of several devices");
  RailsAddress decoded;
  decoded.instance = reader.Number<uint64_t>();
  decoded.address_format = reader.Number<uint32_t>();
  decoded.provider = reader.Text();
  const size_t count = reader.Number<uint8_t>();
  bool whole = count > 0 && count <= kRailsMax && decoded.instance != 0;
  for (size_t i = 0; i < count && whole; i++) {
    RailsAddress::Rail rail;
    rail.hello_address = reader.Number<uint64_t>();
    rail.hello_key = reader.Number<uint64_t>();
    rail.name = reader.Text();
    rail.link_mbps = reader.Number<uint32_t>();
    whole = !rail.name.empty();
    decoded.rails.push_back(std::move(rail));
  }
  ROPETEAM_RETURN_IF_ERROR(reader.Finish());
  if (!whole)
    return Error(Code::kInvalidArgument, "ofi address of several devices, %zu bytes, is malformed",
                 bytes.size());
  *address = std::move(decoded);
  return OkStatus();
}

Status Decode(std::string_view bytes, RailsKey* key) {
  BlobReader reader(bytes, kRailsKeyMagic, kVersion, "ofi region key of several devices");
  RailsKey decoded;
  decoded.instance = reader.Number<uint64_t>();
  decoded.base = reader.Number<uint64_t>();
  decoded.length = reader.Number<uint64_t>();
  const size_t count = reader.Number<uint8_t>();
  for (size_t i = 0; i < count && i < kRailsMax; i++) decoded.keys.push_back(reader.Number<uint64_t>());
  ROPETEAM_RETURN_IF_ERROR(reader.Finish());
  if (decoded.keys.empty() || count > kRailsMax)
    return Error(Code::kInvalidArgument, "ofi region key of several devices, %zu bytes, is malformed",
                 bytes.size());
  *key = std::move(decoded);
  return OkStatus();
}

}  // namespace ropeteam::ofi

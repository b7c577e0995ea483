// SPDX-License-Identifier: Apache-2.0

#include "transport/ofi/codec.h"

#include <cstring>
#include <utility>

#include "core/base/view.h"
#include "transport/parcel.h"

namespace ropeteam::ofi {
namespace {

constexpr uint32_t kAddressMagic = 0x61745452;       // "RTta"
constexpr uint32_t kKeyMagic = 0x6b745452;           // "RTtk"
constexpr uint32_t kRailsAddressMagic = 0x61725452;  // "RTra"
constexpr uint32_t kRailsKeyMagic = 0x6b725452;      // "RTrk"
constexpr uint32_t kVersion = 1;
constexpr size_t kBytesMax = kAddressBytesMax / 2;  // Transport::LocalAddress and ExportRegion promise it
constexpr size_t kChecksumBytes = sizeof(uint64_t);

// FNV-1a: it guards against mistakes, not against malice; whoever knows a key may write to its region anyway.
uint64_t Checksum(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (char c : bytes) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  return hash;
}

class Writer {
 public:
  template <typename T>
  void Number(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void Text(std::string_view text) {
    Number(static_cast<uint32_t>(text.size()));
    bytes_.append(text);
  }
  std::string Finish() && {
    Number(Checksum(bytes_));
    return std::move(bytes_);
  }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  template <typename T>
  T Number() {
    T value{};
    if (bytes_.size() < sizeof value) return Fail<T>();
    std::memcpy(&value, bytes_.data(), sizeof value);
    bytes_.remove_prefix(sizeof value);
    return value;
  }
  std::string Text() {
    const uint32_t size = Number<uint32_t>();
    if (bytes_.size() < size) return Fail<std::string>();
    std::string text(bytes_.substr(0, size));
    bytes_.remove_prefix(size);
    return text;
  }
  bool Finished() const { return !failed_ && bytes_.empty(); }

 private:
  template <typename T>
  T Fail() {
    failed_ = true;
    bytes_ = {};
    return T{};
  }
  std::string_view bytes_;
  bool failed_ = false;
};

// The payload between magic and checksum, or why these bytes are none of ours.
Result<std::string_view> Open(std::string_view bytes, uint32_t magic, const char* what) {
  if (bytes.size() > kBytesMax)
    return Error(Code::kInvalidArgument, "%s of %zu bytes, limit %zu", what, bytes.size(), kBytesMax);
  if (bytes.size() < 2 * sizeof(uint32_t) + kChecksumBytes)
    return Error(Code::kInvalidArgument, "%s of %zu bytes is cut short", what, bytes.size());
  uint32_t head[2];
  std::memcpy(head, bytes.data(), sizeof head);
  if (head[0] != magic)
    return Error(Code::kInvalidArgument, "these %zu bytes are not an ofi %s", bytes.size(), what);
  if (head[1] != kVersion)
    return Error(Code::kInvalidArgument, "ofi %s of version %u, this build reads %u", what, head[1],
                 kVersion);
  const std::string_view checked = bytes.substr(0, bytes.size() - kChecksumBytes);
  uint64_t checksum;
  std::memcpy(&checksum, bytes.data() + checked.size(), sizeof checksum);
  if (checksum != Checksum(checked))
    return Error(Code::kInvalidArgument, "ofi %s with a wrong checksum", what);
  return checked.substr(sizeof head);
}

}  // namespace

std::string Encode(const EndpointAddress& address) {
  Writer writer;
  writer.Number(kAddressMagic);
  writer.Number(kVersion);
  writer.Number(address.instance);
  writer.Number(address.hello_address);
  writer.Number(address.hello_key);
  writer.Number(address.address_format);
  writer.Text(address.provider);
  writer.Text(address.name);
  std::string bytes = std::move(writer).Finish();
  ROPETEAM_CHECK(bytes.size() <= kBytesMax);
  return bytes;
}

std::string Encode(const RegionKey& key) {
  Writer writer;
  writer.Number(kKeyMagic);
  writer.Number(kVersion);
  writer.Number(key.instance);
  writer.Number(key.base);
  writer.Number(key.key);
  writer.Number(key.length);
  return std::move(writer).Finish();
}

Status Decode(std::string_view bytes, EndpointAddress* address) {
  Result<std::string_view> payload = Open(bytes, kAddressMagic, "address");
  if (!payload.ok()) return payload.status();
  Reader reader(*payload);
  EndpointAddress decoded;
  decoded.instance = reader.Number<uint64_t>();
  decoded.hello_address = reader.Number<uint64_t>();
  decoded.hello_key = reader.Number<uint64_t>();
  decoded.address_format = reader.Number<uint32_t>();
  decoded.provider = reader.Text();
  decoded.name = reader.Text();
  if (!reader.Finished() || decoded.instance == 0 || decoded.name.empty())
    return Error(Code::kInvalidArgument, "ofi address of %zu bytes is malformed", bytes.size());
  *address = std::move(decoded);
  return OkStatus();
}

Status Decode(std::string_view bytes, RegionKey* key) {
  Result<std::string_view> payload = Open(bytes, kKeyMagic, "region key");
  if (!payload.ok()) return payload.status();
  Reader reader(*payload);
  RegionKey decoded;
  decoded.instance = reader.Number<uint64_t>();
  decoded.base = reader.Number<uint64_t>();
  decoded.key = reader.Number<uint64_t>();
  decoded.length = reader.Number<uint64_t>();
  if (!reader.Finished())
    return Error(Code::kInvalidArgument, "ofi region key of %zu bytes is malformed", bytes.size());
  *key = decoded;
  return OkStatus();
}

std::string Encode(const RailsAddress& address) {
  ParcelWriter writer(kRailsAddressMagic, kVersion);
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
  ParcelWriter writer(kRailsKeyMagic, kVersion);
  writer.Number(key.instance);
  writer.Number(key.base);
  writer.Number(key.length);
  writer.Number(static_cast<uint8_t>(key.keys.size()));
  for (const uint64_t each : key.keys) writer.Number(each);
  return std::move(writer).Finish();
}

Status Decode(std::string_view bytes, RailsAddress* address) {
  ParcelReader reader(bytes, kRailsAddressMagic, kVersion, "ofi address of several devices");
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
  ParcelReader reader(bytes, kRailsKeyMagic, kVersion, "ofi region key of several devices");
  RailsKey decoded;
  decoded.instance = reader.Number<uint64_t>();
  decoded.base = reader.Number<uint64_t>();
  decoded.length = reader.Number<uint64_t>();
  const size_t count = reader.Number<uint8_t>();
  for (size_t i = 0; i < count && i < kRailsMax; i++) decoded.keys.push_back(reader.Number<uint64_t>());
  ROPETEAM_RETURN_IF_ERROR(reader.Finish());
  if (decoded.keys.empty())
    return Error(Code::kInvalidArgument, "ofi region key of several devices, %zu bytes, is malformed",
                 bytes.size());
  *key = std::move(decoded);
  return OkStatus();
}

}  // namespace ropeteam::ofi

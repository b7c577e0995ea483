// SPDX-License-Identifier: Apache-2.0

#include "transport/verbs/codec.h"

#include <cstring>
#include <utility>

#include "core/base/bytes.h"
#include "core/base/view.h"

namespace ropeteam::verbs {
namespace {

constexpr uint32_t kVersion = 1;
constexpr size_t kAddressBytes = kAddressBytesMax / 2;  // limit of Transport::LocalAddress and ExportRegion
constexpr uint32_t kQueuePairMax = (1u << 24) - 1;

// One kind of bytes.
struct Format {
  uint32_t magic;
  const char* name;
  size_t bytes_max;
};
constexpr Format kAddress = {0x61765452, "address", kAddressBytes};      // "RTva"
constexpr Format kKey = {0x6b765452, "region key", kAddressBytes};       // "RTvk"
constexpr Format kDatagram = {0x6d765452, "message", kMessageBytesMax};  // "RTvm"

// FNV-1a: it detects mistakes, not attacks. Anyone who knows a key may write to its region anyway.
uint64_t Checksum(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (char c : bytes) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  return hash;
}

template <typename T>
std::string Seal(const Format& format, const T& value) {
  std::string bytes;
  {
    Encoder encoder(&bytes);
    encoder.Put(format.magic);
    encoder.Put(kVersion);
    encoder.Put(value);
  }
  Encoder(&bytes).Put(Checksum(bytes));
  ROPETEAM_CHECK(bytes.size() <= format.bytes_max);
  return bytes;
}

template <typename T>
Status Open(const Format& format, std::string_view bytes, T* value) {
  if (bytes.size() > format.bytes_max)
    return Error(Code::kInvalidArgument, "verbs %s of %zu bytes, limit %zu", format.name, bytes.size(),
                 format.bytes_max);
  uint32_t head[2];
  uint64_t checksum;
  if (bytes.size() < sizeof head + sizeof checksum)
    return Error(Code::kInvalidArgument, "verbs %s of %zu bytes is cut short", format.name, bytes.size());
  std::memcpy(head, bytes.data(), sizeof head);
  if (head[0] != format.magic)
    return Error(Code::kInvalidArgument, "these %zu bytes are not a verbs %s", bytes.size(), format.name);
  if (head[1] != kVersion)
    return Error(Code::kInvalidArgument, "verbs %s of version %u, this build reads %u", format.name, head[1],
                 kVersion);
  const std::string_view checked = bytes.substr(0, bytes.size() - sizeof checksum);
  std::memcpy(&checksum, bytes.data() + checked.size(), sizeof checksum);
  if (checksum != Checksum(checked))
    return Error(Code::kInvalidArgument, "verbs %s with a wrong checksum", format.name);
  T decoded;
  if (!ropeteam::Decode(checked.substr(sizeof head), decoded))
    return Error(Code::kInvalidArgument, "verbs %s of %zu bytes is malformed", format.name, bytes.size());
  *value = std::move(decoded);
  return OkStatus();
}

bool Valid(const PortAddress& port) { return port.ethernet <= 1 && port.mtu >= 1 && port.mtu <= 5; }
bool ValidQueuePair(uint32_t number) { return number > 0 && number <= kQueuePairMax; }

bool Valid(const TransportAddress& address) {
  if (address.instance == 0 || address.rails.empty() || address.rails.size() > kRailsMax) return false;
  for (const RailAddress& rail : address.rails)
    if (!Valid(rail.port) || !ValidQueuePair(rail.queue_pair)) return false;
  return true;
}

bool Valid(const Message& m) {
  if (m.kind < MessageKind::kRequest || m.kind > MessageKind::kClosed || m.refusal > Refusal::kDevice)
    return false;
  if (m.sender == 0 || m.receiver == 0 || m.connection == 0) return false;
  if (m.sender_rail >= kRailsMax || m.receiver_rail >= kRailsMax || !Valid(m.port)) return false;
  if (!ValidQueuePair(m.datagram_queue_pair)) return false;
  const bool connects = m.kind == MessageKind::kRequest || m.kind == MessageKind::kAccept;
  if (connects && (!ValidQueuePair(m.queue_pair) || m.sequence > kQueuePairMax || m.reads == 0)) return false;
  return (m.kind == MessageKind::kRefuse) == (m.refusal != Refusal::kNone);
}

template <typename T>
Status DecodeValid(const Format& format, std::string_view bytes, T* value) {
  T decoded;
  ROPETEAM_RETURN_IF_ERROR(Open(format, bytes, &decoded));
  if (!Valid(decoded)) return Error(Code::kInvalidArgument, "verbs %s with impossible values", format.name);
  *value = std::move(decoded);
  return OkStatus();
}

}  // namespace

const char* RefusalText(Refusal refusal) {
  switch (refusal) {
    case Refusal::kNone:
      return "no reason given";
    case Refusal::kOtherInstance:
      return "another instance uses its address";
    case Refusal::kFenced:
      return "it has disconnected this node";
    case Refusal::kLeaving:
      return "it is leaving";
    case Refusal::kFull:
      return "it has as many connections as it allows";
    case Refusal::kNoRail:
      return "its device is missing or down";
    case Refusal::kDevice:
      return "its device would not make the connection";
  }
  return "unknown";
}

std::string Encode(const TransportAddress& address) { return Seal(kAddress, address); }
std::string Encode(const RegionKey& key) { return Seal(kKey, key); }
std::string Encode(const Message& message) { return Seal(kDatagram, message); }

Status Decode(std::string_view bytes, TransportAddress* address) {
  return DecodeValid(kAddress, bytes, address);
}

Status Decode(std::string_view bytes, RegionKey* key) {
  RegionKey decoded;
  ROPETEAM_RETURN_IF_ERROR(Open(kKey, bytes, &decoded));
  if (decoded.instance == 0 || decoded.keys.size() > kRailsMax ||
      decoded.keys.empty() != (decoded.length == 0))
    return Error(Code::kInvalidArgument, "verbs region key with impossible values");
  *key = std::move(decoded);
  return OkStatus();
}

Status Decode(std::string_view bytes, Message* message) { return DecodeValid(kDatagram, bytes, message); }

}  // namespace ropeteam::verbs

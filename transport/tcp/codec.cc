// SPDX-License-Identifier: Apache-2.0

#include "transport/tcp/codec.h"

#include <netinet/in.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "core/base/check.h"
#include "transport/blob.h"

namespace ropeteam::tcp {
namespace {

constexpr uint32_t kAddressMagic = 0x61635452;  // "RTca"
constexpr uint32_t kKeyMagic = 0x6b635452;      // "RTck"
constexpr uint32_t kVersion = 1;

template <typename T>
std::string_view BytesOf(const T& value, size_t length = sizeof(T)) {
  return {reinterpret_cast<const char*>(&value), length};
}

Mac Hmac(const Secret& secret, const std::string& message) {
  uint8_t digest[EVP_MAX_MD_SIZE];
  unsigned length = 0;
  ROPETEAM_CHECK(HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()),
                      reinterpret_cast<const uint8_t*>(message.data()), message.size(), digest,
                      &length) != nullptr);
  Mac mac;
  ROPETEAM_CHECK(length >= mac.size());
  std::copy_n(digest, mac.size(), mac.begin());
  return mac;
}

// Connecting needs an address of one host, with a port.
bool Connectable(const IpAddress& address) {
  const sa_family_t family = address.storage.ss_family;
  if (family == AF_INET && address.length != sizeof(sockaddr_in)) return false;
  if (family == AF_INET6 && address.length != sizeof(sockaddr_in6)) return false;
  if ((family != AF_INET && family != AF_INET6) || PortOf(address) == 0) return false;
  return ParseIpAddress(ToText(address)).ok();
}

}  // namespace

std::string Encode(const EndpointAddress& address) {
  BlobWriter writer(kAddressMagic, kVersion);
  writer.Number(address.instance);
  writer.Text(BytesOf(address.secret));
  writer.Number(address.operation_bytes);
  writer.Number(static_cast<uint32_t>(address.lanes.size()));
  for (const EndpointAddress::Lane& lane : address.lanes) {
    writer.Text(BytesOf(lane.address.storage, lane.address.length));
    writer.Number(lane.link_mbps);
  }
  std::string bytes = std::move(writer).Finish();
  ROPETEAM_CHECK(bytes.size() <= kBlobBytesMax);
  return bytes;
}

std::string Encode(const RegionKey& key) {
  BlobWriter writer(kKeyMagic, kVersion);
  writer.Number(key.instance);
  writer.Number(key.key);
  writer.Number(key.length);
  return std::move(writer).Finish();
}

Status Decode(std::string_view bytes, EndpointAddress* address) {
  BlobReader reader(bytes, kAddressMagic, kVersion, "tcp address");
  EndpointAddress decoded;
  decoded.instance = reader.Number<uint64_t>();
  const std::string secret = reader.Text();
  decoded.operation_bytes = reader.Number<uint64_t>();
  const uint32_t lanes = reader.Number<uint32_t>();
  bool valid = decoded.instance != 0 && secret.size() == decoded.secret.size() &&
               decoded.operation_bytes > 0 && lanes >= 1 && lanes <= kLanesMax;
  for (uint32_t i = 0; valid && i < lanes; i++) {
    EndpointAddress::Lane& lane = decoded.lanes.emplace_back();
    const std::string name = reader.Text();
    lane.link_mbps = reader.Number<uint64_t>();
    valid = name.size() <= sizeof lane.address.storage;
    if (!valid) break;
    std::memcpy(&lane.address.storage, name.data(), name.size());
    lane.address.length = static_cast<socklen_t>(name.size());
    valid = Connectable(lane.address);
  }
  ROPETEAM_RETURN_IF_ERROR(reader.Finish());
  if (!valid) return Error(Code::kInvalidArgument, "tcp address of %zu bytes is malformed", bytes.size());
  std::copy_n(secret.begin(), secret.size(), decoded.secret.begin());
  *address = std::move(decoded);
  return OkStatus();
}

Status Decode(std::string_view bytes, RegionKey* key) {
  BlobReader reader(bytes, kKeyMagic, kVersion, "tcp region key");
  RegionKey decoded;
  decoded.instance = reader.Number<uint64_t>();
  decoded.key = reader.Number<uint64_t>();
  decoded.length = reader.Number<uint64_t>();
  ROPETEAM_RETURN_IF_ERROR(reader.Finish());
  *key = decoded;
  return OkStatus();
}

bool Valid(const Request& request, uint64_t operation_bytes) {
  const bool known =
      request.op == static_cast<uint32_t>(Op::kPut) || request.op == static_cast<uint32_t>(Op::kGet);
  return known && request.flags == 0 && request.length > 0 && request.length <= operation_bytes;
}

bool Valid(const Reply& reply, Op op, uint64_t length, uint64_t id) {
  const bool ok = reply.code == static_cast<uint32_t>(ReplyCode::kOk);
  if (reply.id != id || (!ok && reply.code != static_cast<uint32_t>(ReplyCode::kRefused))) return false;
  return reply.length == (ok && op == Op::kGet ? length : 0);
}

Mac MacOf(const Secret& secret, const Hello& hello) {
  return Hmac(secret, std::string("ropeteam tcp hello").append(BytesOf(hello, offsetof(Hello, mac))));
}

Mac MacOf(const Secret& secret, const Hello& hello, const Welcome& welcome) {
  return Hmac(secret, std::string("ropeteam tcp welcome")
                          .append(BytesOf(hello))
                          .append(BytesOf(welcome, offsetof(Welcome, mac))));
}

bool Same(const Mac& a, const Mac& b) { return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0; }

}  // namespace ropeteam::tcp

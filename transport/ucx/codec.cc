// SPDX-License-Identifier: Apache-2.0

#include "transport/ucx/codec.h"

#include "transport/blob.h"

namespace ropeteam::ucx {
namespace {

constexpr uint32_t kAddressMagic = 0x61755452;  // "RTua"
constexpr uint32_t kKeyMagic = 0x6b755452;      // "RTuk"
constexpr uint32_t kVersion = 1;

}  // namespace

Result<std::string> Encode(const WorkerAddress& address) {
  BlobWriter writer(kAddressMagic, kVersion);
  writer.Number(address.instance);
  writer.Number(address.process.host);
  writer.Number(address.process.start);
  writer.Number(address.process.process);
  writer.Number(address.hello_address);
  writer.Text(address.hello_key);
  writer.Text(address.cma);
  writer.Text(address.name);
  std::string bytes = std::move(writer).Finish();
  if (bytes.size() > kBlobBytesMax)
    return Error(
        Code::kUnsupported,
        "ucx's address of this node has %zu bytes with all its devices and transports, limit %zu: name "
        "fewer devices (--device mlx5_0:1) or transports (UCX_TLS=rc,self)",
        bytes.size(), kBlobBytesMax);
  return bytes;
}

std::string Encode(const RegionKey& key) {
  BlobWriter writer(kKeyMagic, kVersion);
  writer.Number(key.instance);
  writer.Number(key.base);
  writer.Number(key.length);
  writer.Text(key.key);
  return std::move(writer).Finish();
}

Status Decode(std::string_view bytes, WorkerAddress* address) {
  BlobReader reader(bytes, kAddressMagic, kVersion, "ucx address");
  WorkerAddress decoded;
  decoded.instance = reader.Number<uint64_t>();
  decoded.process.host = reader.Number<uint64_t>();
  decoded.process.start = reader.Number<uint64_t>();
  decoded.process.process = reader.Number<int32_t>();
  decoded.hello_address = reader.Number<uint64_t>();
  decoded.hello_key = reader.Text();
  decoded.cma = reader.Text();
  decoded.name = reader.Text();
  ROPETEAM_RETURN_IF_ERROR(reader.Finish());
  if (decoded.instance == 0 || decoded.name.empty() || decoded.hello_key.empty())
    return Error(Code::kInvalidArgument, "ucx address of %zu bytes is malformed", bytes.size());
  *address = std::move(decoded);
  return OkStatus();
}

Status Decode(std::string_view bytes, RegionKey* key) {
  BlobReader reader(bytes, kKeyMagic, kVersion, "ucx region key");
  RegionKey decoded;
  decoded.instance = reader.Number<uint64_t>();
  decoded.base = reader.Number<uint64_t>();
  decoded.length = reader.Number<uint64_t>();
  decoded.key = reader.Text();
  ROPETEAM_RETURN_IF_ERROR(reader.Finish());
  if (decoded.key.empty() != (decoded.length == 0))
    return Error(Code::kInvalidArgument, "ucx region key of %zu bytes is malformed", bytes.size());
  *key = std::move(decoded);
  return OkStatus();
}

}  // namespace ropeteam::ucx

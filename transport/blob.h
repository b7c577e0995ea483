// SPDX-License-Identifier: Apache-2.0
//
// A blob is exchanged by two transports of one kind through the control plane: an endpoint's address or a region's key.
// It begins with a magic number and a version and ends with a checksum over all bytes before it. So foreign, truncated
// or altered bytes are refused with a message. Little-endian.

#ifndef ROPETEAM_TRANSPORT_BLOB_H_
#define ROPETEAM_TRANSPORT_BLOB_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/status.h"
#include "core/base/view.h"

namespace ropeteam {

// Transport::LocalAddress() and ExportRegion() promise this limit.
inline constexpr size_t kBlobBytesMax = kAddressBytesMax / 2;

// FNV-1a: a protection against mistakes, not against attacks. An attacker with a key may write to its region anyway.
inline uint64_t BlobChecksum(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (char c : bytes) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  return hash;
}

class BlobWriter {
 public:
  BlobWriter(uint32_t magic, uint32_t version) {
    Number(magic);
    Number(version);
  }
  template <typename T>
  void Number(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void Text(std::string_view text) {
    Number(static_cast<uint32_t>(text.size()));
    bytes_.append(text);
  }
  // If parts can grow, the caller checks the size against kBlobBytesMax.
  std::string Finish() && {
    Number(BlobChecksum(bytes_));
    return std::move(bytes_);
  }

 private:
  std::string bytes_;
};

class BlobReader {
 public:
  // `what` is for messages: "ucx address". `bytes` and `what` must outlive the reader. For a refused blob, numbers are
  // 0 and texts are empty; Finish() has the reason.
  BlobReader(std::string_view bytes, uint32_t magic, uint32_t version, const char* what)
      : what_(what), size_(bytes.size()) {
    status_ = Open(bytes, magic, version);
  }
  template <typename T>
  T Number() {
    T value{};
    if (payload_.size() < sizeof value) return Fail<T>();
    std::memcpy(&value, payload_.data(), sizeof value);
    payload_.remove_prefix(sizeof value);
    return value;
  }
  std::string Text() {
    const uint32_t size = Number<uint32_t>();
    if (payload_.size() < size) return Fail<std::string>();
    std::string text(payload_.substr(0, size));
    payload_.remove_prefix(size);
    return text;
  }
  // kInvalidArgument unless everything was there and nothing is left over.
  Status Finish() {
    if (status_.ok() && !payload_.empty()) Fail<int>();
    return status_;
  }

 private:
  Status Open(std::string_view bytes, uint32_t magic, uint32_t version) {
    uint32_t head[2];
    uint64_t checksum;
    if (bytes.size() > kBlobBytesMax)
      return Error(Code::kInvalidArgument, "%s of %zu bytes, limit %zu", what_, bytes.size(), kBlobBytesMax);
    if (bytes.size() < sizeof head + sizeof checksum)
      return Error(Code::kInvalidArgument, "%s of %zu bytes is cut short", what_, bytes.size());
    std::memcpy(head, bytes.data(), sizeof head);
    if (head[0] != magic)
      return Error(Code::kInvalidArgument, "these %zu bytes are not an %s", bytes.size(), what_);
    if (head[1] != version)
      return Error(Code::kInvalidArgument, "%s of version %u, this build reads %u", what_, head[1], version);
    const std::string_view checked = bytes.substr(0, bytes.size() - sizeof checksum);
    std::memcpy(&checksum, bytes.data() + checked.size(), sizeof checksum);
    if (checksum != BlobChecksum(checked))
      return Error(Code::kInvalidArgument, "%s with a wrong checksum", what_);
    payload_ = checked.substr(sizeof head);
    return OkStatus();
  }
  template <typename T>
  T Fail() {
    if (status_.ok()) status_ = Error(Code::kInvalidArgument, "%s of %zu bytes is malformed", what_, size_);
    payload_ = {};
    return T{};
  }

  const char* const what_;
  const size_t size_;
  std::string_view payload_;
  Status status_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_TRANSPORT_BLOB_H_

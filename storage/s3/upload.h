// SPDX-License-Identifier: Apache-2.0
//
// The two kinds of Upload of the S3 sink.

#ifndef ROPETEAM_STORAGE_S3_UPLOAD_H_
#define ROPETEAM_STORAGE_S3_UPLOAD_H_

#include <memory>
#include <string>

#include "storage/s3/client.h"
#include "storage/sink.h"

namespace ropeteam::storage::s3 {

inline constexpr uint64_t kPartBytesMin = 5ull << 20;  // S3's limits
inline constexpr uint64_t kPartBytesMax = 5ull << 30;
// A file of so many bytes is kept until Finish() and saves two requests; a larger one would cost more memory than the
// requests are worth.
inline constexpr uint64_t kWholeBytesMax = 1 << 20;

// The nearest size of parts that the store takes for a file of so many bytes; at least 1. kInvalidArgument: there is none.
Result<uint64_t> PartBytes(uint64_t bytes, uint64_t wanted);

// Encryption and storage class, which go with the request that makes the file.
NameValues FileHeaders(const Config& config);

// Looks for an unfinished upload of the same file to go on with, else creates one (files of at most kWholeBytesMax
// need neither). `client` outlives it.
Result<std::unique_ptr<Upload>> BeginUpload(Client* client, const std::string& key, uint64_t bytes,
                                            uint64_t part_bytes, Deadline deadline);

// All unfinished uploads of keys that begin with `prefix`, page by page; `visit` says false to end.
using VisitUpload = std::function<Status(const UploadsReply::Upload& upload)>;
Status ForEachUpload(Client* client, const std::string& prefix, Deadline deadline, const VisitUpload& visit);

// kOk also when it is gone.
Status AbortUpload(Client* client, const std::string& key, const std::string& id, Deadline deadline);

}  // namespace ropeteam::storage::s3

#endif  // ROPETEAM_STORAGE_S3_UPLOAD_H_

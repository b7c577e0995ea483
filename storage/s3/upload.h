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
// A file of at most this size is kept until Finish(), which saves two requests. A larger one would cost more memory
// than the requests are worth.
inline constexpr uint64_t kWholeBytesMax = 1 << 20;

// The nearest part size that the store accepts for a file of this size; at least 1. kInvalidArgument: there is none.
Result<uint64_t> PartBytes(uint64_t bytes, uint64_t wanted);

// Encryption and storage class, which go with the request that makes the file.
NameValues FileHeaders(const Config& config);

// Finds an unfinished upload of the same file to continue, or else creates one (files of at most kWholeBytesMax need
// neither). `client` must outlive it.
Result<std::unique_ptr<Upload>> BeginUpload(Client* client, const std::string& key, uint64_t bytes,
                                            uint64_t part_bytes, Deadline deadline);

// Visits all unfinished uploads of keys that begin with `prefix`, page by page.
using VisitUpload = std::function<Status(const UploadsReply::Upload& upload)>;
Status ForEachUpload(Client* client, const std::string& prefix, Deadline deadline, const VisitUpload& visit);

// kOk also if it does not exist any more.
Status AbortUpload(Client* client, const std::string& key, const std::string& id, Deadline deadline);

}  // namespace ropeteam::storage::s3

#endif  // ROPETEAM_STORAGE_S3_UPLOAD_H_

// SPDX-License-Identifier: Apache-2.0
//
// The sink of object stores that speak S3: AWS, MinIO, Ceph, R2, and Google's XML API as gs://. docs/storage.md has the
// parameters of its URLs and where credentials are looked for.
//
// How the contract of storage/sink.h is met:
//
//     Begin, PutPart, Finish   a multipart upload, one request a part; a file of at most 1 MiB is kept in memory
//                              until Finish() and goes in one PUT, because a PUT is seen at once
//     Has                      by the uploads and parts that the bucket lists, where it lists their CRC32C
//     the part's checksum      x-amz-checksum-crc32c (x-goog-hash), compared by the store; where it does not,
//                              by the sink before it is sent, and Content-MD5 on the way
//     the file's checksum      the parts' own, put together, is compared before the upload is completed, and by
//                              the store where it has FULL_OBJECT; Stat() tells it in that case, and after Put()
//     Put(kIfAbsent)           If-None-Match: * (x-goog-if-generation-match: 0). Whether the store honours it is
//                              tried once
//     folders                  there are none: DeleteFolder() does nothing
//
// Limits: parts of 5 MiB to 5 GiB; prefixes of at most 123 bytes; no requester-pays, no access points, no SSE-C.

#ifndef ROPETEAM_STORAGE_S3_S3_SINK_H_
#define ROPETEAM_STORAGE_S3_S3_SINK_H_

#include <memory>

#include "storage/s3/client.h"
#include "storage/s3/environment.h"
#include "storage/sink.h"
#include "storage/url.h"

namespace ropeteam::storage {

// Reads the environment and the shared files; makes no connection. kInvalidArgument: see storage/sinks.h.
Result<std::unique_ptr<Sink>> OpenS3Sink(const Url& url);

// For tests, which have an environment, a clock and short pauses of their own.
Result<std::unique_ptr<Sink>> OpenS3Sink(const Url& url, const s3::Environment& environment,
                                         const s3::ClientTimes& times);

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_S3_S3_SINK_H_

// SPDX-License-Identifier: Apache-2.0
#include "node/storage_reads.h"

#include <string>
#include <utility>

#include "storage/forwarding_sink.h"

namespace ropeteam {
namespace {

// Examples: a disabled KMS key (400), a proxy that wants a login (407) or ignores ranges, a file system without the call
// (ENOSYS), a symbolic link in the place of a folder (ELOOP). An operator can change each of them.
Status Refusal(Status status) {
  const bool refused = status.code() == Code::kInvalidArgument || status.code() == Code::kUnsupported;
  return refused ? Status(Code::kIo, status.message()) : status;
}

class ReadsSink final : public storage::ForwardingSink {
 public:
  using ForwardingSink::ForwardingSink;

  Status Read(const std::string& name, uint64_t offset, std::span<const storage::Target> targets,
              storage::Deadline deadline) override {
    return Refusal(below().Read(name, offset, targets, deadline));
  }
  Result<storage::FileInfo> Stat(const std::string& name, storage::Deadline deadline) override {
    Result<storage::FileInfo> info = below().Stat(name, deadline);
    if (!info.ok()) return Refusal(info.status());
    return info;
  }
  Result<storage::ListPage> List(const std::string& folder, const std::string& page,
                                 storage::Deadline deadline) override {
    Result<storage::ListPage> list = below().List(folder, page, deadline);
    if (!list.ok()) return Refusal(list.status());
    return list;
  }
};

}  // namespace

std::shared_ptr<storage::Sink> SinkForReads(std::shared_ptr<storage::Sink> below) {
  if (below == nullptr) return nullptr;
  return std::make_shared<ReadsSink>(std::move(below));
}

}  // namespace ropeteam

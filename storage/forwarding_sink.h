// SPDX-License-Identifier: Apache-2.0
//
// A Sink that hands every call to another one: the base of those that change or watch a few calls.

#ifndef ROPETEAM_STORAGE_FORWARDING_SINK_H_
#define ROPETEAM_STORAGE_FORWARDING_SINK_H_

#include <memory>
#include <string>
#include <utility>

#include "storage/sink.h"

namespace ropeteam::storage {

class ForwardingSink : public Sink {
 public:
  explicit ForwardingSink(std::shared_ptr<Sink> below) : below_(std::move(below)) {}

  std::string Describe() const override { return below_->Describe(); }
  Result<std::unique_ptr<Upload>> Begin(const std::string& name, uint64_t bytes, uint64_t part_bytes_wanted,
                                        Deadline deadline) override {
    return below_->Begin(name, bytes, part_bytes_wanted, deadline);
  }
  Status Put(const std::string& name, std::string_view bytes, PutMode mode, Deadline deadline) override {
    return below_->Put(name, bytes, mode, deadline);
  }
  Status Read(const std::string& name, uint64_t offset, std::span<const Target> targets,
              Deadline deadline) override {
    return below_->Read(name, offset, targets, deadline);
  }
  Result<FileInfo> Stat(const std::string& name, Deadline deadline) override {
    return below_->Stat(name, deadline);
  }
  Result<ListPage> List(const std::string& folder, const std::string& page, Deadline deadline) override {
    return below_->List(folder, page, deadline);
  }
  Status Delete(const std::string& name, Deadline deadline) override {
    return below_->Delete(name, deadline);
  }
  Status DeleteFolder(const std::string& folder, Deadline deadline) override {
    return below_->DeleteFolder(folder, deadline);
  }
  Result<uint64_t> AbortUploads(const std::string& folder, std::chrono::seconds age,
                                Deadline deadline) override {
    return below_->AbortUploads(folder, age, deadline);
  }
  void SetYield(Yield yield) override { below_->SetYield(std::move(yield)); }
  void Stop() override { below_->Stop(); }

 protected:
  Sink& below() const { return *below_; }

 private:
  const std::shared_ptr<Sink> below_;
};

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_FORWARDING_SINK_H_

// SPDX-License-Identifier: Apache-2.0
//
// The objects of a step, one rank after the other, out of a running job's memory or from storage. Every byte that is handed
// over is checked: in memory before, on storage when the rank's file has been read as a whole.

#ifndef ROPETEAM_API_CLI_STEP_SOURCE_H_
#define ROPETEAM_API_CLI_STEP_SOURCE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "api/cli/storage_options.h"
#include "core/base/status.h"

namespace ropeteam::cli {

struct SavedObject {
  std::string name;
  uint64_t length = 0;
};

// Not thread-safe.
class StepSource {
 public:
  virtual ~StepSource() = default;

  // "step 100 incarnation 3 of job train".
  virtual std::string Text() const = 0;
  virtual uint32_t world_size() const = 0;

  // Goes to a rank, of which everything below is. The order of ranks is the caller's.
  virtual Status Open(uint32_t rank) = 0;
  const std::vector<SavedObject>& objects() const { return objects_; }
  // A whole object of at most `bytes_max`. kNotFound: there is none of this name. kInvalidArgument: it is larger.
  Result<std::string> Read(const std::string& name, uint64_t bytes_max);

  // kCorrupt: the object has another length. kNotFound as Read().
  Status CheckLength(const std::string& name, uint64_t length) const;

  // Calls `take` with all bytes of these objects: the object's place in `names`, where the bytes begin in it, and the bytes,
  // which are valid during the call. May call from several threads, in any order. The first status that is not OK ends it.
  // kCorrupt: bytes do not match their checksum; some of them may have been handed over.
  using Take = std::function<Status(size_t name, uint64_t offset, const std::byte* data, uint64_t length)>;
  virtual Status ReadAll(const std::vector<std::string>& names, const Take& take) = 0;
  // Called by ReadAll() with numbers of bytes that were handed over.
  std::function<void(uint64_t bytes)> moved = [](uint64_t) {};

 protected:
  void SetObjects(std::vector<SavedObject> objects);
  // An object's place in objects(). kNotFound as Read().
  Result<size_t> Find(const std::string& name) const;
  virtual Status ReadObject(size_t object, std::byte* data) = 0;

 private:
  std::vector<SavedObject> objects_;
  std::unordered_map<std::string_view, size_t> places_;  // of their names
};

// The step that the options of `export` name. kNotFound: there is none, or a file of it is missing.
Result<std::unique_ptr<StepSource>> OpenStepSource(const StorageOptions& options);

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_STEP_SOURCE_H_

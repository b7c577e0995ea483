// SPDX-License-Identifier: Apache-2.0
//
// The directory that `ropeteam export --format hf` makes. No file has its name before Finish(), so what was cut off is never
// taken for a model.

#ifndef ROPETEAM_API_CLI_HF_DIRECTORY_H_
#define ROPETEAM_API_CLI_HF_DIRECTORY_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "api/client/unique_fd.h"
#include "core/base/status.h"

namespace ropeteam::cli {

// Write() is safe from any thread, all else from one.
class HfDirectory {
 public:
  // Makes the directory where it is not there; its parent must be. What an export that was cut off has left in it goes.
  // kAlreadyExists: it has other files. kIo, with the path: it cannot be made or read.
  static Result<HfDirectory> Open(const std::string& path);
  // Removes what was begun and not finished.
  ~HfDirectory();
  HfDirectory(HfDirectory&&) = default;

  // Begins a file of this size and reserves its room; gives its number. `name` may have folders. kNoSpace: there is no room.
  Result<size_t> Create(const std::string& name, uint64_t bytes);
  Status Write(size_t file, uint64_t offset, const void* data, uint64_t length);
  // A small file.
  Status Put(const std::string& name, std::string_view bytes);

  // Everything is on disk under its own name, in the order of the calls above. After an error no name is given that was
  // not given before it.
  Status Finish();

 private:
  struct File {
    std::string path;
    client::UniqueFd fd;
  };
  explicit HfDirectory(std::string path) : path_(std::move(path)) {}
  Status MakeFolders(const std::string& name);

  std::string path_;
  std::vector<File> files_;
};

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_HF_DIRECTORY_H_

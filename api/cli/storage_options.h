// SPDX-License-Identifier: Apache-2.0
//
// What the commands that work on storage are told: `ls --storage`, `verify URL`, `prune`, `export`, `import`.

#ifndef ROPETEAM_API_CLI_STORAGE_OPTIONS_H_
#define ROPETEAM_API_CLI_STORAGE_OPTIONS_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "storage/retention/retention.h"

namespace ropeteam::cli {

// Of one call of the store, in which it retries by itself; as the daemon's.
inline constexpr std::chrono::seconds kStorageTimeoutDefault{60};
inline constexpr std::chrono::seconds kStorageTimeoutMax{86400};

enum class StorageCommand { kList, kVerify, kPrune, kExport, kImport };

// What `export` takes in place of a step's number.
inline constexpr char kLatestStep[] = "latest";

// export --format hf; the destination is a path then.
struct HfOptions {
  bool chosen = false;
  bool best = false;   // the best step's weights, which RopeteamCallback saves with each step
  std::string model;   // its name in the step; empty: all
  std::string config;  // a file or a directory; empty: the step's own
  uint64_t shard_bytes_max = 5'000'000'000;  // of one file of tensors; transformers' own default
  friend bool operator==(const HfOptions&, const HfOptions&) = default;
};

struct StorageOptions {
  std::string url;                     // a bare path is made absolute; empty: `export` from memory
  std::string job;                     // empty: not given; `export` from memory: the daemon's
  std::string step;                    // verify, export, import: as it was typed; empty: not given
  std::string destination;             // export: a URL as `url` is
  std::string socket;                  // export, import: the daemon's
  std::string incarnation_token;       // import
  HfOptions hf;                        // export
  std::optional<uint32_t> rank_first;  // import: both or neither
  std::optional<uint32_t> rank_last;
  std::chrono::seconds timeout = kStorageTimeoutDefault;
  storage::RetentionRules rules;  // prune
  std::string audit_log;          // prune: a path; empty: none
  bool dry_run = false;           // prune: exactly one of these two
  bool yes = false;
  bool unfinished = false;  // prune
  bool json = false;        // ls, verify
  bool help = false;        // nothing else has been checked
};

// kInvalidArgument: an unknown option, a bad value, something missing or too much. Opens nothing.
Result<StorageOptions> ParseStorageOptions(const std::vector<std::string>& arguments, StorageCommand command);

// Whether `ls` or `verify` with these arguments means storage and not the daemon: `--storage` is there, or an argument
// that is neither an option nor a number.
bool MeansStorage(const std::vector<std::string>& arguments);

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_STORAGE_OPTIONS_H_

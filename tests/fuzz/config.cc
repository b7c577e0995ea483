// SPDX-License-Identifier: Apache-2.0
//
// Texts that users write: a daemon's config file as `ropeteam run` reads it, sizes, durations, URLs.

#include <sstream>

#include "api/cli/config_file.h"
#include "core/base/sizes.h"
#include "storage/retention/retention.h"
#include "storage/steps/steps.h"
#include "storage/url.h"
#include "tests/fuzz/fuzz.h"

namespace ropeteam::fuzz {
namespace {

void RunConfig(std::string_view input) {
  const std::string text(input);
  std::istringstream file(text);
  std::vector<std::string> values = {text};
  for (const auto& [name, value] : cli::ReadConfigLines(file)) {
    ROPETEAM_CHECK(name.size() + value.size() < text.size());
    values.push_back(value);
  }
  for (const std::string& value : values) {
    uint64_t bytes = 0;
    if (ParseSize(value, &bytes)) (void)FormatSize(bytes);
    (void)storage::ParseDuration(value);
    (void)storage::ParseKeepBest(value);
    (void)storage::ParseStepSource(value);
    const Result<storage::Url> url = storage::ParseUrl(value);
    ROPETEAM_CHECK(!url.ok() || !url->scheme.empty());
  }
}

std::vector<std::string> ConfigSeeds() {
  return {"# a job\njob = llama\nnode=\"n 0\"\nmemory = 24G # of 64\n keep-within = 7d\n",
          "storage = 's3://bucket/steps?region=eu-central-1&endpoint=http%3A%2F%2Fh%3A1'\n",
          "restore-from = /data/steps/llama@100\nkeep-best = loss:min\n; off = 1\n", "18446744073709551615",
          "16777216T"};
}

const Target kConfig("config", RunConfig, ConfigSeeds);

}  // namespace
}  // namespace ropeteam::fuzz

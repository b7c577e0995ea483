// SPDX-License-Identifier: Apache-2.0
#include "tests/storage/conformance.h"

#include <utility>

namespace ropeteam::storage::test {
namespace {

std::vector<SinkKind>& Kinds() {
  static std::vector<SinkKind> kinds;
  return kinds;
}

}  // namespace

bool RegisterSinkKind(SinkKind kind) {
  Kinds().push_back(std::move(kind));
  return true;
}

const std::vector<SinkKind>& SinkKinds() { return Kinds(); }

}  // namespace ropeteam::storage::test

// SPDX-License-Identifier: Apache-2.0

#include "tests/transport/kinds.h"

#include <iterator>

namespace ropeteam::test {

std::vector<TransportKind> AllKinds() {
  std::vector<TransportKind> all;
  for (auto list : {TcpKinds(), OfiKinds(), VerbsKinds(), UcxKinds()})
    std::move(list.begin(), list.end(), std::back_inserter(all));
  return all;
}

const TransportKind* FindKind(const std::string& name) {
  // Never freed: callers keep the returned pointers.
  static const std::vector<TransportKind> all = AllKinds();
  for (const TransportKind& kind : all)
    if (kind.name == name) return &kind;
  return nullptr;
}

}  // namespace ropeteam::test

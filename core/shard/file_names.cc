// SPDX-License-Identifier: Apache-2.0
#include "core/shard/file_names.h"

namespace ropeteam {
namespace {

bool Clashes(const std::set<std::string>& names, const std::string& name) {
  if (names.contains(name)) return true;
  for (size_t slash = name.find('/'); slash != std::string::npos; slash = name.find('/', slash + 1))
    if (names.contains(name.substr(0, slash))) return true;
  const auto inside = names.lower_bound(name + "/");
  return inside != names.end() && inside->starts_with(name + "/");
}

}  // namespace

std::vector<std::string> TakeFileNames(const std::vector<std::string>& wanted, std::set<std::string>* names) {
  std::vector<std::string> taken;
  for (const std::string& name : wanted)
    if (Clashes(*names, name)) {
      taken.push_back(name);
    } else {
      names->insert(name);
    }
  return taken;
}

}  // namespace ropeteam

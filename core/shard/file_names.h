// SPDX-License-Identifier: Apache-2.0
//
// Which rank's object is a file of a name that several ranks of a step want. Shared by all who lay a step out as files:
// they must come to the same.

#ifndef ROPETEAM_CORE_SHARD_FILE_NAMES_H_
#define ROPETEAM_CORE_SHARD_FILE_NAMES_H_

#include <set>
#include <string>
#include <vector>

namespace ropeteam {

// Called for one rank after the other, from rank 0 on, with one set that is empty at first: the lowest rank that wants a
// name has it. Returns which of the names that this rank wants are taken, or are a folder of a taken one or within one (a
// directory cannot hold both); adds the others to the set. A rank's own names clash with one another, too.
std::vector<std::string> TakeFileNames(const std::vector<std::string>& wanted, std::set<std::string>* names);

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_SHARD_FILE_NAMES_H_

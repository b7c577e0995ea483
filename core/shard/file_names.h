// SPDX-License-Identifier: Apache-2.0
//
// Decides which rank's object becomes a file if several ranks of a step use the same name. All code that lays out a
// step as files shares it, so that the results agree.

#ifndef ROPETEAM_CORE_SHARD_FILE_NAMES_H_
#define ROPETEAM_CORE_SHARD_FILE_NAMES_H_

#include <set>
#include <string>
#include <vector>

namespace ropeteam {

// Call it for one rank after the other, from rank 0 on, with one set that is empty at first. The lowest rank that wants
// a name gets it. Returns the names of this rank that are unavailable: they are taken, are a folder of a taken one, or
// are inside one (a directory cannot hold both). Adds the others to the set. A rank's own names may also conflict with
// one another.
std::vector<std::string> TakeFileNames(const std::vector<std::string>& wanted, std::set<std::string>* names);

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_SHARD_FILE_NAMES_H_

// SPDX-License-Identifier: Apache-2.0
#include "api/cli/programs.h"

#include <sys/stat.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <sstream>
#include <vector>

namespace ropeteam::cli {
namespace {

std::string OwnDirectory() {
  char path[PATH_MAX];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof(path));
  if (length <= 0) return ".";
  const std::string text(path, static_cast<size_t>(length));
  return text.substr(0, text.rfind('/'));
}

std::string FirstThatIs(const std::vector<std::string>& candidates, int mode) {
  for (const std::string& candidate : candidates) {
    if (access(candidate.c_str(), mode) != 0) continue;
    char resolved[PATH_MAX];
    return realpath(candidate.c_str(), resolved) != nullptr ? resolved : candidate;
  }
  return "";
}

}  // namespace

std::string FindProgram(const std::string& name, const std::string& build_directory,
                        const std::string& variable) {
  if (const char* told = std::getenv(variable.c_str()); told != nullptr && told[0] != '\0') return told;
  const std::string own = OwnDirectory();
  std::vector<std::string> candidates = {own + "/" + name, own + "/../../" + build_directory + "/" + name};
  const char* path = std::getenv("PATH");
  std::istringstream directories(path != nullptr ? path : "");
  for (std::string directory; std::getline(directories, directory, ':');)
    candidates.push_back((directory.empty() ? "." : directory) + "/" + name);
  return FirstThatIs(candidates, X_OK);
}

int CheckCommand(const std::string& name) {
  constexpr int kNotFound = 127;
  constexpr int kNotExecutable = 126;
  std::vector<std::string> candidates;
  const char* path = std::getenv("PATH");
  std::istringstream directories(path != nullptr ? path : "/bin:/usr/bin");
  if (name.find('/') != std::string::npos)
    candidates.push_back(name);
  else
    for (std::string directory; std::getline(directories, directory, ':');)
      candidates.push_back((directory.empty() ? "." : directory) + "/" + name);
  int code = kNotFound;
  for (const std::string& candidate : candidates) {
    struct stat info {};
    if (name.empty() || stat(candidate.c_str(), &info) != 0) continue;
    if (S_ISREG(info.st_mode) && access(candidate.c_str(), X_OK) == 0) return 0;
    code = kNotExecutable;
  }
  return code;
}

std::string FindLibrary() {
  const std::string own = OwnDirectory();
  return FirstThatIs(
      {own + "/../client/libropeteam.so", own + "/../lib/libropeteam.so", own + "/../lib64/libropeteam.so",
       own + "/../lib/x86_64-linux-gnu/libropeteam.so", own + "/libropeteam.so"},
      R_OK);
}

std::string FindPythonPackage() {
  const std::string library = FindLibrary();
  if (library.empty()) return "";
  const std::string directory = library.substr(0, library.rfind('/')) + "/ropeteam/python";
  return access((directory + "/ropeteam/__init__.py").c_str(), R_OK) == 0 ? directory : "";
}

}  // namespace ropeteam::cli

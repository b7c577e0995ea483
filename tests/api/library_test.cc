// SPDX-License-Identifier: Apache-2.0
//
// libropeteam.so as a file: what it exports, what it needs, and the C program that is linked with it alone.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>

#include "tests/api/fake_daemon.h"

namespace ropeteam::test {
namespace {

// The output of a command; empty if it fails.
std::string OutputOf(const std::string& command) {
  FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return "";
  std::string output;
  char buffer[4096];
  for (size_t got = 0; (got = ::fread(buffer, 1, sizeof(buffer), pipe)) > 0;) output.append(buffer, got);
  return ::pclose(pipe) == 0 ? output : "";
}

std::string Bracketed(const std::string& line) {
  const size_t begin = line.find('[');
  const size_t end = line.find(']');
  return begin == std::string::npos || end == std::string::npos ? ""
                                                                : line.substr(begin + 1, end - begin - 1);
}

TEST(LibraryTest, ExportsTheCApiAndNothingElse) {
  const std::string symbols = OutputOf("nm -D --defined-only " ROPETEAM_LIBRARY);
  ASSERT_NE(symbols, "") << "nm is not there or cannot read " ROPETEAM_LIBRARY;
  std::istringstream lines(symbols);
  std::set<std::string> exported;
  std::string address;
  std::string kind;
  for (std::string name; lines >> address >> kind >> name;) {
    exported.insert(name);
  }
  std::set<std::string> declared;
  const std::regex call("(ropeteam_\\w+)\\(");
  std::ifstream header(ROPETEAM_HEADER);
  for (std::string line; std::getline(header, line);) {
    std::smatch found;
    if (line.rfind("ROPETEAM_EXPORT ", 0) == 0 && std::regex_search(line, found, call))
      declared.insert(found[1]);
  }
  EXPECT_TRUE(declared.contains("ropeteam_open")) << ROPETEAM_HEADER;
  EXPECT_EQ(exported, declared);
}

TEST(LibraryTest, NeedsTheCAndCppLibrariesOnly) {
#ifdef ROPETEAM_SANITIZED
  GTEST_SKIP() << "in this build the library needs the sanitizer's runtime too";
#endif
  const std::string dynamic = OutputOf("readelf -d " ROPETEAM_LIBRARY);
  ASSERT_NE(dynamic, "") << "readelf is not there or cannot read " ROPETEAM_LIBRARY;
  const std::set<std::string> allowed = {"libc.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libm.so.6",
                                         "libpthread.so.0"};
  std::istringstream lines(dynamic);
  int needed = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.find("(SONAME)") != std::string::npos) {
      EXPECT_EQ(Bracketed(line), "libropeteam.so.0");
    }
    EXPECT_EQ(line.find("(TEXTREL)"), std::string::npos);
    if (line.find("(NEEDED)") == std::string::npos) continue;
    ++needed;
    EXPECT_TRUE(allowed.contains(Bracketed(line))) << line;
  }
  EXPECT_GT(needed, 0);
}

TEST(LibraryTest, AProgramInCMakesAWholeCycle) {
  FakeDaemon daemon(64 * 1024, 512);
  const std::string command =
      "ROPETEAM_SOCKET=" + daemon.socket() + " RANK=0 WORLD_SIZE=1 " ROPETEAM_C_API_TEST;
  const int status = std::system(command.c_str());
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_GE(daemon.counts().commits, 1);
  EXPECT_THAT(daemon.Problems(), ::testing::IsEmpty());
}

}  // namespace
}  // namespace ropeteam::test

// SPDX-License-Identifier: Apache-2.0
#include "storage/format/names.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "core/base/ids.h"
#include "core/shard/file_names.h"
#include "storage/format/json.h"

namespace ropeteam::storage {
namespace {

TEST(StepFolder, PrintsAndParses) {
  EXPECT_EQ(StepFolder({100, 3}), "step-0000000100-i00000003");
  EXPECT_EQ(StepFolder({UINT64_MAX, kIncarnationMax - 1}), "step-18446744073709551615-i9223372036854775807");
  for (const StepName& name : {StepName{0, 0}, StepName{100, 3}, StepName{9999999999, 99999999},
                               StepName{10000000000, 100000000}, StepName{UINT64_MAX, kIncarnationMax - 1}})
    EXPECT_EQ(ParseStepFolder(StepFolder(name)), name);
  EXPECT_LT(StepFolder({9, 3}), StepFolder({10, 3}));
  EXPECT_LT(StepFolder({999999, 3}), StepFolder({9999999999, 3}));
}

TEST(StepFolder, WhatItDoesNotPrintIsNotOne) {
  for (const char* folder :
       {"", "step-", "step-0000000100", "step-100-i00000003", "step-0000000100-i3",
        "step-00000000100-i00000003", "step-0000000100-i00000003/", "step-0000000100-i00000003.tmp",
        "Step-0000000100-i00000003", "step-+000000100-i00000003", "step-000000010x-i00000003",
        "step--000000100-i00000003", "step-18446744073709551616-i00000003", "step- 000000100-i00000003",
        "step-0000000100-i-0000003", "step-0000000100-i9223372036854775808",
        "step-0000000100-i18446744073709551615"})
    EXPECT_FALSE(ParseStepFolder(folder)) << folder;
}

TEST(FileNames, WhatIsAFileByItsName) {
  for (const char* name :
       {"__0_0.distcp", ".metadata", "model.safetensors", "a/b/c.pt", "config.json", "a/.metadata", ".json",
        "rank-1.safetensors", "rank-00001x.pt", "x/rank-00001.safetensors", "\xc3\xa9.pt"})
    EXPECT_TRUE(IsFileName(name)) << name;
  for (const std::string& name :
       std::initializer_list<std::string>{"",
                                          "w",
                                          "metadata",
                                          "x.metadata",
                                          "a.PT",
                                          "a.pth",
                                          "a.json/b",
                                          ".metadata/x",
                                          "../a.pt",
                                          "/a.pt",
                                          "a//b.pt",
                                          "a/./b.pt",
                                          std::string("a\0.pt", 5),
                                          "a\n.pt",
                                          "\xff.pt",
                                          "ropeteam-manifest.json",
                                          "ropeteam-x.pt",
                                          "a/ropeteam-x.pt",
                                          ".a.ropeteam-0123456789abcdef.part-1.json",
                                          ".ropeteam/a.json",
                                          "rank-00001.safetensors",
                                          "rank-123456.safetensors",
                                          "rank-00001/a.pt",
                                          std::string(300, 'a') + ".pt"})
    EXPECT_FALSE(IsFileName(name)) << name;
}

TEST(FileNames, ARankHasAFileAndAFolder) {
  EXPECT_EQ(RankFileName(3), "rank-00003.safetensors");
  EXPECT_EQ(RankFileName(131071), "rank-131071.safetensors");
  EXPECT_EQ(RankFolderPath(7, "a/b.pt"), "rank-00007/a/b.pt");
  EXPECT_EQ(ObjectNameOfPath(7, "rank-00007/a/b.pt"), "a/b.pt");
  EXPECT_EQ(ObjectNameOfPath(7, "rank-00008/a/b.pt"), "rank-00008/a/b.pt");
  EXPECT_EQ(ObjectNameOfPath(7, "a.pt"), "a.pt");
}

TEST(FileNames, AFileAndAFolderOfOneNameClashAndTheFirstHasTheName) {
  using Names = std::vector<std::string>;
  std::set<std::string> names;
  EXPECT_EQ(TakeFileNames({"a.json", "x/a.json/b.pt", "a/b.pt"}, &names), Names());
  EXPECT_EQ(TakeFileNames({"a.json", "a.json/b.pt", "x/a.json", "a.json2", "a/c.pt", "a"}, &names),
            Names({"a.json", "a.json/b.pt", "x/a.json", "a"}));
  EXPECT_EQ(TakeFileNames({"a.json2", "a/c.pt"}, &names), Names({"a.json2", "a/c.pt"}));
}

TEST(Utf8, AsTheStandardSays) {
  for (const char* good : {"", "a", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80",
                           "\xef\xbf\xbf", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"})
    EXPECT_TRUE(IsUtf8(good)) << good;
  for (const char* bad :
       {"\x80", "\xc0\x80", "\xc1\xbf", "\xc2", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xed\xbf\xbf",
        "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "a\xe2\x82", "\xe2\x28\xa1"})
    EXPECT_FALSE(IsUtf8(bad)) << bad;
}

}  // namespace
}  // namespace ropeteam::storage

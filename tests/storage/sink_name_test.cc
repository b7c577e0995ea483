// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <string>

#include "storage/sink.h"

namespace ropeteam::storage {
namespace {

TEST(FileName, OrdinaryOnesPass) {
  for (const char* good : {"a", "job/step-0000000100-i00000003/rank-00003.safetensors", "a/.metadata",
                           "a/..b", "a b", "\xc3\xa9t\xc3\xa9"})
    EXPECT_TRUE(CheckFileName(good).ok()) << good;
  EXPECT_TRUE(CheckFileName(std::string(255, 'n')).ok());
}

TEST(FileName, WhatCouldLeaveThePrefixIsRefused) {
  for (const std::string& bad :
       {std::string(), std::string("/etc/passwd"), std::string("../x"), std::string("a/../x"),
        std::string("a/.."), std::string("."), std::string("a/./b"), std::string("a//b"), std::string("a/"),
        std::string("a\0b", 3), std::string("a\nb"), std::string("a\x7f"), std::string(256, 'n'),
        std::string("a/") + std::string(256, 'n')}) {
    const Status status = CheckFileName(bad);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << bad;
    EXPECT_EQ(status.message().find('\n'), std::string::npos);
  }
}

TEST(FileName, ALengthOverTheLimitIsNamed) {
  std::string name;
  while (name.size() <= kFileNameBytesMax) name += "0123456789/";
  name += "x";
  const Status status = CheckFileName(name);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find(std::to_string(name.size())), std::string::npos) << status.message();
}

}  // namespace
}  // namespace ropeteam::storage

// SPDX-License-Identifier: Apache-2.0
#include "storage/url.h"

#include <gtest/gtest.h>

namespace ropeteam::storage {
namespace {

TEST(Url, APathIsAFileUrlWithoutParameters) {
  const Result<Url> url = ParseUrl("/mnt/a?b=c");
  ASSERT_TRUE(url.ok());
  EXPECT_EQ(url->scheme, "file");
  EXPECT_EQ(url->path, "/mnt/a?b=c");
  EXPECT_TRUE(url->parameters.empty());
}

TEST(Url, HasSchemeBucketPrefixAndDecodedParameters) {
  const Result<Url> url =
      ParseUrl("S3://bucket/runs/7/?endpoint=http%3A%2F%2F127.0.0.1%3A9000&path_style=true");
  ASSERT_TRUE(url.ok());
  EXPECT_EQ(url->scheme, "s3");
  EXPECT_EQ(url->authority, "bucket");
  EXPECT_EQ(url->path, "runs/7");
  EXPECT_EQ(url->parameters.at("endpoint"), "http://127.0.0.1:9000");
  EXPECT_EQ(url->parameters.at("path_style"), "true");
}

TEST(Url, AFileUrlKeepsItsFirstSlash) {
  const Result<Url> url = ParseUrl("file:///mnt/store");
  ASSERT_TRUE(url.ok());
  EXPECT_EQ(url->authority, "");
  EXPECT_EQ(url->path, "/mnt/store");
}

TEST(Url, WhatCannotBeReadIsRefusedAndNamed) {
  for (const char* bad : {"", "relative/path", "://bucket", "s3://b?x", "s3://b?=1", "s3://b?a=1&a=2",
                          "s3://b?a=%4", "s3://b?a=%zz", "s3://b?a=%+1"}) {
    const Result<Url> url = ParseUrl(bad);
    ASSERT_FALSE(url.ok()) << bad;
    EXPECT_EQ(url.status().code(), Code::kInvalidArgument);
    EXPECT_NE(url.status().message().find(bad), std::string::npos) << url.status().message();
  }
}

}  // namespace
}  // namespace ropeteam::storage

// SPDX-License-Identifier: Apache-2.0
#include "core/shard/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "core/base/checksum.h"

namespace ropeteam {
namespace {

using ::testing::HasSubstr;

void ExpectSame(const Manifest& a, const Manifest& b) {
  ASSERT_EQ(a.objects().size(), b.objects().size());
  for (size_t i = 0; i < a.objects().size(); ++i) {
    EXPECT_EQ(a.objects()[i].name, b.objects()[i].name);
    EXPECT_EQ(a.objects()[i].offset, b.objects()[i].offset);
    EXPECT_EQ(a.objects()[i].length, b.objects()[i].length);
  }
  EXPECT_EQ(a.data_end(), b.data_end());
  EXPECT_EQ(a.encoded_bytes(), b.encoded_bytes());
}

void ExpectRoundTrip(const Manifest& manifest) {
  const std::string bytes = manifest.Encode();
  EXPECT_EQ(bytes.size(), manifest.encoded_bytes());
  const Result<Manifest> parsed = Manifest::Parse(bytes, manifest.manifest_offset());
  ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
  ExpectSame(manifest, *parsed);
}

TEST(Manifest, PacksObjectsInOrderOnCacheLines) {
  Manifest manifest;
  EXPECT_EQ(*manifest.Add("weights", 100), 0u);
  EXPECT_EQ(*manifest.Add("bias", 64), 128u);
  EXPECT_EQ(*manifest.Add("empty", 0), 192u);
  EXPECT_EQ(*manifest.Add("after", 1), 192u);
  EXPECT_EQ(*manifest.Add("last", 1), 256u);
  EXPECT_EQ(manifest.data_end(), 257u);
  EXPECT_EQ(manifest.manifest_offset(), 320u);
  ExpectRoundTrip(manifest);
}

TEST(Manifest, AnEmptyOneRoundTrips) {
  const Manifest manifest;
  EXPECT_EQ(manifest.manifest_offset(), 0u);
  EXPECT_EQ(manifest.encoded_bytes(), kManifestHeaderBytes + 4);
  EXPECT_EQ(manifest.Find("anything"), nullptr);
  ExpectRoundTrip(manifest);
}

TEST(Manifest, ObjectsOfAnySizeRoundTrip) {
  Manifest manifest;
  int number = 0;
  for (const uint64_t length : {0ull, 1ull, 63ull, 64ull, 65ull, (3ull << 30) + 1, 1ull << 40, 0ull}) {
    ASSERT_TRUE(manifest.Add("object " + std::to_string(number++), length).ok());
  }
  ExpectRoundTrip(manifest);
}

TEST(Manifest, FindsObjectsByName) {
  Manifest manifest;
  for (int i = 0; i < 1000; ++i) ASSERT_TRUE(manifest.Add("layer." + std::to_string(i), i).ok());
  for (int i = 0; i < 1000; ++i) {
    const Object* object = manifest.Find("layer." + std::to_string(i));
    ASSERT_NE(object, nullptr) << i;
    EXPECT_EQ(object->length, static_cast<uint64_t>(i));
    EXPECT_EQ(object, &manifest.objects()[i]);
  }
  EXPECT_EQ(manifest.Find("layer.1000"), nullptr);
  EXPECT_EQ(manifest.Find(""), nullptr);
}

TEST(Manifest, ACopyHasItsOwnIndex) {
  Manifest original;
  ASSERT_TRUE(original.Add("a", 1).ok());
  Manifest copy = original;
  ASSERT_TRUE(copy.Add("b", 2).ok());
  EXPECT_EQ(original.Find("b"), nullptr);
  EXPECT_EQ(copy.Find("a"), &copy.objects()[0]);
  const Manifest moved = std::move(copy);
  EXPECT_EQ(moved.Find("b"), &moved.objects()[1]);
}

TEST(Manifest, NamesOf1And255BytesAreTakenAndOfNoneAnd256Refused) {
  Manifest manifest;
  EXPECT_TRUE(manifest.Add("x", 1).ok());
  EXPECT_TRUE(manifest.Add(std::string(255, 'n'), 1).ok());
  const Manifest before = manifest;

  const Status empty = manifest.Add("", 1).status();
  EXPECT_EQ(empty.code(), Code::kInvalidArgument);
  EXPECT_THAT(empty.message(), HasSubstr("empty"));
  const Status longer = manifest.Add(std::string(256, 'n'), 1).status();
  EXPECT_EQ(longer.code(), Code::kInvalidArgument);
  EXPECT_THAT(longer.message(), HasSubstr("256 bytes, limit 255"));
  ExpectSame(manifest, before);
  ExpectRoundTrip(manifest);
}

TEST(Manifest, AZeroByteInANameIsRefused) {
  Manifest manifest;
  EXPECT_EQ(manifest.Add(std::string("a\0b", 3), 1).status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(manifest.objects().empty());
}

TEST(Manifest, NamesAreBytesNotText) {
  Manifest manifest;
  EXPECT_TRUE(manifest.Add("\xff\xfe\x01/\n", 1).ok());
  EXPECT_TRUE(manifest.Add("größe/π", 2).ok());
  ExpectRoundTrip(manifest);
}

TEST(Manifest, ANameUsedTwiceIsRefusedByName) {
  Manifest manifest;
  ASSERT_TRUE(manifest.Add("step", 8).ok());
  const Manifest before = manifest;
  const Status twice = manifest.Add("step", 16).status();
  EXPECT_EQ(twice.code(), Code::kInvalidArgument);
  EXPECT_THAT(twice.message(), HasSubstr("step"));
  ExpectSame(manifest, before);
}

TEST(Manifest, LengthsNear2To64DoNotWrapAround) {
  Manifest manifest;
  ASSERT_TRUE(manifest.Add("first", 100).ok());
  const Manifest before = manifest;
  for (const uint64_t length : {UINT64_MAX, UINT64_MAX - 63, UINT64_MAX - 127, UINT64_MAX - 128,
                                UINT64_MAX - 192, uint64_t{1} << 63, kStreamBytesMax - 127}) {
    const Status status = manifest.Add("huge", length).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << length;
    EXPECT_THAT(status.message(), HasSubstr(std::to_string(length)));
    EXPECT_THAT(status.message(), HasSubstr(std::to_string(kStreamBytesMax)));
  }
  ExpectSame(manifest, before);
  EXPECT_TRUE(manifest.Add("all that is left", kStreamBytesMax - 128).ok());
  EXPECT_EQ(manifest.data_end(), kStreamBytesMax);
  EXPECT_EQ(manifest.Add("one more", 1).status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(manifest.Add("none more", 0).ok());
  ExpectRoundTrip(manifest);
}

TEST(Manifest, TenThousandObjects) {
  Manifest manifest;
  for (int i = 0; i < 10000; ++i) {
    ASSERT_TRUE(manifest.Add("model.layers." + std::to_string(i) + ".weight", (i * 37) % 1000).ok());
  }
  ExpectRoundTrip(manifest);
  const Result<Manifest> parsed = Manifest::Parse(manifest.Encode(), manifest.manifest_offset());
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->Find("model.layers.9999.weight")->length, (9999u * 37) % 1000);
}

TEST(Manifest, AMillionObjectsAndNotOneMore) {
  Manifest manifest;
  for (uint64_t i = 0; i < kObjectsMax; ++i) {
    if (!manifest.Add(std::to_string(i), 1).ok()) FAIL() << i;
  }
  const Status more = manifest.Add("one more", 1).status();
  EXPECT_EQ(more.code(), Code::kInvalidArgument);
  EXPECT_THAT(more.message(), HasSubstr("1000001"));
  EXPECT_THAT(more.message(), HasSubstr("limit 1000000"));
  const std::string bytes = manifest.Encode();
  const Result<Manifest> parsed = Manifest::Parse(bytes, manifest.manifest_offset());
  ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
  EXPECT_EQ(parsed->objects().size(), kObjectsMax);
  EXPECT_NE(parsed->Find("999999"), nullptr);
}

TEST(Manifest, TheEstimateCoversNamesOf64Bytes) {
  for (const int objects : {0, 1, 17, 1000}) {
    Manifest manifest;
    for (int i = 0; i < objects; ++i) {
      std::string name = std::to_string(i);
      name.resize(64, '.');
      ASSERT_TRUE(manifest.Add(name, 1).ok());
    }
    EXPECT_LE(manifest.encoded_bytes(), Manifest::EstimateBytes(objects));
    EXPECT_LE(manifest.encoded_bytes(), ManifestBytesMax(objects));
  }
  // An absurd object count must not wrap around to a small reservation.
  EXPECT_GE(Manifest::EstimateBytes(UINT64_MAX), Manifest::EstimateBytes(kObjectsMax));
}

}  // namespace
}  // namespace ropeteam

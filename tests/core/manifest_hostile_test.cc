// SPDX-License-Identifier: Apache-2.0
//
// Manifest::Parse() reads what another process wrote. It must survive any bytes, and trust none of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>

#include "core/base/checksum.h"
#include "core/shard/manifest.h"

namespace ropeteam {
namespace {

using ::testing::HasSubstr;

constexpr size_t kVersionAt = 4;
constexpr size_t kObjectCountAt = 8;
constexpr size_t kNamesBytesAt = 12;
constexpr size_t kDataBytesAt = 16;

Manifest Small() {
  Manifest manifest;
  EXPECT_TRUE(manifest.Add("weights", 100).ok());
  EXPECT_TRUE(manifest.Add("bias", 0).ok());
  EXPECT_TRUE(manifest.Add("rng", 17).ok());
  return manifest;
}

size_t EntryAt(size_t index, size_t field) {
  return kManifestHeaderBytes + index * kManifestEntryBytes + field;
}
constexpr size_t kOffset = 0;
constexpr size_t kLength = 8;
constexpr size_t kNameBegin = 16;
constexpr size_t kNameLength = 20;

template <typename T>
void Set(std::string* bytes, size_t at, T value) {
  std::memcpy(bytes->data() + at, &value, sizeof(value));
}

// A hostile writer makes the checksum match.
void FixCrc(std::string* bytes) { Set(bytes, bytes->size() - 4, Crc32c(bytes->data(), bytes->size() - 4)); }

Status ParseStatus(const std::string& bytes, uint64_t offset = Small().manifest_offset()) {
  return Manifest::Parse(bytes, offset).status();
}

TEST(ManifestHostile, EverySingleByteFlipIsRefused) {
  const std::string good = Small().Encode();
  ASSERT_TRUE(ParseStatus(good).ok());
  for (size_t at = 0; at < good.size(); ++at) {
    for (int flip = 1; flip < 256; ++flip) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ flip);
      ASSERT_EQ(ParseStatus(bad).code(), Code::kCorrupt) << "byte " << at << " flip " << flip;
    }
  }
}

TEST(ManifestHostile, EveryTruncationAndEveryExtensionIsRefused) {
  const std::string good = Small().Encode();
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_EQ(ParseStatus(good.substr(0, size)).code(), Code::kCorrupt) << size;
  }
  EXPECT_EQ(ParseStatus(good + '\0').code(), Code::kCorrupt);
  std::string longer = good + std::string(8, '\0');
  FixCrc(&longer);
  EXPECT_EQ(ParseStatus(longer).code(), Code::kCorrupt);
}

TEST(ManifestHostile, AnotherPlaceInTheStreamIsRefused) {
  const Manifest manifest = Small();
  const std::string bytes = manifest.Encode();
  for (const uint64_t offset : {uint64_t{0}, manifest.manifest_offset() - 64, manifest.manifest_offset() + 64,
                                manifest.manifest_offset() + 1, UINT64_MAX}) {
    EXPECT_EQ(ParseStatus(bytes, offset).code(), Code::kCorrupt) << offset;
  }
  // The same if the manifest itself gives that offset.
  std::string moved = bytes;
  Set<uint64_t>(&moved, kDataBytesAt, manifest.manifest_offset() + 64);
  FixCrc(&moved);
  EXPECT_EQ(ParseStatus(moved, manifest.manifest_offset() + 64).code(), Code::kCorrupt);
}

TEST(ManifestHostile, AnotherVersionIsUnsupportedAndBothAreNamed) {
  std::string bytes = Small().Encode();
  Set<uint32_t>(&bytes, kVersionAt, 7);
  FixCrc(&bytes);
  const Status status = ParseStatus(bytes);
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr("version 7"));
  EXPECT_THAT(status.message(), HasSubstr("reads 1"));
}

struct Forgery {
  const char* what;
  size_t at;
  uint64_t value;
  bool wide;  // 8 bytes, else 4
};

TEST(ManifestHostile, ForgeriesWithAFittingChecksumAreRefused) {
  const std::vector<Forgery> forgeries = {
      {"no objects but entries", kObjectCountAt, 0, false},
      {"one object too many", kObjectCountAt, 4, false},
      {"absurdly many objects", kObjectCountAt, UINT32_MAX, false},
      {"more than the limit", kObjectCountAt, kObjectsMax + 1, false},
      {"names longer than the bytes", kNamesBytesAt, 15, false},
      {"absurdly long names", kNamesBytesAt, UINT32_MAX, false},
      {"no names", kNamesBytesAt, 0, false},
      {"offset off the alignment", EntryAt(1, kOffset), 129, true},
      {"overlap with the one before", EntryAt(1, kOffset), 64, true},
      {"a gap", EntryAt(1, kOffset), 192, true},
      {"offset far away", EntryAt(2, kOffset), UINT64_MAX - 63, true},
      {"the first not at 0", EntryAt(0, kOffset), 64, true},
      {"a length into the next", EntryAt(0, kLength), 129, true},
      {"a length that wraps around", EntryAt(2, kLength), UINT64_MAX, true},
      {"a length that wraps around to where it began", EntryAt(1, kLength), UINT64_MAX - 63, true},
      {"name begins before its place", EntryAt(1, kNameBegin), 0, false},
      {"name begins behind its place", EntryAt(1, kNameBegin), 8, false},
      {"name begins behind the names", EntryAt(1, kNameBegin), UINT32_MAX, false},
      {"an empty name", EntryAt(1, kNameLength), 0, false},
      {"a name longer than the names", EntryAt(2, kNameLength), 4, false},
      {"an absurdly long name", EntryAt(2, kNameLength), UINT32_MAX, false},
      {"names left over", EntryAt(2, kNameLength), 2, false},
  };
  for (const Forgery& forgery : forgeries) {
    std::string bytes = Small().Encode();
    if (forgery.wide) {
      Set<uint64_t>(&bytes, forgery.at, forgery.value);
    } else {
      Set<uint32_t>(&bytes, forgery.at, static_cast<uint32_t>(forgery.value));
    }
    FixCrc(&bytes);
    const Status status = ParseStatus(bytes);
    EXPECT_EQ(status.code(), Code::kCorrupt) << forgery.what;
    EXPECT_FALSE(status.message().empty()) << forgery.what;
  }
}

TEST(ManifestHostile, TwoObjectsOfOneNameAreRefused) {
  Manifest manifest;
  ASSERT_TRUE(manifest.Add("a1", 1).ok());
  ASSERT_TRUE(manifest.Add("a2", 1).ok());
  std::string bytes = manifest.Encode();
  bytes[bytes.size() - 5] = '1';
  FixCrc(&bytes);
  const Status status = ParseStatus(bytes, manifest.manifest_offset());
  EXPECT_EQ(status.code(), Code::kCorrupt);
  EXPECT_THAT(status.message(), HasSubstr("twice"));
}

TEST(ManifestHostile, GarbageIsRefused) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 20000; ++round) {
    std::string bytes(random() % 200, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    if (bytes.size() >= 28 && round % 2 == 0) {
      // Passes the first checks: the magic, version and checksum are right over garbage.
      Set<uint32_t>(&bytes, 0, kManifestMagic);
      Set<uint32_t>(&bytes, kVersionAt, kManifestVersion);
      if (round % 4 == 0) {
        const auto count = static_cast<uint32_t>(random() % ((bytes.size() - 28) / kManifestEntryBytes + 1));
        Set<uint32_t>(&bytes, kObjectCountAt, count);
        Set<uint32_t>(&bytes, kNamesBytesAt,
                      static_cast<uint32_t>(bytes.size() - 28 - count * kManifestEntryBytes));
      }
      FixCrc(&bytes);
    }
    const Result<Manifest> parsed = Manifest::Parse(bytes, random() % 256);
    ASSERT_FALSE(parsed.ok()) << "round " << round;
  }
}

// Random damage with a matching checksum: an accepted manifest must be one that a writer could have written.
TEST(ManifestHostile, WhateverIsTakenEncodesToTheSameBytes) {
  std::mt19937_64 random(2);
  uint64_t taken = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = Small().Encode();
    for (uint64_t flips = 1 + random() % 3; flips > 0; --flips) {
      const size_t at = random() % (bytes.size() - 4);
      bytes[at] = static_cast<char>(bytes[at] ^ (1 + random() % 255));
    }
    FixCrc(&bytes);
    const Result<Manifest> parsed = Manifest::Parse(bytes, Small().manifest_offset());
    if (!parsed.ok()) continue;
    ++taken;
    ASSERT_EQ(parsed->Encode(), bytes) << "round " << round;
  }
  EXPECT_GT(taken, 0u);  // for example a changed letter of a name
}

}  // namespace
}  // namespace ropeteam

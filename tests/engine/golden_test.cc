// SPDX-License-Identifier: Apache-2.0
//
// The messages between daemons, of each version that this build speaks, kept as files: golden/protocol-N.txt
// has a line for each message with its name and its encoding in hexadecimal digits. A released version's file
// never changes. The newest version's file is rewritten with ROPETEAM_WRITE_GOLDEN=1 until that version is
// released.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "core/base/view.h"
#include "core/engine/report.h"
#include "tests/fuzz/engine_messages.h"

namespace ropeteam {
namespace {

using Messages =
    decltype(std::tuple_cat(fuzz::EngineMessages(), std::tuple<TraceQuestion, TraceAnswer, Envelope>(),
                            fuzz::EngineQuestions(), fuzz::EngineReplies()));

// Fills integers and strings with increasing numbers, so that no two have the same value. Every list gets two
// elements.
class Filler {
 public:
  template <typename T>
  void Fill(T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      value = true;
    } else if constexpr (std::is_same_v<T, std::string>) {
      value = "text " + std::to_string(++last_);
    } else if constexpr (std::is_enum_v<T>) {
      value = static_cast<T>(1);
    } else if constexpr (std::integral<T>) {
      value = static_cast<T>(++last_);
    } else {
      std::apply([this](auto&&... field) { (Fill(field), ...); }, value.Fields());
    }
  }
  template <typename... T>
  void Fill(std::variant<T...>& value) {
    Fill(value.template emplace<sizeof...(T) - 1>());
  }
  template <typename T>
  void Fill(std::vector<T>& values) {
    values.resize(2);
    for (T& value : values) Fill(value);
  }
  template <typename T>
  void Fill(std::set<T>& values) {
    std::vector<T> elements;
    Fill(elements);
    values.insert(elements.begin(), elements.end());
  }

 private:
  uint64_t last_ = 0;
};

template <typename T>
std::string NameOf() {
  const std::string function = __PRETTY_FUNCTION__;
  const size_t end = function.find_first_of(";]", function.find("T = "));
  const size_t begin = function.rfind(':', end) + 1;
  return function.substr(begin, end - begin);
}

template <typename Visit>
void ForEachMessage(Visit visit) {
  [&]<size_t... I>(std::index_sequence<I...>) { (visit(std::tuple_element_t<I, Messages>()), ...); }
  (std::make_index_sequence<std::tuple_size_v<Messages>>());
}

std::string FileOf(uint32_t version) {
  return std::string(ROPETEAM_GOLDEN) + "/protocol-" + std::to_string(version) + ".txt";
}

std::string ToHex(const std::string& bytes) {
  std::string hex;
  for (const char byte : bytes) {
    hex += "0123456789abcdef"[static_cast<uint8_t>(byte) >> 4];
    hex += "0123456789abcdef"[static_cast<uint8_t>(byte) & 15];
  }
  return hex;
}

std::string FromHex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2)
    bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return bytes;
}

std::map<std::string, std::string> Read(uint32_t version) {
  std::map<std::string, std::string> messages;
  std::ifstream file(FileOf(version));
  for (std::string name, hex; file >> name >> hex;) messages[name] = FromHex(hex);
  return messages;
}

TEST(Golden, EveryVersionsMessagesAreReadAndWrittenAsTheyWere) {
  if (std::getenv("ROPETEAM_WRITE_GOLDEN") != nullptr) {
    std::ofstream file(FileOf(kProtocolVersion));
    ForEachMessage([&](auto message) {
      Filler().Fill(message);
      file << NameOf<decltype(message)>() << ' ' << ToHex(Encode(message, kProtocolVersion)) << '\n';
    });
  }
  for (uint32_t version = kProtocolOldest; version <= kProtocolVersion; ++version) {
    std::map<std::string, std::string> kept = Read(version);
    ASSERT_FALSE(kept.empty()) << FileOf(version);
    ForEachMessage([&](auto message) {
      const std::string name = NameOf<decltype(message)>();
      const auto found = kept.find(name);
      if (found == kept.end()) {
        EXPECT_LT(version, kProtocolVersion) << name << " is in no file";
        return;
      }
      EXPECT_TRUE(Decode(found->second, message, version)) << name << " of version " << version;
      EXPECT_EQ(ToHex(Encode(message, version)), ToHex(found->second)) << name << " of version " << version;
      kept.erase(found);
    });
    EXPECT_TRUE(kept.empty()) << kept.begin()->first << " of version " << version << " is unknown";
  }
}

// A question may be asked in one epoch and repeated in the next, where another version is spoken.
TEST(Golden, WhatIsRepeatedInTheNextEpochIsTheSameInEveryVersion) {
  const auto same = [](auto message) {
    Filler().Fill(message);
    EXPECT_EQ(Encode(message, kProtocolOldest), Encode(message, kProtocolVersion))
        << NameOf<decltype(message)>();
  };
  same(Envelope());
  same(Question());
  [&]<size_t... I>(std::index_sequence<I...>) {
    (same(std::tuple_element_t<I, fuzz::EngineQuestions>()), ...);
  }
  (std::make_index_sequence<std::tuple_size_v<fuzz::EngineQuestions>>());
}

// The newer version has more fields at the end. Neither version may be decoded as the other.
TEST(Golden, AMessageOfTheOtherVersionIsRefused) {
  LeaderState state;
  Filler().Fill(state);
  LeaderState read;
  EXPECT_FALSE(Decode(Encode(state, kProtocolVersion), read, 8));
  EXPECT_FALSE(Decode(Encode(state, 8), read, kProtocolVersion));
  EXPECT_TRUE(Decode(Encode(state, 8), read, 8));
}

}  // namespace
}  // namespace ropeteam

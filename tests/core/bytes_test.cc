// SPDX-License-Identifier: Apache-2.0
#include "core/base/bytes.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

namespace ropeteam {
namespace {

enum class Colour : uint16_t { kRed = 1, kBlue = 0x1234 };

struct Point {
  int32_t x = 0;
  int64_t y = 0;
  auto Fields() { return std::tie(x, y); }
  friend bool operator==(const Point&, const Point&) = default;
};

struct Named {
  std::string name;
  std::vector<Point> points;
  auto Fields() { return std::tie(name, points); }
  friend bool operator==(const Named&, const Named&) = default;
};

struct Everything {
  bool flag = false;
  uint8_t u8 = 0;
  uint16_t u16 = 0;
  uint32_t u32 = 0;
  uint64_t u64 = 0;
  int8_t i8 = 0;
  double real = 0;
  Colour colour = Colour::kRed;
  std::string text;
  std::vector<uint8_t> bytes;
  std::vector<uint64_t> numbers;
  std::vector<std::string> texts;
  std::vector<Colour> colours;
  std::vector<Named> nameds;
  std::vector<std::vector<uint16_t>> lists;
  Point point;
  std::set<uint32_t> set;
  std::variant<std::monostate, Point, std::string> either;
  auto Fields() {
    return std::tie(flag, u8, u16, u32, u64, i8, real, colour, text, bytes, numbers, texts, colours, nameds,
                    lists, point, set, either);
  }
  friend bool operator==(const Everything&, const Everything&) = default;
};

Everything Full() {
  Everything e;
  e.flag = true;
  e.u8 = 0xfe;
  e.u16 = 0xfedc;
  e.u32 = 0xfedcba98;
  e.u64 = 0xfedcba9876543210;
  e.i8 = -3;
  e.real = -1.25e300;
  e.colour = Colour::kBlue;
  e.text = std::string("zero \0 inside", 13);
  e.bytes = {1, 2, 3};
  e.numbers = {0, UINT64_MAX};
  e.texts = {"", "one", std::string(300, 'x')};
  e.colours = {Colour::kRed, Colour::kBlue};
  e.nameds = {{"a", {{1, -1}, {INT32_MIN, INT64_MAX}}}, {"", {}}};
  e.lists = {{}, {1, 2}, {3}};
  e.point = {-7, 7};
  e.set = {3, 5, 0xffffffff};
  e.either = Point{1, -1};
  return e;
}

TEST(Bytes, EverythingRoundTrips) {
  for (const Everything& e : {Everything{}, Full()}) {
    Everything decoded = Full();  // former content must not remain
    ASSERT_TRUE(Decode(Encode(e), decoded));
    EXPECT_EQ(decoded, e);
  }
}

TEST(Bytes, LayoutIsLittleEndianWithoutPadding) {
  struct Message {
    uint8_t a = 1;
    uint32_t b = 0x01020304;
    bool c = true;
    std::string d = "hi";
    std::vector<uint16_t> e = {0x0506};
    auto Fields() { return std::tie(a, b, c, d, e); }
  };
  const std::string expected("\x01\x04\x03\x02\x01\x01\x02\x00\x00\x00hi\x01\x00\x00\x00\x06\x05", 18);
  EXPECT_EQ(Encode(Message{}), expected);
}

TEST(Bytes, EveryTruncationIsRefused) {
  const std::string bytes = Encode(Full());
  for (size_t size = 0; size < bytes.size(); ++size) {
    // A copy of exactly this size, so that the address sanitizer sees a read beyond it.
    const std::vector<char> exact(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(size));
    Everything decoded;
    EXPECT_FALSE(Decode({exact.data(), exact.size()}, decoded)) << size << " of " << bytes.size();
  }
}

TEST(Bytes, LeftOverBytesAreRefused) {
  Everything decoded;
  EXPECT_FALSE(Decode(Encode(Full()) + '\0', decoded));
  Point point;
  EXPECT_FALSE(Decode(Encode(Point{1, 2}) + Encode(Point{3, 4}), point));
}

TEST(Bytes, ABoolIsZeroOrOne) {
  struct Flag {
    bool flag = false;
    auto Fields() { return std::tie(flag); }
  };
  Flag flag;
  EXPECT_TRUE(Decode(std::string(1, '\0'), flag));
  EXPECT_FALSE(flag.flag);
  EXPECT_TRUE(Decode("\x01", flag));
  EXPECT_TRUE(flag.flag);
  EXPECT_FALSE(Decode("\x02", flag));
  EXPECT_FALSE(Decode("\xff", flag));
}

template <typename T>
struct Many {
  std::vector<T> values;
  auto Fields() { return std::tie(values); }
};

template <typename T>
void ExpectAbsurdCountRefused() {
  for (const uint32_t count : {UINT32_MAX, uint32_t{1} << 31, uint32_t{0x40000001}, uint32_t{1000000}}) {
    std::string bytes;
    Encoder(&bytes).Put(count);
    bytes += std::string(16, '\0');
    Many<T> many;
    EXPECT_FALSE(Decode(bytes, many)) << count;
    EXPECT_LE(many.values.capacity(), 16u) << count;  // no memory was reserved for impossible elements
  }
}

// Otherwise one value would have several encodings.
TEST(Bytes, ASetAscends) {
  struct Set {
    std::set<uint8_t> set;
    auto Fields() { return std::tie(set); }
  };
  Set set;
  EXPECT_TRUE(Decode(std::string("\x02\0\0\0\x03\x04", 6), set));
  EXPECT_EQ(set.set, (std::set<uint8_t>{3, 4}));
  EXPECT_FALSE(Decode(std::string("\x02\0\0\0\x04\x03", 6), set));
  EXPECT_FALSE(Decode(std::string("\x02\0\0\0\x03\x03", 6), set));
}

TEST(Bytes, AVariantHasOneOfItsAlternatives) {
  struct Either {
    std::variant<std::monostate, uint8_t> either;
    auto Fields() { return std::tie(either); }
  };
  Either either;
  EXPECT_TRUE(Decode(std::string("\x01\x07", 2), either));
  EXPECT_EQ(std::get<1>(either.either), 7);
  EXPECT_FALSE(Decode(std::string("\x02\x07", 2), either));
}

TEST(Bytes, AbsurdCountsAreRefusedWithoutAllocation) {
  ExpectAbsurdCountRefused<uint8_t>();
  ExpectAbsurdCountRefused<uint64_t>();
  ExpectAbsurdCountRefused<std::string>();
  ExpectAbsurdCountRefused<Point>();
  ExpectAbsurdCountRefused<std::vector<uint32_t>>();
  ExpectAbsurdCountRefused<Colour>();

  struct Text {
    std::string text;
    auto Fields() { return std::tie(text); }
  };
  Text text;
  EXPECT_FALSE(Decode(std::string("\xff\xff\xff\xff"
                                  "abc",
                                  7),
                      text));
  EXPECT_LE(text.text.capacity(), 16u);
}

// An empty vector takes 4 bytes. The bytes of an inner vector's elements must not count as room for elements
// of the outer vector.
TEST(Bytes, NestedCountsAreBoundedByWhatIsLeft) {
  std::string bytes;
  {
    Encoder encoder(&bytes);
    encoder.Put(uint32_t{3});
    encoder.Put(uint32_t{2});
    encoder.Put(uint16_t{1});
    encoder.Put(uint16_t{2});
    encoder.Put(uint32_t{5});  // five elements, but two bytes are left
    encoder.Put(uint16_t{3});
  }
  Many<std::vector<uint16_t>> many;
  EXPECT_FALSE(Decode(bytes, many));
}

struct Later {
  uint8_t first = 0;
  uint16_t number = 0;
  std::vector<uint8_t> list;
  std::string last;
  auto Fields() { return Tie(first, SparseSince<9>(number), SparseSince<9>(list), Since<8>(last)); }
  friend bool operator==(const Later&, const Later&) = default;
};

// An older version neither writes nor reads the field, and a default value takes one byte.
TEST(Bytes, AFieldOfALaterVersionIsMarked) {
  const Later full{1, 0x0302, {7}, ""};
  EXPECT_EQ(Encode(full, 7), std::string("\x01", 1));
  EXPECT_EQ(Encode(full, 9), std::string("\x01\x01\x02\x03\x01\x01\x00\x00\x00\x07\x00\x00\x00\x00", 14));
  EXPECT_EQ(Encode(Later{1, 0, {}, ""}, 9), std::string("\x01\x00\x00\x00\x00\x00\x00", 7));
  for (const Later& value : {full, Later{1, 0, {}, "x"}}) {
    Later found{9, 9, {9}, "9"};  // a default value replaces what was there
    EXPECT_TRUE(Decode(Encode(value, 9), found, 9));
    EXPECT_EQ(found, value);
  }
  Later older{9, 5, {}, "kept"};
  EXPECT_TRUE(Decode(Encode(full, 7), older, 7));
  EXPECT_EQ(older, (Later{1, 5, {}, "kept"}));
  EXPECT_FALSE(Decode(std::string("\x01\x02\x00\x00\x00\x00\x00", 7), older, 9));
}

TEST(Bytes, NothingIsReadAfterTheFirstError) {
  Decoder decoder("\x02\x00\x00\x00");
  bool flag = false;
  decoder.Get(flag);
  EXPECT_FALSE(decoder.ok());
  uint64_t number = 0;
  decoder.Get(number);
  std::string text;
  decoder.Get(text);
  EXPECT_FALSE(decoder.ok());
  EXPECT_FALSE(decoder.done());
}

TEST(Bytes, GarbageAndDamageNeverHarm) {
  std::mt19937_64 random(3);
  const std::string good = Encode(Full());
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = good;
    if (round % 2 == 0) {
      bytes.resize(random() % 300);
      for (char& c : bytes) c = static_cast<char>(random() % (round % 4 == 0 ? 4 : 256));
    } else {
      for (uint64_t flips = 1 + random() % 4; flips > 0; --flips) {
        char& c = bytes[random() % bytes.size()];
        c = static_cast<char>(c ^ (1 + random() % 255));
      }
    }
    Everything decoded;
    // A decoded value encodes to the same bytes.
    if (Decode(bytes, decoded)) {
      ASSERT_EQ(Encode(decoded), bytes) << "round " << round;
    }
  }
}

}  // namespace
}  // namespace ropeteam

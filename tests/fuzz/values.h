// SPDX-License-Identifier: Apache-2.0
//
// Makes values from a fuzzer's bytes, and the bytes that make given values. Our messages are mostly 8-byte
// numbers, and a decoder refuses a message with one byte too many. So changed bytes of an encoded message
// seldom pass the decoder. A target that tests the code behind a decoder takes bytes in this form:
//
//     number    1 byte: 0 to 0xaf itself; 0xb0 + k: 2^20 + k; 0xc0 + k: 2^64 - 1 shifted right by k;
//               0xff: the 8 bytes that follow
//     text      1 byte n below 0xf0: the n bytes that follow; else (n - 0xef) * 512 times 'x'
//     vector    1 byte n: n % 16 elements; if n >= 0xf0, of numbers: (n - 0xef) * 4096 times the next one
//     struct    its Fields()
//
// Small numbers are the ids of nodes, ranks, steps and copies. 2^20 + k is incarnation k of epoch 1. Values
// after the end of the bytes are 0 or empty.

#ifndef ROPETEAM_TESTS_FUZZ_VALUES_H_
#define ROPETEAM_TESTS_FUZZ_VALUES_H_

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "core/base/ids.h"

namespace ropeteam::fuzz {

inline constexpr uint64_t kIncarnations = uint64_t{1} << kIncarnationNumberBits;  // of epoch 1

class FromBytes {
 public:
  explicit FromBytes(std::string_view in) : in_(in) {}
  bool done() const { return in_.empty(); }

  uint8_t Byte() {
    const std::string_view byte = Take(1);
    return byte.empty() ? uint8_t{0} : static_cast<uint8_t>(byte[0]);
  }
  uint64_t Number() {
    const uint8_t first = Byte();
    if (first < 0xb0) return first;
    if (first < 0xc0) return kIncarnations + first - 0xb0;
    if (first != 0xff) return UINT64_MAX >> (first - 0xc0);
    uint64_t value = 0;
    const std::string_view bytes = Take(sizeof(value));
    std::memcpy(&value, bytes.data(), bytes.size());
    return value;
  }
  std::string Text() {
    const uint8_t length = Byte();
    if (length < 0xf0) return std::string(Take(length));
    return std::string(large_left_-- > 0 ? (length - 0xefu) * 512u : 1u, 'x');
  }

  template <typename T>
  void Get(T& value) {
    if constexpr (std::is_same_v<T, std::string>) {
      value = Text();
    } else if constexpr (std::is_same_v<T, bool>) {
      value = (Byte() & 1) != 0;
    } else if constexpr (std::is_enum_v<T> || std::integral<T>) {
      value = static_cast<T>(Number());
    } else if constexpr (!std::is_same_v<T, std::monostate>) {
      std::apply([this](auto&&... field) { (Get(field), ...); }, value.Fields());
    }
  }
  template <typename... T>
  void Get(std::variant<T...>& value) {
    const size_t index = Byte() % sizeof...(T);
    size_t each = 0;
    (void)((each++ == index && (Get(value.template emplace<T>()), true)) || ...);
  }
  template <typename T>
  void Get(std::vector<T>& values) {
    const uint8_t count = Byte();
    values.clear();
    if constexpr (std::integral<T>) {
      if (count >= 0xf0 && large_left_-- > 0) {
        T value{};
        Get(value);
        values.assign((count - 0xefu) * 4096u, value);
        return;
      }
    }
    for (int i = 0; i < count % 16 && !done(); ++i) Get(values.emplace_back());
  }
  template <typename T>
  void Get(std::set<T>& values) {
    const std::vector<T> elements = Get<std::vector<T>>();
    values = std::set<T>(elements.begin(), elements.end());
  }
  template <typename T>
  T Get() {
    T value{};
    Get(value);
    return value;
  }

 private:
  std::string_view Take(size_t bytes) {
    const std::string_view taken = in_.substr(0, bytes);
    in_.remove_prefix(taken.size());
    return taken;
  }

  std::string_view in_;
  // How many texts and vectors of the input may still be large. Nested large ones would take gigabytes.
  int large_left_ = 4;
};

// Writes the first 15 elements of a vector, and the first 239 bytes of a text.
class ToBytes {
 public:
  template <typename T>
  ToBytes& Put(const T& value) {
    if constexpr (std::is_same_v<T, std::string>) {
      const size_t length = std::min<size_t>(value.size(), 0xef);
      Byte(length);
      out_.append(value, 0, length);
    } else if constexpr (std::is_same_v<T, bool>) {
      Byte(value ? 1 : 0);
    } else if constexpr (std::is_enum_v<T> || std::integral<T>) {
      Number(static_cast<uint64_t>(value));
    } else if constexpr (!std::is_same_v<T, std::monostate>) {
      std::apply([this](const auto&... field) { (Put(field), ...); }, const_cast<T&>(value).Fields());
    }
    return *this;
  }
  template <typename... T>
  ToBytes& Put(const std::variant<T...>& value) {
    Byte(value.index());
    std::visit([this](const auto& each) { Put(each); }, value);
    return *this;
  }
  template <typename T>
  ToBytes& Put(const std::vector<T>& values) {
    const size_t count = std::min<size_t>(values.size(), 15);
    Byte(count);
    for (size_t i = 0; i < count; ++i) Put(values[i]);
    return *this;
  }
  template <typename T>
  ToBytes& Put(const std::set<T>& values) {
    return Put(std::vector<T>(values.begin(), values.end()));
  }
  ToBytes& Byte(size_t byte) {
    out_.push_back(static_cast<char>(byte));
    return *this;
  }
  const std::string& bytes() const { return out_; }

 private:
  void Number(uint64_t value) {
    if (value < 0xb0) {
      Byte(value);
    } else if (value >= kIncarnations && value < kIncarnations + 16) {
      Byte(value - kIncarnations + 0xb0);
    } else {
      Byte(0xff);
      out_.append(reinterpret_cast<const char*>(&value), sizeof(value));
    }
  }
  std::string out_;
};

// Calls `visit` with a default value of one of the Types: number `index` modulo their count.
template <typename Types, typename Visit>
void WithType(size_t index, Visit visit) {
  index %= std::tuple_size_v<Types>;
  [&]<size_t... I>(std::index_sequence<I...>) {
    ((I == index ? visit(std::tuple_element_t<I, Types>{}) : void()), ...);
  }
  (std::make_index_sequence<std::tuple_size_v<Types>>());
}

}  // namespace ropeteam::fuzz

#endif  // ROPETEAM_TESTS_FUZZ_VALUES_H_

// SPDX-License-Identifier: Apache-2.0
//
// The one codec of everything that crosses a socket. A message is a struct with
//
//     auto Fields() { return std::tie(step, name, extents); }
//
// and is written field after field: integers and enums little-endian at their own width, bool as one byte,
// strings, vectors and sets as a 32-bit count and their elements, variants as the index in a byte and the alternative,
// structs as their fields. A set's elements ascend. There are no tags: both ends know the protocol version that they
// speak, before the message. A field that a later version has is marked with it,
//
//     auto Fields() { return Tie(step, name, Since<9>(extents)); }
//
// and older ones neither write nor read it. SparseSince<9>(key) is a byte 0 for the default value or an empty list, and a
// byte 1 and the value for others. All else of a struct stays as it is: HACKING.md has the rule.
//
// Decode() trusts nothing: it answers false for bytes that end early, are left over, or announce more
// elements than bytes remain for, and never allocates more than the input's own size times the element's.

#ifndef ROPETEAM_CORE_BASE_BYTES_H_
#define ROPETEAM_CORE_BASE_BYTES_H_

#include <bit>
#include <concepts>
#include <cstddef>
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

namespace ropeteam {

static_assert(std::endian::native == std::endian::little, "the wire and the arena are little-endian");

template <typename T>
concept HasFields = requires(T& value) {
  value.Fields();
};

// A field of the versions from kFirst on.
template <uint32_t kFirst, typename T>
struct SinceField {
  T& value;
  static constexpr uint32_t kSince = kFirst;
  auto Fields() { return std::tie(value); }
};
template <uint32_t kFirst, typename T>
SinceField<kFirst, T> Since(T& value) {
  return {value};
}
template <uint32_t kFirst, typename T>
struct SparseSinceField : SinceField<kFirst, T> {
  static constexpr bool kSparse = true;
  bool is_default() const {
    if constexpr (requires(const T& list) { list.empty(); })
      return this->value.empty();
    else
      return this->value == T();
  }
};
template <uint32_t kFirst, typename T>
SparseSinceField<kFirst, T> SparseSince(T& value) {
  return {{value}};
}
// std::tie(), also of fields that are marked.
template <typename... T>
std::tuple<T...> Tie(T&&... fields) {
  return {std::forward<T>(fields)...};
}
template <typename T>
concept IsSince = requires {
  T::kSince;
};
template <typename T>
concept IsSparse = requires {
  T::kSparse;
};

// Everything that this build knows.
inline constexpr uint32_t kEveryVersion = UINT32_MAX;

// `out` is complete when the encoder is destroyed.
class Encoder {
 public:
  explicit Encoder(std::string* out, uint32_t version = kEveryVersion) : out_(out), version_(version) {}
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;
  ~Encoder() { Flush(); }

  template <typename T>
  void Put(const T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      Raw(static_cast<uint8_t>(value ? 1 : 0));
    } else if constexpr (std::is_enum_v<T> || std::integral<T> || std::floating_point<T>) {
      Raw(value);
    } else if constexpr (std::is_same_v<T, std::string>) {
      Raw(static_cast<uint32_t>(value.size()));
      Append(value.data(), value.size());
    } else if constexpr (IsSince<T>) {
      if (version_ < T::kSince) return;
      if constexpr (IsSparse<T>) {
        const bool set = !value.is_default();
        Put(set);
        if (!set) return;
      }
      Put(value.value);
    } else if constexpr (!std::is_same_v<T, std::monostate>) {
      // Fields() is not const because Decode() shares it; encoding only reads.
      std::apply([this](const auto&... field) { (Put(field), ...); }, const_cast<T&>(value).Fields());
    }
  }

  template <typename T>
  void Put(const std::vector<T>& values) {
    Raw(static_cast<uint32_t>(values.size()));
    if constexpr (std::integral<T> && !std::is_same_v<T, bool>) {
      Append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
    } else {
      for (const T& value : values) Put(value);
    }
  }

  template <typename T>
  void Put(const std::set<T>& values) {
    Raw(static_cast<uint32_t>(values.size()));
    for (const T& value : values) Put(value);
  }

  template <typename... T>
  void Put(const std::variant<T...>& value) {
    Raw(static_cast<uint8_t>(value.index()));
    std::visit([this](const auto& alternative) { Put(alternative); }, value);
  }

 private:
  template <typename T>
  [[gnu::always_inline]] void Raw(T value) {
    if (sizeof(pending_) - pending_size_ < sizeof(T)) Flush();
    std::memcpy(pending_ + pending_size_, &value, sizeof(T));
    pending_size_ += sizeof(T);
  }
  void Append(const char* bytes, size_t size) {
    Flush();
    out_->append(bytes, size);
  }
  void Flush() {
    out_->append(pending_, pending_size_);
    pending_size_ = 0;
  }
  std::string* out_;
  uint32_t version_;
  size_t pending_size_ = 0;
  char pending_[120];  // an append of its own for every field would cost more than all else
};

class Decoder {
 public:
  explicit Decoder(std::string_view in, uint32_t version = kEveryVersion) : in_(in), version_(version) {}

  bool done() const { return ok_ && in_.empty(); }
  bool ok() const { return ok_; }

  template <typename T>
  void Get(T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      uint8_t byte = 0;
      Raw(byte);
      if (byte > 1) ok_ = false;
      value = byte != 0;
    } else if constexpr (std::is_enum_v<T> || std::integral<T> || std::floating_point<T>) {
      Raw(value);
    } else if constexpr (std::is_same_v<T, std::string>) {
      const uint32_t size = Count(1);
      value.assign(in_.substr(0, size));
      in_.remove_prefix(size);
    } else if constexpr (IsSince<T>) {
      if (version_ < T::kSince) return;
      if constexpr (IsSparse<T>) {
        bool set = false;
        Get(set);
        value.value = {};
        if (!set) return;
      }
      Get(value.value);
    } else if constexpr (!std::is_same_v<T, std::monostate>) {
      std::apply([this](auto&&... field) { (Get(field), ...); }, value.Fields());
    }
  }

  template <typename T>
  void Get(std::vector<T>& values) {
    values.clear();
    if constexpr (std::integral<T> && !std::is_same_v<T, bool>) {
      const uint32_t count = Count(sizeof(T));
      values.resize(count);
      if (count != 0) std::memcpy(values.data(), in_.data(), count * sizeof(T));
      in_.remove_prefix(count * sizeof(T));
    } else {
      // An element takes a byte at least, so a count is bounded by what is left
      const uint32_t count = Count(1);
      for (uint32_t i = 0; i < count && ok_; ++i) Get(values.emplace_back());
    }
  }

  template <typename T>
  void Get(std::set<T>& values) {
    values.clear();
    const uint32_t count = Count(1);
    for (uint32_t i = 0; i < count && ok_; ++i) {
      T value{};
      Get(value);
      if (!values.empty() && !(*values.rbegin() < value)) ok_ = false;
      values.insert(values.end(), std::move(value));
    }
  }

  template <typename... T>
  void Get(std::variant<T...>& value) {
    uint8_t index = 0;
    Raw(index);
    if (index >= sizeof...(T)) ok_ = false;
    size_t each = 0;
    (void)((ok_ && each++ == index && (Get(value.template emplace<T>()), true)) || ...);
  }

 private:
  template <typename T>
  void Raw(T& value) {
    if (in_.size() < sizeof(T)) {
      ok_ = false;
      in_ = {};
      return;
    }
    std::memcpy(&value, in_.data(), sizeof(T));
    in_.remove_prefix(sizeof(T));
  }
  uint32_t Count(size_t element_bytes) {
    uint32_t count = 0;
    Raw(count);
    if (in_.size() / element_bytes >= count) return count;
    ok_ = false;
    in_ = {};
    return 0;
  }

  std::string_view in_;
  uint32_t version_;
  bool ok_ = true;
};

template <HasFields T>
std::string Encode(const T& message, uint32_t version = kEveryVersion) {
  std::string bytes;
  Encoder(&bytes, version).Put(message);
  return bytes;
}

// False, with `message` unspecified, unless `bytes` are exactly one T of this version. Fields that it lacks stay as they
// are in `message`.
template <HasFields T>
bool Decode(std::string_view bytes, T& message, uint32_t version = kEveryVersion) {
  Decoder decoder(bytes, version);
  decoder.Get(message);
  return decoder.done();
}

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_BASE_BYTES_H_

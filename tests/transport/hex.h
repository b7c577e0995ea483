// SPDX-License-Identifier: Apache-2.0
//
// Bytes as hexadecimal text, for messages between a transport test and its peer process.

#ifndef ROPETEAM_TESTS_TRANSPORT_HEX_H_
#define ROPETEAM_TESTS_TRANSPORT_HEX_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

namespace ropeteam::test {

inline std::string ToHex(const std::string& bytes) {
  std::string hex;
  for (const char c : bytes) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned>(static_cast<uint8_t>(c)));
    hex += digits;
  }
  return hex;
}

inline std::string FromHex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2)
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}

}  // namespace ropeteam::test

#endif  // ROPETEAM_TESTS_TRANSPORT_HEX_H_

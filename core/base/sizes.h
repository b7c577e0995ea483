// SPDX-License-Identifier: Apache-2.0
//
// Sizes in bytes as people write and read them. Pure functions.

#ifndef ROPETEAM_CORE_BASE_SIZES_H_
#define ROPETEAM_CORE_BASE_SIZES_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace ropeteam {

// "4096", "512M", "24G", "24GiB", any case; K, M, G and T are powers of 1024. False for anything else ("24GB"
// among it: whether it means 10^9 or 2^30 is anyone's guess) and for what 64 bits do not hold.
bool ParseSize(std::string_view text, uint64_t* bytes);

// "24.0 GiB", "512 B", for people.
std::string FormatSize(double bytes);
inline std::string FormatSize(uint64_t bytes) { return FormatSize(static_cast<double>(bytes)); }

// At least `bytes`, as an option takes it: whole gigabytes from 4G on, whole megabytes below. "12G", "384M".
std::string SizeFlag(uint64_t bytes);

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_BASE_SIZES_H_

// SPDX-License-Identifier: Apache-2.0
//
// The names of files that the posix sink creates next to its callers' files:
//
//     .NAME.ropeteam-0123456789abcdef.part         an unfinished upload or Put() of NAME
//     .NAME.ropeteam-0123456789abcdef.part-00007   part 7 of one, where a file is written in sequence only
//     .NAME.ropeteam-0123456789abcdef.writing      NAME is being written in place: it does not count yet
//
// with NAME cut to 200 bytes, so that the whole fits into NAME_MAX. Calls neither list nor accept such names.

#ifndef ROPETEAM_STORAGE_POSIX_NAMES_H_
#define ROPETEAM_STORAGE_POSIX_NAMES_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace ropeteam::storage::posix {

enum class NameKind { kFile, kUpload, kPart, kMarker };

NameKind KindOf(std::string_view base);
// The 16 digits as a number, of a name that is not kFile.
uint64_t IdOf(std::string_view base);

std::string UploadName(std::string_view base, uint64_t id);
std::string PartName(const std::string& upload, uint32_t index);
std::string MarkerName(std::string_view base);
// NAME of a marker; empty: it was cut.
std::string HiddenBy(std::string_view marker);

// FNV-1a. If two names have one hash, a resumption is lost, or one of them is hidden while the other is written;
// nothing else.
uint64_t HashOf(std::string_view text);
uint64_t RandomId();

// "a/b/c": "a/b" and "c".
std::string_view FolderOf(std::string_view name);
std::string_view BaseOf(std::string_view name);
std::string Joined(const std::string& folder, std::string_view base);

}  // namespace ropeteam::storage::posix

#endif  // ROPETEAM_STORAGE_POSIX_NAMES_H_

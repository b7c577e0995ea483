// SPDX-License-Identifier: Apache-2.0
//
// The job key: 32 random bytes that only the nodes of a job have. It is never sent: each process derives the job's
// certificate authority from it, and makes a certificate of its own that this authority signs. A process with such a
// certificate has the key.
//
//   PRK       = HKDF-Extract-SHA256(salt "ropeteam job key 1", key)          RFC 5869
//   derive(L) = HKDF-Expand-SHA256(PRK, L || 0x00 || name of the job)
//   CA key    = Ed25519 key whose seed is derive("tls ca")                   RFC 8032
//
// The job's name is part of it: one key in two jobs makes two authorities. The derivation is a format: nodes of two builds
// must derive the same authority.
//
// Pure functions but for reading and making files; any thread. No message holds a digit of a key.

#ifndef ROPETEAM_MEMBERSHIP_CREDENTIALS_JOB_KEY_H_
#define ROPETEAM_MEMBERSHIP_CREDENTIALS_JOB_KEY_H_

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"

namespace ropeteam {

inline constexpr size_t kJobKeyBytes = 32;
// The job's, and while it is being replaced the next or the former one.
inline constexpr size_t kJobKeysMax = 2;
// Two lines with room for white space: more is another file.
inline constexpr size_t kSecretFileBytesMax = 1024;
// The subject alternative name of every certificate that a job key makes.
inline constexpr char kJobKeyTlsName[] = "node.ropeteam.internal";

struct JobKey {
  std::array<unsigned char, kJobKeyBytes> bytes{};
  JobKey() = default;
  JobKey(const JobKey&) = default;
  JobKey& operator=(const JobKey&) = default;
  ~JobKey();  // wipes the bytes
};

// One or two keys of 64 hexadecimal digits, separated by white space; the first one is this node's identity, all are believed.
// `source` names where the text is from in messages. kInvalidArgument.
Result<std::vector<JobKey>> ParseJobKeys(std::string_view text, const std::string& source);
// The text of a file that only its owner may write and only owner and group may read. kInvalidArgument, kIo, kNotFound.
Result<std::string> ReadSecretFile(const std::string& path, const std::string& source);
// ParseJobKeys() of such a file.
Result<std::vector<JobKey>> ReadJobKeyFile(const std::string& path, const std::string& source);
// For the nodes of one user on one machine: reads `path`, a file of this user alone, and makes it (mode 0600) where it is
// missing. Of two processes that make it at once one wins, and both read the same key. The directory must exist and be
// this user's alone. kInvalidArgument, kIo.
Result<std::vector<JobKey>> ReadOrMakeJobKeyFile(const std::string& path);
// The value of ROPETEAM_JOB_KEY, which is then overwritten where /proc shows it, and unset. Before other threads run.
std::string TakeJobKeyVariable();

// HKDF with SHA-256, extract and expand (RFC 5869); at most 255 * 32 bytes.
std::string HkdfSha256(std::string_view salt, std::string_view key, std::string_view info, size_t bytes);
// derive(label) of above.
std::string DeriveFromJobKey(const JobKey& key, const std::string& job, std::string_view label, size_t bytes);
// The public key of the job's authority, 32 bytes.
std::string JobAuthority(const JobKey& key, const std::string& job);
// The first 8 hexadecimal digits of the authority's SHA-256: may be shown, and tells two keys apart.
std::string JobKeyId(const JobKey& key, const std::string& job);

// The certificate and key of one process, and the roots that it trusts, as PEM.
struct TlsIdentity {
  std::string certificate;  // with those between it and the root, if any
  std::string private_key;
  std::string roots;
};
// A certificate of a key pair that is drawn for each call, for the node `node`, signed by the authority of keys[0], and the
// authorities of all keys. `keys` is not empty. kInternal: libcrypto refused.
Result<TlsIdentity> MakeTlsIdentity(const std::vector<JobKey>& keys, const std::string& job,
                                    const std::string& node);

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_CREDENTIALS_JOB_KEY_H_

// SPDX-License-Identifier: Apache-2.0
//
// Certificates made by an operator: three PEM files, checked before use. Any thread; nothing is cached.

#ifndef ROPETEAM_MEMBERSHIP_CREDENTIALS_TLS_FILES_H_
#define ROPETEAM_MEMBERSHIP_CREDENTIALS_TLS_FILES_H_

#include <cstdint>
#include <string>

#include "core/base/status.h"
#include "membership/credentials/job_key.h"

namespace ropeteam {

// A chain of a few certificates, or the roots of a large organisation.
inline constexpr size_t kTlsFileBytesMax = 1 << 20;

// The paths that --tls-cert, --tls-key and --tls-ca name.
struct TlsFiles {
  std::string certificate;  // the node's own first, then those between it and the root
  std::string private_key;  // without a passphrase; others than owner and group must not read it
  std::string roots;
};

struct CheckedTls {
  TlsIdentity identity;
  std::string name;     // the certificate's CN
  std::string expires;  // "2027-01-31"
  int64_t seconds_left = 0;
};
// Returns the files' contents if they can serve as client and server: the key belongs to the certificate, the
// certificate comes from the roots, is valid now and may be used for both. Otherwise the message has the failed check
// and the options' names. kInvalidArgument, kIo, kNotFound.
Result<CheckedTls> ReadTlsFiles(const TlsFiles& files);

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_CREDENTIALS_TLS_FILES_H_

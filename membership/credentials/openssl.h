// SPDX-License-Identifier: Apache-2.0
//
// Owners of libcrypto's objects.

#ifndef ROPETEAM_MEMBERSHIP_CREDENTIALS_OPENSSL_H_
#define ROPETEAM_MEMBERSHIP_CREDENTIALS_OPENSSL_H_

#include <openssl/evp.h>
#include <openssl/x509.h>

#include <memory>

namespace ropeteam {

template <auto Free>
struct OpensslFreer {
  template <typename T>
  void operator()(T* object) const {
    Free(object);
  }
};
template <typename T, auto Free>
using OpensslOwner = std::unique_ptr<T, OpensslFreer<Free>>;

using KeyPair = OpensslOwner<EVP_PKEY, EVP_PKEY_free>;
using Certificate = OpensslOwner<X509, X509_free>;
using Memory = OpensslOwner<BIO, BIO_free>;

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_CREDENTIALS_OPENSSL_H_

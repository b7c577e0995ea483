// SPDX-License-Identifier: Apache-2.0
//
// Clients without the job's key, for the tests of every gRPC server.

#ifndef ROPETEAM_TESTS_MEMBERSHIP_INTRUDER_H_
#define ROPETEAM_TESTS_MEMBERSHIP_INTRUDER_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/security/tls_certificate_verifier.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "membership/credentials/credentials.h"

namespace ropeteam {

inline std::vector<JobKey> KeyForTest(char digit) {
  return ParseJobKeys(std::string(2 * kJobKeyBytes, digit), "the test's key").value();
}

inline std::shared_ptr<const Credentials> CredentialsForTest(char digit,
                                                             const std::string& job = "test-job") {
  return Credentials::FromJobKey(KeyForTest(digit), job, "node-x", "test").value();
}

// A client that shows `identity`'s certificate (none if it is empty), trusts `roots` and accepts any host
// name.
inline std::shared_ptr<grpc::ChannelCredentials> RawChannel(const TlsIdentity& identity,
                                                            const std::string& roots) {
  using namespace grpc::experimental;
  TlsChannelCredentialsOptions options;
  std::vector<IdentityKeyCertPair> pairs;
  if (!identity.certificate.empty()) pairs.push_back({identity.private_key, identity.certificate});
  options.set_certificate_provider(std::make_shared<StaticDataCertificateProvider>(roots, pairs));
  options.watch_root_certs();
  if (!pairs.empty()) options.watch_identity_key_cert_pairs();
  options.set_verify_server_certs(true);
  options.set_check_call_host(false);
  options.set_certificate_verifier(std::make_shared<NoOpCertificateVerifier>());
  return TlsCredentials(options);
}

// Calls a method that no server has. UNIMPLEMENTED: the server accepted the client and looked for the method.
// UNAVAILABLE: it did not accept the client.
inline grpc::Status Knock(const std::string& address,
                          const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  grpc::GenericStub stub(grpc::CreateCustomChannel("ipv4:" + address, credentials, arguments));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  grpc::CompletionQueue queue;
  const grpc::Slice empty("");
  const grpc::ByteBuffer request(&empty, 1);
  const auto call = stub.PrepareUnaryCall(&context, "/nobody/Knows", request, &queue);
  call->StartCall();
  grpc::ByteBuffer reply;
  grpc::Status status;
  call->Finish(&reply, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  return status;
}

struct Intruder {
  std::string what;
  std::shared_ptr<grpc::ChannelCredentials> credentials;
};

// Clients that a server with CredentialsForTest(digit) must refuse.
inline std::vector<Intruder> Intruders(char digit, const std::string& job = "test-job") {
  const TlsIdentity own = MakeTlsIdentity(KeyForTest(digit), job, "node-y").value();
  const TlsIdentity foreign = MakeTlsIdentity(KeyForTest(digit == '9' ? '8' : '9'), job, "node-y").value();
  const TlsIdentity other_job = MakeTlsIdentity(KeyForTest(digit), job + "-2", "node-y").value();
  return {{"in clear", grpc::InsecureChannelCredentials()},
          {"no certificate", RawChannel({}, own.roots)},
          {"a certificate of another key", RawChannel(foreign, own.roots)},
          {"the same key in another job", RawChannel(other_job, own.roots)}};
}

}  // namespace ropeteam

#endif  // ROPETEAM_TESTS_MEMBERSHIP_INTRUDER_H_

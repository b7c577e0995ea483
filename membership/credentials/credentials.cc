// SPDX-License-Identifier: Apache-2.0
#include "membership/credentials/credentials.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_certificate_verifier.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/crypto.h>

namespace ropeteam {
namespace {

using grpc::experimental::CertificateProviderInterface;
// How often gRPC reads the memory files, in whole seconds.
constexpr unsigned kProviderIntervalSeconds = 1;

using grpc::experimental::TlsCustomVerificationCheckRequest;

// Runs after the chain was verified, never instead of it. gRPC's own check would compare the host's name. An empty name
// accepts every certificate of the roots.
class NameVerifier final : public grpc::experimental::ExternalCertificateVerifier {
 public:
  explicit NameVerifier(std::string name) : name_(std::move(name)) {}
  bool Verify(TlsCustomVerificationCheckRequest* request, std::function<void(grpc::Status)>,
              grpc::Status* status) override {
    bool has_name = name_.empty() || request->common_name() == name_;
    for (const grpc::string_ref& name : request->dns_names()) has_name = has_name || name == name_;
    if (!has_name)
      *status = grpc::Status(grpc::StatusCode::UNAUTHENTICATED, "the certificate is not one for " + name_);
    return true;  // decided
  }
  void Cancel(TlsCustomVerificationCheckRequest*) override {}

 private:
  const std::string name_;
};

// Both parts must be watched even if they never change: otherwise gRPC's handshakes fail (grpc issue 26133).
void Watch(grpc::experimental::TlsCredentialsOptions* options, const std::string& name) {
  options->watch_root_certs();
  options->watch_identity_key_cert_pairs();
  options->set_certificate_verifier(
      grpc::experimental::ExternalCertificateVerifier::Create<NameVerifier>(name));
}

std::shared_ptr<grpc::ServerCredentials> MakeServer(
    const std::shared_ptr<CertificateProviderInterface>& provider, const std::string& name) {
  grpc::experimental::TlsServerCredentialsOptions options(provider);
  Watch(&options, name);
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  return grpc::experimental::TlsServerCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> MakeChannel(
    const std::shared_ptr<CertificateProviderInterface>& provider, const std::string& name) {
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(provider);
  Watch(&options, name);
  options.set_verify_server_certs(true);
  options.set_check_call_host(false);
  return grpc::experimental::TlsCredentials(options);
}

bool HasAny(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    if (text.find(part) != std::string::npos) return true;
  return false;
}

}  // namespace

Credentials::~Credentials() = default;

Result<std::shared_ptr<const Credentials>> Credentials::FromJobKey(const std::vector<JobKey>& keys,
                                                                   const std::string& job,
                                                                   const std::string& node,
                                                                   const std::string& from) {
  Result<TlsIdentity> identity = MakeTlsIdentity(keys, job, node);
  if (!identity.ok()) return identity.status();
  const auto provider = std::make_shared<grpc::experimental::StaticDataCertificateProvider>(
      identity->roots,
      std::vector<grpc::experimental::IdentityKeyCertPair>{{identity->private_key, identity->certificate}});
  OPENSSL_cleanse(identity->private_key.data(), identity->private_key.size());
  std::shared_ptr<Credentials> credentials(new Credentials());
  credentials->server_ = MakeServer(provider, kJobKeyTlsName);
  credentials->channel_ = MakeChannel(provider, kJobKeyTlsName);
  credentials->description_ = "job key " + JobKeyId(keys.front(), job) + " (" + from + ")";
  return std::shared_ptr<const Credentials>(std::move(credentials));
}

Result<std::shared_ptr<const Credentials>> Credentials::FromFiles(const TlsFiles& files,
                                                                  const std::string& peer_name,
                                                                  std::chrono::milliseconds interval) {
  Result<std::unique_ptr<WatchedFiles>> watched = WatchedFiles::Open(files, interval);
  if (!watched.ok()) return watched.status();
  const std::string identity = (*watched)->identity_path();
  const auto provider = std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
      identity, identity, (*watched)->roots_path(), kProviderIntervalSeconds);
  std::shared_ptr<Credentials> credentials(new Credentials());
  credentials->files_ = std::move(*watched);
  credentials->server_ = MakeServer(provider, peer_name);
  credentials->channel_ = MakeChannel(provider, peer_name);
  return std::shared_ptr<const Credentials>(std::move(credentials));
}

std::shared_ptr<grpc::ServerCredentials> ServerCredentialsOf(const Credentials* credentials) {
  return credentials != nullptr ? credentials->server() : grpc::InsecureServerCredentials();
}

std::shared_ptr<grpc::ChannelCredentials> ChannelCredentialsOf(const Credentials* credentials) {
  return credentials != nullptr ? credentials->channel() : grpc::InsecureChannelCredentials();
}

std::string ExplainEnd(const std::string& message, const std::string& address, const std::string& job,
                       const Credentials* credentials) {
  const std::string at = "the coordinator at " + address;
  if (credentials != nullptr) {
    if (HasAny(message, {"WRONG_VERSION_NUMBER", "wrong version number", "HTTP_REQUEST", "http request"}))
      return at + " speaks without TLS: it was started with --insecure";
    if (HasAny(message, {"CERTIFICATE_VERIFY_FAILED", "certificate verify failed", "alert"}))
      return credentials->is_of_files()
                 ? at + " has no certificate that --tls-ca signed, or does not accept this node's " +
                       credentials->description()
                 : at +
                       " is of another job or has another job key: check --job and --job-key-file (here: "
                       "job " +
                       job + ", " + credentials->description() + ")";
    return "";
  }
  if (HasAny(message,
             {"Socket closed", "Connection reset", "Broken pipe", "closed the connection", "GOAWAY"}))
    return at + " closed the connection before it answered: it may want the job's key (--job-key-file)";
  return "";
}

}  // namespace ropeteam

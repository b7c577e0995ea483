// SPDX-License-Identifier: Apache-2.0
#include "membership/standalone/options.h"

#include <cstdlib>

#include "membership/standalone/wire.h"

namespace ropeteam {
namespace {

// Heartbeats detect a dead path. These pings only remove what it leaves in the server: a stream that cannot be closed
// because its peer accepts nothing any more.
constexpr int kReapPingMs = 10'000;
constexpr int kReapTimeoutMs = 5'000;
// A connection that has not shown a certificate and spoken HTTP/2 within this time is closed.
constexpr int kHandshakeMaxMs = 5'000;
// A node has one stream per connection, and one more for its successor.
constexpr int kStreamsPerConnectionMax = 2;
// A channel lives for one attempt, and the Agent decides when to try. gRPC's own pauses must only not be longer.
constexpr int kConnectMinMs = 50;
constexpr int kConnectMaxMs = 500;

static_assert(kFrameBytesMax < (1u << 30), "gRPC's limits are ints");

}  // namespace

void SetGrpcEnvironment() { setenv("GRPC_DNS_RESOLVER", "native", 0); }

std::string ExplainName(const std::string& message, const std::string& address) {
  // "DNS resolution failed for HOST:PORT: UNKNOWN: the C library's reason"
  if (message.find("DNS resolution failed") == std::string::npos) return message;
  const size_t colon = message.rfind(": ");
  return "the name " + address.substr(0, address.rfind(':')) + " is not resolved" +
         (colon != std::string::npos ? message.substr(colon) : "");
}

void SetServerOptions(grpc::ServerBuilder* builder) {
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kReapPingMs);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kReapTimeoutMs);
  // Bandwidth probing doubles the packets of a connection that carries five small messages a second.
  builder->AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder->AddChannelArgument(GRPC_ARG_ENABLE_CHANNELZ, 0);
  builder->SetMaxReceiveMessageSize(static_cast<int>(kFrameBytesMax));
  builder->SetMaxSendMessageSize(static_cast<int>(kFrameBytesMax));
}

Result<std::unique_ptr<grpc::Server>> StartServer(grpc::ServerBuilder* builder, Acceptor* acceptor,
                                                  const Credentials* credentials) {
  using grpc::experimental::ExternalConnectionAcceptor;
  builder->AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMaxMs);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kStreamsPerConnectionMax);
  std::shared_ptr<ExternalConnectionAcceptor> external;
  if (acceptor != nullptr)
    external = builder->experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
        ServerCredentialsOf(credentials));
  std::unique_ptr<grpc::Server> server = builder->BuildAndStart();
  if (server == nullptr) return Error(Code::kInternal, "gRPC does not start a server");
  if (acceptor != nullptr)
    acceptor->Start([external](int connection) {
      ExternalConnectionAcceptor::NewConnectionParameters parameters;
      parameters.fd = connection;
      external->HandleNewConnection(&parameters);
    });
  return server;
}

grpc::ChannelArguments ChannelOptions() {
  grpc::ChannelArguments arguments;
  // A new attempt must be a new TCP connection: the old one may be a path that is silently dead.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kConnectMinMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectMaxMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kConnectMaxMs);
  // Nodes connect to each other directly, not through the proxy that http_proxy names.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_CHANNELZ, 0);
  arguments.SetMaxReceiveMessageSize(static_cast<int>(kFrameBytesMax));
  arguments.SetMaxSendMessageSize(static_cast<int>(kFrameBytesMax));
  return arguments;
}

}  // namespace ropeteam

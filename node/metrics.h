// SPDX-License-Identifier: Apache-2.0
//
// `--metrics`: the daemon's counters in Prometheus' text format over HTTP. docs/metrics.md lists the names.
//
// Each connection has a thread. For each scrape, the event loop makes a snapshot of some hundred numbers. That takes
// microseconds, however many steps the arena holds. The scrape's thread makes the text. Connections are bounded for each
// remote address and in all; beyond that the oldest is closed, so that slow clients keep nobody away.

#ifndef ROPETEAM_NODE_METRICS_H_
#define ROPETEAM_NODE_METRICS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/base/status.h"
#include "core/engine/metrics.h"
#include "node/event_loop.h"
#include "node/node_stats.h"
#include "transport/transport.h"

namespace ropeteam {

// All of a node's metrics at one moment, as values.
struct MetricsSnapshot {
  std::string version;  // empty: there is no node yet, and the fields below are meaningless
  std::string job;
  std::string node;
  std::string fabric;  // DataPlane::transport_name()
  TimeUs now = 0;      // EventLoop::Now()
  EngineMetrics engine;
  NodeStats stats;
  Transport::Counters transport;
  Epoch epoch = 0;
  uint64_t members = 0;
  uint64_t nodes_expected = 0;
  uint64_t early_messages = 0;
  uint64_t unauthenticated = 0;  // connections
};

class MetricsServer {
 public:
  // Called on the loop's thread.
  using Collect = std::function<MetricsSnapshot()>;

  // Listens on "ADDRESS:PORT" when it returns. kIo: the port is taken, or the address is not this machine's.
  // kUnsupported: the build is without prometheus-cpp. `loop` must outlive the server.
  static Result<std::unique_ptr<MetricsServer>> Start(const std::string& address, EventLoop* loop,
                                                      Collect collect);
  // Ends the running scrapes, which may take a moment. A later Run() of the loop does not call `collect`.
  ~MetricsServer();

  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

 private:
  class Impl;
  explicit MetricsServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_METRICS_H_

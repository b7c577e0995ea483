// SPDX-License-Identifier: Apache-2.0
//
// MetricsServer in a build without prometheus-cpp.

#include "node/metrics.h"

namespace ropeteam {

class MetricsServer::Impl {};

Result<std::unique_ptr<MetricsServer>> MetricsServer::Start(const std::string& address, EventLoop* /*loop*/,
                                                            Collect /*collect*/) {
  return Error(Code::kUnsupported, "--metrics %s: this build has no metrics, %s", address.c_str(),
               ROPETEAM_METRICS_MISSING);
}

MetricsServer::~MetricsServer() = default;

}  // namespace ropeteam

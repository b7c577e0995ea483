// SPDX-License-Identifier: Apache-2.0
//
// What the transports are measured against, besides the bare libfabric loop: the fabrics' own tools, run as
// they are, and a plain socket. Each call is one pass: it starts what it needs, and what it returns is what
// was moved while the clock of the tool itself ran, in bytes per second.

#ifndef ROPETEAM_BENCH_YARDSTICKS_H_
#define ROPETEAM_BENCH_YARDSTICKS_H_

#include <cstdint>
#include <string>

#include "bench/child.h"
#include "bench/remote.h"
#include "core/base/status.h"

namespace ropeteam::bench {

struct ToolOptions {
  std::string device;             // "mlx5_0"; empty: the tool's choice
  int gid_index = -1;             // -1: the tool's choice
  uint64_t size = 1 << 20;        // of an operation
  uint32_t depth = 16;            // operations outstanding
  uint64_t bytes = 256ull << 20;  // moved by the pass
  bool get = false;
  Remote remote;  // where the tool's server runs
};

// ib_write_bw or ib_read_bw of perftest. kUnsupported when it is not installed.
Result<double> RunPerftest(const ToolOptions& options);
// ucx_perftest's ucp_put_bw or ucp_get, with UCX's own choice of transports or that of UCX_TLS, held to
// the device and the GID where they are given.
Result<double> RunUcxPerftest(const ToolOptions& options);

// The last number but `from_end` of the line that begins with `word`; kIo with the output when there is none.
Result<double> NumberOf(const std::string& output, const std::string& word, size_t from_end);

// A TCP connection between this process and a child, here or on another machine, that receives into memory of
// `bytes` bytes and answers with one byte at the end of each pass.
class SocketLoop {
 public:
  Status Start(uint64_t bytes, const Remote& remote);
  // Bytes per second.
  Result<double> Pass(const void* data, uint64_t bytes);
  ~SocketLoop();

 private:
  Child receiver_;
  int fd_ = -1;
};
inline constexpr const char* kSocketTargetCommand = "socket-target";
int SocketTargetMain(int argc, char** argv);

}  // namespace ropeteam::bench

#endif  // ROPETEAM_BENCH_YARDSTICKS_H_

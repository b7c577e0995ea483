// SPDX-License-Identifier: Apache-2.0
//
// The baselines of the transports besides the bare libfabric loop: the fabrics' own tools, unchanged, and a
// plain socket. Each call is one pass. It starts the processes that it needs, and returns bytes per second as
// measured by the tool's own clock.

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
  uint64_t size = 1 << 20;        // bytes of one operation
  uint32_t depth = 16;            // operations outstanding
  uint64_t bytes = 256ull << 20;  // moved by the pass
  bool get = false;
  Remote remote;  // where the tool's server runs
};

// ib_write_bw or ib_read_bw of perftest. kUnsupported if it is not installed.
Result<double> RunPerftest(const ToolOptions& options);
// ucx_perftest's ucp_put_bw or ucp_get, over the transports that UCX or UCX_TLS chooses. It uses the given
// device and GID, if any.
Result<double> RunUcxPerftest(const ToolOptions& options);

// A number of the last line that begins with `word`, counted from the end: 0 is the last one. kIo with the
// output if there is no such number.
Result<double> NumberOf(const std::string& output, const std::string& word, size_t from_end);

// A TCP connection between this process and a child, here or on another machine. The child receives into
// `bytes` bytes of memory and answers with one byte at the end of each pass.
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

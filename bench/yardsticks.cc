// SPDX-License-Identifier: Apache-2.0
#include "bench/yardsticks.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>
#include <vector>

#include "bench/measure.h"

namespace ropeteam::bench {
namespace {

constexpr uint32_t kIterationsMin = 5;  // the minimum of ib_write_bw
// A client that starts before its server fails and is started again, for this long.
constexpr double kServerStartSeconds = 20;
constexpr useconds_t kStartPauseUs = 20'000;
constexpr double kBitsPerByte = 8, kGiga = 1e9, kMebi = 1 << 20;

Result<sockaddr_in> AddressOf(const std::string& text, uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  if (inet_pton(AF_INET, text.c_str(), &address.sin_addr) != 1)
    return Error(Code::kInvalidArgument, "\"%s\" is no numeric IPv4 address", text.c_str());
  return address;
}

// A port that is free now on this machine, and probably on the other one.
uint16_t FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t length = sizeof address;
  uint16_t port = 0;
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0)
    port = ntohs(address.sin_port);
  close(fd);
  return port;
}

uint64_t IterationsOf(const ToolOptions& options) {
  return std::max<uint64_t>(kIterationsMin, options.bytes / options.size);
}

// Whether a socket of this machine listens on the port. It reads the kernel's tables: a tool's server would
// treat a test connection as its client.
bool Listens(uint16_t port) {
  char wanted[8];
  std::snprintf(wanted, sizeof wanted, ":%04X", port);
  for (const char* path : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(path);
    std::string number, local, other, state;
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      words >> number >> local >> other >> state;
      if (state == "0A" && local.ends_with(wanted)) return true;
    }
  }
  return false;
}

// Runs server and client of a tool until the client succeeds or the time is over, and returns the client's
// output. If a client fails, its server may have ended too, so both are started again. On another machine it
// is unknown when the server listens, so the server keeps running and only the client is started again.
Result<std::string> RunPair(const Remote& remote, uint16_t port, const std::vector<std::string>& server,
                            const std::vector<std::string>& client) {
  const double give_up = SecondsNow() + kServerStartSeconds;
  Child listening;
  for (bool start = true;; start = remote.local()) {
    if (start) ROPETEAM_RETURN_IF_ERROR(listening.Start(CommandOf(remote, server), true));
    while (remote.local() && !Listens(port) && SecondsNow() < give_up) usleep(kStartPauseUs);
    Child connecting;
    ROPETEAM_RETURN_IF_ERROR(connecting.Start(client, true));
    std::string output = connecting.ReadAll();
    if (connecting.Wait() == 0) return output;
    if (SecondsNow() > give_up)
      return Error(Code::kIo, "%s failed: %.400s", client[0].c_str(), output.c_str());
    usleep(kStartPauseUs);
  }
}

// UCX's variables for the device and the GID that the transport uses.
std::vector<std::string> UcxEnvironment(const ToolOptions& options) {
  std::vector<std::string> words;
  if (!options.device.empty()) words.push_back("UCX_NET_DEVICES=" + options.device);
  if (options.gid_index >= 0) words.push_back("UCX_IB_GID_INDEX=" + std::to_string(options.gid_index));
  if (!words.empty()) words.insert(words.begin(), "env");
  return words;
}

}  // namespace

Result<double> NumberOf(const std::string& output, const std::string& word, size_t from_end) {
  std::istringstream lines(output);
  std::string line;
  std::vector<double> numbers;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string first;
    if (!(words >> first) || first != word) continue;
    numbers.clear();
    for (std::string each; words >> each;) {
      char* end = nullptr;
      const double number = std::strtod(each.c_str(), &end);
      if (*end == '\0') numbers.push_back(number);
    }
  }
  if (numbers.size() <= from_end)
    return Error(Code::kIo, "no line \"%s\" with %zu numbers in: %.400s", word.c_str(), from_end + 1,
                 output.c_str());
  return numbers[numbers.size() - 1 - from_end];
}

Result<double> RunPerftest(const ToolOptions& options) {
  const uint16_t port = FreePort();
  std::vector<std::string> server = {options.get ? "ib_read_bw" : "ib_write_bw",
                                     "-F",
                                     "--report_gbits",
                                     "-p",
                                     std::to_string(port),
                                     "-s",
                                     std::to_string(options.size),
                                     "-n",
                                     std::to_string(IterationsOf(options))};
  // Not for reads: the device limits the number of outstanding reads.
  if (!options.get) server.insert(server.end(), {"-t", std::to_string(options.depth)});
  if (!options.device.empty()) server.insert(server.end(), {"-d", options.device});
  if (options.gid_index >= 0) server.insert(server.end(), {"-x", std::to_string(options.gid_index)});
  std::vector<std::string> client = server;
  client.push_back(options.remote.address);
  const Result<std::string> output = RunPair(options.remote, port, server, client);
  if (!output.ok()) return output.status();
  // "#bytes #iterations BW peak[Gb/sec] BW average[Gb/sec] MsgRate[Mpps]"
  const Result<double> gigabits = NumberOf(*output, std::to_string(options.size), 1);
  if (!gigabits.ok()) return gigabits.status();
  return *gigabits * kGiga / kBitsPerByte;
}

Result<double> RunUcxPerftest(const ToolOptions& options) {
  const uint16_t port = FreePort();
  std::vector<std::string> server = UcxEnvironment(options), client = server;
  server.insert(server.end(), {"ucx_perftest", "-p", std::to_string(port)});
  client.insert(client.end(), {"ucx_perftest", options.remote.address, "-p", std::to_string(port), "-t",
                               options.get ? "ucp_get" : "ucp_put_bw", "-s", std::to_string(options.size),
                               "-n", std::to_string(IterationsOf(options)), "-w",
                               std::to_string(kIterationsMin), "-O", std::to_string(options.depth)});
  const Result<std::string> output = RunPair(options.remote, port, server, client);
  if (!output.ok()) return output.status();
  // "Final: iterations 50%ile average overall | bandwidth (MB/s) average overall | messages/s average
  // overall"
  const Result<double> mebibytes = NumberOf(*output, "Final:", 2);
  if (!mebibytes.ok()) return mebibytes.status();
  return *mebibytes * kMebi;
}

Status SocketLoop::Start(uint64_t bytes, const Remote& remote) {
  ROPETEAM_RETURN_IF_ERROR(receiver_.Start(OwnCommandOf(
      remote, {kSocketTargetCommand, std::to_string(bytes), ParentWord(remote), remote.address})));
  const int port = std::atoi(receiver_.ReadLine().c_str());
  fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const Result<sockaddr_in> address = AddressOf(remote.address, static_cast<uint16_t>(port));
  if (!address.ok()) return address.status();
  if (port == 0 || connect(fd_, reinterpret_cast<const sockaddr*>(&*address), sizeof *address) != 0)
    return ErrnoError(errno, "the receiver of the socket loop at port %d", port);
  return OkStatus();
}

Result<double> SocketLoop::Pass(const void* data, uint64_t bytes) {
  const double start = SecondsNow();
  const char* from = static_cast<const char*>(data);
  for (uint64_t sent = 0; sent < bytes;) {
    const ssize_t count = send(fd_, from + sent, bytes - sent, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return ErrnoError(errno, "sending");
    sent += static_cast<uint64_t>(count);
  }
  char done = 0;
  if (read(fd_, &done, 1) != 1) return Error(Code::kIo, "the receiver of the socket loop has ended");
  return static_cast<double>(bytes) / (SecondsNow() - start);
}

SocketLoop::~SocketLoop() {
  if (fd_ >= 0) close(fd_);
}

int SocketTargetMain(int argc, char** argv) {
  if (argc != 3) return 2;
  if (!FollowParent(argv[1])) return 3;
  Result<sockaddr_in> address = AddressOf(argv[2], 0);
  if (!address.ok()) return 1;
  const Buffer memory(std::strtoull(argv[0], nullptr, 10), 2, true);
  const int listening = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  socklen_t length = sizeof *address;
  if (bind(listening, reinterpret_cast<sockaddr*>(&*address), length) != 0 || listen(listening, 1) != 0 ||
      getsockname(listening, reinterpret_cast<sockaddr*>(&*address), &length) != 0)
    return 1;
  std::printf("%d\n", ntohs(address->sin_port));
  std::fflush(stdout);
  const int fd = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
  while (true) {
    for (uint64_t received = 0; received < memory.size();) {
      const ssize_t count = read(fd, memory.data() + received, memory.size() - received);
      if (count <= 0) return 0;
      received += static_cast<uint64_t>(count);
    }
    if (write(fd, "d", 1) != 1) return 0;
  }
}

}  // namespace ropeteam::bench

// SPDX-License-Identifier: Apache-2.0

#include "transport/ucx/liveness.h"

#include <errno.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <mutex>
#include <set>
#include <sstream>
#include <string>

#include "transport/blob.h"

namespace ropeteam::ucx {
namespace {

std::mutex instances_mutex;
std::set<uint64_t>& Instances() {
  static auto* const instances = new std::set<uint64_t>;  // outlives every transport
  return *instances;
}

// Field 22 of /proc/PID/stat; 0 when there is no such process.
uint64_t StartOf(int32_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  // The second field is the program's name in parentheses. The name may contain any character.
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream rest(text.substr(name_end + 1));
  constexpr int kFieldsBefore = 19;  // 3 to 21
  std::string skipped;
  for (int i = 0; i < kFieldsBefore; i++) rest >> skipped;
  uint64_t start = 0;
  rest >> start;
  return start;
}

uint64_t HostNumber() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char name[64];
  const ssize_t length = readlink("/proc/self/ns/pid", name, sizeof name);
  if (boot.empty() || length <= 0) return 0;
  return BlobChecksum(boot + std::string(name, static_cast<size_t>(length)));
}

}  // namespace

ProcessIdentity ThisProcess() {
  // Not cached: a forked child is another process.
  const auto process = static_cast<int32_t>(getpid());
  return {HostNumber(), StartOf(process), process};
}

void AddInstance(uint64_t instance) {
  std::lock_guard lock(instances_mutex);
  Instances().insert(instance);
}

void RemoveInstance(uint64_t instance) {
  std::lock_guard lock(instances_mutex);
  Instances().erase(instance);
}

void PeerWatch::Start(const ProcessIdentity& peer, uint64_t instance) {
  Stop();
  const ProcessIdentity self = ThisProcess();
  if (self.host == 0 || peer.host != self.host || peer.start == 0) return;
  instance_ = instance;
  inside_ = peer.process == self.process && peer.start == self.start;
  if (inside_) return;
  fd_ = static_cast<int>(syscall(SYS_pidfd_open, peer.process, 0));
  // A kernel before 5.3 has no pidfd (ENOSYS). UCX then watches the peer, like a peer on another host.
  if (fd_ < 0) dead_ = errno == ESRCH;
  // The start time is read after opening, because the descriptor may belong to a later process with the same
  // id.
  if (fd_ >= 0 && StartOf(peer.process) != peer.start) dead_ = true;
}

void PeerWatch::Stop() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
  inside_ = dead_ = false;
}

bool PeerWatch::Dead() {
  if (dead_) return true;
  if (inside_) {
    std::lock_guard lock(instances_mutex);
    return dead_ = !Instances().contains(instance_);
  }
  if (fd_ < 0) return false;
  pollfd item{fd_, POLLIN, 0};
  return dead_ = poll(&item, 1, 0) > 0;
}

}  // namespace ropeteam::ucx

// SPDX-License-Identifier: Apache-2.0
#include "tests/membership/standalone_cluster.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>

#include "membership/standalone/loop.h"

extern char** environ;

namespace ropeteam {
namespace {

std::string Number(uint64_t value) { return std::to_string(value); }

}  // namespace

std::string OwnHost(int number) {
  // Linux accepts all addresses of 127/8. The address depends on the process id, so concurrent tests do not
  // collide.
  const auto pid = static_cast<unsigned>(getpid());
  char host[32];
  std::snprintf(host, sizeof host, "127.%u.%u.%d", 16 + (pid >> 8) % 200, pid & 255, number);
  return host;
}

std::string FreeAddress() {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  inet_pton(AF_INET, OwnHost().c_str(), &address.sin_addr);
  socklen_t length = sizeof address;
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    std::abort();
  close(fd);
  return OwnHost() + ":" + Number(ntohs(address.sin_port));
}

MembershipConfig StandaloneConfig(const std::string& address) {
  MembershipConfig config;
  config.job = "test-job";
  config.coordinator_addresses = {address};
  config.protocol_version = 1;
  config.chunk_bytes = 4u << 20;
  config.data_transport = "verbs";
  return config;
}

Member StandaloneMember(const std::string& name, uint32_t ordinal, NodeId id) {
  Member member;
  member.id = id;
  member.name = name;
  member.ordinal = ordinal;
  member.control_address = "127.0.0.1:1";
  member.data_address = std::string("\x00\xff\x80 endpoint", 12);
  member.protocol = 1;  // as in StandaloneConfig()
  return member;
}

Status TestMember::Start() {
  Membership::Callbacks callbacks;
  callbacks.on_view = [this](const View& view) {
    const std::lock_guard lock(mutex_);
    orderly_ &= view.Contains(view.leader) && view.Contains(self_.id) &&
                (views_.empty() || view.epoch > views_.back().epoch);
    views_.push_back(view);
    changed_.notify_all();
  };
  callbacks.on_refused = [this](const Status& status) {
    const std::lock_guard lock(mutex_);
    refusals_.push_back(status);
    changed_.notify_all();
  };
  callbacks.on_lease = [this](TimeUs valid_until) {
    const std::lock_guard lock(mutex_);
    lease_until_ = valid_until;
    changed_.notify_all();
  };
  return membership_->Start(self_, callbacks);
}

bool TestMember::WaitFor(const std::function<bool(const View&)>& condition, int ms) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::milliseconds(ms),
                           [&] { return condition(views_.empty() ? View{} : views_.back()); });
}

bool TestMember::WaitForNames(const std::vector<std::string>& names, int ms) {
  return WaitFor(
      [&](const View& view) {
        std::vector<std::string> present;
        for (const Member& member : view.members) present.push_back(member.name);
        return present == names;
      },
      ms);
}

bool TestMember::WaitForRefusal(Status* status, int ms) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, std::chrono::milliseconds(ms), [&] { return !refusals_.empty(); }))
    return false;
  *status = refusals_.front();
  return true;
}

bool TestMember::WaitForLease(const std::function<bool(TimeUs)>& condition, int ms) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::milliseconds(ms), [&] { return condition(lease_until_); });
}

bool TestMember::HasLease() {
  const std::lock_guard lock(mutex_);
  return lease_until_ > Loop::Now();
}

View TestMember::LastView() {
  const std::lock_guard lock(mutex_);
  return views_.empty() ? View{} : views_.back();
}

size_t TestMember::ViewCount() {
  const std::lock_guard lock(mutex_);
  return views_.size();
}

bool TestMember::orderly() {
  const std::lock_guard lock(mutex_);
  return orderly_;
}

MemberProcess::MemberProcess(const std::string& address, const std::string& name, uint32_t ordinal, NodeId id,
                             uint32_t expected, bool embed) {
  int in[2];
  int out[2];
  if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) std::abort();
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
  std::vector<std::string> arguments = {ROPETEAM_MEMBER_PROCESS, address,    name,
                                        Number(ordinal),         Number(id), Number(expected)};
  if (embed) arguments.push_back("embed");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  if (posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ) != 0) std::abort();
  posix_spawn_file_actions_destroy(&actions);
  close(in[0]);
  close(out[1]);
  input_ = in[1];
  output_ = out[0];
  collector_ = std::thread([this] { Collect(); });
}

MemberProcess::~MemberProcess() {
  Kill();
  if (collector_.joinable()) collector_.join();
  if (input_ >= 0) close(input_);
  close(output_);
}

void MemberProcess::Collect() {
  std::string line;
  char byte = 0;
  while (read(output_, &byte, 1) == 1) {
    if (byte != '\n') {
      line += byte;
      continue;
    }
    const std::lock_guard lock(mutex_);
    lines_.push_back(std::exchange(line, {}));
    changed_.notify_all();
  }
}

void MemberProcess::Signal(int signal) {
  if (pid_ > 0) kill(pid_, signal);
}

void MemberProcess::Kill() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

long MemberProcess::Finish() {
  close(std::exchange(input_, -1));
  if (!WaitForLine("cpu ")) return -1;
  waitpid(std::exchange(pid_, -1), nullptr, 0);
  const std::lock_guard lock(mutex_);
  return std::atol(lines_.back().c_str() + 4);
}

bool MemberProcess::WaitForLine(const std::string& prefix, int ms) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::milliseconds(ms), [&] {
    for (const std::string& line : lines_)
      if (line.rfind(prefix, 0) == 0) return true;
    return false;
  });
}

}  // namespace ropeteam

// SPDX-License-Identifier: Apache-2.0
#include "bench/cluster.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "api/client/admin_client.h"
#include "bench/command.h"
#include "bench/measure.h"

extern char** environ;

namespace ropeteam::bench {
namespace {

constexpr int64_t kTimeoutMs = 60'000;    // for calls that take seconds at most, even on a busy machine
constexpr int kReadyTimeoutMs = 120'000;  // a large arena is pre-faulted at 0.3 to 2 GB/s
constexpr int kStopTimeoutMs = 20'000;

// ropeteamd beside this program if installed, else the one of the build tree.
std::string FindDaemon() {
  const std::filesystem::path own = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const std::filesystem::path beside = own / "ropeteamd";
  return std::filesystem::exists(beside) ? beside : own / "../node/ropeteamd";
}

uint16_t FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  const bool bound = fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  if (fd >= 0) close(fd);
  if (!bound) throw BenchError("no free port on 127.0.0.1");
  return ntohs(address.sin_port);
}

std::string EndOfFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  const std::string all = text.str();
  return all.size() > 2000 ? all.substr(all.size() - 2000) : all;
}

void Check(ropeteam_status_t status, const char* what) {
  if (status == ROPETEAM_OK) return;
  throw BenchError(std::string(what) + ": " + ropeteam_status_name(status) + ": " + ropeteam_last_error());
}

// The value of "Key:   123 kB" in /proc/PID/status.
double StatusMib(pid_t pid, const std::string& key) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(file, line);)
    if (line.rfind(key + ":", 0) == 0) return std::stod(line.substr(key.size() + 1)) / 1024;
  return 0;
}

}  // namespace

void AddShardOptions(CLI::App* command, ShardOptions* options) {
  command->add_option("--size", options->size_mib, "of the shard, MiB")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--objects", options->objects, "of the shard")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
}

ProcessUse UseOf(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  std::istringstream fields(
      line.substr(std::min(line.rfind(')') + 2, line.size())));  // a name may have spaces
  std::vector<std::string> values;
  for (std::string value; fields >> value;) values.push_back(value);
  if (values.size() < 13) throw BenchError("process " + std::to_string(pid) + " is gone");
  // values[0] is the state, field 3 of proc(5); minflt is field 10, majflt 12, utime 14, stime 15.
  ProcessUse use;
  use.page_faults = std::stoull(values[7]) + std::stoull(values[9]);
  use.cpu_seconds = static_cast<double>(std::stoull(values[11]) + std::stoull(values[12])) /
                    static_cast<double>(sysconf(_SC_CLK_TCK));
  use.memory_beyond_arena_mib = StatusMib(pid, "RssAnon") + StatusMib(pid, "RssFile");
  return use;
}

Cluster::Cluster(const ClusterOptions& options) : options_(options), nodes_(options.nodes) {
  char pattern[] = "/tmp/ropeteam-bench.XXXXXX";
  if (mkdtemp(pattern) == nullptr) throw BenchError("no temporary directory");
  directory_ = pattern;
  job_ = std::filesystem::path(directory_).filename();
  coordinator_ = "127.0.0.1:" + std::to_string(FreePort());
  try {
    for (uint32_t node = 0; node < options.nodes; ++node) Start(node);
  } catch (...) {
    for (uint32_t node = 0; node < options.nodes; ++node) Stop(node, SIGKILL);
    std::filesystem::remove_all(directory_);
    throw;
  }
}

Cluster::~Cluster() {
  for (uint32_t node = 0; node < nodes_.size(); ++node) Stop(node, SIGTERM);
  std::filesystem::remove_all(directory_);
}

void Cluster::Start(uint32_t number) {
  Node& node = nodes_[number];
  const std::string name = "node-" + std::to_string(number);
  node.socket = directory_ + "/" + name + ".sock";
  node.log = directory_ + "/" + name + ".log";
  int ready[2];
  if (pipe2(ready, O_CLOEXEC) != 0) throw BenchError("no pipe");
  std::vector<std::string> arguments = {FindDaemon(),
                                        "--job",
                                        job_,
                                        "--node",
                                        name,
                                        "--ordinal",
                                        std::to_string(number),
                                        "--nodes",
                                        std::to_string(options_.nodes),
                                        "--coordinator",
                                        coordinator_,
                                        "--listen",
                                        "127.0.0." + std::to_string(number + 1),
                                        "--memory",
                                        std::to_string(options_.memory_bytes),
                                        "--replicas",
                                        std::to_string(options_.replicas),
                                        "--socket",
                                        node.socket,
                                        "--log-file",
                                        node.log,
                                        "--ready-fd",
                                        "3"};
  arguments.insert(arguments.end(), options_.arguments.begin(), options_.arguments.end());
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ready[1], 3);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
  const int failed = posix_spawn(&node.pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ready[1]);
  pollfd waiting{ready[0], POLLIN, 0};
  char line[512];
  const bool up =
      failed == 0 && poll(&waiting, 1, kReadyTimeoutMs) == 1 && read(ready[0], line, sizeof(line)) > 0;
  close(ready[0]);
  if (!up) throw BenchError(arguments[0] + " did not get ready: " + EndOfFile(node.log));
  // The daemon chooses the arena's name and reports it.
  const Result<std::string> json = Ask(number, local::AdminCommand::kNode);
  if (!json.ok()) throw BenchError(json.status().ToString());
  node.arena = nlohmann::json::parse(*json).at("daemon").at("arena").get<std::string>();
}

void Cluster::Stop(uint32_t number, int signal) {
  Node& node = nodes_[number];
  if (node.pid > 0) {
    kill(node.pid, signal);
    const double deadline = SecondsNow() + kStopTimeoutMs / 1000.0;
    while (waitpid(node.pid, nullptr, WNOHANG) == 0) {
      if (SecondsNow() > deadline) kill(node.pid, SIGKILL);
      poll(nullptr, 0, 5);
    }
    node.pid = -1;
  }
  std::error_code ignored;  // the arena may not exist
  if (!node.arena.empty()) std::filesystem::remove(node.arena, ignored);
}

void Cluster::Lose(uint32_t node) { Stop(node, SIGKILL); }
void Cluster::Replace(uint32_t node) { Start(node); }

Result<std::string> Cluster::Ask(uint32_t node, local::AdminCommand command) const {
  Result<std::unique_ptr<AdminClient>> admin = AdminClient::Connect(nodes_[node].socket, kTimeoutMs);
  if (!admin.ok()) return admin.status();
  local::Admin request;
  request.command = command;
  request.timeout_ms = kTimeoutMs;
  return (*admin)->Request(request);
}

uint64_t Cluster::Registrations() const {
  uint64_t registrations = 0;
  for (uint32_t node = 0; node < nodes_.size(); ++node) {
    const Result<std::string> json = Ask(node, local::AdminCommand::kNode);
    if (!json.ok()) throw BenchError(json.status().ToString());
    registrations += nlohmann::json::parse(*json).at("transport").at("registrations").get<uint64_t>();
  }
  return registrations;
}

BenchRank::BenchRank(const std::string& socket, uint32_t rank, uint32_t world_size,
                     const std::string& incarnation_token) {
  ropeteam_open_options_t options{};
  options.size = sizeof(options);
  options.socket = socket.c_str();
  options.rank = rank;
  options.world_size = world_size;
  options.incarnation_token = incarnation_token.c_str();
  options.timeout_ms = kTimeoutMs;
  Check(ropeteam_open(&options, &handle_), "open");
}

// Begins a save, fills it by `put`, and commits it.
template <typename Put>
void BenchRank::Save(uint64_t step, uint64_t bytes, uint64_t objects, Put&& put) {
  const ropeteam_save_options_t options{sizeof(options), bytes, objects, 0};
  ropeteam_save_t* save = nullptr;
  Check(ropeteam_save_begin(handle_, step, &options, &save), "save_begin");
  const ropeteam_status_t filled = put(save);
  if (filled != ROPETEAM_OK) ropeteam_save_close(save);
  Check(filled, "save_put");
  const ropeteam_status_t committed = ropeteam_save_commit(save);
  ropeteam_save_close(save);
  Check(committed, "save_commit");
}

void BenchRank::Save(uint64_t step, const void* data, uint64_t bytes, uint64_t objects) {
  while (names_.size() < objects) names_.push_back("object." + std::to_string(names_.size()));
  Save(step, bytes, objects, [&](ropeteam_save_t* save) {
    ropeteam_status_t status = ROPETEAM_OK;
    uint64_t at = 0;
    for (uint64_t i = 0; i < objects && status == ROPETEAM_OK; ++i) {
      const uint64_t length = i + 1 == objects ? bytes - at : bytes / objects;
      status = ropeteam_save_put(save, names_[i].c_str(), static_cast<const uint8_t*>(data) + at, length);
      at += length;
    }
    return status;
  });
}

void BenchRank::SaveInParts(uint64_t step, const void* data, uint64_t bytes, uint64_t parts) {
  parts_.clear();
  uint64_t at = 0;
  for (uint64_t i = 0; i < parts; ++i) {
    const uint64_t length = i + 1 == parts ? bytes - at : bytes / parts;
    parts_.push_back({static_cast<const uint8_t*>(data) + at, length, nullptr, 0});
    at += length;
  }
  Save(step, bytes, 1, [&](ropeteam_save_t* save) {
    return ropeteam_save_put_parts(save, "parts", parts_.data(), parts_.size());
  });
}

void BenchRank::Wait(uint64_t step, ropeteam_level_t level) {
  Check(ropeteam_wait(handle_, step, level, kTimeoutMs), "wait");
}

bool BenchRank::Reached(uint64_t step, ropeteam_level_t level) {
  const ropeteam_status_t status = ropeteam_wait(handle_, step, level, 0);
  if (status != ROPETEAM_DEADLINE_EXCEEDED) Check(status, "wait");
  return status == ROPETEAM_OK;
}

void BenchRank::Persist(uint64_t step) { Check(ropeteam_persist(handle_, step, kTimeoutMs), "persist"); }

uint64_t BenchRank::Latest() {
  ropeteam_step_t step{};
  step.size = sizeof(step);
  Check(ropeteam_latest(handle_, &step, kTimeoutMs), "latest");
  return step.step;
}

ropeteam_view_t* BenchRank::OpenView(uint64_t step, uint32_t rank) {
  ropeteam_view_t* view = nullptr;
  Check(ropeteam_view_open(handle_, step, rank, kTimeoutMs, &view), "view_open");
  return view;
}

void BenchRank::ReadAll(ropeteam_view_t* view, void* data) {
  uint64_t at = 0;
  for (uint64_t i = 0; i < ropeteam_view_count(view); ++i) {
    ropeteam_object_t object{};
    object.size = sizeof(object);
    Check(ropeteam_view_object(view, i, &object), "view_object");
    Check(
        ropeteam_view_read(view, object.name, 0, static_cast<uint8_t*>(data) + at, object.length, kTimeoutMs),
        "view_read");
    at += object.length;
  }
  ropeteam_view_close(view);
}

}  // namespace ropeteam::bench

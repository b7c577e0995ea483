// SPDX-License-Identifier: Apache-2.0
#include "api/cli/launcher.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdio>
#include <sstream>
#include <string_view>

#include "core/base/checksum.h"

namespace ropeteam::cli {
namespace {

// Looks up settings in the order of precedence, and records the origin of each.
class Chooser {
 public:
  Chooser(const std::map<std::string, std::string>& flags, const Environment& environment)
      : flags_(flags), environment_(environment) {}

  std::string Variable(const std::string& name) const {
    const char* value = environment_(name);
    return value == nullptr ? "" : value;
  }

  // Takes the option from a flag or ROPETEAM_*. False: neither is set.
  bool Told(const std::string& option) {
    if (const auto flag = flags_.find(option); flag != flags_.end()) {
      settings[option] = {flag->second, "--" + option};
      return true;
    }
    const std::string name = VariableOf(option);
    const std::string value = Variable(name);
    if (value.empty()) return false;
    settings[option] = {value, name};
    return true;
  }

  // Takes the option from the first of the launchers' variables that is set.
  bool Launcher(const std::string& option, const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      const std::string value = Variable(name);
      if (value.empty() || (name == "TORCHELASTIC_RUN_ID" && value == "none"))
        continue;  // torchrun's "not given"
      settings[option] = {value, name};
      return true;
    }
    return false;
  }

  Settings settings;

 private:
  const std::map<std::string, std::string>& flags_;
  const Environment& environment_;
};

bool ToNumber(const std::string& text, uint32_t* number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *number);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; in >> line;) lines.push_back(line);
  return lines;
}

bool IsLoopback(const std::string& address) { return address.starts_with("127.") || address == "::1"; }

std::string WithPort(const std::string& host, const std::string& port) {
  return (host.find(':') != std::string::npos ? "[" + host + "]:" : host + ":") + port;
}

Status ChooseCounts(Chooser& chooser, uint32_t* ordinal, uint32_t* nodes) {
  if (!chooser.Told("nodes") &&
      !chooser.Launcher("nodes", {"SKYPILOT_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES",
                                  "GROUP_WORLD_SIZE", "PET_NNODES", "NNODES"}))
    chooser.settings["nodes"] = {"1", "default"};
  // torchrun's elastic "2:4": take the minimum.
  Setting& count = chooser.settings["nodes"];
  if (count.from == "NNODES" || count.from == "PET_NNODES")
    count.value = count.value.substr(0, count.value.find(':'));
  if (!ToNumber(count.value, nodes) || *nodes == 0)
    return Error(Code::kInvalidArgument, "%s is \"%.80s\", not a number of nodes", count.from.c_str(),
                 count.value.c_str());
  if (!chooser.Told("ordinal") && !chooser.Launcher("ordinal", {"SKYPILOT_NODE_RANK", "SLURM_NODEID",
                                                                "GROUP_RANK", "PET_NODE_RANK", "NODE_RANK"}))
    chooser.settings["ordinal"] = {"0", "default"};
  if (*nodes > 1 && chooser.settings["ordinal"].from == "default")
    return Error(
        Code::kInvalidArgument,
        "a job of %u nodes (%s) without this node's position: give --ordinal, from 0, or set NODE_RANK",
        *nodes, count.from.c_str());
  const Setting& position = chooser.settings["ordinal"];
  if (!ToNumber(position.value, ordinal))
    return Error(Code::kInvalidArgument, "%s is \"%.80s\", not a node's position", position.from.c_str(),
                 position.value.c_str());
  return OkStatus();
}

// The host that runs the coordinator, as the launcher names it.
bool CoordinatorHost(const Chooser& chooser, Setting* host) {
  if (const std::vector<std::string> ips = Lines(chooser.Variable("SKYPILOT_NODE_IPS")); !ips.empty()) {
    *host = {ips.front(), "SKYPILOT_NODE_IPS"};
  } else if (const std::string first = FirstSlurmHost(chooser.Variable("SLURM_JOB_NODELIST"));
             !first.empty()) {
    *host = {first, "SLURM_JOB_NODELIST"};
  } else if (const std::string pet = chooser.Variable("PET_MASTER_ADDR"); !pet.empty()) {
    *host = {pet, "PET_MASTER_ADDR"};
  } else if (const std::string master = chooser.Variable("MASTER_ADDR"); !master.empty()) {
    *host = {master, "MASTER_ADDR"};
  } else {
    return false;
  }
  return true;
}

bool OverEtcd(Chooser& chooser) {
  return chooser.Told("membership") && chooser.settings["membership"].value.starts_with("etcd");
}

Status ChooseCoordinator(Chooser& chooser, uint32_t nodes) {
  if (OverEtcd(chooser) || chooser.Told("coordinator") || nodes == 1) return OkStatus();
  Setting host;
  if (!CoordinatorHost(chooser, &host))
    return Error(
        Code::kInvalidArgument,
        "%u nodes need a coordinator: give --coordinator HOST:PORT, the same on all (no SKYPILOT_NODE_IPS, "
        "SLURM_JOB_NODELIST, PET_MASTER_ADDR or MASTER_ADDR is set)",
        nodes);
  std::string port = chooser.Variable("ROPETEAM_COORDINATOR_PORT");
  if (port.empty()) port = std::to_string(kCoordinatorPortDefault);
  chooser.settings["coordinator"] = {WithPort(host.value, port), host.from};
  return OkStatus();
}

// Peers must reach this node. With several nodes, loopback works only if all run on one machine.
Status ChooseListen(Chooser& chooser, uint32_t ordinal, uint32_t nodes,
                    const LocalAddressFor& local_address_for) {
  if (chooser.Told("listen") || nodes == 1) return OkStatus();
  if (const std::vector<std::string> ips = Lines(chooser.Variable("SKYPILOT_NODE_IPS"));
      ordinal < ips.size()) {
    chooser.settings["listen"] = {ips[ordinal], "SKYPILOT_NODE_IPS"};
    return OkStatus();
  }
  const bool over_etcd = OverEtcd(chooser);
  Setting coordinator = chooser.settings[over_etcd ? "membership" : "coordinator"];
  if (over_etcd) {  // the route to its first endpoint works too
    const size_t slashes = coordinator.value.find("//") + 2;
    coordinator.value.erase(0, slashes);
    const size_t user = coordinator.value.substr(0, coordinator.value.find('/')).rfind('@');
    if (user != std::string::npos) coordinator.value.erase(0, user + 1);
  }
  const std::string first = coordinator.value.substr(0, coordinator.value.find_first_of(",/"));
  std::string host = first.substr(0, first.rfind(':'));
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  const std::string address = local_address_for(host);
  if (address.empty())
    return Error(Code::kInvalidArgument,
                 "this machine does not know the name %s (%s), or has no route to it: check it, or give "
                 "--listen ADDRESS",
                 host.c_str(), coordinator.from.c_str());
  // Distributions write the host's own name as 127.0.1.1 into /etc/hosts. That is right here and wrong for
  // every peer.
  if (IsLoopback(address) && !IsLoopback(host))
    return Error(Code::kInvalidArgument,
                 "%s, named by %s, is %s on this machine, which no peer can reach: give --listen ADDRESS",
                 host.c_str(), coordinator.from.c_str(), address.c_str());
  chooser.settings["listen"] = {address, "the way to " + host};
  return OkStatus();
}

}  // namespace

const std::vector<std::string>& ValueOptions() {
  static const std::vector<std::string> options = {"job",
                                                   "node",
                                                   "ordinal",
                                                   "nodes",
                                                   "coordinator",
                                                   "listen",
                                                   "control-port",
                                                   "data-port",
                                                   "memory",
                                                   "chunk-size",
                                                   "arena-path",
                                                   "replicas",
                                                   "keep-steps",
                                                   "domain",
                                                   "socket",
                                                   "transport",
                                                   "provider",
                                                   "device",
                                                   "gid-index",
                                                   "dead-after-ms",
                                                   "heartbeat-ms",
                                                   "check-threads",
                                                   "scrub-rate",
                                                   "quarantine-after",
                                                   "wait-for-missing",
                                                   "log-level",
                                                   "log-file",
                                                   "storage",
                                                   "restore-from",
                                                   "persist-every",
                                                   "persist-rate",
                                                   "keep-on-storage",
                                                   "keep-every",
                                                   "keep-best",
                                                   "keep-within",
                                                   "storage-mode",
                                                   "audit-log",
                                                   "job-key-file",
                                                   "tls-cert",
                                                   "tls-key",
                                                   "tls-ca",
                                                   "tls-name",
                                                   "metrics",
                                                   "join-timeout",
                                                   "coordinator-listen",
                                                   "notice",
                                                   "notice-seconds",
                                                   "notice-endpoint",
                                                   "membership",
                                                   "etcd-ca",
                                                   "etcd-cert",
                                                   "etcd-key",
                                                   "etcd-password-file"};
  return options;
}

const std::vector<std::string>& FlagOptions() {
  static const std::vector<std::string> options = {
      "arena-reset",       "embed-coordinator", "no-embed-coordinator", "require-rdma",
      "take-over-storage", "insecure",          "drain-on-term",        "encrypt-replicas"};
  return options;
}

std::string VariableOf(const std::string& option) {
  std::string name = "ROPETEAM_";
  for (const char c : option)
    name += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return name;
}

std::string JobOf(const std::vector<std::string>& command, const std::string& directory) {
  constexpr std::string_view kScript = ".py";
  constexpr size_t kNameBytes = 40;
  const auto base = [](const std::string& path) { return path.substr(path.rfind('/') + 1); };
  // What stands before the script of a launcher says how it is run, and not what.
  const std::string program = base(command[0]);
  const bool launches = program.starts_with("python") || program == "torchrun" || program == "accelerate" ||
                        program == "deepspeed" || program == "ft_launcher";
  size_t first = 0;
  for (size_t i = 1; launches && i < command.size() && first == 0; ++i) {
    const bool module = command[i - 1] == "-m" || command[i - 1] == "--module";
    const bool launcher = command[i] == "torch.distributed.run" || command[i] == "torch.distributed.launch";
    if (command[i].ends_with(kScript) || (module && !launcher)) first = i;
  }
  std::string name = base(command[first]);
  if (name.ends_with(kScript)) name.resize(name.size() - kScript.size());
  name.resize(std::min(name.size(), kNameBytes));
  for (char& c : name)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '.' && c != '_' && c != '-') c = '_';
  if (name.empty() || name.front() == '.' || name.front() == '-') name = "job" + name;
  uint32_t sum = Crc32c(directory.c_str(), directory.size() + 1);
  for (size_t i = first; i < command.size(); ++i)
    sum = Crc32c(command[i].c_str(), command[i].size() + 1, sum);
  char text[16];
  std::snprintf(text, sizeof(text), "-%08x", sum);
  return name + text;
}

std::string FirstSlurmHost(const std::string& list) {
  const size_t end = list.find_first_of(",[");
  if (end == std::string::npos || list[end] == ',') return list.substr(0, end);
  const size_t close = list.find(']', end);
  if (close == std::string::npos) return "";
  const std::string inside = list.substr(end + 1, close - end - 1);
  const std::string first = inside.substr(0, inside.find_first_of(",-"));
  if (first.empty()) return "";
  // The text after the bracket belongs to each of its hosts: "rack[1-2]n[5-6]".
  std::string rest = list.substr(close + 1);
  if (const size_t comma = rest.find(','); comma != std::string::npos && rest.find('[') > comma)
    rest.resize(comma);
  return list.substr(0, end) + first + (rest.empty() || rest[0] == ',' ? "" : FirstSlurmHost(rest));
}

std::string FindLocalAddressFor(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return "";
  std::string address;
  for (const addrinfo* each = found; each != nullptr && address.empty(); each = each->ai_next) {
    // Connecting a datagram socket sends nothing; it only uses the routing table.
    const int fd = socket(each->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    sockaddr_storage own{};
    socklen_t length = sizeof(own);
    char text[NI_MAXHOST];
    if (connect(fd, each->ai_addr, each->ai_addrlen) == 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0 &&
        getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text, sizeof(text), nullptr, 0,
                    NI_NUMERICHOST) == 0)
      address = text;
    close(fd);
  }
  freeaddrinfo(found);
  return address;
}

Result<Settings> ChooseSettings(const std::map<std::string, std::string>& flags,
                                const Environment& environment, const LocalAddressFor& local_address_for) {
  Chooser chooser(flags, environment);
  for (const std::string& option : ValueOptions())
    (void)chooser.Told(option);  // options that are not set here are chosen below
  if (!chooser.Told("job") &&
      !chooser.Launcher("job", {"SKYPILOT_TASK_ID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"}))
    chooser.settings["job"] = {"local", "default"};
  uint32_t ordinal = 0;
  uint32_t nodes = 1;
  ROPETEAM_RETURN_IF_ERROR(ChooseCounts(chooser, &ordinal, &nodes));
  if (!chooser.Told("node") && !chooser.Launcher("node", {"SLURMD_NODENAME"}))
    chooser.settings["node"] = {"node-" + std::to_string(ordinal), "default"};
  ROPETEAM_RETURN_IF_ERROR(ChooseCoordinator(chooser, nodes));
  ROPETEAM_RETURN_IF_ERROR(ChooseListen(chooser, ordinal, nodes, local_address_for));
  return std::move(chooser.settings);
}

Result<std::vector<std::string>> ChooseFlags(const std::vector<std::string>& given,
                                             const Environment& environment) {
  std::vector<std::string> chosen = given;
  const auto was_given = [&](const std::string& name) {
    return std::find(given.begin(), given.end(), name) != given.end();
  };
  const bool coordinator_given = was_given("embed-coordinator") || was_given("no-embed-coordinator");
  for (const std::string& option : FlagOptions()) {
    const char* value = environment(VariableOf(option));
    if (value == nullptr || *value == '\0' || was_given(option)) continue;
    const std::string text = value;
    if (text != "1" && text != "true" && text != "0" && text != "false")
      return Error(Code::kInvalidArgument, "%s is \"%.80s\": it is 1 or true, 0 or false",
                   VariableOf(option).c_str(), value);
    if (text == "0" || text == "false") continue;
    if (coordinator_given && option.ends_with("embed-coordinator")) continue;
    chosen.push_back(option);
  }
  return chosen;
}

}  // namespace ropeteam::cli

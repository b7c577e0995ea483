// SPDX-License-Identifier: Apache-2.0
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <system_error>
#include <utility>

#include "api/cli/arenas.h"
#include "api/cli/commands.h"
#include "api/cli/config_file.h"
#include "api/cli/etcd_member.h"
#include "api/cli/launcher.h"
#include "api/cli/programs.h"
#include "api/cli/run_options.h"
#include "api/cli/supervisor.h"
#include "api/client/admin_client.h"
#include "core/base/sizes.h"

namespace ropeteam::cli {
namespace {

constexpr int64_t kAskTimeoutMs = 5000;
// With --required. The nodes of a job may start minutes apart, and a wrong address should be reported soon.
constexpr char kJoinTimeoutSeconds[] = "120";

// The daemon's default log file, to keep its log out of COMMAND's output. It is in a directory that only this
// user owns; empty (stderr): there is none.
std::string DefaultLogFile(const std::string& job, const std::string& node) {
  const Result<std::string> directory = MakeDataDirectory();
  if (!directory.ok()) {
    std::fprintf(stderr, "ropeteam run: the daemon logs here: %s\n", directory.status().message().c_str());
    return "";
  }
  std::string name = job + "-" + node;
  for (char& c : name)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '.' && c != '_' && c != '-') c = '_';
  if (name.size() > 200) name.resize(200);
  return *directory + "/" + name + ".log";
}

// Without --nodes, the daemon uses the job's value. A default passed here would count as the user's and could
// be refused.
bool LeftToTheJob(const std::string& option, const Setting& setting) {
  return option == "nodes" && setting.from == "default";
}

void PrintSettings(const RunOptions& options, const Settings& settings) {
  std::string line = options.config.empty() ? "" : "the daemon's settings " + options.config + " (--config)";
  for (const char* option :
       {"job", "node", "ordinal", "nodes", "coordinator", "membership", "listen", "memory", "log-file"}) {
    const auto found = settings.find(option);
    if (found == settings.end()) continue;
    const std::string from =
        LeftToTheJob(option, found->second) ? "default, or the running job's" : found->second.from;
    line += std::string(line.empty() ? "" : ", ") + option + " " + found->second.value + " (" + from + ")";
  }
  std::fprintf(stderr, "ropeteam run: %s\n", line.c_str());
}

const char* Variable(const std::string& name) { return std::getenv(name.c_str()); }

Result<Settings> Choose(const RunOptions& options) {
  if (options.config.empty()) {
    Result<Settings> settings = ChooseSettings(options.daemon_values, Variable, FindLocalAddressFor);
    if (!settings.ok()) return settings;
    // Jobs of one node that were not named must not share their steps. The nodes of a larger job need the same name.
    std::error_code error;
    Setting& job = settings->at("job");
    if (job.from == "default" && settings->at("nodes").value == "1" && !settings->contains("coordinator") &&
        !settings->contains("membership"))
      job = {JobOf(options.command, std::filesystem::current_path(error).string()),
             "the command and its directory"};
    if (settings->contains("log-file")) return settings;
    const std::string log_file = DefaultLogFile(settings->at("job").value, settings->at("node").value);
    if (!log_file.empty()) (*settings)["log-file"] = {log_file, "default"};
    return settings;
  }
  Settings settings;
  for (const auto& [option, value] : options.daemon_values) settings[option] = {value, "--" + option};
  // The daemon takes the rest from the file. Only a missing log file is chosen here.
  std::ifstream file(options.config);
  std::map<std::string, std::string> named = ReadConfigLines(file);
  for (const auto& [option, setting] : settings) named[option] = setting.value;
  if (named.contains("log-file")) return settings;
  if (named["node"].empty())
    named["node"] = "node-" + (named["ordinal"].empty() ? std::string("0") : named["ordinal"]);
  const std::string log_file = DefaultLogFile(named["job"], named["node"]);
  if (!log_file.empty()) settings["log-file"] = {log_file, "default"};
  return settings;
}

Supervisor::Config MakeConfig(const RunOptions& options, const Settings& settings,
                              const std::vector<std::string>& flags, const std::string& daemon) {
  Supervisor::Config config;
  config.command = options.command;
  config.ready_timeout_s = options.ready_timeout_s;
  config.hang_timeout_s = options.watchdog_s;
  config.quiet = options.quiet;
  config.daemon = {daemon};
  if (!options.config.empty()) config.daemon.push_back("--config=" + options.config);
  config.restart = config.daemon;
  for (const auto& [option, setting] : settings) {
    if (LeftToTheJob(option, setting)) continue;
    config.daemon.push_back("--" + option + "=" + setting.value);
    // COMMAND runs by then, so a restarted daemon serves it even without a coordinator.
    if (option != "join-timeout") config.restart.push_back(config.daemon.back());
  }
  for (const std::string& flag : flags) {
    config.daemon.push_back("--" + flag);
    // A restarted daemon must take over its predecessor's contents.
    if (flag != "arena-reset") config.restart.push_back("--" + flag);
  }
  if (const auto log = settings.find("log-file"); log != settings.end()) config.log_file = log->second.value;
  return config;
}

// What the daemon reports before COMMAND runs.
struct DaemonFacts {
  std::string job;
  std::string arena;  // path of its file
  std::optional<uint64_t> replicas;
  std::optional<uint64_t> former_step;  // the newest step from earlier ranks of this node
};

// If the daemon does not answer as expected, facts are left out. None is important enough to fail.
DaemonFacts AskDaemon(const std::string& socket) {
  DaemonFacts facts;
  Result<std::unique_ptr<AdminClient>> client = AdminClient::Connect(socket, kAskTimeoutMs);
  if (!client.ok()) return facts;
  facts.job = (*client)->hello().job;
  local::Admin admin;
  admin.command = local::AdminCommand::kNode;
  admin.timeout_ms = kAskTimeoutMs;
  const Result<std::string> answer = (*client)->Request(admin);
  if (!answer.ok()) return facts;
  try {
    const nlohmann::json json = nlohmann::json::parse(*answer);
    const nlohmann::json& daemon = json.at("daemon");
    facts.arena = daemon.at("arena").get<std::string>();
    facts.replicas = daemon.at("replicas").get<uint64_t>();
    for (const nlohmann::json& copy : json.at("copies")) {
      if (copy.at("role") != "own") continue;
      const auto step = copy.at("id").at("step").get<uint64_t>();
      facts.former_step = std::max(facts.former_step.value_or(0), step);
    }
  } catch (const nlohmann::json::exception&) {
    // A daemon of another build. The facts that were read so far are valid.
  }
  return facts;
}

// Warns of problems that would otherwise be noticed too late or never.
void PrintWarnings(const DaemonFacts& facts, const Settings& settings) {
  if (facts.replicas == 0u) {
    const auto nodes = settings.find("nodes");
    const bool several = nodes != settings.end() && nodes->second.value != "1";
    std::fprintf(
        stderr, "ropeteam run: warning: replicas 0, no copy of what is saved survives this node: %s\n",
        several ? "give --replicas 1 or more"
                : "for more nodes than this one give --nodes N --ordinal I --coordinator HOST:PORT on "
                  "each, unless the launcher's variables say so");
  }
  if (facts.former_step)
    std::fprintf(
        stderr,
        "ropeteam run: a former run of job %s has left up to step %llu in %s: a program that loads goes "
        "on from there; to begin from scratch, remove the file on every node or give another --job\n",
        facts.job.c_str(), static_cast<unsigned long long>(*facts.former_step), facts.arena.c_str());
}

void PrintWhatStays(const std::string& job, const std::string& arena) {
  struct stat info {};
  constexpr uint64_t kBlock = 512;
  if (arena.empty() || stat(arena.c_str(), &info) != 0) return;
  std::fprintf(
      stderr,
      "ropeteam run: %s of memory stay in %s for the next run of job %s; `ropeteam clean --job %s` frees "
      "what it has on this node\n",
      FormatSize(static_cast<uint64_t>(info.st_blocks) * kBlock).c_str(), arena.c_str(), job.c_str(),
      job.c_str());
}

std::map<std::string, std::string> CommandEnvironment(const RunOptions& options, const std::string& socket,
                                                      const std::string& job) {
  std::map<std::string, std::string> environment = {{"ROPETEAM_SOCKET", socket}, {"ROPETEAM_JOB", job}};
  const std::string library = FindLibrary();
  if (!library.empty() && std::getenv("ROPETEAM_LIBRARY") == nullptr)
    environment["ROPETEAM_LIBRARY"] = library;
  // The requested path comes first. An installation's own package comes last, so that PYTHONPATH has
  // precedence.
  const char* inherited = std::getenv("PYTHONPATH");
  std::string path;
  for (const std::string& part :
       {options.python_path, std::string(inherited != nullptr ? inherited : ""), FindPythonPackage()})
    if (!part.empty()) path += (path.empty() ? "" : ":") + part;
  if (!path.empty()) environment["PYTHONPATH"] = path;
  return environment;
}

// Replaces this process by `program`. Returns, with an exit code, only if that failed.
int Become(const char* command, const std::string& program, const std::vector<std::string>& arguments) {
  if (program.empty()) {
    std::fprintf(stderr, "ropeteam %s: its program is neither beside this one nor on PATH\n", command);
    return kExitFailed;
  }
  std::vector<char*> argv = {const_cast<char*>(program.c_str())};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  execv(program.c_str(), argv.data());
  std::fprintf(stderr, "ropeteam %s: %s: %s\n", command, program.c_str(), std::strerror(errno));
  return kExitFailed;
}

// Returns the hosts of --start-etcd, and sets the daemon's --membership to match. Empty: the option is not
// used.
Result<std::vector<EtcdHost>> ChooseEtcdHosts(RunOptions* options) {
  const char* variable = std::getenv("ROPETEAM_START_ETCD");
  std::string text = !options->start_etcd.empty() ? options->start_etcd : variable != nullptr ? variable : "";
  if (text.empty()) return std::vector<EtcdHost>();
  const char* membership = std::getenv("ROPETEAM_MEMBERSHIP");
  if (options->daemon_values.contains("membership") || (membership != nullptr && *membership != '\0') ||
      !options->config.empty())
    return Error(
        Code::kInvalidArgument,
        "--start-etcd goes with neither --membership, an etcd that is there is left alone, nor --config");
  if (text == "auto") {
    const char* ips = std::getenv("SKYPILOT_NODE_IPS");
    std::istringstream words(ips != nullptr ? ips : "");
    std::vector<std::string> hosts{std::istream_iterator<std::string>(words), {}};
    const auto listen = options->daemon_values.find("listen");
    if (hosts.empty()) hosts = {listen != options->daemon_values.end() ? listen->second : "127.0.0.1"};
    hosts.resize(hosts.size() < kEtcdMembers ? 1 : kEtcdMembers);
    text.clear();
    for (const std::string& host : hosts)
      text += (text.empty() ? "" : ",") + (host.find(':') != std::string::npos ? "[" + host + "]" : host);
  }
  Result<std::vector<EtcdHost>> hosts = ParseEtcdHosts(text);
  if (hosts.ok()) options->daemon_values["membership"] = EtcdUrlOf(*hosts);
  return hosts;
}

// Starts this node's member, if it has one.
Result<std::optional<EtcdMember>> StartEtcd(const RunOptions& options, const std::vector<EtcdHost>& hosts,
                                            const std::vector<std::string>& flags, Settings* settings) {
  if (hosts.empty()) return std::optional<EtcdMember>();
  const auto value = [settings](const char* name) {
    const auto found = settings->find(name);
    return found != settings->end() ? found->second.value : std::string();
  };
  EtcdMemberConfig config{hosts,           std::strtoull(value("ordinal").c_str(), nullptr, 10),
                          value("listen"), value("job"),
                          value("tls-ca"), value("tls-cert"),
                          value("tls-key")};
  if (config.listen.empty()) config.listen = "127.0.0.1";
  if (options.start_etcd == "auto" && hosts.size() == 1 && value("nodes") != "1" &&
      std::getenv("SKYPILOT_NODE_IPS") == nullptr)
    return Error(Code::kInvalidArgument,
                 "--start-etcd auto does not know the first three of %s nodes: name them",
                 value("nodes").c_str());
  const bool loopback = config.listen.starts_with("127.") || config.listen == "::1";
  if (config.cert.empty() && !loopback && std::find(flags.begin(), flags.end(), "insecure") == flags.end())
    return Error(
        Code::kInvalidArgument,
        "--start-etcd would let anyone who reaches %s change the job's members, even with a job key: "
        "give "
        "--tls-cert, --tls-key and --tls-ca with certificates that name each host, or say --insecure",
        config.listen.c_str());
  if (!config.cert.empty())
    for (const auto& [option, file] : {std::pair("etcd-ca", &config.ca), std::pair("etcd-cert", &config.cert),
                                       std::pair("etcd-key", &config.key)})
      settings->try_emplace(option, Setting{*file, "--start-etcd"});
  if (config.own >= hosts.size()) return std::optional<EtcdMember>();
  Result<EtcdMember> member = EtcdMember::Start(config);
  if (!member.ok()) return member.status();
  return std::optional<EtcdMember>(std::move(*member));
}

std::string FindDaemon(const RunOptions& options) {
  return options.daemon.empty() ? FindProgram("ropeteamd", "node", "ROPETEAMD") : options.daemon;
}

// ropeteamd explains its own options.
int PrintHelp(const RunOptions& options) {
  std::fputs(kRunHelp, stdout);
  std::fflush(stdout);
  return Become("run", FindDaemon(options), {"--help"});
}

}  // namespace

int RunCommand(const std::vector<std::string>& arguments) {
  const Secrets secrets = TakeSecrets();
  Result<RunOptions> options = ParseRunOptions(arguments);
  if (!options.ok()) {
    std::fprintf(stderr, "ropeteam run: %s\n", options.status().message().c_str());
    return kExitUsage;
  }
  if (options->help) {
    return PrintHelp(*options);
  }
  if (const int code = CheckCommand(options->command.front()); code != 0) {
    std::fprintf(stderr, "ropeteam run: %s: %s\n", options->command.front().c_str(),
                 code == 127 ? "no such command" : "cannot be executed");
    return code;
  }
  const Result<std::vector<EtcdHost>> hosts = ChooseEtcdHosts(&*options);
  if (!hosts.ok()) {
    std::fprintf(stderr, "ropeteam run: %s\n", hosts.status().message().c_str());
    return kExitUsage;
  }
  Result<Settings> settings = Choose(*options);
  if (!settings.ok()) {
    std::fprintf(stderr, "ropeteam run: %s\n", settings.status().message().c_str());
    return kExitUsage;
  }
  if (options->required) settings->try_emplace("join-timeout", Setting{kJoinTimeoutSeconds, "--required"});
  const Result<std::vector<std::string>> flags =
      options->config.empty() ? ChooseFlags(options->daemon_flags, Variable) : options->daemon_flags;
  if (!flags.ok()) {
    std::fprintf(stderr, "ropeteam run: %s\n", flags.status().message().c_str());
    return kExitUsage;
  }
  const std::string daemon = FindDaemon(*options);
  if (daemon.empty()) {
    std::fprintf(stderr,
                 "ropeteam run: no ropeteamd beside this program or on PATH: give --daemon or ROPETEAMD\n");
    return kExitFailed;
  }
  // Declared here so that it ends after the daemon, which returns its lease.
  Result<std::optional<EtcdMember>> etcd = StartEtcd(*options, *hosts, *flags, &*settings);
  if (!etcd.ok()) {
    std::fprintf(stderr, "ropeteam run: %s\n", etcd.status().message().c_str());
    return etcd.status().code() == Code::kInvalidArgument ? kExitUsage : kExitFailed;
  }
  if (!options->quiet) PrintSettings(*options, *settings);

  Supervisor::Config config = MakeConfig(*options, *settings, *flags, daemon);
  config.secrets = secrets;
  Supervisor supervisor(std::move(config));
  const Status started = supervisor.StartDaemon();
  if (!started.ok()) {
    std::fprintf(stderr, "ropeteam run: %s\n", started.message().c_str());
    if (supervisor.ending_signal() != 0) return 128 + supervisor.ending_signal();
    return started.code() == Code::kUnavailable ? std::max(supervisor.daemon_exit_code(), kExitFailed)
                                                : kExitFailed;
  }
  const DaemonFacts facts = AskDaemon(supervisor.socket());
  // Marks the arena as in use also between the end of a daemon and its restart.
  const UniqueFd held = HoldArena(facts.arena);
  if (!options->quiet) PrintWarnings(facts, *settings);
  const auto told = settings->find("job");
  const std::string job = told != settings->end() ? told->second.value : facts.job;
  const int code = supervisor.RunCommand(CommandEnvironment(*options, supervisor.socket(), job));
  supervisor.StopDaemon();
  if (!options->quiet && !options->remove_arena_at_exit) PrintWhatStays(job, facts.arena);
  if (options->remove_arena_at_exit && !facts.arena.empty() && unlink(facts.arena.c_str()) != 0)
    std::fprintf(stderr, "ropeteam run: cannot remove %s\n", facts.arena.c_str());
  return code;
}

int BenchCommand(const std::vector<std::string>& arguments) {
  return Become("bench", FindProgram("ropeteam-bench", "bench", "ROPETEAM_BENCH"), arguments);
}

}  // namespace ropeteam::cli

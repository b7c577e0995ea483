// SPDX-License-Identifier: Apache-2.0
#include "api/cli/etcd_member.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "api/cli/arenas.h"
#include "api/cli/programs.h"

namespace ropeteam::cli {
namespace {

namespace fs = std::filesystem;

constexpr int kTickMs = 1000;  // between attempts; etcd refuses changes for some seconds after a change
constexpr int kWaitStepMs = 50;
constexpr int kConnectMs = 1000;
constexpr int kComplainTries = 10;  // no message before: etcd refuses changes for 5 s after a change
constexpr int kStopMs = 5000;       // then SIGKILL; etcd ends in milliseconds
constexpr int kRestartsQuick = 3;   // immediate restarts, then one per kRestartSlowMs to keep logs short
constexpr int kRestartSlowMs = 30'000;
constexpr time_t kHealthyS = 60;             // after running this long, restarts are immediate again
constexpr size_t kAnswerBytesMax = 1 << 20;  // from etcdctl
constexpr size_t kNameBytesMax = 200;

std::string WithPort(const std::string& host, uint16_t port) {
  return (host.find(':') != std::string::npos ? "[" + host + "]:" : host + ":") + std::to_string(port);
}

void Say(const std::string& text) { std::fprintf(stderr, "ropeteam run: etcd: %s\n", text.c_str()); }

// Does the keeper's work, in a process of its own.
class Keeper {
 public:
  Keeper(const EtcdMemberConfig& config, std::string directory)
      : config_(config),
        directory_(std::move(directory)),
        name_(EtcdMemberName(config.own)),
        scheme_(config.cert.empty() ? "http://" : "https://"),
        peer_url_(PeerUrl(config.own)) {
    sigemptyset(&handled_);
    sigaddset(&handled_, SIGCHLD);
    for (const int number : {SIGTERM, SIGINT, SIGHUP, SIGQUIT}) sigaddset(&handled_, number);
    sigprocmask(SIG_BLOCK, &handled_, &original_);
  }

  int Run() {
    while (!ending_) {
      std::vector<std::string> more;
      if (!HasData() && !Enter(&more)) {
        Wait(kTickMs);
        continue;
      }
      StartEtcd(more);
      const time_t began = std::time(nullptr);
      while (etcd_ != 0 && !ending_) Wait(kTickMs);
      if (ending_) break;
      restarts_ = std::time(nullptr) - began >= kHealthyS ? 1 : restarts_ + 1;
      if (WasRemoved()) {
        Say("this member was removed from the cluster: it enters again, without its data");
        std::error_code ignored;
        fs::remove_all(directory_ + "/data", ignored);
      } else {
        Say("it ended (" + Log() + "), starting it again");
      }
      Wait(restarts_ <= kRestartsQuick ? kTickMs : kRestartSlowMs);
    }
    StopEtcd();
    return 0;
  }

 private:
  std::string PeerUrl(size_t i) const {
    return scheme_ + WithPort(config_.hosts[i].host, static_cast<uint16_t>(config_.hosts[i].port + 1));
  }
  std::string ClientUrl(size_t i) const {
    return scheme_ + WithPort(config_.hosts[i].host, config_.hosts[i].port);
  }
  bool HasData() const { return fs::exists(directory_ + "/data/member"); }
  std::string Log() const { return directory_ + "/etcd.log"; }

  // Sets the options with which etcd starts. False: it cannot start now.
  bool Enter(std::vector<std::string>* more) {
    std::string list;
    size_t asked = 0;
    for (size_t i = 0; i < config_.hosts.size() && list.empty(); ++i) {
      asked = i;
      if (i != config_.own) list = Ask(i, {"member", "list", "--write-out=json"});
    }
    Result<EtcdEntry> entry = EtcdEntry{true, "", ""};
    if (!list.empty()) entry = DecideEntry(list, name_, peer_url_);
    if (!entry.ok()) {
      Complain(entry.status().message());
      return false;
    }
    std::string members;
    if (entry->begin) {
      for (size_t i = 0; i < config_.hosts.size(); ++i)
        members += (i == 0 ? "" : ",") + EtcdMemberName(i) + "=" + PeerUrl(i);
    } else {
      if (!entry->remove.empty() && Ask(asked, {"member", "remove", entry->remove}).empty()) return false;
      if (Ask(asked, {"member", "add", name_, "--peer-urls=" + peer_url_}).empty()) return false;
      Say("this member's place in the cluster is taken again");
      members = entry->members + (entry->members.empty() ? "" : ",") + name_ + "=" + peer_url_;
    }
    *more = {"--initial-cluster=" + members,
             std::string("--initial-cluster-state=") + (entry->begin ? "new" : "existing"),
             "--initial-cluster-token=" + config_.job};
    return true;
  }

  // Whether another member reports that this name is no longer a member, or has another address.
  bool WasRemoved() {
    for (size_t i = 0; i < config_.hosts.size(); ++i) {
      if (i == config_.own) continue;
      const std::string list = Ask(i, {"member", "list", "--write-out=json"});
      if (list.empty()) continue;
      const nlohmann::json json = nlohmann::json::parse(list, nullptr, false);
      if (!json.contains("members")) continue;
      return list.find('"' + peer_url_ + '"') == std::string::npos;
    }
    return false;
  }

  void Complain(const std::string& what) {
    if (what == complained_) return;
    complained_ = what;
    Say(what);
  }

  std::vector<std::string> Tls(const char* ca, const char* cert, const char* key) const {
    if (config_.cert.empty()) return {};
    return {ca + config_.ca, cert + config_.cert, key + config_.key};
  }

  // Whether a process listens there. Without one, etcdctl would need seconds to fail.
  bool Listens(size_t member) const {
    const EtcdHost& host = config_.hosts[member];
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    if (getaddrinfo(host.host.c_str(), std::to_string(host.port).c_str(), &hints, &found) != 0) return false;
    bool listens = false;
    for (const addrinfo* each = found; each != nullptr && !listens; each = each->ai_next) {
      const client::UniqueFd fd(socket(each->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      if (!fd.valid()) continue;
      int error = connect(fd.get(), each->ai_addr, each->ai_addrlen) == 0 ? 0 : errno;
      pollfd poll_fd{fd.get(), POLLOUT, 0};
      socklen_t size = sizeof(error);
      if (error == EINPROGRESS && poll(&poll_fd, 1, kConnectMs) > 0)
        getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
      listens = error == 0;
    }
    freeaddrinfo(found);
    return listens;
  }

  // Returns etcdctl's output for a request to that member; empty: it failed.
  std::string Ask(size_t member, const std::vector<std::string>& words) {
    if (!Listens(member)) return "";
    std::vector<std::string> command = {"etcdctl", "--command-timeout=2s", "--dial-timeout=1s",
                                        "--endpoints=" + ClientUrl(member)};
    for (const std::string& word : Tls("--cacert=", "--cert=", "--key=")) command.push_back(word);
    command.insert(command.end(), words.begin(), words.end());
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return "";
    const pid_t child = Spawn(command, ends[1], "");
    close(ends[1]);
    std::string text;
    char buffer[4096];
    for (ssize_t count = 0; (count = read(ends[0], buffer, sizeof(buffer))) > 0;)
      if (text.size() < kAnswerBytesMax) text.append(buffer, static_cast<size_t>(count));
    close(ends[0]);
    int status = -1;
    if (child < 0 || waitpid(child, &status, 0) != child) return "";
    if (status == 0) {
      if (words[1] != "list") refused_ = 0;
      return text;
    }
    if (words[1] == "list") return "";
    // The error follows lines of etcdctl's log.
    const size_t error = text.rfind("Error: ");
    if (++refused_ == kComplainTries)
      Complain("member " + words[1] + ": " + text.substr(error == std::string::npos ? 0 : error, 300) +
               "; changing the members takes more than half of them");
    return "";
  }

  // The output goes to `out`, or is appended to the file `log`.
  pid_t Spawn(const std::vector<std::string>& command, int out, const std::string& log) const {
    std::vector<char*> argv;
    for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    const pid_t self = getpid();
    const pid_t child = fork();
    if (child != 0) return child;
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != self) _exit(1);
    sigprocmask(SIG_SETMASK, &original_, nullptr);
    setenv("ETCDCTL_API", "3", 1);
    if (!log.empty()) out = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    dup2(open("/dev/null", O_RDONLY), STDIN_FILENO);
    dup2(out, STDOUT_FILENO);
    dup2(out, STDERR_FILENO);
    execvp(argv[0], argv.data());
    _exit(127);
  }

  void StartEtcd(const std::vector<std::string>& more) {
    const EtcdHost& own = config_.hosts[config_.own];
    const std::string client = scheme_ + WithPort(config_.listen, own.port);
    const std::string peer = scheme_ + WithPort(config_.listen, static_cast<uint16_t>(own.port + 1));
    std::vector<std::string> command = {"etcd",
                                        "--name=" + name_,
                                        "--data-dir=" + directory_ + "/data",
                                        "--listen-client-urls=" + client,
                                        "--advertise-client-urls=" + ClientUrl(config_.own),
                                        "--listen-peer-urls=" + peer,
                                        "--initial-advertise-peer-urls=" + peer_url_,
                                        "--auto-compaction-mode=revision",
                                        "--auto-compaction-retention=1000",
                                        "--quota-backend-bytes=536870912"};
    for (const auto& words : {Tls("--trusted-ca-file=", "--cert-file=", "--key-file="),
                              Tls("--peer-trusted-ca-file=", "--peer-cert-file=", "--peer-key-file=")})
      command.insert(command.end(), words.begin(), words.end());
    if (!config_.cert.empty()) {
      command.emplace_back("--client-cert-auth");
      command.emplace_back("--peer-client-cert-auth");
    }
    command.insert(command.end(), more.begin(), more.end());
    etcd_ = std::max<pid_t>(0, Spawn(command, -1, Log()));
  }

  // Waits this long, or until etcd ends or this process must end.
  void Wait(int milliseconds) {
    const pid_t before = etcd_;
    for (int left = milliseconds; left > 0 && etcd_ == before && !ending_; left -= kWaitStepMs) {
      const timespec step{0, kWaitStepMs * 1'000'000L};
      siginfo_t info{};
      const int number = sigtimedwait(&handled_, &info, &step);
      // As the daemon: a launcher's SIGTERM to all processes must not end etcd before the command has ended.
      const bool stranger = number == SIGTERM && info.si_pid != supervisor_ && getppid() == supervisor_;
      if (number > 0 && number != SIGCHLD && !stranger) ending_ = true;
      if (etcd_ != 0 && waitpid(etcd_, nullptr, WNOHANG) == etcd_) etcd_ = 0;
    }
  }

  void StopEtcd() {
    if (etcd_ == 0) return;
    kill(etcd_, SIGTERM);
    for (int waited = 0; etcd_ != 0 && waited < kStopMs; waited += 100) Wait(100);
    if (etcd_ == 0) return;
    kill(etcd_, SIGKILL);
    waitpid(etcd_, nullptr, 0);
  }

  const EtcdMemberConfig config_;
  const std::string directory_;
  const std::string name_;
  const std::string scheme_;
  const std::string peer_url_;
  const pid_t supervisor_ = getppid();
  sigset_t handled_{};
  sigset_t original_{};
  pid_t etcd_ = 0;  // 0: not running
  int restarts_ = 0;
  int refused_ = 0;  // consecutive refused changes of the members
  bool ending_ = false;
  std::string complained_;
};

}  // namespace

Result<std::vector<EtcdHost>> ParseEtcdHosts(const std::string& text) {
  std::vector<EtcdHost> hosts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    std::string word = text.substr(begin, end - begin);
    begin = end + 1;
    EtcdHost host;
    const size_t colon = word.rfind(':');
    const bool bracket = word.starts_with('[');
    if (colon != std::string::npos && (bracket ? word[colon - 1] == ']' : word.find(':') == colon)) {
      const char* last = word.data() + word.size();
      const auto [stop, error] = std::from_chars(word.data() + colon + 1, last, host.port);
      if (error != std::errc() || stop != last || host.port == 0 || host.port == UINT16_MAX)
        return Error(Code::kInvalidArgument, "--start-etcd: \"%.100s\" has no port from 1 to 65534",
                     word.c_str());
      word.resize(colon);
    }
    if (bracket && word.ends_with(']')) word = word.substr(1, word.size() - 2);
    if (word.empty() || word.find_first_of("=/ ") != std::string::npos)
      return Error(Code::kInvalidArgument, "--start-etcd \"%.200s\" is not HOST[:PORT] or three of them",
                   text.c_str());
    host.host = word;
    hosts.push_back(host);
  }
  if (hosts.size() != 1 && hosts.size() != kEtcdMembers)
    return Error(
        Code::kInvalidArgument,
        "--start-etcd names %zu hosts: name those of the job's first three nodes, or one, with which "
        "etcd is lost",
        hosts.size());
  return hosts;
}

std::string EtcdUrlOf(const std::vector<EtcdHost>& hosts) {
  std::string url = "etcd://";
  for (const EtcdHost& host : hosts)
    url += (&host == &hosts.front() ? "" : ",") + WithPort(host.host, host.port);
  return url + "/ropeteam";
}

Result<EtcdEntry> DecideEntry(const std::string& list, const std::string& name, const std::string& peer_url) {
  const nlohmann::json json = nlohmann::json::parse(list, nullptr, false);
  try {
    EtcdEntry entry;
    for (const nlohmann::json& member : json.at("members")) {
      const std::string url = member.at("peerURLs").at(0).get<std::string>();
      const std::string of = member.value("name", "");
      if (of != name && url != peer_url) {
        entry.members += (entry.members.empty() ? "" : ",") + of + "=" + url;
        continue;
      }
      // A member has client URLs once it has run.
      entry.begin =
          url == peer_url && of == name && member.value("clientURLs", nlohmann::json::array()).empty();
      char id[17];
      std::snprintf(id, sizeof(id), "%llx", static_cast<unsigned long long>(member.at("ID").get<uint64_t>()));
      entry.remove = id;
    }
    return entry;
  } catch (const nlohmann::json::exception& error) {
    return Error(Code::kInvalidArgument, "etcdctl member list said \"%.200s\": %s", list.c_str(),
                 error.what());
  }
}

std::string EtcdMemberName(size_t own) { return "ropeteam-" + std::to_string(own); }

std::string EtcdDirectoryName(const std::string& job, size_t own) {
  std::string name = job;
  for (char& c : name)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '.' && c != '_' && c != '-') c = '_';
  return "etcd-" + name.substr(0, kNameBytesMax) + "-" + std::to_string(own);
}

std::vector<std::string> ListEtcdDirectories() {
  std::vector<std::string> found;
  for (const std::string& user : UserDirectories()) {
    if (!CheckOwnDirectory(user).ok()) continue;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(user, error))
      if (entry.path().filename().string().starts_with("etcd-") && CheckOwnDirectory(entry.path()).ok())
        found.push_back(entry.path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

client::UniqueFd LockEtcdDirectory(const std::string& directory) {
  client::UniqueFd lock(open((directory + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock.valid() || flock(lock.get(), LOCK_EX | LOCK_NB) != 0) return {};
  return lock;
}

Result<EtcdMember> EtcdMember::Start(const EtcdMemberConfig& config) {
  for (const char* program : {"etcd", "etcdctl"})
    if (CheckCommand(program) != 0)
      return Error(Code::kNotFound, "--start-etcd: no %s on PATH (Debian: etcd-server, etcd-client)",
                   program);
  const Result<std::string> user = MakeDataDirectory();
  if (!user.ok()) return Error(Code::kIo, "--start-etcd: %s", user.status().message().c_str());
  const std::string directory = *user + "/" + EtcdDirectoryName(config.job, config.own);
  if (mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST)
    return ErrnoError(errno, "cannot make %s", directory.c_str());
  if (const Status own = CheckOwnDirectory(directory); !own.ok())
    return Error(Code::kIo, "--start-etcd: %s", own.message().c_str());
  client::UniqueFd lock = LockEtcdDirectory(directory);
  if (!lock.valid())
    return Error(Code::kAlreadyExists, "--start-etcd: another ropeteam run keeps the member in %s",
                 directory.c_str());
  const pid_t self = getpid();
  const pid_t keeper = fork();
  if (keeper < 0) return ErrnoError(errno, "fork");
  if (keeper == 0) {
    setpgid(0, 0);  // signals from the terminal are only for COMMAND
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != self) _exit(1);
    _exit(Keeper(config, directory).Run());
  }
  return EtcdMember(keeper, directory, std::move(lock));
}

EtcdMember::EtcdMember(EtcdMember&& other) noexcept
    : keeper_(std::exchange(other.keeper_, 0)),
      directory_(std::move(other.directory_)),
      lock_(std::move(other.lock_)) {}

EtcdMember::~EtcdMember() {
  if (keeper_ == 0) return;
  kill(keeper_, SIGTERM);
  // The supervisor may have reaped it.
  while (waitpid(keeper_, nullptr, 0) < 0 && errno == EINTR) {
  }
  std::error_code ignored;
  fs::remove_all(directory_, ignored);
}

}  // namespace ropeteam::cli

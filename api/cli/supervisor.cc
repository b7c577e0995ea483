// SPDX-License-Identifier: Apache-2.0
#include "api/cli/supervisor.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <fstream>
#include <sstream>

namespace ropeteam::cli {
namespace {

constexpr uint64_t kBackoffMinUs = 200'000;      // a daemon that crashed once is back within a step
constexpr uint64_t kBackoffMaxUs = 10'000'000;   // a daemon that keeps crashing does not fill a log
constexpr uint64_t kHealthyUs = 30'000'000;      // after running this long, the next wait is the shortest
constexpr uint64_t kStopTimeoutUs = 10'000'000;  // a clean stop takes milliseconds
constexpr uint64_t kReadyPollUs = 20'000;  // how soon an end is noticed while waiting for the ready line
constexpr size_t kLogTailLines = 20;
constexpr size_t kLineBytesMax =
    8192;  // twice PIPE_BUF, which is what a pipe takes at once and the limit of the daemon's lines
// ropeteamd's codes for a wrong option and for a refusal by the job, for example because another daemon has
// taken over this node's name. A restart would fail in the same way, or displace that daemon in turn.
constexpr int kExitUsage = 2;
constexpr int kExitRefused = 3;
// Exit codes of a drained daemon: node/drain.h.
constexpr int kExitsDrained[] = {0, 5, 6};
constexpr int kPassedOn[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

uint64_t NowUs() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000 + static_cast<uint64_t>(now.tv_nsec) / 1000;
}

std::vector<char*> Pointers(const std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (const std::string& string : strings) pointers.push_back(const_cast<char*>(string.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

std::string Describe(int status) {
  if (WIFSIGNALED(status))
    return "was ended by signal " + std::to_string(WTERMSIG(status)) + " (" + strsignal(WTERMSIG(status)) +
           ")";
  return "ended with exit code " + std::to_string(WEXITSTATUS(status));
}

// Called in the child before exec: the child ends when its parent ends.
void DieWithParent(pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(1);  // the parent died between fork() and prctl()
}

}  // namespace

Supervisor::Supervisor(Config config)
    : config_(std::move(config)), hang_watch_(config_.hang_timeout_s, config_.ready_timeout_s) {
  sigemptyset(&handled_);
  for (const int number : kPassedOn) sigaddset(&handled_, number);
  sigaddset(&handled_, SIGCHLD);
  sigprocmask(SIG_BLOCK, &handled_, &original_);
}

Supervisor::~Supervisor() {
  StopDaemon();
  sigprocmask(SIG_SETMASK, &original_, nullptr);
}

Status Supervisor::SpawnDaemon(const std::vector<std::string>& program) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) return ErrnoError(errno, "pipe");
  said_ = client::UniqueFd(ends[0]);
  const client::UniqueFd writer(ends[1]);
  unfinished_.clear();
  std::vector<std::string> arguments = program;
  arguments.push_back("--ready-fd=" + std::to_string(writer.get()));
  arguments.emplace_back("--supervised");
  const std::vector<char*> argv = Pointers(arguments);
  const pid_t self = getpid();
  const pid_t child = fork();
  if (child < 0) return ErrnoError(errno, "fork");
  if (child == 0) {
    // A separate process group: signals from the terminal are only for COMMAND.
    setpgid(0, 0);
    DieWithParent(self);
    sigprocmask(SIG_SETMASK, &original_, nullptr);
    // The daemon's stdout has only the ready line, which also comes through the descriptor. So stdout is used
    // by COMMAND alone.
    const int null = open("/dev/null", O_RDWR);
    dup2(null, STDIN_FILENO);
    dup2(null, STDOUT_FILENO);
    fcntl(writer.get(), F_SETFD, 0);
    GiveSecrets(config_.secrets);
    execv(argv[0], argv.data());
    std::fprintf(stderr, "ropeteam run: %s: %s\n", argv[0], std::strerror(errno));
    _exit(127);
  }
  daemon_ = child;
  daemon_started_us_ = NowUs();
  draining_until_us_ = 0;
  hang_watch_.Starting();
  return OkStatus();
}

Status Supervisor::StartDaemon() {
  Status status = SpawnDaemon(config_.daemon);
  if (status.ok()) status = WaitReady();
  progress_.reset();
  if (status.code() == Code::kDeadlineExceeded ||
      (status.code() == Code::kUnavailable && daemon_exit_code_ > 128))
    PrintLogTail();
  return status;
}

Status Supervisor::WaitReady() {
  const uint64_t deadline = NowUs() + config_.ready_timeout_s * 1'000'000ull;
  while (ready_line_.empty()) {
    pollfd poll_fd{said_.get(), POLLIN, 0};
    if (poll(&poll_fd, 1, static_cast<int>(kReadyPollUs / 1000)) > 0) ReadDaemon();
    for (siginfo_t info; NextSignal(0, &info);) OnSignal(info);
    if (ending_signal_ != 0)
      return Error(Code::kAborted, "signal %d before ropeteamd was ready", ending_signal_);
    if (daemon_ == 0)
      return Error(Code::kUnavailable, "ropeteamd ended before it was ready, exit code %d",
                   daemon_exit_code_);
    if (NowUs() >= deadline)
      return Error(Code::kDeadlineExceeded, "ropeteamd was not ready within %u s (--ready-timeout)",
                   config_.ready_timeout_s);
  }
  // "ropeteamd ready socket PATH control …": a path does not contain " control ".
  const size_t begin = ready_line_.find(" socket ");
  const size_t end = ready_line_.find(" control ");
  if (begin == std::string::npos || end == std::string::npos || end < begin)
    return Error(Code::kIo, "ropeteamd printed \"%.200s\", not the path of its socket", ready_line_.c_str());
  socket_ = ready_line_.substr(begin + 8, end - begin - 8);
  return OkStatus();
}

void Supervisor::ReadDaemon() {
  char buffer[4096];
  for (ssize_t count = 0; (count = read(said_.get(), buffer, sizeof(buffer))) > 0;) {
    unfinished_.append(buffer, static_cast<size_t>(count));
    for (size_t end = 0; (end = unfinished_.find('\n')) != std::string::npos; unfinished_.erase(0, end + 1))
      OnLine(unfinished_.substr(0, end));
    if (unfinished_.size() > kLineBytesMax) unfinished_.clear();
  }
}

void Supervisor::OnLine(const std::string& line) {
  if (line == "starting") return hang_watch_.Starting();
  if (line == "alive") return hang_watch_.Alive();
  if (line.starts_with("progress ")) return OnProgress(line);
  constexpr std::string_view kDraining = "draining ";
  if (line.starts_with(kDraining)) {
    draining_until_us_ = NowUs() + std::strtoull(line.c_str() + kDraining.size(), nullptr, 10) * 1'000'000;
    return;
  }
  if (line.starts_with("note "))
    std::fprintf(stderr, "ropeteam run: %s\n", line.c_str() + 5);
  else if (ready_line_.empty())
    ready_line_ = line;
}

void Supervisor::OnProgress(const std::string& line) {
  std::istringstream words(line);
  std::string progress, what;
  uint64_t done = 0;
  uint64_t total = 0;
  // No progress is shown after COMMAND has started, because the terminal is COMMAND's, or while the daemon is
  // being stopped.
  if (!(words >> progress >> what >> done >> total) || command_ != 0 || command_ended_ || config_.quiet)
    return;
  if (progress_ == nullptr) progress_ = std::make_unique<Progress>("arena " + what, total);
  if (done <= progressed_) return;
  progress_->Add(done - progressed_);
  progressed_ = done;
  if (done >= total) progress_->Finish();
}

void Supervisor::WatchDaemon() {
  const uint64_t now = NowUs();
  watch_at_us_ = now + kHangTickUs;
  ReadDaemon();
  if (daemon_ == 0 || !hang_watch_.Tick(now, SampleMainThread(daemon_))) return;
  std::fprintf(stderr, "ropeteam run: ropeteamd has hung for %u s (--watchdog), killing it\n",
               hang_watch_.limit_s());
  hang_watch_.Starting();
  kill(daemon_, SIGKILL);
}

bool Supervisor::NextSignal(uint64_t deadline_us, siginfo_t* info) const {
  for (;;) {
    timespec timeout{};
    const uint64_t now = NowUs();
    const uint64_t left = deadline_us > now ? deadline_us - now : 0;
    timeout.tv_sec = static_cast<time_t>(left / 1'000'000);
    timeout.tv_nsec = static_cast<long>(left % 1'000'000 * 1000);
    const int number = sigtimedwait(&handled_, info, deadline_us == UINT64_MAX ? nullptr : &timeout);
    if (number > 0) return true;
    if (errno != EINTR) return false;
  }
}

void Supervisor::OnSignal(const siginfo_t& info) {
  if (info.si_signo == SIGCHLD) return Reap();
  if (command_ == 0) {
    ending_signal_ = info.si_signo;
    return;
  }
  terminated_ = terminated_ || info.si_signo == SIGTERM;
  // The terminal sends Ctrl-C to the whole foreground group, so COMMAND has received it already.
  if (info.si_code == SI_KERNEL) return;
  kill(command_, info.si_signo);
}

void Supervisor::Reap() {
  int status = 0;
  // Waits for all children: as a container's first process, this one also inherits orphans.
  for (pid_t pid = waitpid(-1, &status, WNOHANG); pid > 0; pid = waitpid(-1, &status, WNOHANG)) {
    if (pid == command_) {
      command_ended_ = true;
      command_status_ = status;
    } else if (pid == daemon_) {
      OnDaemonEnded(status);
    }
  }
}

void Supervisor::OnDaemonEnded(int status) {
  daemon_ = 0;
  daemon_exit_code_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  ReadDaemon();
  if (command_ == 0 || command_ended_) return;
  const bool drained = draining_until_us_ != 0 &&
                       std::find(std::begin(kExitsDrained), std::end(kExitsDrained), daemon_exit_code_) !=
                           std::end(kExitsDrained);
  if (drained || daemon_exit_code_ == kExitUsage || daemon_exit_code_ == kExitRefused) {
    std::fprintf(stderr,
                 "ropeteam run: ropeteamd %s and is not started again; the command goes on without it\n",
                 Describe(status).c_str());
    return;
  }
  const uint64_t now = NowUs();
  const bool healthy = now - daemon_started_us_ >= kHealthyUs;
  backoff_us_ = healthy || backoff_us_ == 0 ? kBackoffMinUs : std::min(backoff_us_ * 2, kBackoffMaxUs);
  restart_at_us_ = now + backoff_us_;
  std::fprintf(stderr,
               "ropeteam run: ropeteamd %s, starting it again in %.1f s; what was sealed is still there\n",
               Describe(status).c_str(), static_cast<double>(backoff_us_) / 1e6);
}

int Supervisor::RunCommand(const std::map<std::string, std::string>& environment) {
  for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
  const std::vector<char*> argv = Pointers(config_.command);
  const pid_t self = getpid();
  const pid_t child = fork();
  if (child < 0) {
    std::fprintf(stderr, "ropeteam run: fork: %s\n", std::strerror(errno));
    return 1;
  }
  if (child == 0) {
    DieWithParent(self);
    sigprocmask(SIG_SETMASK, &original_, nullptr);
    execvp(argv[0], argv.data());
    const int error = errno;
    std::fprintf(stderr, "ropeteam run: %s: %s\n", argv[0], std::strerror(error));
    _exit(error == ENOENT ? 127 : 126);
  }
  command_ = child;
  Reap();  // in case the daemon ended after its ready line
  watch_at_us_ = NowUs();
  while (!command_ended_) {
    siginfo_t info{};
    if (NextSignal(std::min(restart_at_us_, watch_at_us_), &info)) {
      OnSignal(info);
      continue;
    }
    if (NowUs() >= watch_at_us_) WatchDaemon();
    if (NowUs() < restart_at_us_) continue;
    restart_at_us_ = UINT64_MAX;
    const Status spawned = SpawnDaemon(config_.restart);
    if (!spawned.ok()) {
      std::fprintf(stderr, "ropeteam run: ropeteamd: %s\n", spawned.ToString().c_str());
      restart_at_us_ = NowUs() + kBackoffMaxUs;
    }
  }
  return WIFSIGNALED(command_status_) ? 128 + WTERMSIG(command_status_) : WEXITSTATUS(command_status_);
}

void Supervisor::StopDaemon() {
  if (daemon_ == 0) return;
  // A finished job has nothing to save, so it gets SIGINT, which never drains. A command that was told to end may have
  // saved and ended with 0.
  const bool job_is_done = command_ != 0 && command_ended_ && command_status_ == 0 && !terminated_;
  command_ended_ = true;  // no restarts from here on
  kill(daemon_, job_is_done ? SIGINT : SIGTERM);
  const uint64_t begun = NowUs();
  while (daemon_ != 0) {
    siginfo_t info{};
    if (NextSignal(NowUs() + kReadyPollUs, &info)) {
      if (info.si_signo == SIGCHLD) Reap();
      continue;
    }
    ReadDaemon();  // it may drain first (--drain-on-term)
    if (NowUs() < std::max(begun, draining_until_us_) + kStopTimeoutUs) continue;
    std::fprintf(stderr,
                 "ropeteam run: ropeteamd did not end within %.0f s, killing it; what was sealed stays\n",
                 static_cast<double>(NowUs() - begun) / 1e6);
    kill(daemon_, SIGKILL);
    waitpid(daemon_, nullptr, 0);
    daemon_ = 0;
  }
}

void Supervisor::PrintLogTail() const {
  std::ifstream log(config_.log_file);
  std::deque<std::string> lines;
  for (std::string line; std::getline(log, line);) {
    lines.push_back(line);
    if (lines.size() > kLogTailLines) lines.pop_front();
  }
  if (lines.empty()) return;
  std::fprintf(stderr, "ropeteam run: the last lines of %s:\n", config_.log_file.c_str());
  for (const std::string& line : lines) std::fprintf(stderr, "  %s\n", line.c_str());
}

}  // namespace ropeteam::cli

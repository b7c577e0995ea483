// SPDX-License-Identifier: Apache-2.0
//
// ropeteamd and ropeteam as real processes, which are started, signalled and killed.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "api/include/ropeteam/ropeteam.h"

namespace ropeteam {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;
using Json = nlohmann::json;

constexpr std::chrono::seconds kGiveUp(60);
constexpr std::chrono::milliseconds kPoll(5);

// A child process that writes stdout and stderr to files. Killed when it goes out of scope.
class Process {
 public:
  Process(std::vector<std::string> arguments, const std::string& output) : output_(output) {
    pid_ = fork();
    if (pid_ == 0) {
      const int out = open((output + ".out").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
      const int err = open((output + ".err").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
      dup2(out, STDOUT_FILENO);
      dup2(err, STDERR_FILENO);
      std::vector<char*> argv;
      for (std::string& argument : arguments) argv.push_back(argument.data());
      argv.push_back(nullptr);
      execv(argv[0], argv.data());
      _exit(127);
    }
  }
  ~Process() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  void Signal(int number) const { kill(pid_, number); }
  // The exit code, or 128 + signal.
  int Wait() {
    int status = 0;
    const auto deadline = std::chrono::steady_clock::now() + kGiveUp;
    while (waitpid(pid_, &status, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() > deadline) {
        ADD_FAILURE() << "process " << pid_ << " does not end: " << Err();
        kill(pid_, SIGKILL);
      }
      std::this_thread::sleep_for(kPoll);
    }
    pid_ = 0;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }
  std::string Out() const { return Read(output_ + ".out"); }
  std::string Err() const { return Read(output_ + ".err"); }
  static std::string Read(const std::string& path) {
    std::ifstream file(path);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }

 private:
  const std::string output_;
  pid_t pid_ = 0;
};

bool Eventually(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + kGiveUp;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(kPoll);
  }
  return true;
}

class Programs : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name :
         {"ROPETEAM_SOCKET", "ROPETEAM_JOB", "ROPETEAM_NODES", "SLURM_JOB_ID", "SLURM_NNODES"})
      unsetenv(name);
    char path[] = "/dev/shm/ropeteam-test-XXXXXX";
    ASSERT_NE(mkdtemp(path), nullptr);
    directory_ = path;
    socket_ = directory_ + "/s.sock";
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::vector<std::string> Options() const {
    // Without the scrub: tests that flip a byte choose what finds it.
    return {"--job=t",        "--memory=24M",       "--chunk-size=1M", "--arena-path=" + directory_,
            "--scrub-rate=0", "--socket=" + socket_};
  }
  std::unique_ptr<Process> Start(std::vector<std::string> arguments) {
    return std::make_unique<Process>(std::move(arguments), directory_ + "/p" + std::to_string(++processes_));
  }
  std::unique_ptr<Process> StartDaemon(const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {ROPETEAMD_PATH};
    for (const std::string& option : Options()) arguments.push_back(option);
    arguments.insert(arguments.end(), more.begin(), more.end());
    auto daemon = Start(arguments);
    EXPECT_TRUE(Eventually([&] { return daemon->Out().find("ready") != std::string::npos; }))
        << daemon->Err();
    return daemon;
  }
  std::vector<std::string> RunArguments(const std::vector<std::string>& options,
                                        const std::string& script) const {
    std::vector<std::string> arguments = {ROPETEAM_PATH, "run", "--daemon=" ROPETEAMD_PATH,
                                          "--log-file=" + directory_ + "/daemon.log"};
    for (const std::string& option : Options()) arguments.push_back(option);
    arguments.insert(arguments.end(), options.begin(), options.end());
    for (const char* argument : {"--", "/bin/sh", "-c"}) arguments.push_back(argument);
    arguments.push_back(script);
    return arguments;
  }
  std::unique_ptr<Process> Ask(const std::vector<std::string>& arguments) {
    std::vector<std::string> all = {ROPETEAM_PATH};
    all.insert(all.end(), arguments.begin(), arguments.end());
    all.push_back("--socket=" + socket_);
    return Start(all);
  }
  // This node's daemon as `status --json` reports it; null: no daemon.
  Json Daemon() {
    const auto ask = Ask({"status", "--local", "--json"});
    if (ask->Wait() != 0) return nullptr;
    return Json::parse(ask->Out()).at("daemon");
  }
  static bool IsAlive(pid_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string number, name, state;
    return static_cast<bool>(file >> number >> name >> state) && state != "Z" && state != "X";
  }
  static uint16_t FreePort() {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length), 0);
    close(fd);
    return ntohs(address.sin_port);
  }
  std::string ArenaPath() const { return directory_ + "/ropeteam-t-node-0.arena"; }
  // One rank of a world of one rank saves `bytes` bytes.
  void Save(uint64_t step, size_t bytes) const {
    ropeteam_open_options_t options{};
    options.size = sizeof(options);
    options.socket = socket_.c_str();
    options.world_size = 1;
    ropeteam_t* handle = nullptr;
    ASSERT_EQ(ropeteam_open(&options, &handle), ROPETEAM_OK) << ropeteam_last_error();
    ropeteam_save_options_t save_options{};
    save_options.size = sizeof(save_options);
    save_options.bytes = bytes;
    save_options.objects = 1;
    ropeteam_save_t* save = nullptr;
    ASSERT_EQ(ropeteam_save_begin(handle, step, &save_options, &save), ROPETEAM_OK) << ropeteam_last_error();
    const std::string data(bytes, 'R');
    EXPECT_EQ(ropeteam_save_put(save, "weights", data.data(), data.size()), ROPETEAM_OK)
        << ropeteam_last_error();
    EXPECT_EQ(ropeteam_save_commit(save), ROPETEAM_OK) << ropeteam_last_error();
    EXPECT_EQ(ropeteam_wait(handle, step, ROPETEAM_COMMITTED, 20000), ROPETEAM_OK) << ropeteam_last_error();
    ropeteam_save_close(save);
    ropeteam_close(handle);
  }
  // Flips one byte of the first run of 4096 'R' in the arena's file.
  void FlipByte() const {
    std::fstream file(ArenaPath(), std::ios::in | std::ios::out | std::ios::binary);
    std::string bytes(24 << 20, '\0');
    file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    const size_t at = bytes.find(std::string(4096, 'R'));
    ASSERT_NE(at, std::string::npos);
    file.clear();
    file.seekp(static_cast<std::streamoff>(at + 100));
    file.put('r');
  }

  std::string directory_;
  std::string socket_;
  int processes_ = 0;
};

TEST_F(Programs, TheDaemonSaysWhenItIsReadyAndEndsCleanly) {
  const auto daemon = StartDaemon();
  EXPECT_EQ(daemon->Out(), "ropeteamd ready socket " + socket_ + " control none data inproc alone\n");
  daemon->Signal(SIGTERM);
  EXPECT_EQ(daemon->Wait(), 0);
  EXPECT_FALSE(std::filesystem::exists(socket_));
  EXPECT_TRUE(std::filesystem::exists(ArenaPath())) << "the arena stays";
}

TEST_F(Programs, BadOptionsEndTheDaemonWithTwo) {
  const auto daemon = Start({ROPETEAMD_PATH, "--job=t", "--memory=nonsense"});
  EXPECT_EQ(daemon->Wait(), 2);
  EXPECT_THAT(daemon->Err(), HasSubstr("nonsense"));
  const auto twice = Start({ROPETEAMD_PATH, "--job=t", "--memory=8M", "--job=u"});
  EXPECT_EQ(twice->Wait(), 2);
  EXPECT_EQ(twice->Err(), "ropeteamd: --job is given twice (ropeteamd --help lists the options)\n");
  for (const char* url : {"s4://bucket/prefix", "s3://", "s3://bucket?color=red"}) {
    const auto storage = Start({ROPETEAMD_PATH, "--job=t", "--arena-path=" + directory_, "--storage", url});
    EXPECT_EQ(storage->Wait(), 2) << url;
    EXPECT_THAT(storage->Err(), HasSubstr("storage URL " + std::string(url, 5)));
  }
  const auto absent =
      Start({ROPETEAMD_PATH, "--job=t", "--arena-path=" + directory_, "--storage=" + directory_ + "/absent"});
  EXPECT_EQ(absent->Wait(), 1) << "it may be mounted later";
}

TEST_F(Programs, ASecondDaemonOfTheSameNodeIsRefused) {
  const auto first = StartDaemon();
  std::vector<std::string> arguments = {ROPETEAMD_PATH};
  for (const std::string& option : Options()) arguments.push_back(option);
  const auto second = Start(arguments);
  EXPECT_EQ(second->Wait(), 1);
  EXPECT_THAT(second->Err(), HasSubstr("pid " + std::to_string(first->pid())));
  EXPECT_FALSE(Daemon().is_null()) << "the first one lives on, its socket in place";
}

TEST_F(Programs, AfterKillNineTheNextDaemonFindsWhatWasSealed) {
  auto daemon = StartDaemon();
  Save(5, 3'000'000);
  daemon->Signal(SIGKILL);
  EXPECT_EQ(daemon->Wait(), 128 + SIGKILL);
  daemon = StartDaemon();
  const auto verify = Ask({"verify", "5"});
  EXPECT_EQ(verify->Wait(), 0) << verify->Err();
  EXPECT_THAT(verify->Out(), HasSubstr("all good"));
  const auto list = Ask({"ls", "5"});
  EXPECT_EQ(list->Wait(), 0) << list->Err();
  EXPECT_THAT(list->Out(), HasSubstr("weights"));
}

TEST_F(Programs, VerifyNamesTheNodeTheRankAndTheChunkOfAFlippedByte) {
  const auto daemon = StartDaemon();
  Save(5, 3'000'000);
  FlipByte();
  const auto verify = Ask({"verify"});
  EXPECT_EQ(verify->Wait(), 1);
  EXPECT_THAT(verify->Out(), HasSubstr("bad: node node-0 step 5 rank 0 incarnation 1 chunks 0"));
}

TEST_F(Programs, ADaemonOfAnotherSizeSaysWhatToDoAndKeepsTheArena) {
  auto daemon = StartDaemon();
  Save(5, 1000);
  daemon->Signal(SIGTERM);
  EXPECT_EQ(daemon->Wait(), 0);
  const auto other = Start({ROPETEAMD_PATH, "--job=t", "--memory=32M", "--chunk-size=1M",
                            "--arena-path=" + directory_, "--socket=" + socket_});
  EXPECT_EQ(other->Wait(), 1);
  EXPECT_THAT(other->Err(), HasSubstr("--arena-reset"));
  daemon = StartDaemon();
  EXPECT_EQ(Ask({"verify", "5"})->Wait(), 0);
}

TEST_F(Programs, ADaemonWhoseNameAnotherHasTakenEndsWithThree) {
  const std::string coordinator = "--coordinator=127.0.0.1:" + std::to_string(FreePort());
  const auto start = [&](const std::string& directory, const std::string& node, const std::string& ordinal) {
    std::filesystem::create_directory(directory_ + "/" + directory);
    return Start({ROPETEAMD_PATH, "--job=t", "--memory=8M", "--chunk-size=1M", "--nodes=2", coordinator,
                  "--node=" + node, "--ordinal=" + ordinal, "--arena-path=" + directory_ + "/" + directory,
                  "--socket=" + directory_ + "/" + directory + "/s.sock"});
  };
  const auto leader = start("a", "leader", "0");
  const auto first = start("b", "twin", "1");
  ASSERT_TRUE(Eventually([&] { return first->Err().find("members 2") != std::string::npos; }))
      << first->Err();
  const auto second = start("c", "twin", "1");
  EXPECT_EQ(first->Wait(), 3);
  EXPECT_THAT(first->Err(), HasSubstr("refused"));
  EXPECT_TRUE(Eventually([&] { return second->Err().find("members 2") != std::string::npos; }))
      << second->Err();
}

TEST_F(Programs, ARefusedDaemonRemovesTheArenaThatItMade) {
  const std::string coordinator = "--coordinator=127.0.0.1:" + std::to_string(FreePort());
  const auto arguments = [&](const std::string& ordinal, const std::string& chunk) {
    return std::vector<std::string>{ROPETEAMD_PATH,
                                    "--job=t",
                                    "--memory=8M",
                                    "--chunk-size=" + chunk,
                                    "--nodes=2",
                                    coordinator,
                                    "--ordinal=" + ordinal,
                                    "--arena-path=" + directory_,
                                    "--socket=" + directory_ + "/" + ordinal + ".sock"};
  };
  const std::string arena = directory_ + "/ropeteam-t-node-1.arena";
  const auto leader = Start(arguments("0", "1M"));
  ASSERT_TRUE(Eventually([&] { return leader->Err().find("members 1") != std::string::npos; }))
      << leader->Err();
  const auto refused = Start(arguments("1", "2M"));
  EXPECT_EQ(refused->Wait(), 3);
  EXPECT_THAT(refused->Err(), HasSubstr("arena " + arena + " removed"));
  EXPECT_FALSE(std::filesystem::exists(arena));
  // An arena that was there before stays, whatever is in it.
  auto alone = arguments("1", "2M");
  alone[4] = "--nodes=1";
  alone.erase(alone.begin() + 5, alone.begin() + 7);
  alone.push_back("--node=node-1");
  const auto before = Start(alone);
  ASSERT_TRUE(Eventually([&] { return before->Out().find("ready") != std::string::npos; })) << before->Err();
  before->Signal(SIGTERM);
  EXPECT_EQ(before->Wait(), 0);
  EXPECT_EQ(Start(arguments("1", "2M"))->Wait(), 3);
  EXPECT_TRUE(std::filesystem::exists(arena));
}

TEST_F(Programs, RunGivesTheCommandItsEnvironmentAndTakesItsExitCode) {
  const auto run = Start(RunArguments({"--quiet"}, "echo job $ROPETEAM_JOB socket $ROPETEAM_SOCKET; exit 7"));
  EXPECT_EQ(run->Wait(), 7);
  EXPECT_EQ(run->Out(), "job t socket " + socket_ + "\n");
  EXPECT_TRUE(std::filesystem::exists(ArenaPath()));
  EXPECT_FALSE(std::filesystem::exists(socket_)) << "the daemon has ended too";
}

TEST_F(Programs, RunTellsWhatItChoseAndLeavesNothingIfAsked) {
  const auto run = Start(RunArguments({"--remove-arena-at-exit"}, "kill -9 $$"));
  EXPECT_EQ(run->Wait(), 128 + SIGKILL);
  EXPECT_THAT(run->Err(), HasSubstr("job t (--job)"));
  EXPECT_FALSE(std::filesystem::exists(ArenaPath()));
}

TEST_F(Programs, RunOfACommandThatIsNotThereEndsAsAShellDoes) {
  std::vector<std::string> arguments = RunArguments({"--quiet"}, "");
  arguments.resize(arguments.size() - 3);
  arguments.push_back("/nonexistent/program");
  const auto run = Start(arguments);
  EXPECT_EQ(run->Wait(), 127);
  EXPECT_THAT(run->Err(), HasSubstr("/nonexistent/program"));
}

TEST_F(Programs, RunPassesSignalsOnToTheCommand) {
  const auto run = Start(
      RunArguments({"--quiet"}, "trap 'echo got usr1; exit 5' USR1; echo up; while :; do sleep 0.01; done"));
  ASSERT_TRUE(Eventually([&] { return run->Out() == "up\n"; })) << run->Err();
  run->Signal(SIGUSR1);
  EXPECT_EQ(run->Wait(), 5);
  EXPECT_EQ(run->Out(), "up\ngot usr1\n");
}

TEST_F(Programs, RunStartsADaemonThatDiedAgain) {
  const auto run =
      Start(RunArguments({"--quiet"}, "echo up; trap 'exit 0' TERM; while :; do sleep 0.01; done"));
  ASSERT_TRUE(Eventually([&] { return run->Out() == "up\n"; })) << run->Err();
  Save(3, 2'000'000);
  const pid_t first = Daemon().at("pid").get<pid_t>();
  kill(first, SIGKILL);
  Json daemon;
  ASSERT_TRUE(Eventually([&] {
    daemon = Daemon();
    return daemon.is_object() && daemon.at("pid") != first;
  })) << run->Err();
  EXPECT_THAT(run->Err(), HasSubstr("signal 9"));
  EXPECT_TRUE(Eventually([&] { return Ask({"verify", "3"})->Wait() == 0; })) << "what was sealed is there";
  run->Signal(SIGTERM);
  EXPECT_EQ(run->Wait(), 0);
}

TEST_F(Programs, NeitherDaemonNorCommandOutlivesARunThatWasKilled) {
  const auto run = Start(RunArguments({"--quiet"}, "echo $$; exec sleep 1000"));
  ASSERT_TRUE(Eventually([&] { return run->Out().ends_with('\n'); })) << run->Err();
  const pid_t command = std::stoi(run->Out());
  const pid_t daemon = Daemon().at("pid").get<pid_t>();
  run->Signal(SIGKILL);
  EXPECT_EQ(run->Wait(), 128 + SIGKILL);
  EXPECT_TRUE(Eventually([&] { return !IsAlive(daemon) && !IsAlive(command); }));
}

TEST_F(Programs, UnderRunADaemonIgnoresTheSigtermOfOthers) {
  const auto run =
      Start(RunArguments({"--quiet"}, "trap 'exit 0' TERM; echo up; while :; do sleep 0.01; done"));
  ASSERT_TRUE(Eventually([&] { return run->Out() == "up\n"; })) << run->Err();
  const pid_t daemon = Daemon().at("pid").get<pid_t>();
  kill(daemon, SIGTERM);
  const std::string told = "ignoring the SIGTERM of process " + std::to_string(getpid());
  ASSERT_TRUE(Eventually([&] {
    std::ifstream log(directory_ + "/daemon.log");
    return std::string(std::istreambuf_iterator<char>(log), {}).find(told) != std::string::npos;
  }));
  Save(3, 2'000'000);
  EXPECT_EQ(Daemon().at("pid").get<pid_t>(), daemon);
  // A person can still end it.
  kill(daemon, SIGINT);
  ASSERT_TRUE(Eventually([&] {
    const Json now = Daemon();
    return now.is_object() && now.at("pid") != daemon;
  })) << run->Err();
  EXPECT_THAT(run->Err(), HasSubstr("ropeteamd ended with exit code 0, starting it again"));
  run->Signal(SIGTERM);
  EXPECT_EQ(run->Wait(), 0);
}

TEST_F(Programs, RunWithADaemonThatRefusesSaysWhy) {
  const auto run = Start(RunArguments({"--quiet", "--replicas=3"}, "true"));
  EXPECT_EQ(run->Wait(), 2);
  EXPECT_THAT(run->Err(), HasSubstr("--replicas 3 needs 4 nodes"));
}

TEST_F(Programs, StatusTellsAPersonAndAProgram) {
  const auto daemon = StartDaemon();
  Save(9, 100'000);
  const auto text = Ask({"status"});
  EXPECT_EQ(text->Wait(), 0) << text->Err();
  EXPECT_THAT(text->Out(), HasSubstr("latest step 9"));
  EXPECT_THAT(text->Out(), HasSubstr("committed"));
  const auto json = Ask({"status", "--json"});
  EXPECT_EQ(json->Wait(), 0);
  const Json status = Json::parse(json->Out());
  EXPECT_EQ(status.at("latest").at("step"), 9);
  EXPECT_EQ(status.at("steps").at(0).at("committed"), true);
  EXPECT_EQ(status.at("nodes").at(0).at("copies").at(0).at("id").at("rank"), 0);
  const auto watch = Ask({"status", "--watch=0.01", "--count=3", "--json"});
  EXPECT_EQ(watch->Wait(), 0);
  const std::string lines = watch->Out();
  EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 3);
}

TEST_F(Programs, WithoutADaemonTheCommandLineSaysSo) {
  for (const auto& twice : std::vector<std::vector<std::string>>{{"status", "--timeout=1", "--timeout", "2"},
                                                                 {"verify", "/s", "--job=a", "--job=b"}}) {
    const auto ask = Start({ROPETEAM_PATH, twice[0], twice[1], twice[2], twice[3]});
    EXPECT_EQ(ask->Wait(), 2);
    EXPECT_THAT(ask->Err(), HasSubstr("is given twice"));
  }
  for (const char* command : {"status", "ls", "verify"}) {
    const auto ask = Ask({command});
    EXPECT_EQ(ask->Wait(), 1);
    EXPECT_THAT(ask->Err(), HasSubstr(socket_)) << command;
  }
  const auto wrong = Start({ROPETEAM_PATH, "status", "--bogus"});
  EXPECT_EQ(wrong->Wait(), 2);
  EXPECT_THAT(wrong->Err(), HasSubstr("--bogus"));
  EXPECT_EQ(Start({ROPETEAM_PATH, "frobnicate"})->Wait(), 2);
  EXPECT_EQ(Start({ROPETEAM_PATH, "--version"})->Wait(), 0);
}

}  // namespace
}  // namespace ropeteam

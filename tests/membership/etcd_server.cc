// SPDX-License-Identifier: Apache-2.0
#include "tests/membership/etcd_server.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "tests/membership/standalone_cluster.h"

extern char** environ;

namespace ropeteam {
namespace {

bool Shell(const std::string& command) { return std::system((command + " >/dev/null 2>&1").c_str()) == 0; }

}  // namespace

std::string EtcdServer::Missing() {
  if (!Shell("etcd --version")) return "no etcd: apt-get install etcd-server";
  if (!Shell("etcdctl version")) return "no etcdctl: apt-get install etcd-client";
  return "";
}

EtcdServer::EtcdServer(std::vector<std::string> options, bool tls) : options_(std::move(options)), tls_(tls) {
  char folder[] = "/dev/shm/ropeteam-etcd.XXXXXX";
  if (mkdtemp(folder) == nullptr) std::abort();
  folder_ = folder;
  endpoint_ = FreeAddress();
  peer_ = FreeAddress();
  if (!tls_) return;
  const std::string host = endpoint_.substr(0, endpoint_.rfind(':'));
  const std::string key = "openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes ";
  if (!Shell("cd " + folder_ + " && " + key + "-x509 -days 2 -subj /CN=ca -keyout ca.key -out ca.pem && " +
             key + "-subj /CN=node -keyout node.key -out node.csr && printf 'subjectAltName=IP:" + host +
             "' > san && openssl x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 "
             "-extfile san "
             "-out node.pem"))
    std::abort();
}

EtcdServer::~EtcdServer() {
  Kill();
  Shell("rm -r " + folder_);
}

void EtcdServer::Start() {
  const std::string client = (tls_ ? "https://" : "http://") + endpoint_;
  const std::string peer = "http://" + peer_;
  std::vector<std::string> arguments = {"etcd",
                                        "--data-dir=" + folder_ + "/data",
                                        "--name=m",
                                        "--listen-client-urls=" + client,
                                        "--advertise-client-urls=" + client,
                                        "--listen-peer-urls=" + peer,
                                        "--initial-advertise-peer-urls=" + peer,
                                        "--initial-cluster=m=" + peer,
                                        "--unsafe-no-fsync"};
  if (tls_)
    for (const char* option : {"--cert-file=", "--key-file=", "--trusted-ca-file="})
      arguments.push_back(option + folder_ +
                          (option[2] == 'c'   ? "/node.pem"
                           : option[2] == 'k' ? "/node.key"
                                              : "/ca.pem"));
  if (tls_) arguments.emplace_back("--client-cert-auth");
  arguments.insert(arguments.end(), options_.begin(), options_.end());
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, (folder_ + "/log").c_str(),
                                   O_WRONLY | O_CREAT | O_APPEND, 0600);
  posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  if (posix_spawnp(&pid_, "etcd", &actions, nullptr, argv.data(), environ) != 0) std::abort();
  posix_spawn_file_actions_destroy(&actions);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!Control("get none") && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

bool EtcdServer::Control(const std::string& words) const {
  std::string command =
      "ETCDCTL_API=3 etcdctl --command-timeout=1s --endpoints=" + std::string(tls_ ? "https://" : "http://") +
      endpoint_;
  if (tls_)
    command +=
        " --cacert=" + folder_ + "/ca.pem --cert=" + folder_ + "/node.pem --key=" + folder_ + "/node.key";
  return Shell(command + " " + words);
}

void EtcdServer::Signal(int signal) {
  if (pid_ > 0) kill(pid_, signal);
}

void EtcdServer::Kill() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

void EtcdServer::Wipe() { Shell("rm -r " + folder_ + "/data"); }

}  // namespace ropeteam

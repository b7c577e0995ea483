// SPDX-License-Identifier: Apache-2.0
#include "api/cli/sockets.h"

#include <dirent.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>

#include "api/cli/arenas.h"
#include "api/client/admin_client.h"
#include "api/client/unique_fd.h"

namespace ropeteam::cli {
namespace {

constexpr int64_t kNamesTimeoutMs = 2000;  // a daemon that hangs must not hide the others

void ListDirectory(const std::string& directory, std::vector<std::string>* sockets) {
  DIR* entries = opendir(directory.c_str());
  if (entries == nullptr) return;
  while (const dirent* entry = readdir(entries)) {
    const std::string path = directory + "/" + entry->d_name;
    struct stat info {};
    if (path.ends_with(".sock") && lstat(path.c_str(), &info) == 0 && S_ISSOCK(info.st_mode) &&
        info.st_uid == geteuid())
      sockets->push_back(path);
  }
  closedir(entries);
}

// The names of a live daemon; empty if unknown.
struct Answering {
  std::string path;
  std::string job;
  std::string node;
};

std::vector<Answering> AskForNames(const std::vector<std::string>& sockets, int64_t timeout_ms) {
  std::vector<Answering> answering;
  for (const std::string& path : sockets) {
    const Result<std::unique_ptr<AdminClient>> client =
        AdminClient::Connect(path, std::min(timeout_ms, kNamesTimeoutMs));
    if (client.ok()) {
      answering.push_back({path, (*client)->hello().job, (*client)->hello().node});
    } else if (client.status().code() != Code::kUnavailable) {
      answering.push_back({path, "", ""});  // it is alive, but its names are unknown
    }
  }
  return answering;
}

// `silent`: if the choice is by name, the sockets of daemons that run but did not answer in time.
Status NoneOrSeveral(const std::vector<Answering>& found, const std::string& silent,
                     const SocketChoice& choice) {
  std::string wish;
  if (!choice.job.empty()) wish += " of job " + choice.job;
  if (!choice.node.empty()) wish += " of node " + choice.node;
  if (found.empty() && !silent.empty())
    return Error(
        Code::kUnavailable,
        "no ropeteamd of yours%s has answered; these daemons run but did not answer in time: give a longer "
        "--timeout, or --socket PATH:%s",
        wish.c_str(), silent.c_str());
  if (found.empty())
    return Error(
        Code::kUnavailable,
        "no ropeteamd of yours%s was found on this machine: start one with `ropeteam run -- COMMAND`, or "
        "give --socket PATH (or ROPETEAM_SOCKET)",
        wish.c_str());
  std::string list;
  for (const Answering& each : found) {
    const std::string path = "--socket " + each.path;
    list += "\n  ";
    if (each.job.empty())
      list += path;
    else if (choice.by_path_only)
      list += path + "   of job " + each.job + ", node " + each.node;
    else
      list += "--job " + each.job + " --node " + each.node + "   or " + path;
  }
  return Error(Code::kUnavailable, "%zu daemons%s are here, say which:%s", found.size(), wish.c_str(),
               list.c_str());
}

}  // namespace

std::vector<std::string> ListSockets() {
  std::vector<std::string> sockets;
  for (const std::string& directory : UserDirectories()) ListDirectory(directory, &sockets);
  std::sort(sockets.begin(), sockets.end());
  return sockets;
}

bool SocketIsDead(const std::string& path) {
  struct stat info {};
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path) || lstat(path.c_str(), &info) != 0) return false;
  if (std::time(nullptr) - info.st_mtime < kSocketStartsSeconds) return false;
  std::memcpy(address.sun_path, path.data(), path.size());
  const client::UniqueFd probe(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  return probe.valid() &&
         connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 &&
         errno == ECONNREFUSED;
}

Result<std::string> ChooseSocket(const SocketChoice& choice, int64_t timeout_ms) {
  if (!choice.path.empty()) return choice.path;
  const bool by_name = !choice.job.empty() || !choice.node.empty();
  std::vector<std::string> sockets = ListSockets();
  if (const char* told = std::getenv("ROPETEAM_SOCKET"); told != nullptr && told[0] != '\0') {
    if (!by_name) return std::string(told);
    if (std::find(sockets.begin(), sockets.end(), told) == sockets.end()) sockets.emplace_back(told);
  }
  if (!by_name && sockets.size() == 1) return sockets.front();
  std::vector<Answering> found = AskForNames(sockets, timeout_ms);
  std::string silent;
  if (by_name) {
    for (const Answering& each : found)
      if (each.job.empty()) silent += "\n  --socket " + each.path;
    std::erase_if(found, [&](const Answering& each) {
      return (!choice.job.empty() && each.job != choice.job) ||
             (!choice.node.empty() && each.node != choice.node);
    });
  }
  if (found.size() == 1) return found.front().path;
  return NoneOrSeveral(found, silent, choice);
}

}  // namespace ropeteam::cli

// SPDX-License-Identifier: Apache-2.0
#include "bench/persist_yardsticks.h"

#include <linux/magic.h>
#include <stdlib.h>
#include <sys/vfs.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "bench/command.h"

namespace ropeteam::bench {
namespace {

namespace fs = std::filesystem;

// The sink's I/O size.
constexpr const char* kDdBlock = "bs=4M";

double RunDd(const std::vector<std::string>& operands) {
  std::vector<std::string> command = {"env", "LC_ALL=C", "dd", kDdBlock};
  command.insert(command.end(), operands.begin(), operands.end());
  Child dd;
  if (const Status started = dd.Start(command, true); !started.ok()) throw BenchError(started.ToString());
  const std::string said = dd.ReadAll();
  // "268435456 bytes (268 MB, 256 MiB) copied, 0.12 s, 2.2 GB/s"
  const size_t at = said.find(" copied, ");
  if (dd.Wait() != 0 || at == std::string::npos) throw BenchError("dd: " + said);
  return std::stod(said.substr(at + sizeof(" copied, ") - 1));
}

}  // namespace

ScratchDirectory::ScratchDirectory(const std::string& parent) : path_(parent + "/ropeteam-bench.XXXXXX") {
  if (mkdtemp(path_.data()) == nullptr)
    throw BenchError("no directory can be made in " + parent + "; --directory names another");
}

ScratchDirectory::~ScratchDirectory() {
  std::error_code ignored;  // the user can see and remove what is left
  fs::remove_all(path_, ignored);
}

std::string FileSystemOf(const std::string& directory) {
  struct statfs info {};
  if (statfs(directory.c_str(), &info) != 0) throw BenchError("no directory " + directory);
  switch (static_cast<unsigned long>(info.f_type)) {
    case EXT4_SUPER_MAGIC:
      return "ext4";
    case XFS_SUPER_MAGIC:
      return "xfs";
    case BTRFS_SUPER_MAGIC:
      return "btrfs";
    case TMPFS_MAGIC:
      return "tmpfs";
    case OVERLAYFS_SUPER_MAGIC:
      return "overlay";
    case NFS_SUPER_MAGIC:
      return "nfs";
  }
  char number[32];
  std::snprintf(number, sizeof(number), "file system %lx", static_cast<unsigned long>(info.f_type));
  return number;
}

double DdWriteSeconds(const std::string& from, const std::string& to) {
  fs::remove(to);  // a new file, as the sink writes
  return RunDd({"if=" + from, "of=" + to, "oflag=direct", "conv=fsync"});
}

double DdReadSeconds(const std::string& from) {
  return RunDd({"if=" + from, "of=/dev/null", "iflag=direct"});
}

S3Tools::S3Tools(const std::string& given) : root_(given) {
  for (fs::path at = fs::read_symlink("/proc/self/exe").parent_path(); root_.empty(); at = at.parent_path()) {
    if (fs::exists(at / "bench/persist_client.py")) root_ = at;
    if (at == at.parent_path()) break;
  }
  for (const std::string& file : {server(), client(), python()})
    if (!fs::exists(file)) {
      lacking_ = "there is no " + file + "; --source names the source tree, scripts/test makes its .venv";
      return;
    }
  Child probe;
  if (const Status started = probe.Start({python(), "-c", "import awscrt.s3"}, true); !started.ok()) {
    lacking_ = started.ToString();
    return;
  }
  std::string said = probe.ReadAll();
  while (said.ends_with('\n')) said.pop_back();
  if (probe.Wait() != 0)
    lacking_ = python() + " has no awscrt, the client to compare with: " + said.substr(said.rfind('\n') + 1);
}

S3Server::S3Server(const S3Tools& tools, Kind kind) {
  // These credentials are valid for this server only.
  setenv("AWS_ACCESS_KEY_ID", "bench", 1);
  setenv("AWS_SECRET_ACCESS_KEY", "bench-secret", 1);
  setenv("AWS_EC2_METADATA_DISABLED", "true", 1);
  unsetenv("AWS_SESSION_TOKEN");
  std::vector<std::string> command;
  if (kind == Kind::kElsewhere) command = {"chrt", "--idle", "0"};
  for (const std::string& word : {tools.python(), tools.server(), std::string("--port"), std::string("0")})
    command.push_back(word);
  for (const char* word : {"--bucket", "bench", "--access-key", "bench", "--secret-key", "bench-secret",
                           "--no-md5-large", "--until-stdin-closes"})
    command.emplace_back(word);
  if (kind != Kind::kKeep) command.emplace_back("--discard");
  if (const Status started = child_.Start(command); !started.ok()) throw BenchError(started.ToString());
  const nlohmann::json line = nlohmann::json::parse(child_.ReadLine(), nullptr, false);
  if (!line.is_object() || !line.contains("port")) throw BenchError(tools.server() + " does not start");
  port_ = std::to_string(line["port"].get<int>());
}

std::string S3Server::url() const {
  return "s3://bench/runs?endpoint=http://127.0.0.1:" + port_ + "&region=us-east-1";
}

S3Client::S3Client(const S3Tools& tools, const S3Server& server, const std::string& file,
                   const std::string& checksum) {
  const Status started = child_.Start({tools.python(), tools.client(), server.port(), file, checksum});
  if (!started.ok()) throw BenchError(started.ToString());
  if (child_.ReadLine() != "ready") throw BenchError(tools.client() + " does not start");
}

double S3Client::Ask(const std::string& command) {
  const bool asked = child_.Write(command + "\n");
  const std::string answer = asked ? child_.ReadLine() : "";
  if (answer.empty()) throw BenchError("the client of S3 failed at " + command);
  return std::stod(answer);
}

MemoryFile::MemoryFile(const Buffer& bytes) : directory_("/dev/shm"), path_(directory_.path() + "/source") {
  std::ofstream file(path_, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) throw BenchError("/dev/shm has no room for " + std::to_string(bytes.size()) + " bytes");
}

}  // namespace ropeteam::bench

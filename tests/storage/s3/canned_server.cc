// SPDX-License-Identifier: Apache-2.0
#include "tests/storage/s3/canned_server.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "core/base/check.h"

namespace ropeteam::storage::test {
namespace {

constexpr size_t kReadBytes = 256 << 10;
constexpr size_t kBodyKept = 4096;
constexpr size_t kRequestsKept = 1000;

void WriteAll(int fd, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = send(fd, text.data() + done, text.size() - done, MSG_NOSIGNAL);
    if (count <= 0) return;
    done += static_cast<size_t>(count);
  }
}

}  // namespace

std::string CannedRequest::Header(const std::string& name) const {
  std::string lower = head;
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const size_t at = lower.find("\r\n" + name + ":");
  if (at == std::string::npos) return "";
  const size_t begin = head.find_first_not_of(' ', at + name.size() + 3);
  return head.substr(begin, head.find("\r\n", begin) - begin);
}

CannedServer::CannedServer(Answer answer) : answer_(std::move(answer)) {
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  ROPETEAM_CHECK(bind(listener_, generic, length) == 0 && listen(listener_, 64) == 0);
  ROPETEAM_CHECK(getsockname(listener_, generic, &length) == 0);
  port_ = ntohs(address.sin_port);
  accepting_ = std::thread([this] { Accept(); });
}

CannedServer::~CannedServer() {
  stopping_ = true;
  shutdown(listener_, SHUT_RDWR);
  accepting_.join();
  for (std::thread& thread : threads_) thread.join();
  close(listener_);
}

std::vector<CannedRequest> CannedServer::requests() {
  const std::lock_guard lock(mutex_);
  return requests_;
}

void CannedServer::Accept() {
  while (!stopping_) {
    const int connection = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (connection >= 0) threads_.emplace_back([this, connection] { Serve(connection); });
  }
}

void CannedServer::Serve(int connection) {
  std::string buffer(kReadBytes, '\0'), pending;
  while (true) {
    size_t end;
    while ((end = pending.find("\r\n\r\n")) == std::string::npos) {
      const ssize_t count = recv(connection, buffer.data(), buffer.size(), 0);
      if (count <= 0) {
        close(connection);
        return;
      }
      pending.append(buffer.data(), static_cast<size_t>(count));
    }
    CannedRequest request;
    request.head = pending.substr(0, end);
    pending.erase(0, end + 4);
    const uint64_t length = std::strtoull(request.Header("content-length").c_str(), nullptr, 10);
    if (!request.Header("expect").empty()) WriteAll(connection, "HTTP/1.1 100 Continue\r\n\r\n");
    const size_t already = std::min<uint64_t>(pending.size(), length);
    request.body = pending.substr(0, std::min(already, kBodyKept));
    request.body_bytes = already;
    pending.erase(0, already);
    while (request.body_bytes < length) {
      const ssize_t count =
          recv(connection, buffer.data(), std::min<uint64_t>(buffer.size(), length - request.body_bytes), 0);
      if (count <= 0) break;
      if (request.body.size() < kBodyKept)
        request.body.append(buffer.data(),
                            std::min<size_t>(static_cast<size_t>(count), kBodyKept - request.body.size()));
      request.body_bytes += static_cast<uint64_t>(count);
    }
    const std::string reply = answer_(request);
    {
      const std::lock_guard lock(mutex_);
      if (requests_.size() < kRequestsKept) requests_.push_back(request);
    }
    WriteAll(connection, reply);
  }
}

}  // namespace ropeteam::storage::test

// SPDX-License-Identifier: Apache-2.0
//
// A small HTTP server in this process. It reads requests, discards their bodies and sends the answers of a
// function. It covers what the strict server does not: Google's dialect, and a store with almost no cost.

#ifndef ROPETEAM_TESTS_STORAGE_S3_CANNED_SERVER_H_
#define ROPETEAM_TESTS_STORAGE_S3_CANNED_SERVER_H_

#include <atomic>
#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace ropeteam::storage::test {

struct CannedRequest {
  std::string head;  // request line and headers as received, without the empty line
  uint64_t body_bytes = 0;
  std::string body;  // the first 4 KiB of it
  // A header's value by its lower-case name; empty: not present.
  std::string Header(const std::string& name) const;
  std::string line() const { return head.substr(0, head.find("\r\n")); }
};

class CannedServer {
 public:
  // Returns for example "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n". Each connection calls it from a
  // thread of its own.
  using Answer = std::function<std::string(const CannedRequest& request)>;
  explicit CannedServer(Answer answer);
  ~CannedServer();  // all clients must have disconnected

  int port() const { return port_; }
  std::vector<CannedRequest> requests();

 private:
  void Accept();
  void Serve(int connection);

  const Answer answer_;
  int listener_ = -1;
  int port_ = 0;
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::vector<CannedRequest> requests_;
  std::list<std::thread> threads_;
  std::thread accepting_;
};

}  // namespace ropeteam::storage::test

#endif  // ROPETEAM_TESTS_STORAGE_S3_CANNED_SERVER_H_

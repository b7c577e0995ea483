// SPDX-License-Identifier: Apache-2.0
//
// Answers of an object store over a real connection: status lines, headers, and bodies of any length. A sink makes one
// call, and each of its requests gets the next answer.

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <mutex>
#include <thread>

#include "core/base/checksum.h"
#include "storage/s3/s3_sink.h"
#include "tests/fuzz/fuzz.h"

namespace ropeteam::fuzz {
namespace {

// Between the answers of an input. Its first byte chooses the call.
constexpr char kSeparator = '\x1e';
// Ends a call that asks on.
constexpr char kLastAnswer[] = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n";
constexpr char kFile[] = "hello, world";
constexpr size_t kFileBytes = sizeof(kFile) - 1;

// Answers one request on each connection, and closes it.
class Store {
 public:
  static Store& Get() {
    static Store* const store = new Store;
    return *store;
  }
  int port() const { return port_; }
  void SetAnswers(std::vector<std::string> answers) {
    const std::lock_guard lock(mutex_);
    answers_ = std::move(answers);
    next_ = 0;
  }

 private:
  Store() : listener_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(at);
    auto* const generic = reinterpret_cast<sockaddr*>(&at);
    ROPETEAM_CHECK(bind(listener_, generic, length) == 0 && listen(listener_, 64) == 0 &&
                   getsockname(listener_, generic, &length) == 0);
    port_ = ntohs(at.sin_port);
    std::thread([this] { Serve(); }).detach();
  }
  [[noreturn]] void Serve() {
    for (;;) {
      const int connection = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      // The bodies that are put here are short, and come with their headers.
      std::string request;
      char buffer[4096];
      ssize_t count = 1;
      while (request.find("\r\n\r\n") == std::string::npos && count > 0) {
        count = recv(connection, buffer, sizeof(buffer), 0);
        if (count > 0) request.append(buffer, static_cast<size_t>(count));
      }
      std::string answer = kLastAnswer;
      {
        const std::lock_guard lock(mutex_);
        if (next_ < answers_.size()) answer = answers_[next_++];
      }
      (void)send(connection, answer.data(), answer.size(), MSG_NOSIGNAL);
      shutdown(connection, SHUT_WR);
      while (recv(connection, buffer, sizeof(buffer), 0) > 0) continue;
      close(connection);
    }
  }

  const int listener_;
  int port_ = 0;
  std::mutex mutex_;
  std::vector<std::string> answers_;
  size_t next_ = 0;
};

std::unique_ptr<storage::Sink> OpenSink() {
  const storage::s3::Environment environment{[](const std::string& name) -> std::optional<std::string> {
                                               if (name == "AWS_ACCESS_KEY_ID") return "key";
                                               if (name == "AWS_SECRET_ACCESS_KEY") return "secret";
                                               return std::nullopt;
                                             },
                                             [] { return int64_t{1'760'000'000}; }};
  storage::s3::ClientTimes times;
  times.retry = {std::chrono::milliseconds(0), std::chrono::milliseconds(0)};
  const auto url =
      storage::ParseUrl("s3://bucket/prefix?region=eu-central-1&endpoint=http%3A%2F%2F127.0.0.1%3A" +
                        std::to_string(Store::Get().port()));
  return storage::OpenS3Sink(url.value(), environment, times).value();
}

void RunHttp(std::string_view input) {
  if (input.empty()) return;
  std::vector<std::string> answers;
  for (std::string_view rest = input.substr(1); !rest.empty();) {
    const size_t end = std::min(rest.find(kSeparator), rest.size());
    answers.emplace_back(rest.substr(0, end));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  Store::Get().SetAnswers(std::move(answers));
  const auto sink = OpenSink();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  switch (input[0] % 6) {
    case 0: {
      // The bytes before and after the target stay as they are.
      std::vector<std::byte> memory(kFileBytes + 16, std::byte{1});
      uint32_t crc = 0;
      const storage::Target target{memory.data() + 8, kFileBytes, &crc};
      const Status status = sink->Read("file", 3, {&target, 1}, deadline);
      for (size_t i = 0; i < 8; ++i)
        ROPETEAM_CHECK(memory[i] == std::byte{1} && memory[kFileBytes + 8 + i] == std::byte{1});
      if (status.ok()) ROPETEAM_CHECK(crc == Crc32c(target.data, kFileBytes));
      return;
    }
    case 1: {
      const Result<storage::FileInfo> info = sink->Stat("file", deadline);
      ROPETEAM_CHECK(!info.ok() || info->name == "file");
      return;
    }
    case 2: {
      const Result<storage::ListPage> page = sink->List("folder", "", deadline);
      if (!page.ok()) return;
      for (const storage::FileInfo& file : page->files)
        ROPETEAM_CHECK(storage::CheckFileName(file.name).ok());
      for (const std::string& folder : page->folders) ROPETEAM_CHECK(storage::CheckFileName(folder).ok());
      return;
    }
    case 3:
      return (void)sink->Put("file", kFile, storage::PutMode::kIfAbsent, deadline);
    case 4: {
      const auto upload = sink->Begin("file", kFileBytes, 5 << 20, deadline);
      if (!upload.ok()) return;
      const storage::Piece piece{reinterpret_cast<const std::byte*>(kFile), kFileBytes};
      const uint32_t crc = Crc32c(kFile, kFileBytes);
      if ((*upload)->PutPart(0, {&piece, 1}, crc, deadline).ok()) (void)(*upload)->Finish(crc, deadline);
      return;
    }
    default:
      return (void)sink->AbortUploads("folder", std::chrono::seconds(0), deadline);
  }
}

std::vector<std::string> HttpSeeds() {
  const std::string read =
      "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 3-14/100\r\nETag: \"e\"\r\nContent-Length: "
      "12\r\n\r\nhello, world";
  const std::string busy =
      "HTTP/1.1 503 Slow Down\r\nRetry-After: 1\r\nDate: Fri, 24 May 2013 00:00:00 GMT\r\nTransfer-Encoding: "
      "chunked\r\n\r\n"
      "2e\r\n<Error><Code>RequestTimeTooSkewed</Code></Error>\r\n0\r\n\r\n";
  const std::string stat =
      "HTTP/1.1 200 OK\r\nContent-Length: 12\r\nx-amz-checksum-crc32c: 4waSgw==\r\nx-goog-hash: "
      "crc32c=n03x6A==\r\n\r\n";
  const std::string moved =
      "HTTP/1.1 301 Moved Permanently\r\nx-amz-bucket-region: eu-west-1\r\nContent-Length: 0\r\n\r\n";
  const std::string body =
      "<ListBucketResult><Contents><Key>prefix/folder/a</Key><Size>1</Size></Contents></ListBucketResult>";
  const std::string list =
      "HTTP/1.1 200 OK\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
  return {
      '\0' + busy + kSeparator + read.substr(0, read.size() - 4) + kSeparator + moved + kSeparator + read,
      '\1' + moved + kSeparator + stat,
      '\2' + list,
      "\3HTTP/1.1 412 Precondition Failed\r\nx-amz-request-id: r\r\nContent-Length: 0\r\n\r\n" +
          (kSeparator + stat),
      '\4' + busy + kSeparator + stat,
  };
}

const Target kHttp("http", RunHttp, HttpSeeds);

}  // namespace
}  // namespace ropeteam::fuzz

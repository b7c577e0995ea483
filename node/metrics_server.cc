// SPDX-License-Identifier: Apache-2.0
#include <poll.h>
#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>
#include <sys/socket.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "membership/standalone/acceptor.h"
#include "node/metrics.h"
#include "node/metrics_families.h"
#include "node/unique_fd.h"

namespace ropeteam {
namespace {

// Each connection has a thread. Prometheus needs one; the others are for slow clients, of which the oldest has to go.
constexpr StrangerLimits kConnections{.of_address = 16, .total = 64, .authenticate = false};
// A client that takes longer to send its request, or to read the answer, is disconnected.
constexpr TimeUs kRequestTimeoutUs = 2'000'000;
constexpr size_t kHeadBytesMax = 8192;
// Timeout of the loop's snapshot, which takes microseconds: a loop that exceeds it hangs. Shorter than
// Prometheus' own timeout of 10 s, so that a scrape can report this.
constexpr std::chrono::seconds kLoopTimeout{1};

// Shared by the scraping threads and by closures posted to the loop, which may run after the server's end.
class Source : public std::enable_shared_from_this<Source> {
 public:
  Source(EventLoop* loop, MetricsServer::Collect collect) : loop_(loop), collect_(std::move(collect)) {}

  std::vector<prometheus::MetricFamily> Collect() {
    std::unique_lock lock(mutex_);
    const uint64_t before = answers_;
    if (!asked_ && !stopped_) {  // one request at a time, even if many clients scrape while the loop hangs
      asked_ = true;
      asked_at_ = EventLoop::Now();
      loop_->Post([self = shared_from_this()] { self->Answer(); });
    }
    answered_.wait_for(lock, kLoopTimeout, [&] { return stopped_ || answers_ != before; });
    if (answers_ == before) return SilentFamilies();
    const std::shared_ptr<const MetricsSnapshot> snapshot = snapshot_;
    const TimeUs waited = waited_;
    lock.unlock();
    return FamiliesOf(*snapshot, waited);
  }

  void Stop() {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    answered_.notify_all();
  }

 private:
  void Answer() {
    {
      const std::lock_guard lock(mutex_);
      if (stopped_) return;
    }
    auto snapshot = std::make_shared<const MetricsSnapshot>(collect_());
    const std::lock_guard lock(mutex_);
    waited_ = EventLoop::Now() - asked_at_;
    snapshot_ = std::move(snapshot);
    asked_ = false;
    ++answers_;
    answered_.notify_all();
  }

  EventLoop* const loop_;
  const MetricsServer::Collect collect_;
  std::mutex mutex_;
  std::condition_variable answered_;
  // Guarded by mutex_.
  bool asked_ = false;
  TimeUs asked_at_ = 0;
  TimeUs waited_ = 0;
  uint64_t answers_ = 0;
  std::shared_ptr<const MetricsSnapshot> snapshot_;
  bool stopped_ = false;
};

// Waits until the connection can be read or written. False: not before `deadline`.
bool Await(int connection, short events, TimeUs deadline) {
  pollfd polled{connection, events, 0};
  const TimeUs now = EventLoop::Now();
  return now < deadline && poll(&polled, 1, static_cast<int>((deadline - now) / 1000) + 1) > 0;
}

// The head of a request; empty if it does not come.
std::string Receive(int connection) {
  const TimeUs deadline = EventLoop::Now() + kRequestTimeoutUs;
  std::string head;
  while (head.find("\r\n\r\n") == std::string::npos) {
    char part[1024];
    if (head.size() > kHeadBytesMax || !Await(connection, POLLIN, deadline)) return "";
    const ssize_t count = recv(connection, part, sizeof part, 0);
    if (count <= 0) return "";
    head.append(part, static_cast<size_t>(count));
  }
  return head;
}

void Respond(int connection, const std::string& status, const std::string& body) {
  const TimeUs deadline = EventLoop::Now() + kRequestTimeoutUs;
  const std::string text = "HTTP/1.1 " + status +
                           "\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: " +
                           std::to_string(body.size()) + "\r\nConnection: close\r\n\r\n" + body;
  for (size_t sent = 0; sent < text.size();) {
    if (!Await(connection, POLLOUT, deadline)) return;
    const ssize_t count = send(connection, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (count <= 0) return;
    sent += static_cast<size_t>(count);
  }
}

}  // namespace

class MetricsServer::Impl {
 public:
  Impl(std::unique_ptr<Acceptor> acceptor, EventLoop* loop, Collect collect)
      : source_(std::make_shared<Source>(loop, std::move(collect))), acceptor_(std::move(acceptor)) {
    acceptor_->Start([this](int connection) {
      const std::lock_guard lock(mutex_);
      try {
        std::thread([this, connection] { Serve(UniqueFd(connection)); }).detach();
        serving_++;
      } catch (const std::system_error&) {  // no thread is left
        close(connection);
      }
    });
  }
  ~Impl() {
    source_->Stop();
    acceptor_->Stop();  // shuts down all connections, so that their threads end
    std::unique_lock lock(mutex_);
    served_.wait(lock, [this] { return serving_ == 0; });
  }

 private:
  void Serve(UniqueFd connection) {
    const std::string head = Receive(connection.get());
    if (head.starts_with("GET /metrics ") || head.starts_with("GET /metrics?"))
      Respond(connection.get(), "200 OK", prometheus::TextSerializer().Serialize(source_->Collect()));
    else if (!head.empty())
      Respond(connection.get(), "404 Not Found", "the metrics are at /metrics\n");
    connection.reset();
    const std::lock_guard lock(mutex_);
    serving_--;
    served_.notify_all();
  }

  const std::shared_ptr<Source> source_;
  std::mutex mutex_;
  std::condition_variable served_;
  size_t serving_ = 0;
  const std::unique_ptr<Acceptor> acceptor_;
};

Result<std::unique_ptr<MetricsServer>> MetricsServer::Start(const std::string& address, EventLoop* loop,
                                                            Collect collect) {
  Result<std::unique_ptr<Acceptor>> acceptor = Acceptor::Listen(address, kConnections);
  if (!acceptor.ok())
    return Error(acceptor.status().code(), "--metrics %s: %s", address.c_str(),
                 acceptor.status().message().c_str());
  return std::unique_ptr<MetricsServer>(
      new MetricsServer(std::make_unique<Impl>(std::move(*acceptor), loop, std::move(collect))));
}

MetricsServer::MetricsServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MetricsServer::~MetricsServer() = default;

}  // namespace ropeteam

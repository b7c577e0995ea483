// SPDX-License-Identifier: Apache-2.0
#include <netdb.h>
#include <prometheus/collectable.h>
#include <prometheus/exposer.h>
#include <prometheus/metric_family.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "node/metrics.h"
#include "node/metrics_families.h"
#include "node/options.h"
#include "node/unique_fd.h"

namespace ropeteam {
namespace {

// Scrapes served in parallel. Prometheus needs one; the other is for a slow scrape or another client.
constexpr const char* kThreads = "2";
// A client that takes longer to send its request or to read the answer is disconnected.
constexpr const char* kRequestTimeoutMs = "2000";
// The library notices a stop request when a connection arrives, otherwise only after 2 s.
constexpr std::chrono::milliseconds kKnockEvery{10};
// Timeout of the loop's snapshot, which takes microseconds: a loop that exceeds it hangs. Shorter than
// Prometheus' own timeout of 10 s, so that a scrape can report this.
constexpr std::chrono::seconds kLoopTimeout{1};

// Shared by the scraping threads and by closures posted to the loop, which may run after the server's end.
class Source : public prometheus::Collectable, public std::enable_shared_from_this<Source> {
 public:
  Source(EventLoop* loop, MetricsServer::Collect collect) : loop_(loop), collect_(std::move(collect)) {}

  std::vector<prometheus::MetricFamily> Collect() const override {
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
  void Answer() const {
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
  mutable std::mutex mutex_;
  mutable std::condition_variable answered_;
  // Guarded by mutex_.
  mutable bool asked_ = false;
  mutable TimeUs asked_at_ = 0;
  mutable TimeUs waited_ = 0;
  mutable uint64_t answers_ = 0;
  mutable std::shared_ptr<const MetricsSnapshot> snapshot_;
  bool stopped_ = false;
};

// Connects and closes again, to wake a listener that waits for connections.
void Knock(const std::string& address) {
  std::string host;
  uint16_t port = 0;
  if (!SplitHostPort("--metrics", address, &host, &port).ok()) return;  // it was checked before
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return;
  const UniqueFd knocker(socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  (void)connect(knocker.get(), found->ai_addr, found->ai_addrlen);  // the attempt is enough
  freeaddrinfo(found);
}

}  // namespace

class MetricsServer::Impl {
 public:
  Impl(const std::string& address, EventLoop* loop, Collect collect)
      : address_(address), source_(std::make_shared<Source>(loop, std::move(collect))) {
    exposer_.emplace(std::vector<std::string>{"listening_ports", address, "num_threads", kThreads,
                                              "request_timeout_ms", kRequestTimeoutMs});
    exposer_->RegisterCollectable(source_);
  }
  ~Impl() {
    source_->Stop();
    std::atomic<bool> ended{false};
    std::thread knocking([&] {
      while (!ended) {
        Knock(address_);
        std::this_thread::sleep_for(kKnockEvery);
      }
    });
    exposer_.reset();
    ended = true;
    knocking.join();
  }

 private:
  const std::string address_;
  const std::shared_ptr<Source> source_;
  std::optional<prometheus::Exposer> exposer_;
};

Result<std::unique_ptr<MetricsServer>> MetricsServer::Start(const std::string& address, EventLoop* loop,
                                                            Collect collect) {
  try {
    return std::unique_ptr<MetricsServer>(
        new MetricsServer(std::make_unique<Impl>(address, loop, std::move(collect))));
  } catch (const std::exception& error) {
    return Error(
        Code::kIo,
        "--metrics %s: cannot listen there (%s): the port is taken, or the address is not this machine's",
        address.c_str(), error.what());
  }
}

MetricsServer::MetricsServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MetricsServer::~MetricsServer() = default;

}  // namespace ropeteam

// SPDX-License-Identifier: Apache-2.0

#include "bench/bare_fi.h"

#include <algorithm>

#ifdef ROPETEAM_HAVE_OFI

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "transport/ofi/ofi_transport.h"

extern char** environ;

namespace ropeteam::bench {
namespace {

constexpr uint64_t kKey = 1;          // of the target's memory, if the provider lets us choose keys
constexpr double kStuckSeconds = 30;  // a pass that moves nothing for this long has failed
// The target polls its completion queue this often between two looks at its commands.
constexpr uint32_t kPollsPerCommandLook = 256;
constexpr size_t kNameBytesMax = 256;
constexpr size_t kHugePage = 2 << 20;

// The target's address and memory, as it sends them.
struct Greeting {
  uint64_t address = 0;
  uint64_t key = 0;
  uint64_t name_length = 0;
  char name[kNameBytesMax] = {};
};

double Seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

struct Closer {
  template <typename T>
  void operator()(T* object) const {
    fi_close(&object->fid);
  }
  void operator()(fi_info* info) const { fi_freeinfo(info); }
};
template <typename T>
using Owned = std::unique_ptr<T, Closer>;

// One process's side: an endpoint and touched memory.
class End {
 public:
  ~End() {
    endpoint_.reset();
    memory_region_.reset();
    if (memory_ != nullptr) munmap(memory_, mapped_);
  }

  Status Open(const BareFiOptions& options) {
    ROPETEAM_RETURN_IF_ERROR(ChooseInfo(options));
    ROPETEAM_RETURN_IF_ERROR(Make("fi_fabric", &fabric_, [&](fid_fabric** out) {
      return fi_fabric(info_->fabric_attr, out, nullptr);
    }));
    ROPETEAM_RETURN_IF_ERROR(Make("fi_domain", &domain_, [&](fid_domain** out) {
      return fi_domain(fabric_.get(), info_.get(), out, nullptr);
    }));
    fi_av_attr av{};
    av.type = FI_AV_TABLE;
    ROPETEAM_RETURN_IF_ERROR(Make("fi_av_open", &addresses_, [&](fid_av** out) {
      return fi_av_open(domain_.get(), &av, out, nullptr);
    }));
    fi_cq_attr cq{};
    cq.format = FI_CQ_FORMAT_CONTEXT;
    cq.wait_obj = FI_WAIT_NONE;
    cq.size = std::max<size_t>(options.outstanding, 64);
    ROPETEAM_RETURN_IF_ERROR(Make("fi_cq_open", &completions_, [&](fid_cq** out) {
      return fi_cq_open(domain_.get(), &cq, out, nullptr);
    }));
    ROPETEAM_RETURN_IF_ERROR(Make("fi_endpoint", &endpoint_, [&](fid_ep** out) {
      return fi_endpoint(domain_.get(), info_.get(), out, nullptr);
    }));
    int result = fi_ep_bind(endpoint_.get(), &addresses_->fid, 0);
    if (result == 0) result = fi_ep_bind(endpoint_.get(), &completions_->fid, FI_TRANSMIT | FI_RECV);
    if (result == 0) result = fi_enable(endpoint_.get());
    if (result != 0) return Error(Code::kIo, "fi_enable: %s", fi_strerror(-result));
    return MapMemory(options.bytes);
  }

  Status Greet(Greeting* greeting) {
    size_t length = sizeof greeting->name;
    const int result = fi_getname(&endpoint_->fid, greeting->name, &length);
    if (result != 0) return Error(Code::kIo, "fi_getname: %s", fi_strerror(-result));
    greeting->name_length = length;
    greeting->key = fi_mr_key(memory_region_.get());
    greeting->address =
        (info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0 ? reinterpret_cast<uintptr_t>(memory_) : 0;
    return OkStatus();
  }

  Status Meet(const Greeting& greeting) {
    greeting_ = greeting;
    if (fi_av_insert(addresses_.get(), greeting.name, 1, &peer_, 0, nullptr) != 1)
      return Error(Code::kIo, "fi_av_insert refuses the target's address");
    return OkStatus();
  }

  ssize_t Post(bool get, uint64_t offset, uint64_t length, uint64_t flags, fi_context2* context) {
    iovec local{static_cast<char*>(memory_) + offset, length};
    void* descriptor = fi_mr_desc(memory_region_.get());
    fi_rma_iov remote{greeting_.address + offset, length, greeting_.key};
    fi_msg_rma message{};
    message.msg_iov = &local;
    message.desc = &descriptor;
    message.iov_count = 1;
    message.addr = peer_;
    message.rma_iov = &remote;
    message.rma_iov_count = 1;
    message.context = context;
    return get ? fi_readmsg(endpoint_.get(), &message, flags) : fi_writemsg(endpoint_.get(), &message, flags);
  }

  // The number of operations completed since the last call; an error ends the loop.
  Result<uint64_t> Completed() {
    fi_cq_entry entries[64];
    const ssize_t count = fi_cq_read(completions_.get(), entries, 64);
    if (count >= 0) return static_cast<uint64_t>(count);
    if (count == -FI_EAGAIN) return uint64_t{0};
    fi_cq_err_entry error{};
    if (count == -FI_EAVAIL) fi_cq_readerr(completions_.get(), &error, 0);
    return Error(Code::kIo, "an operation failed: %s",
                 fi_strerror(error.err != 0 ? error.err : static_cast<int>(-count)));
  }

 private:
  template <typename T, typename F>
  Status Make(const char* what, Owned<T>* owned, F make) {
    T* made = nullptr;
    const int result = make(&made);
    if (result != 0) return Error(Code::kIo, "%s: %s", what, fi_strerror(-result));
    owned->reset(made);
    return OkStatus();
  }

  Status ChooseInfo(const BareFiOptions& options) {
    Owned<fi_info> hints(fi_allocinfo());
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;  // the fastest: this loop has one thread
    hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    hints->fabric_attr->prov_name = strdup(options.provider.c_str());
    fi_info* any = nullptr;
    if (fi_getinfo(FI_VERSION(1, 15), nullptr, nullptr, 0, hints.get(), &any) != 0) any = nullptr;
    const Owned<fi_info> seen(any);
    const uint32_t format = any == nullptr ? static_cast<uint32_t>(FI_SOCKADDR_IN) : any->addr_format;
    if (format == FI_SOCKADDR || format == FI_SOCKADDR_IN || format == FI_SOCKADDR_IN6)
      ROPETEAM_RETURN_IF_ERROR(HintAddress(options, hints.get()));
    else if (!options.device.empty())
      hints->domain_attr->name = strdup(options.device.c_str());
    fi_info* info = nullptr;
    const int result = fi_getinfo(FI_VERSION(1, 15), nullptr, nullptr, 0, hints.get(), &info);
    if (result != 0)
      return Error(Code::kUnsupported, "provider \"%s\" at %s: %s", options.provider.c_str(),
                   options.remote.here.c_str(), fi_strerror(-result));
    info_.reset(info);
    return OkStatus();
  }

  static Status HintAddress(const BareFiOptions& options, fi_info* hints) {
    auto* address = static_cast<sockaddr_in*>(std::calloc(1, sizeof(sockaddr_in)));
    hints->addr_format = FI_SOCKADDR_IN;
    hints->src_addr = address;  // freed with the hints
    hints->src_addrlen = sizeof *address;
    address->sin_family = AF_INET;
    if (inet_pton(AF_INET, options.remote.here.c_str(), &address->sin_addr) != 1)
      return Error(Code::kInvalidArgument, "\"%s\" is no numeric IPv4 address", options.remote.here.c_str());
    return OkStatus();
  }

  Status MapMemory(uint64_t bytes) {
    mapped_ = (bytes + kHugePage) / kHugePage * kHugePage;
    void* mapped = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED)
      return ErrnoError(errno, "mmap of %llu bytes", static_cast<unsigned long long>(mapped_));
    memory_ = mapped;
    (void)madvise(memory_, mapped_, MADV_HUGEPAGE);  // a failure is harmless: pages are small then
    std::memset(memory_, 0x5a, mapped_);
    return Make("fi_mr_reg", &memory_region_, [&](fid_mr** out) {
      return fi_mr_reg(domain_.get(), memory_, mapped_, FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE,
                       0, kKey, 0, out, nullptr);
    });
  }

  Owned<fi_info> info_;
  Owned<fid_fabric> fabric_;
  Owned<fid_domain> domain_;
  Owned<fid_av> addresses_;
  Owned<fid_cq> completions_;
  void* memory_ = nullptr;
  size_t mapped_ = 0;
  Owned<fid_mr> memory_region_;
  Owned<fid_ep> endpoint_;
  fi_addr_t peer_ = FI_ADDR_UNSPEC;
  Greeting greeting_;
};

bool WriteAll(int fd, const void* data, size_t length) {
  const char* at = static_cast<const char*>(data);
  while (length > 0) {
    const ssize_t written = write(fd, at, length);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    at += written, length -= static_cast<size_t>(written);
  }
  return true;
}

bool ReadAll(int fd, void* data, size_t length) {
  char* at = static_cast<char*>(data);
  while (length > 0) {
    const ssize_t got = read(fd, at, length);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got, length -= static_cast<size_t>(got);
  }
  return true;
}

}  // namespace

struct BareFiLoop::State {
  BareFiOptions options;
  End end;
  pid_t target = -1;
  int commands = -1, answers = -1;
  std::vector<fi_context2> contexts;

  ~State() {
    if (commands >= 0) close(commands);  // the target ends at the end of its input
    if (answers >= 0) close(answers);
    if (target > 0) waitpid(target, nullptr, 0);
  }

  Status Spawn() {
    int to_target[2], from_target[2];
    if (pipe2(to_target, O_CLOEXEC) != 0) return ErrnoError(errno, "pipe");
    commands = to_target[1];
    if (pipe2(from_target, O_CLOEXEC) != 0) {
      close(to_target[0]);
      return ErrnoError(errno, "pipe");
    }
    answers = from_target[0];
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, to_target[0], 0);
    posix_spawn_file_actions_adddup2(&actions, from_target[1], 1);
    std::vector<std::string> words = OwnCommandOf(
        options.remote, {kBareFiTargetCommand, options.provider, options.remote.address,
                         std::to_string(options.bytes), ParentWord(options.remote), options.device});
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    const int error = posix_spawnp(&target, argv[0], &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    close(to_target[0]);
    close(from_target[1]);
    if (error != 0) {
      target = -1;
      return ErrnoError(error, "start %s", argv[0]);
    }
    return OkStatus();
  }

  // 'g': poll until the next command; 's': sleep. The target answers with the same letter.
  Status Tell(char command) {
    char answer = 0;
    if (!WriteAll(commands, &command, 1) || !ReadAll(answers, &answer, 1) || answer != command)
      return Error(Code::kIo, "the target process of the bare loop is gone");
    return OkStatus();
  }

  Status Run() {
    const uint64_t flags =
        FI_COMPLETION | (options.delivery_complete && !options.get ? FI_DELIVERY_COMPLETE : 0);
    const uint64_t operations = (options.bytes + options.operation_bytes - 1) / options.operation_bytes;
    uint64_t posted = 0, completed = 0;
    double moved = Seconds();
    while (completed < operations) {
      while (posted < operations && posted - completed < options.outstanding) {
        const uint64_t offset = posted * options.operation_bytes;
        const uint64_t length = std::min(options.operation_bytes, options.bytes - offset);
        const ssize_t result =
            end.Post(options.get, offset, length, flags, &contexts[posted % options.outstanding]);
        if (result == -FI_EAGAIN) break;
        if (result != 0)
          return Error(Code::kIo, "posting failed: %s", fi_strerror(static_cast<int>(-result)));
        posted++;
      }
      Result<uint64_t> count = end.Completed();
      if (!count.ok()) return count.status();
      completed += *count;
      if (*count > 0) {
        moved = 0;
      } else if (moved == 0) {
        moved = Seconds();
      } else if ((posted & 15) == 0 && Seconds() - moved > kStuckSeconds) {
        return Error(Code::kIo, "the bare loop moved nothing for %.0f s", kStuckSeconds);
      }
    }
    return OkStatus();
  }

  // Reads one byte after the writes: on these connections the target handles the read after them.
  Status Fence() {
    while (true) {
      const ssize_t result = end.Post(/*get=*/true, 0, 1, FI_COMPLETION, &contexts[0]);
      Result<uint64_t> count = end.Completed();
      if (!count.ok()) return count.status();
      uint64_t completed = *count;
      if (result == -FI_EAGAIN) continue;
      if (result != 0) return Error(Code::kIo, "posting failed: %s", fi_strerror(static_cast<int>(-result)));
      while (completed == 0) {
        count = end.Completed();
        if (!count.ok()) return count.status();
        completed = *count;
      }
      return OkStatus();
    }
  }
};

BareFiLoop::BareFiLoop() = default;
BareFiLoop::~BareFiLoop() = default;

Status BareFiLoop::Start(const BareFiOptions& options) {
  state_.reset();
  if (options.bytes == 0 || options.operation_bytes == 0 || options.outstanding == 0)
    return Error(Code::kInvalidArgument, "the bare loop wants bytes, operation bytes and outstanding");
  // libfabric reads these variables once, and the process may also use Ropeteam's own transport.
  SetOfiEnvironment();
  auto state = std::make_unique<State>();
  state->options = options;
  state->contexts.resize(options.outstanding);
  ROPETEAM_RETURN_IF_ERROR(state->Spawn());
  ROPETEAM_RETURN_IF_ERROR(state->end.Open(options));
  Greeting greeting;
  if (!ReadAll(state->answers, &greeting, sizeof greeting))
    return Error(Code::kIo, "the target process of the bare loop did not start");
  ROPETEAM_RETURN_IF_ERROR(state->end.Meet(greeting));
  state_ = std::move(state);
  return OkStatus();
}

Result<double> BareFiLoop::Pass() {
  if (!state_) return Error(Code::kInvalidArgument, "the bare loop is not started");
  ROPETEAM_RETURN_IF_ERROR(state_->Tell('g'));
  const double start = Seconds();
  Status status = state_->Run();
  if (status.ok() && !state_->options.get && !state_->options.delivery_complete) status = state_->Fence();
  const double seconds = Seconds() - start;
  ROPETEAM_RETURN_IF_ERROR(status);
  ROPETEAM_RETURN_IF_ERROR(state_->Tell('s'));
  return static_cast<double>(state_->options.bytes) / seconds;
}

void BareFiLoop::Stop() { state_.reset(); }

int BareFiTargetMain(int argc, char** argv) {
  if (argc != 5) return 2;
  if (!FollowParent(argv[3])) return 3;
  SetOfiEnvironment();
  BareFiOptions options;
  options.provider = argv[0];
  options.remote.here = argv[1];
  options.bytes = std::strtoull(argv[2], nullptr, 10);
  options.device = argv[4];
  End end;
  Greeting greeting;
  Status status = end.Open(options);
  if (status.ok()) status = end.Greet(&greeting);
  if (!status.ok()) {
    fprintf(stderr, "bare loop target: %s\n", status.ToString().c_str());
    return 1;
  }
  if (!WriteAll(1, &greeting, sizeof greeting)) return 1;
  char command = 's';
  while (true) {
    // The target sleeps here until the next command or the end of its input.
    if (!ReadAll(0, &command, 1)) return 0;
    if (!WriteAll(1, &command, 1)) return 0;
    pollfd commands{0, POLLIN, 0};
    while (command == 'g') {
      for (uint32_t i = 0; i < kPollsPerCommandLook; i++)
        if (!end.Completed().ok()) break;  // the initiator reports a broken connection
      if (poll(&commands, 1, 0) > 0) break;
    }
  }
}

}  // namespace ropeteam::bench

#else  // ROPETEAM_HAVE_OFI

namespace ropeteam::bench {

struct BareFiLoop::State {};
BareFiLoop::BareFiLoop() = default;
BareFiLoop::~BareFiLoop() = default;
Status BareFiLoop::Start(const BareFiOptions&) {
  return Error(Code::kUnsupported, "this build is without libfabric");
}
Result<double> BareFiLoop::Pass() { return Error(Code::kInvalidArgument, "the bare loop is not started"); }
void BareFiLoop::Stop() {}
int BareFiTargetMain(int, char**) { return 1; }

}  // namespace ropeteam::bench

#endif  // ROPETEAM_HAVE_OFI

namespace ropeteam::bench {

Result<BareFiResult> RunBareFi(const BareFiOptions& options) {
  BareFiLoop loop;
  ROPETEAM_RETURN_IF_ERROR(loop.Start(options));
  std::vector<double> rates;
  for (uint32_t pass = 0; pass <= options.passes; pass++) {
    Result<double> rate = loop.Pass();
    if (!rate.ok()) return rate.status();
    if (pass > 0 || options.passes == 0) rates.push_back(*rate);
  }
  std::sort(rates.begin(), rates.end());
  return BareFiResult{rates[rates.size() / 2], rates.front(), rates.back(),
                      static_cast<uint32_t>(rates.size())};
}

}  // namespace ropeteam::bench

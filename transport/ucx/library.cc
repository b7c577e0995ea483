// SPDX-License-Identifier: Apache-2.0

#include "transport/ucx/library.h"

#include <stdarg.h>
#include <stdlib.h>
#include <unistd.h>

#include <ucs/config/global_opts.h>
#include <ucs/debug/debug.h>
#include <ucs/debug/log_def.h>

#include <algorithm>
#include <fstream>
#include <mutex>
#include <set>
#include <sstream>
#include <string_view>

#include "core/base/log.h"

namespace ropeteam::ucx {
namespace {

constexpr size_t kMessageBytesMax = 1024;
// A context is being opened. UCX's warnings are then only for debugging, because our own message says the
// same.
thread_local bool opening = false;

LogLevel LevelOf(ucs_log_level_t level) {
  switch (level) {
    case UCS_LOG_LEVEL_FATAL:
    case UCS_LOG_LEVEL_ERROR:
      return LogLevel::kError;
    case UCS_LOG_LEVEL_WARN:
      return LogLevel::kWarning;
    case UCS_LOG_LEVEL_DIAG:
    case UCS_LOG_LEVEL_INFO:
      return LogLevel::kDebug;
    default:
      return LogLevel::kTrace;
  }
}

ucs_log_func_rc_t TakeMessage(const char* /*file*/, unsigned /*line*/, const char* /*function*/,
                              ucs_log_level_t level, const ucs_log_component_config_t* /*component*/,
                              const char* format, va_list arguments) {
  char text[kMessageBytesMax];
  vsnprintf(text, sizeof text, format, arguments);
  // The setting is for transports that this machine lacks, such as the retries of network cards.
  const bool unused = std::string_view(text).starts_with("invalid configuration");
  // The peer died or deregistered its memory. Checking the peer shows which.
  const bool refused = std::string_view(text).starts_with("process_vm_");
  ROPETEAM_LOG(unused || refused || opening ? LogLevel::kDebug : LevelOf(level), "ucx: %s", text);
  return UCS_LOG_FUNC_RC_STOP;
}

// Once per process. UCX's constructor installs signal handlers that print a backtrace to standard error. A
// library must leave the handling of crashes to the daemon.
void Tame() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (getenv("UCX_LOG_LEVEL") == nullptr && getenv("UCX_LOG_FILE") == nullptr)
      ucs_log_push_handler(TakeMessage);
    if (getenv("UCX_HANDLE_ERRORS") != nullptr) return;  // somebody is debugging
    for (unsigned i = 0; i < ucs_global_opts.error_signals.count; i++)
      ucs_debug_disable_signal(ucs_global_opts.error_signals.signals[i]);
  });
}

struct ConfigCloser {
  void operator()(ucp_config_t* config) const { ucp_config_release(config); }
};
using Config = std::unique_ptr<ucp_config_t, ConfigCloser>;

std::string Join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ",") + word;
  return text;
}

Status Set(ucp_config_t* config, const char* name, const std::string& value) {
  const ucs_status_t status = ucp_config_modify(config, name, value.c_str());
  if (status == UCS_OK) return OkStatus();
  return Error(Code::kInvalidArgument, "UCX_%s \"%.200s\": %s", name, value.c_str(),
               ucs_status_string(status));
}

// Settings that apply unless the environment has others. UCX's programming interface names the settings of
// its transports by family: MM_… for UCX_POSIX_… and UCX_SYSV_…, RC_… for UCX_RC_VERBS_… and similar ones.
struct Default {
  const char* name;
  const char* value;
};
constexpr Default kDefaults[] = {
    // A host that vanishes is noticed after a few seconds instead of twenty.
    {"KEEPALIVE_INTERVAL", "2s"},
    // Some devices take 7 as infinite.
    {"RC_RETRY_COUNT", "6"},
    // An acknowledgement that takes longer counts as lost. With UCX's default of 1 s it takes 7 s to notice a
    // death.
    {"RC_TIMEOUT", "50ms"},
};
// Whether any UCX_… variable sets this, for any transport.
bool InEnvironment(const std::string& name) {
  const bool family = name.starts_with("RC_");
  const std::string suffix = "_" + (family ? name.substr(3) : name) + "=";
  for (char** entry = environ; *entry != nullptr; entry++) {
    const std::string_view text(*entry);
    const size_t equals = text.find('=');
    if (text.starts_with("UCX_") && equals != std::string_view::npos &&
        text.substr(0, equals + 1).ends_with(suffix))
      return true;
  }
  return false;
}

Result<Config> MakeConfig(const UcxConfig& config) {
  ucp_config_t* read = nullptr;
  const ucs_status_t status = ucp_config_read(nullptr, nullptr, &read);
  if (status != UCS_OK)
    return Error(Code::kInvalidArgument, "the UCX_* variables of the environment: %s",
                 ucs_status_string(status));
  Config made(read);
  for (const Default& entry : kDefaults)
    if (!InEnvironment(entry.name)) ROPETEAM_RETURN_IF_ERROR(Set(read, entry.name, entry.value));
  // UCX itself closes an endpoint whose datagrams stay unanswered for this long, also while it is being
  // connected.
  if (!ClosesInWireup()) ROPETEAM_RETURN_IF_ERROR(Set(read, "UD_TIMEOUT", "1000000000s"));
  if (!config.transports.empty()) ROPETEAM_RETURN_IF_ERROR(Set(read, "TLS", config.transports));
  if (!config.devices.empty()) ROPETEAM_RETURN_IF_ERROR(Set(read, "NET_DEVICES", Join(config.devices)));
  if (config.gid_index >= 0)
    ROPETEAM_RETURN_IF_ERROR(Set(read, "GID_INDEX", std::to_string(config.gid_index)));
  return made;
}

Result<Context> InitContext(const UcxConfig& config) {
  Result<Config> made = MakeConfig(config);
  if (!made.ok()) return made.status();
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP;
  params.mt_workers_shared = 1;  // regions are registered from any thread
  params.name = "ropeteam";
  ucp_context_h context = nullptr;
  opening = true;
  const ucs_status_t status = ucp_init(&params, made->get(), &context);
  opening = false;
  if (status != UCS_OK)
    return Error(Code::kUnsupported, "ucp_init: %s (%d)", ucs_status_string(status),
                 static_cast<int>(status));
  return Context(context);
}

// What `print` writes to a stream.
std::string Printed(const std::function<void(FILE*)>& print) {
  char* text = nullptr;
  size_t length = 0;
  FILE* stream = open_memstream(&text, &length);
  if (stream == nullptr) return {};
  print(stream);
  fclose(stream);
  std::string result(text, length);
  free(text);
  return result;
}

// "rc_mlx5/mlx5_0:1, tcp/eth0": all that UCX has here, without the restrictions of UcxConfig.
std::string ResourcesThere() {
  Result<Context> all = InitContext(UcxConfig{});
  if (!all.ok()) return "none";
  std::string text;
  for (const Resource& resource : ResourcesOf(all->get()))
    text += (text.empty() ? "" : ", ") + resource.transport + "/" + resource.device;
  return text.empty() ? "none" : text;
}

uint64_t NumberIn(const std::string& path) {
  std::ifstream file(path);
  int64_t value = 0;
  if (!(file >> value) || value < 0) return 0;
  return static_cast<uint64_t>(value);
}

}  // namespace

bool Resource::network() const {
  static const std::set<std::string> kLocal = {"self", "posix", "sysv", "cma", "knem", "xpmem"};
  return !kLocal.contains(transport) && !transport.starts_with("cuda") && !transport.starts_with("gdr") &&
         !transport.starts_with("rocm") && !transport.starts_with("ze");
}

bool Resource::rdma() const {
  return transport.starts_with("rc") || transport.starts_with("dc") || transport.starts_with("gga");
}

Result<Context> OpenContext(const UcxConfig& config) {
  Tame();
  Result<Context> context = InitContext(config);
  if (!context.ok()) {
    if (context.status().code() != Code::kUnsupported) return context.status();
    return Error(config.devices.empty() ? Code::kUnsupported : Code::kInvalidArgument,
                 "ucx has no transport \"%.200s\" on device \"%.200s\"; there are: %s",
                 config.transports.empty() ? "any" : config.transports.c_str(),
                 config.devices.empty() ? "any" : Join(config.devices).c_str(), ResourcesThere().c_str());
  }
  // If one transport or device of several does not exist, UCX only warns.
  const std::vector<Resource> resources = ResourcesOf(context->get());
  if (std::none_of(resources.begin(), resources.end(),
                   [](const Resource& resource) { return resource.transport != "self"; }))
    return Error(Code::kUnsupported,
                 "none of ucx's transports \"%.200s\" reaches another process; there are: %s",
                 config.transports.c_str(), ResourcesThere().c_str());
  for (const std::string& device : config.devices) {
    const bool there = std::any_of(resources.begin(), resources.end(),
                                   [&device](const Resource& resource) { return resource.device == device; });
    if (!there)
      return Error(Code::kInvalidArgument,
                   "ucx has no device \"%.80s\" for transports \"%.200s\"; there are: %s", device.c_str(),
                   config.transports.empty() ? "any" : config.transports.c_str(), ResourcesThere().c_str());
  }
  return context;
}

std::vector<Resource> ResourcesOf(ucp_context_h context) {
  std::vector<Resource> resources;
  std::istringstream lines(Printed([context](FILE* stream) { ucp_context_print_info(context, stream); }));
  // "#      resource 1  :  md 1  dev 1  flags -- tcp/lo". UCP has no call that returns this.
  for (std::string line; std::getline(lines, line);) {
    const size_t slash = line.rfind('/'), start = line.rfind(' ', slash);
    if (line.find(" resource ") == std::string::npos || slash == std::string::npos) continue;
    Resource resource{line.substr(start + 1, slash - start - 1), line.substr(slash + 1)};
    resource.device.resize(resource.device.find_last_not_of(" \t") + 1);
    resources.push_back(std::move(resource));
  }
  return resources;
}

std::string LanesOf(ucp_ep_h endpoint) {
  std::istringstream lines(Printed([endpoint](FILE* stream) { ucp_ep_print_info(endpoint, stream); }));
  std::string text;
  // "#                 lane[0]:  1:posix/memory.0 md[1]  -> md[1]/posix/sysdev[255] am am_bw#0 keepalive"
  for (std::string line; std::getline(lines, line);) {
    const size_t lane = line.find("lane["), colon = line.find("]:", lane);
    if (lane == std::string::npos || colon == std::string::npos) continue;
    std::istringstream words(line.substr(colon + 2));
    std::string word;
    words >> word;
    text += (text.empty() ? "" : ", ") + word.substr(word.find(':') + 1);
  }
  return text.empty() ? "none" : text;
}

uint64_t LinkMbps(const std::string& device) {
  if (const uint64_t mbps = NumberIn("/sys/class/net/" + device + "/speed"); mbps != 0) return mbps;
  const size_t colon = device.find(':');
  if (colon == std::string::npos) return 0;
  // "100 Gb/sec (4X EDR)"
  constexpr uint64_t kMbpsPerGbps = 1000;
  return kMbpsPerGbps * NumberIn("/sys/class/infiniband/" + device.substr(0, colon) + "/ports/" +
                                 device.substr(colon + 1) + "/rate");
}

int NumaNode(const std::string& device) {
  const std::string name = device.substr(0, device.find(':'));
  for (const char* root : {"/sys/class/infiniband/", "/sys/class/net/"}) {
    std::ifstream file(root + name + "/device/numa_node");
    int node = -1;
    if (file >> node) return node;
  }
  return -1;
}

std::string Version() { return ucp_get_version_string(); }

bool ClosesInWireup() {
  unsigned major = 0, minor = 0, release = 0;
  ucp_get_version(&major, &minor, &release);
  return major > 1 || (major == 1 && minor >= 14);
}

}  // namespace ropeteam::ucx

// SPDX-License-Identifier: Apache-2.0

#include "transport/ucx/cma.h"

#include <ucs/async/async_fwd.h>

#include <cstring>

#include "core/base/log.h"

namespace ropeteam::ucx {
namespace {

constexpr const char* kName = "cma";
constexpr const char* kDevice = "memory";

// The memory domain of the component "cma"; null if UCX has none here.
uct_md_h OpenDomain() {
  uct_component_h* components = nullptr;
  unsigned count = 0;
  if (uct_query_components(&components, &count) != UCS_OK) return nullptr;
  uct_md_h domain = nullptr;
  for (unsigned i = 0; i < count && domain == nullptr; i++) {
    uct_component_attr_t attributes{};
    attributes.field_mask = UCT_COMPONENT_ATTR_FIELD_NAME | UCT_COMPONENT_ATTR_FIELD_MD_RESOURCE_COUNT;
    if (uct_component_query(components[i], &attributes) != UCS_OK ||
        std::strcmp(attributes.name, kName) != 0 || attributes.md_resource_count == 0)
      continue;
    uct_md_config_t* config = nullptr;
    if (uct_md_config_read(components[i], nullptr, nullptr, &config) != UCS_OK) continue;
    if (uct_md_open(components[i], kName, config, &domain) != UCS_OK) domain = nullptr;
    uct_config_release(config);
  }
  uct_release_component_list(components);
  return domain;
}

}  // namespace

std::unique_ptr<Cma> Cma::Open() {
  std::unique_ptr<Cma> cma(new Cma);
  if (!cma->Start()) return nullptr;
  return cma;
}

bool Cma::Start() {
  domain_ = OpenDomain();
  if (domain_ == nullptr) return false;
  if (ucs_async_context_create(UCS_ASYNC_MODE_THREAD_SPINLOCK, &async_) != UCS_OK) return false;
  if (uct_worker_create(async_, UCS_THREAD_MODE_SERIALIZED, &worker_) != UCS_OK) return false;
  uct_iface_config_t* config = nullptr;
  if (uct_md_iface_config_read(domain_, kName, nullptr, nullptr, &config) != UCS_OK) return false;
  uct_iface_params_t params{};
  params.field_mask = UCT_IFACE_PARAM_FIELD_OPEN_MODE | UCT_IFACE_PARAM_FIELD_DEVICE;
  params.open_mode = UCT_IFACE_OPEN_MODE_DEVICE;
  params.mode.device.tl_name = kName;
  params.mode.device.dev_name = kDevice;
  const ucs_status_t opened = uct_iface_open(domain_, worker_, &params, config, &interface_);
  uct_config_release(config);
  if (opened != UCS_OK) {
    LOG_DEBUG("ucx: cma: %s", ucs_status_string(opened));
    return false;
  }
  uct_iface_attr_t attributes{};
  if (uct_iface_query(interface_, &attributes) != UCS_OK) return false;
  device_address_bytes_ = attributes.device_addr_len;
  address_.assign(attributes.device_addr_len + attributes.iface_addr_len, '\0');
  auto* device = reinterpret_cast<uct_device_addr_t*>(address_.data());
  auto* interface = reinterpret_cast<uct_iface_addr_t*>(address_.data() + device_address_bytes_);
  if (uct_iface_get_device_address(interface_, device) != UCS_OK ||
      uct_iface_get_address(interface_, interface) != UCS_OK)
    return false;
  uct_iface_progress_enable(interface_, UCT_PROGRESS_SEND | UCT_PROGRESS_RECV);
  return true;
}

Cma::~Cma() {
  if (interface_ != nullptr) uct_iface_close(interface_);
  if (worker_ != nullptr) uct_worker_destroy(worker_);
  if (async_ != nullptr) ucs_async_context_destroy(async_);
  if (domain_ != nullptr) uct_md_close(domain_);
}

CmaEndpoint Cma::Connect(const std::string& address) {
  if (address.size() != address_.size()) return nullptr;
  const auto* device = reinterpret_cast<const uct_device_addr_t*>(address.data());
  const auto* interface = reinterpret_cast<const uct_iface_addr_t*>(address.data() + device_address_bytes_);
  if (uct_iface_is_reachable(interface_, device, interface) == 0) return nullptr;
  uct_ep_params_t params{};
  params.field_mask = UCT_EP_PARAM_FIELD_IFACE | UCT_EP_PARAM_FIELD_DEV_ADDR | UCT_EP_PARAM_FIELD_IFACE_ADDR;
  params.iface = interface_;
  params.dev_addr = device;
  params.iface_addr = interface;
  uct_ep_h endpoint = nullptr;
  if (uct_ep_create(&params, &endpoint) != UCS_OK) return nullptr;
  return CmaEndpoint(endpoint);
}

ucs_status_t Cma::Put(uct_ep_h endpoint, void* local, uint64_t length, uint64_t remote,
                      uct_completion_t* done) {
  const uct_iov_t piece{local, length, UCT_MEM_HANDLE_NULL, 0, 1};
  return uct_ep_put_zcopy(endpoint, &piece, 1, remote, UCT_INVALID_RKEY, done);
}

ucs_status_t Cma::Get(uct_ep_h endpoint, void* local, uint64_t length, uint64_t remote,
                      uct_completion_t* done) {
  const uct_iov_t piece{local, length, UCT_MEM_HANDLE_NULL, 0, 1};
  return uct_ep_get_zcopy(endpoint, &piece, 1, remote, UCT_INVALID_RKEY, done);
}

}  // namespace ropeteam::ucx

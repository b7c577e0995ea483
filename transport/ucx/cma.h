// SPDX-License-Identifier: Apache-2.0
//
// UCX's cross-memory attach: one system call writes from this process's memory to that of another process of the same
// host, which takes no part. UCP 1.13 has it but does not use it for puts and gets (UCP does from 1.15 on). It
// uses a shared queue that the target empties, at a third of the speed, and cannot cancel operations if the target
// hangs. So a peer that cma reaches is written to here, by UCX's lower interface, and never over UCP.
//
// Nothing checks a key: bytes land wherever the target has memory mapped, or the operation fails. All calls
// [loop], but for Address().

#ifndef ROPETEAM_TRANSPORT_UCX_CMA_H_
#define ROPETEAM_TRANSPORT_UCX_CMA_H_

#include <uct/api/uct.h>

#include <cstdint>
#include <memory>
#include <string>

namespace ropeteam::ucx {

struct EndpointDestroyer {
  void operator()(uct_ep_h endpoint) const { uct_ep_destroy(endpoint); }
};
using CmaEndpoint = std::unique_ptr<uct_ep, EndpointDestroyer>;

class Cma {
 public:
  // Null where the machine does not have it or the kernel does not allow it.
  static std::unique_ptr<Cma> Open();
  ~Cma();
  Cma(const Cma&) = delete;
  Cma& operator=(const Cma&) = delete;

  // For Connect() in other processes; constant.
  const std::string& Address() const { return address_; }
  // Null when that process cannot be reached this way: another host, another process-id namespace.
  CmaEndpoint Connect(const std::string& address);

  // As UCP's calls: UCS_OK (done), UCS_INPROGRESS (`done` is called from Progress() when it is), or an error.
  // `done` must have count 1 and status UCS_OK, and stay until then.
  ucs_status_t Put(uct_ep_h endpoint, void* local, uint64_t length, uint64_t remote, uct_completion_t* done);
  ucs_status_t Get(uct_ep_h endpoint, void* local, uint64_t length, uint64_t remote, uct_completion_t* done);
  // How much was done. There is never anything to wait for: call it while anything is in progress.
  unsigned Progress() { return uct_worker_progress(worker_); }

 private:
  Cma() = default;
  bool Start();

  ucs_async_context_t* async_ = nullptr;
  uct_worker_h worker_ = nullptr;
  uct_md_h domain_ = nullptr;
  uct_iface_h interface_ = nullptr;
  size_t device_address_bytes_ = 0;
  std::string address_;  // of the device, then of the interface
};

}  // namespace ropeteam::ucx

#endif  // ROPETEAM_TRANSPORT_UCX_CMA_H_

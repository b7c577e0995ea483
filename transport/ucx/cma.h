// SPDX-License-Identifier: Apache-2.0
//
// UCX's cross-memory attach: one system call copies between the memory of this process and that of another
// process of the same host. The other process takes no part. UCP uses it for puts and gets only from 1.15 on.
// UCP 1.13 uses a shared queue that the target empties. That has a third of the speed, and operations cannot
// be cancelled if the target hangs. So this class copies to and from every peer that cma reaches, by UCX's
// lower interface.
//
// Nothing checks a key: bytes reach any memory that the target has mapped; for other addresses the operation
// fails. All calls except Address() are [loop].

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

  // The argument of Connect() in other processes; constant.
  const std::string& Address() const { return address_; }
  // Null if that process cannot be reached this way: another host or another process-id namespace.
  CmaEndpoint Connect(const std::string& address);

  // As UCP's calls: UCS_OK (done), UCS_INPROGRESS (Progress() calls `done` later), or an error. `done` must
  // have count 1 and status UCS_OK, and must outlive the operation.
  ucs_status_t Put(uct_ep_h endpoint, void* local, uint64_t length, uint64_t remote, uct_completion_t* done);
  ucs_status_t Get(uct_ep_h endpoint, void* local, uint64_t length, uint64_t remote, uct_completion_t* done);
  // Returns how much was done. No descriptor shows that there is work: call it while anything is in progress.
  unsigned Progress() { return uct_worker_progress(worker_); }

 private:
  Cma() = default;
  bool Start();

  ucs_async_context_t* async_ = nullptr;
  uct_worker_h worker_ = nullptr;
  uct_md_h domain_ = nullptr;
  uct_iface_h interface_ = nullptr;
  size_t device_address_bytes_ = 0;
  std::string address_;  // the device's, followed by the interface's
};

}  // namespace ropeteam::ucx

#endif  // ROPETEAM_TRANSPORT_UCX_CMA_H_

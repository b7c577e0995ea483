// SPDX-License-Identifier: Apache-2.0
//
// Whether device memory can be registered with libfabric. Pure functions; dmabuf.cc also has OfiTransport's
// part.

#ifndef ROPETEAM_TRANSPORT_OFI_DMABUF_H_
#define ROPETEAM_TRANSPORT_OFI_DMABUF_H_

#include <rdma/fabric.h>

#include <cstdint>
#include <string>

namespace ropeteam::ofi {

// The first libfabric with FI_MR_DMABUF.
inline constexpr uint32_t kDmabufVersion = FI_VERSION(1, 20);

// Why a dmabuf cannot be registered, for people, with the libfabric that this was built against (`built`) and
// the one that is loaded (`found`); empty: as far as versions and provider go, it can.
//
// The memory is another process's GPU's and has no address in this one, so a provider that would touch it
// with the processor, be it to copy a few bytes, would end the process. That leaves efa, whose cards carry
// out reads and writes.
std::string WhyNoDmabuf(uint32_t built, uint32_t found, const std::string& provider);

}  // namespace ropeteam::ofi

#endif  // ROPETEAM_TRANSPORT_OFI_DMABUF_H_

// SPDX-License-Identifier: Apache-2.0

#include "transport/ofi/dmabuf.h"

#include <rdma/fi_domain.h>  // FI_MR_DMABUF, where libfabric has it
#ifdef FI_MR_DMABUF
#include <rdma/fi_ext.h>
#endif

#include "core/base/log.h"
#include "transport/ofi/internal.h"

namespace ropeteam::ofi {
namespace {

constexpr uint32_t kBuiltVersion = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION);

std::string VersionText(uint32_t version) {
  return std::to_string(FI_MAJOR(version)) + "." + std::to_string(FI_MINOR(version));
}

}  // namespace

std::string WhyNoDmabuf(uint32_t built, uint32_t found, const std::string& provider) {
  const std::string needed = ", " + VersionText(kDmabufVersion) + " needed";
  if (FI_VERSION_LT(found, kDmabufVersion)) return "libfabric " + VersionText(found) + " found" + needed;
  if (FI_VERSION_LT(built, kDmabufVersion)) return "built against libfabric " + VersionText(built) + needed;
  if (provider != "efa") return "not with provider \"" + provider + "\", only with efa";
  return "";
}

bool OfiTransport::WantsDmabuf() const {
  return WhyNoDmabuf(kBuiltVersion, fi_version(), config_.provider).empty();
}

// Called after the endpoint is open: only an open endpoint reports whether the card carries out reads and
// writes.
void OfiTransport::ProbeDmabuf() {
  no_dmabuf_ = WhyNoDmabuf(kBuiltVersion, fi_version(), info_->fabric_attr->prov_name);
  if (no_dmabuf_.empty() && (info_->caps & FI_HMEM) == 0) no_dmabuf_ = "the provider offers no FI_HMEM";
#ifdef FI_MR_DMABUF
  for (const int option : {FI_OPT_EFA_EMULATED_READ, FI_OPT_EFA_EMULATED_WRITE}) {
    if (!no_dmabuf_.empty()) break;
    bool emulated = true;
    size_t length = sizeof emulated;
    const int result = fi_getopt(&endpoint_->fid, FI_OPT_ENDPOINT, option, &emulated, &length);
    if (result != 0 || emulated) no_dmabuf_ = "the card cannot read and write by itself";
  }
#endif
  capabilities_.dmabuf = no_dmabuf_.empty();
}

Result<RegionId> OfiTransport::RegisterDmabuf(int fd, uint64_t offset, uint64_t length) {
  if (!capabilities_.dmabuf)
    return Error(Code::kUnsupported, "transport ofi cannot register a dmabuf: %s", no_dmabuf_.c_str());
  if (length == 0) return Error(Code::kInvalidArgument, "register 0 bytes of a dmabuf");
  return AddRegion(length, [&](Region* region) {
    region->exported = false;
    const Status status = MapDmabuf(region, fd, offset);
    if (!status.ok()) LOG_ERROR("transport ofi: %s", status.ToString().c_str());
    return status;
  });
}

#ifdef FI_MR_DMABUF

Status OfiTransport::MapDmabuf(Region* region, int fd, uint64_t offset) {
  fi_mr_dmabuf dmabuf{};
  dmabuf.fd = fd;
  dmabuf.offset = offset;
  dmabuf.len = region->length;
  dmabuf.base_addr = nullptr;  // byte `offset` of the dmabuf then has the address `offset`
  fi_mr_attr attributes{};
  attributes.dmabuf = &dmabuf;
  attributes.iov_count = 1;
  attributes.access = FI_READ | FI_WRITE;
  attributes.requested_key = RandomNumber();
  // The memory is given as not managed by an interface of libfabric. Otherwise libfabric would query the
  // device's driver in this process.
  attributes.iface = FI_HMEM_SYSTEM;
  fid_mr* registered = nullptr;
  const int result = fi_mr_regattr(domain_.get(), &attributes, FI_MR_DMABUF, &registered);
  if (result != 0)
    return front::RegistrationError(-result, fi_strerror(-result),
                                    std::string(info_->domain_attr->name) + " as a dmabuf", region->length);
  region->memory.reset(registered);
  region->descriptor = fi_mr_desc(registered);
  region->base = reinterpret_cast<char*>(offset);
  return OkStatus();
}

#else

Status OfiTransport::MapDmabuf(Region* /*region*/, int /*fd*/, uint64_t /*offset*/) {
  return Error(Code::kInternal, "a dmabuf without FI_MR_DMABUF");  // capabilities_.dmabuf is false
}

#endif

}  // namespace ropeteam::ofi

// SPDX-License-Identifier: Apache-2.0
//
// Chooses the addresses, listens, and registers memory.

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "core/base/log.h"
#include "transport/tcp/devices.h"
#include "transport/tcp/internal.h"

namespace ropeteam {

Result<std::unique_ptr<Transport>> CreateTcpTransport(const TcpConfig& config) {
  Result<std::unique_ptr<tcp::TcpTransport>> made = tcp::TcpTransport::Create(config);
  if (!made.ok()) {
    LOG_ERROR("transport tcp listen %s device %s: %s", config.listen_address.c_str(), config.device.c_str(),
              made.status().ToString().c_str());
    return made.status();
  }
  LOG_INFO("transport %s", (*made)->Describe().c_str());
  return std::unique_ptr<Transport>(std::move(made).value());
}

namespace tcp {
namespace {

constexpr int kBacklog = 1024;

std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> words;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

// The listen addresses of a configuration, checked against its devices.
Result<std::vector<IpAddress>> AddressesOf(const TcpConfig& config) {
  const std::vector<std::string> texts = Split(config.listen_address), devices = Split(config.device);
  std::vector<IpAddress> addresses;
  for (const std::string& text : texts) {
    Result<IpAddress> address = ParseIpAddress(text);
    if (!address.ok()) return address.status();
    addresses.push_back(*address);
  }
  for (size_t i = 0; i < devices.size(); i++) {
    Result<IpAddress> of = AddressOfInterface(devices[i]);
    if (texts.empty()) {
      if (!of.ok()) return of.status();
      addresses.push_back(*of);
      continue;
    }
    const std::string has = InterfaceOf(addresses[std::min(i, addresses.size() - 1)]);
    if (has == devices[i]) continue;
    if (!of.ok()) return of.status();
    return Error(Code::kInvalidArgument, "listen address %s is on %s, not on device \"%s\"",
                 texts[i % texts.size()].c_str(), has.empty() ? "no device here" : has.c_str(),
                 devices[i].c_str());
  }
  if (addresses.empty())
    return Error(Code::kInvalidArgument, "tcp: neither a listen address nor a device given");
  if (addresses.size() > kLanesMax || (!texts.empty() && devices.size() > texts.size()))
    return Error(Code::kInvalidArgument, "tcp: %zu listen addresses and %zu devices, limit %zu",
                 addresses.size(), devices.size(), kLanesMax);
  return addresses;
}

}  // namespace

void Fd::Reset() {
  if (fd_ < 0) return;
  const linger drop{1, 0};
  (void)setsockopt(fd_, SOL_SOCKET, SO_LINGER, &drop, sizeof drop);  // fails for what is no socket
  const sockaddr none{.sa_family = AF_UNSPEC, .sa_data = {}};
  (void)connect(fd_, &none, sizeof none);
  close(std::exchange(fd_, -1));
}

std::shared_ptr<Export> Exports::Add(uint64_t key, char* base, uint64_t length) {
  auto exported = std::make_shared<Export>();
  exported->base = base;
  exported->length = length;
  const std::lock_guard lock(mutex_);
  ROPETEAM_CHECK(by_key_.emplace(key, exported).second);
  return exported;
}

std::shared_ptr<Export> Exports::Find(uint64_t key) const {
  const std::lock_guard lock(mutex_);
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? nullptr : found->second;
}

void Exports::Remove(uint64_t key, Export* exported) {
  {
    const std::lock_guard lock(mutex_);
    by_key_.erase(key);
  }
  const std::lock_guard lock(exported->mutex);  // waits for a call that uses the memory
  exported->base = nullptr;
}

Result<std::unique_ptr<TcpTransport>> TcpTransport::Create(const TcpConfig& config) {
  if (config.operation_bytes == 0 || config.operation_bytes > kTcpOperationBytesMax || config.depth == 0 ||
      config.depth > kTcpDepthMax)
    return Error(Code::kInvalidArgument,
                 "tcp: operation of %llu bytes, depth %u: want 1 to %llu bytes, depth 1 to %u",
                 static_cast<unsigned long long>(config.operation_bytes), config.depth,
                 static_cast<unsigned long long>(kTcpOperationBytesMax), kTcpDepthMax);
  Secret secret;
  if (getrandom(secret.data(), secret.size(), 0) != static_cast<ssize_t>(secret.size()))
    return ErrnoError(errno, "getrandom");
  std::unique_ptr<TcpTransport> transport(new TcpTransport(config, RandomNumber(), secret));
  ROPETEAM_RETURN_IF_ERROR(transport->Open());
  return transport;
}

Status TcpTransport::Open() {
  ROPETEAM_RETURN_IF_ERROR(wake_.Open());
  epoll_ = Fd(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_.open()) return ErrnoError(errno, "epoll_create1");
  reserve_ = Fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!reserve_.open()) return ErrnoError(errno, "open /dev/null");
  Result<std::vector<IpAddress>> addresses = AddressesOf(config_);
  if (!addresses.ok()) return addresses.status();
  for (const IpAddress& address : *addresses) ROPETEAM_RETURN_IF_ERROR(Listen(address));
  NameSelf();
  return OkStatus();
}

Status TcpTransport::Listen(const IpAddress& address) {
  ROPETEAM_RETURN_IF_ERROR(CheckListenable(address));
  auto listener = std::make_unique<Listener>();
  listener->fd = Fd(socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int fd = listener->fd.get();
  if (fd < 0) return ErrnoError(errno, "socket for %s", ToText(address).c_str());
  SetOption(fd, SOL_SOCKET, SO_REUSEADDR, 1);
  if (bind(fd, address.get(), address.length) != 0 || listen(fd, kBacklog) != 0) {
    if (errno == EADDRINUSE)
      return Error(Code::kAlreadyExists, "listen address %s is in use", ToText(address).c_str());
    return ErrnoError(errno, "listen on %s", ToText(address).c_str());
  }
  listener->address.length = sizeof listener->address.storage;
  if (getsockname(fd, listener->address.get(), &listener->address.length) != 0)
    return ErrnoError(errno, "getsockname");
  listener->interface = InterfaceOf(listener->address);
  listener->link_mbps = LinkMbpsOf(listener->interface);
  Watch(listener.get(), EPOLLIN);
  listeners_.push_back(std::move(listener));
  return OkStatus();
}

void TcpTransport::NameSelf() {
  EndpointAddress self;
  self.instance = instance_;
  self.secret = secret_;
  self.operation_bytes = config_.operation_bytes;
  for (const auto& listener : listeners_) {
    const std::string comma = self.lanes.empty() ? "" : ",";
    const std::string text = ToText(listener->address);
    self.lanes.push_back({listener->address, listener->link_mbps});
    capabilities_.devices += comma + listener->interface;
    capabilities_.address += comma + text;
    capabilities_.link_mbps += listener->link_mbps;
    description_ += (comma.empty() ? "tcp on " : ", ") + listener->interface + " " + text;
  }
  local_address_ = Encode(self);
  capabilities_.name = "tcp";
  capabilities_.fences_peers = true;
  capabilities_.admits_peers = true;
  capabilities_.guards_chunks = true;
  capabilities_.operation_bytes = config_.operation_bytes;
}

TcpTransport::~TcpTransport() {
  for (const auto& [id, peer] : peers_) GiveUp(peer.get(), PeerState::kClosing);
  peers_.clear();
  inbound_.clear();
  listeners_.clear();
  closed_.clear();
  regions_.Clear();  // before exports_
}

Status TcpTransport::MapRegion(Region* region, void* base) {
  region->base = static_cast<char*>(base);
  region->key = RandomNumber();
  region->exported_as = exports_.Add(region->key, region->base, region->length);
  region->exports = &exports_;
  return OkStatus();
}

void TcpTransport::GuardRegion(RegionId region, PeerAccess* access) {
  regions_.With(region, [access](Region* guarded) {
    const std::lock_guard lock(guarded->exported_as->mutex);
    guarded->exported_as->access = access;
  });
}

std::string TcpTransport::EncodeKey(const Region& region) const {
  return Encode(RegionKey{instance_, region.key, region.length});
}

}  // namespace tcp
}  // namespace ropeteam

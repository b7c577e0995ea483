// SPDX-License-Identifier: Apache-2.0

#include "transport/inproc/inproc_transport.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "transport/front/checks.h"
#include "transport/front/operation_table.h"

namespace ropeteam {
namespace {

constexpr size_t kNameBytesMax = 255;
constexpr char kAddressTag = 'A';
constexpr char kKeyTag = 'K';

struct RegionKey {
  uint64_t instance = 0;
  RegionId region = 0;
  uint64_t length = 0;
};

// The bytes begin with "inproc" and a tag, by which Decode() recognizes them.
std::string Encode(char tag, uint64_t a, uint64_t b, uint64_t c, const std::string& text) {
  std::string bytes = std::string("inproc") + tag;
  for (uint64_t number : {a, b, c, static_cast<uint64_t>(text.size())})
    bytes.append(reinterpret_cast<const char*>(&number), sizeof number);
  return bytes + text;
}

bool Decode(const std::string& bytes, char tag, uint64_t* a, uint64_t* b, uint64_t* c, std::string* text) {
  const std::string head = std::string("inproc") + tag;
  uint64_t numbers[4];
  if (bytes.size() < head.size() + sizeof numbers || !bytes.starts_with(head)) return false;
  std::memcpy(numbers, bytes.data() + head.size(), sizeof numbers);
  *text = bytes.substr(head.size() + sizeof numbers);
  *a = numbers[0], *b = numbers[1], *c = numbers[2];
  return text->size() == numbers[3];
}

}  // namespace

class InprocTransport final : public Transport {
 public:
  InprocTransport(std::shared_ptr<InprocFabric> fabric, std::string name, uint64_t instance)
      : fabric_(std::move(fabric)), name_(std::move(name)), instance_(instance) {
    capabilities_.name = "inproc";
    capabilities_.fences_peers = false;
    capabilities_.operation_bytes = UINT64_MAX;
  }

  ~InprocTransport() override {
    std::lock_guard lock(fabric_->mutex_);
    if (!dead_) fabric_->members_[name_].transport = nullptr;
  }

  const TransportCapabilities& capabilities() const override { return capabilities_; }
  std::string LocalAddress() const override { return Encode(kAddressTag, instance_, 0, 0, name_); }
  std::string Describe() const override { return "inproc " + name_; }

  Result<RegionId> RegisterRegion(void* base, uint64_t length) override;
  Status DeregisterRegion(RegionId region) override;
  std::string ExportRegion(RegionId region) const override;
  Result<PeerId> Connect(const std::string& address) override;
  void Disconnect(PeerId peer) override;
  Result<RemoteRegionId> ImportRegion(PeerId peer, const std::string& key) override;
  Status Put(PeerId peer, RegionId local, uint64_t local_offset, RemoteRegionId remote,
             uint64_t remote_offset, uint64_t length, uint64_t context) override {
    return Submit({OperationKind::kPut, peer, local, local_offset, remote, remote_offset, length, context});
  }
  Status Get(PeerId peer, RegionId local, uint64_t local_offset, RemoteRegionId remote,
             uint64_t remote_offset, uint64_t length, uint64_t context) override {
    return Submit({OperationKind::kGet, peer, local, local_offset, remote, remote_offset, length, context});
  }
  size_t Poll(Completion* out, size_t capacity) override;
  void Wait(uint64_t timeout_us) override;
  void Wake() override {
    std::lock_guard lock(wake_mutex_);
    woken_ = true;
    wake_condition_.notify_one();
  }
  Counters counters() const override { return counts_.Read(registrations_.load(std::memory_order_relaxed)); }

 private:
  friend class InprocFabric;

  struct Region {
    char* base = nullptr;
    uint64_t length = 0;
    uint64_t operations = 0;
  };
  struct Peer {
    std::string name;
    uint64_t instance = 0;
    bool gone = false;
  };
  struct RemoteRegion {
    PeerId peer = 0;
    RegionKey key;
  };
  struct Operation {
    OperationKind kind = OperationKind::kPut;
    PeerId peer = 0;
    RegionId local = 0;
    uint64_t local_offset = 0;
    RemoteRegionId remote = 0;
    uint64_t remote_offset = 0, length = 0, context = 0;
  };

  Status Submit(const Operation& operation);
  bool CarryOut(const Operation& operation, Code* code);
  void Complete(const Operation& operation, Code code);
  void Advance();

  const std::shared_ptr<InprocFabric> fabric_;
  const std::string name_;
  const uint64_t instance_;
  TransportCapabilities capabilities_;
  bool dead_ = false;  // under the fabric's mutex

  std::map<RegionId, Region> regions_;  // under the fabric's mutex, because peers use it too
  RegionId region_next_ = 1;

  // Used by the loop's thread only.
  std::map<PeerId, Peer> peers_;
  PeerId peer_next_ = 1;
  std::map<RemoteRegionId, RemoteRegion> remote_regions_;
  RemoteRegionId remote_region_next_ = 1;
  std::deque<Operation> pending_;
  std::deque<Completion> completed_;
  size_t accepted_ = 0;

  std::mutex wake_mutex_;
  std::condition_variable wake_condition_;
  bool woken_ = false;

  front::Counts counts_;
  std::atomic<uint64_t> registrations_{0};
};

Result<std::unique_ptr<Transport>> InprocFabric::CreateTransport(const std::string& name) {
  if (name.empty() || name.size() > kNameBytesMax)
    return Error(Code::kInvalidArgument, "inproc name of %zu bytes, want 1 to %zu", name.size(),
                 kNameBytesMax);
  std::lock_guard lock(mutex_);
  Member& member = members_[name];
  if (member.transport != nullptr)
    return Error(Code::kAlreadyExists, "inproc name \"%s\" is in use", name.c_str());
  auto transport = std::make_unique<InprocTransport>(shared_from_this(), name, instance_next_++);
  member = Member{};
  member.transport = transport.get();
  return std::unique_ptr<Transport>(std::move(transport));
}

void InprocFabric::Kill(const std::string& name) {
  std::lock_guard lock(mutex_);
  Member& member = members_[name];
  if (member.transport == nullptr) return;
  member.transport->dead_ = true;
  member.transport->Wake();
  member.transport = nullptr;
  for (auto& [other_name, other] : members_)
    if (other.transport != nullptr) other.transport->Wake();
}

void InprocFabric::Hold(const std::string& name) {
  std::lock_guard lock(mutex_);
  members_[name].held = true;
}

void InprocFabric::Release(const std::string& name) {
  std::lock_guard lock(mutex_);
  members_[name].held = false;
  for (auto& [other_name, other] : members_)
    if (other.transport != nullptr) other.transport->Wake();
}

void InprocFabric::FailNext(const std::string& name, uint64_t count, Code code) {
  std::lock_guard lock(mutex_);
  ROPETEAM_CHECK(count == 0 || code != Code::kOk);
  members_[name].fail_next = count;
  members_[name].fail_code = code;
}

void InprocFabric::LimitPerPoll(size_t operations) {
  std::lock_guard lock(mutex_);
  operations_per_poll_ = operations;
}

Result<RegionId> InprocTransport::RegisterRegion(void* base, uint64_t length) {
  ROPETEAM_RETURN_IF_ERROR(front::CheckMemory(base, length));
  std::lock_guard lock(fabric_->mutex_);
  ROPETEAM_RETURN_IF_ERROR(front::CheckRegionCount(regions_.size()));
  regions_[region_next_] = {static_cast<char*>(base), length, 0};
  registrations_.fetch_add(1, std::memory_order_relaxed);
  return region_next_++;
}

Status InprocTransport::DeregisterRegion(RegionId id) {
  std::lock_guard lock(fabric_->mutex_);
  const auto found = regions_.find(id);
  if (found == regions_.end()) return front::NotRegistered(id);
  ROPETEAM_RETURN_IF_ERROR(front::CheckUnused(id, found->second.operations));
  regions_.erase(found);
  return OkStatus();
}

std::string InprocTransport::ExportRegion(RegionId id) const {
  std::lock_guard lock(fabric_->mutex_);
  const auto found = regions_.find(id);
  return found == regions_.end() ? std::string() : Encode(kKeyTag, instance_, id, found->second.length, "");
}

Result<PeerId> InprocTransport::Connect(const std::string& address) {
  Peer peer;
  uint64_t unused = 0;
  if (!Decode(address, kAddressTag, &peer.instance, &unused, &unused, &peer.name) || peer.name.empty())
    return Error(Code::kInvalidArgument, "these %zu bytes are not an inproc address", address.size());
  peers_[peer_next_] = std::move(peer);
  return peer_next_++;
}

void InprocTransport::Disconnect(PeerId id) {
  if (peers_.erase(id) == 0) return;
  std::erase_if(remote_regions_, [id](const auto& entry) { return entry.second.peer == id; });
  for (const Operation& operation : pending_)
    if (operation.peer == id) Complete(operation, Code::kPeerGone);
  std::erase_if(pending_, [id](const Operation& operation) { return operation.peer == id; });
  completed_.push_back({OperationKind::kDisconnect, id, 0, Code::kOk});
}

Result<RemoteRegionId> InprocTransport::ImportRegion(PeerId peer, const std::string& bytes) {
  const auto found = peers_.find(peer);
  if (found == peers_.end()) return front::NotConnected(peer);
  RegionKey key;
  uint64_t region = 0;
  std::string text;
  if (!Decode(bytes, kKeyTag, &key.instance, &region, &key.length, &text) || !text.empty())
    return Error(Code::kInvalidArgument, "these %zu bytes are not an inproc region key", bytes.size());
  if (key.instance != found->second.instance) return front::ForeignKey(found->second.name);
  key.region = static_cast<RegionId>(region);
  remote_regions_[remote_region_next_] = {peer, key};
  return remote_region_next_++;
}

Status InprocTransport::Submit(const Operation& operation) {
  if (!peers_.contains(operation.peer)) return front::NotConnected(operation.peer);
  const auto remote = remote_regions_.find(operation.remote);
  if (remote == remote_regions_.end() || remote->second.peer != operation.peer)
    return front::NotOfPeer(operation.remote, operation.peer);
  ROPETEAM_RETURN_IF_ERROR(front::CheckRange(operation.remote_offset, operation.length,
                                             remote->second.key.length, "remote region", operation.remote));
  if (accepted_ >= kOperationsOutstandingMax) return front::TooManyOperations(accepted_);
  std::lock_guard lock(fabric_->mutex_);
  const auto local = regions_.find(operation.local);
  if (local == regions_.end()) return front::NotRegistered(operation.local);
  ROPETEAM_RETURN_IF_ERROR(front::CheckRange(operation.local_offset, operation.length, local->second.length,
                                             "region", operation.local));
  local->second.operations++;
  accepted_++;
  pending_.push_back(operation);
  return OkStatus();
}

// Under the fabric's mutex. False: Hold() delays the operation.
bool InprocTransport::CarryOut(const Operation& operation, Code* code) {
  Peer& peer = peers_.at(operation.peer);
  InprocFabric::Member& member = fabric_->members_[peer.name];
  if (member.transport == nullptr || member.transport->instance_ != peer.instance) peer.gone = true;
  if (peer.gone) {
    *code = Code::kPeerGone;
    return true;
  }
  if (member.held) return false;
  if (member.fail_next > 0) {
    member.fail_next--;
    *code = member.fail_code;
    return true;
  }
  const RegionKey& key = remote_regions_.at(operation.remote).key;
  const auto target = member.transport->regions_.find(key.region);
  if (target == member.transport->regions_.end()) {
    *code = Code::kInvalidArgument;  // the peer has deregistered it
    return true;
  }
  char* theirs = target->second.base + operation.remote_offset;
  char* ours = regions_.at(operation.local).base + operation.local_offset;
  if (operation.length != 0) {
    if (operation.kind == OperationKind::kPut)
      std::memmove(theirs, ours, operation.length);
    else
      std::memmove(ours, theirs, operation.length);
  }
  *code = Code::kOk;
  return true;
}

void InprocTransport::Complete(const Operation& operation, Code code) {
  counts_.Add(operation.kind, code, operation.length);
  completed_.push_back({operation.kind, operation.peer, operation.context, code});
  std::lock_guard lock(fabric_->mutex_);
  regions_.at(operation.local).operations--;
}

void InprocTransport::Advance() {
  std::vector<std::pair<Operation, Code>> done;
  {
    std::lock_guard lock(fabric_->mutex_);
    if (dead_) return;
    std::deque<Operation> held;
    while (!pending_.empty() && done.size() < fabric_->operations_per_poll_) {
      Code code = Code::kOk;
      if (CarryOut(pending_.front(), &code))
        done.emplace_back(pending_.front(), code);
      else
        held.push_back(pending_.front());
      pending_.pop_front();
    }
    pending_.insert(pending_.begin(), held.begin(), held.end());
  }
  for (const auto& [operation, code] : done) Complete(operation, code);
}

size_t InprocTransport::Poll(Completion* out, size_t capacity) {
  Advance();
  size_t count = 0;
  for (; count < capacity && !completed_.empty(); count++) {
    out[count] = completed_.front();
    completed_.pop_front();
    if (out[count].kind != OperationKind::kDisconnect) accepted_--;
  }
  return count;
}

void InprocTransport::Wait(uint64_t timeout_us) {
  Advance();
  if (!completed_.empty()) return;
  // The operations that remain are held. Release() wakes this thread for them.
  std::unique_lock lock(wake_mutex_);
  const auto woken = [this] { return woken_; };
  if (timeout_us >= UINT64_MAX / 2)
    wake_condition_.wait(lock, woken);
  else
    wake_condition_.wait_for(lock, std::chrono::microseconds(timeout_us), woken);
  woken_ = false;
}

}  // namespace ropeteam

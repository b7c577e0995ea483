// SPDX-License-Identifier: Apache-2.0
//
// The thread that owns the Transport: it registers the arena once, connects to the members of the view as
// they are needed, moves what the Engine asks for, and makes the progress without which peers could not reach
// this node's memory.
//
// A transfer that was submitted is answered exactly once, by `on_done`, when the fabric has let go of the
// local range; also when the peer is unknown, has left, or the plane is stopped. Failed transfers are not
// tried again here. A put from device memory that cannot even begin is answered with kNotFound.

#ifndef ROPETEAM_NODE_DATA_PLANE_H_
#define ROPETEAM_NODE_DATA_PLANE_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/base/view.h"
#include "core/engine/engine.h"
#include "node/device_buffers.h"
#include "transport/transport.h"

namespace ropeteam {

// What Member.data_address holds: two strings, each behind its length as 16 bits little-endian.
std::string PackDataAddress(const std::string& endpoint, const std::string& region_key);
bool UnpackDataAddress(std::string_view packed, std::string* endpoint, std::string* region_key);

struct TransferDone {
  uint64_t tag = 0;
  Code code = Code::kOk;
};

class DataPlane {
 public:
  // Both are called on the plane's thread, and must not block.
  struct Callbacks {
    std::function<void(std::vector<TransferDone> done)> on_done;
    // No byte of this departed instance's transfers can land any more. Only on transports that can tell.
    std::function<void(NodeId peer)> on_fenced;
  };

  // Registers `arena`, which must stay mapped until the plane is gone. The message of an error names the
  // limit to raise.
  static Result<std::unique_ptr<DataPlane>> Create(std::unique_ptr<Transport> transport,
                                                   std::span<std::byte> arena);
  ~DataPlane();  // Stop()

  // For Member.data_address; at most kAddressBytesMax bytes.
  const std::string& address() const { return address_; }
  std::string Describe() const { return transport_->Describe(); }
  const TransportCapabilities& capabilities() const { return transport_->capabilities(); }
  // "verbs", "ofi/tcp;ofi_rxm": what all nodes of a job must have in common.
  std::string transport_name() const;
  Transport::Counters counters() const { return transport_->counters(); }

  void Start(Callbacks callbacks);
  // Answers what is outstanding (kPeerGone), disconnects every peer, joins the thread. No callback after the
  // return. Idempotent.
  void Stop();

  // What puts may read beside the arena. Any thread.
  DeviceBuffers& device_buffers() { return device_buffers_; }

  // Any thread.
  void Submit(std::vector<StartTransfer> transfers);
  // The view's members other than this node. Who is no longer among them is disconnected, then fenced.
  void SetMembers(std::vector<Member> members);

  DataPlane(const DataPlane&) = delete;
  DataPlane& operator=(const DataPlane&) = delete;

 private:
  struct Peer {
    std::string data_address;
    bool connected = false;
    PeerId peer = 0;
    RemoteRegionId region = 0;
  };
  struct Input {
    std::vector<StartTransfer> transfers;
    std::vector<std::vector<Member>> views;  // all of them: who came and went between two looks is fenced too
    bool stop = false;
  };

  DataPlane(std::unique_ptr<Transport> transport, RegionId region);
  void Run();
  bool TakeInput();  // false when nothing was there
  void ApplyMembers(const std::vector<Member>& members);
  void Leave(NodeId node, Peer& peer);
  Status Connect(NodeId node, Peer& peer);
  void StartWaiting();
  bool StartOne(const StartTransfer& transfer);  // false: the transport is full, later
  bool StartFromDevice(const Peer& peer, const StartTransfer& transfer);  // likewise
  void Refuse(const StartTransfer& transfer, const Status& status, Code code);
  void Complete(const Completion& completion);
  void DrainForStop();
  void TellDone();

  const std::unique_ptr<Transport> transport_;
  DeviceBuffers device_buffers_;
  const RegionId region_;
  std::string address_;
  Callbacks callbacks_;
  std::thread thread_;

  std::mutex mutex_;
  Input input_;  // guarded by mutex_

  // The thread's own.
  std::map<NodeId, Peer> peers_;                    // of the newest view
  std::map<PeerId, NodeId> leaving_;                // Disconnect() under way
  std::deque<StartTransfer> waiting_;               // accepted, not yet taken by the transport
  std::vector<TransferDone> done_;                  // not yet told
  size_t outstanding_ = 0;                          // taken by the transport, not yet completed
  std::map<uint64_t, DeviceBufferId> from_device_;  // of those, the tags of puts from device memory
  bool stopping_ = false;
};

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_DATA_PLANE_H_

// SPDX-License-Identifier: Apache-2.0
//
// What the transport tests share: a way to make transports of each kind, memory with guards, and a peer that
// can be stopped, killed and started again under its address. A peer of inproc lives in this process, one of
// the others in another.

#ifndef ROPETEAM_TESTS_TRANSPORT_RIG_H_
#define ROPETEAM_TESTS_TRANSPORT_RIG_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/transport/kinds.h"
#include "transport/inproc/inproc_transport.h"
#include "transport/transport.h"

namespace ropeteam::test {

// Shared memory, so that a peer in another process can have it as its region and the test can look at it.
class Memory {
 public:
  explicit Memory(uint64_t length);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  uint8_t* data() { return data_; }
  uint64_t length() const { return length_; }
  int fd() const { return fd_; }

  // Fills with bytes that depend on position and seed.
  void Fill(uint32_t seed);
  // Whether [offset, +length) is as Fill(seed) leaves it, `source_offset` further on.
  bool Holds(uint32_t seed, uint64_t offset, uint64_t length, uint64_t source_offset);
  // Whether everything outside [offset, +length) is as Fill(seed) left it.
  bool HoldsOutside(uint32_t seed, uint64_t offset, uint64_t length);

 private:
  const uint64_t length_;
  int fd_ = -1;
  uint8_t* data_ = nullptr;
};

// One transport of this process with a region of its own, and another such one as its peer.
struct Endpoint {
  explicit Endpoint(Result<std::unique_ptr<Transport>> made, uint64_t length = 8 << 20);
  void Meet(const Endpoint& other);
  Memory memory;
  std::unique_ptr<Transport> transport;
  RegionId region = 0;
  PeerId peer = 0;
  RemoteRegionId remote = 0;
};

// A peer with one region, `memory`, which a test may stop and kill.
class RemotePeer {
 public:
  virtual ~RemotePeer() = default;
  virtual void Stop() = 0;  // makes no progress until Continue()
  virtual void Continue() = 0;
  virtual void Kill() = 0;  // kill -9, and gone when this returns
  virtual void Deregister() = 0;
  // Puts its whole region to the region of `key` at `address`, again and again, whatever becomes of it: to
  // the same peer as long as that is not gone, then to a new one. Does not wait for any of it.
  virtual void Bombard(const std::string& to_address, const std::string& to_key) = 0;
  std::string address, key;
  std::string name;  // to start another under the same address
};

class Rig {
 public:
  virtual ~Rig() = default;
  static std::unique_ptr<Rig> Make(const std::string& kind);

  virtual std::unique_ptr<Transport> NewTransport() = 0;
  // `name` as in RemotePeer; empty: a fresh one.
  virtual std::unique_ptr<RemotePeer> NewPeer(Memory* memory, const std::string& name = "") = 0;
  // Progress of peers that live in this process.
  virtual void PollPeers() {}
  // False: Disconnect() of a peer that hangs waits until the device lets go by itself.
  virtual bool cancels_one_peer() const { return true; }
  virtual bool shares_bandwidth() const { return true; }
  virtual bool names_refusals() const {
    return false;
  }  // a refused range is kInvalidArgument, not kLinkFailed
  virtual bool serves_stopped() const { return false; }  // see TransportKind
  virtual bool refuses_revoked() const { return true; }  // see TransportKind
  virtual bool fences() const { return false; }          // see TransportKind
  virtual std::string deaf() const { return ""; }        // see TransportKind
  virtual uint64_t gone_within_us() const { return 100'000; }
  virtual bool has_processes() const { return true; }  // a peer is a process of its own
  virtual std::string describes() const = 0;           // a part of Describe()
};

// The kinds of transport that can run here, for INSTANTIATE_TEST_SUITE_P.
std::vector<std::string> TransportKinds();
// Those that cannot.
std::vector<std::string> AbsentKindNames();

// Polls `transports` and the rig's peers until `done`, at most `limit_ms`; completions are appended by
// transport. Returns whether `done`.
using Completions = std::map<Transport*, std::vector<Completion>>;
bool PollUntil(Rig* rig, const std::vector<Transport*>& transports, Completions* completions,
               const std::function<bool()>& done, uint64_t limit_ms = 20'000);

// Whether this is the guest of scripts/soft-roce, where a megabyte takes 10 ms: tests that need many take
// fewer.
bool InGuest();
// Objects of this process that the kernel's RDMA keeps, by kind ("qp", "mr"); -1 where it does not say.
int RdmaObjects(const std::string& kind);

uint64_t NowUs();
// Bytes of memory that could be had, from /proc/meminfo.
uint64_t MemoryAvailable();

}  // namespace ropeteam::test

#endif  // ROPETEAM_TESTS_TRANSPORT_RIG_H_

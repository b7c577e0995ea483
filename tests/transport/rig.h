// SPDX-License-Identifier: Apache-2.0
//
// Shared by the transport tests: transports of each kind, memory with guards, and a peer that can be stopped,
// killed and started again under its address. A peer of inproc lives in this process, all others in a process
// of their own.

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

// Shared memory: a peer in another process can use it as its region, and the test can check it.
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
  // Whether [offset, +length) holds the bytes that Fill(seed) writes at `source_offset`.
  bool Holds(uint32_t seed, uint64_t offset, uint64_t length, uint64_t source_offset);
  // Whether everything outside [offset, +length) is as Fill(seed) left it.
  bool HoldsOutside(uint32_t seed, uint64_t offset, uint64_t length);

 private:
  const uint64_t length_;
  int fd_ = -1;
  uint8_t* data_ = nullptr;
};

// One transport of this process with a region; another Endpoint is its peer.
struct Endpoint {
  explicit Endpoint(Result<std::unique_ptr<Transport>> made, uint64_t length = 8 << 20);
  void Meet(const Endpoint& other);
  Memory memory;
  std::unique_ptr<Transport> transport;
  RegionId region = 0;
  PeerId peer = 0;
  RemoteRegionId remote = 0;
};

// A peer with one region, `memory`. A test may stop and kill the peer.
class RemotePeer {
 public:
  virtual ~RemotePeer() = default;
  virtual void Stop() = 0;  // makes no progress until Continue()
  virtual void Continue() = 0;
  virtual void Kill() = 0;  // kill -9; the process has ended when this returns
  virtual void Deregister() = 0;
  // Puts its whole region to the region of `key` at `address`, again and again, whatever the results: to the
  // same peer until that is gone, then to a new one. Returns at once.
  virtual void Bombard(const std::string& to_address, const std::string& to_key) = 0;
  std::string address, key;
  std::string name;  // to start another peer under the same address
};

class Rig {
 public:
  virtual ~Rig() = default;
  static std::unique_ptr<Rig> Make(const std::string& kind);

  virtual std::unique_ptr<Transport> NewTransport() = 0;
  // `name` as in RemotePeer; empty: a new one.
  virtual std::unique_ptr<RemotePeer> NewPeer(Memory* memory, const std::string& name = "") = 0;
  // Makes progress for peers that live in this process.
  virtual void PollPeers() {}
  // False: Disconnect() of a hanging peer completes only when the device releases its operations.
  virtual bool cancels_one_peer() const { return true; }
  virtual bool shares_bandwidth() const { return true; }
  virtual bool names_refusals() const {
    return false;
  }  // a refused range is kInvalidArgument, not kLinkFailed
  virtual bool serves_stopped() const { return false; }  // see TransportKind
  virtual bool refuses_revoked() const { return true; }  // see TransportKind
  virtual bool reconnects() const { return true; }       // see TransportKind
  virtual bool fences() const { return false; }          // see TransportKind
  virtual std::string deaf() const { return ""; }        // see TransportKind
  virtual uint64_t gone_within_us() const { return 100'000; }
  virtual bool has_processes() const { return true; }  // a peer is a process of its own
  virtual std::string describes() const = 0;           // a part of Describe()
};

// The kinds of transport that can run here, for INSTANTIATE_TEST_SUITE_P.
std::vector<std::string> TransportKinds();
// The kinds that cannot run here.
std::vector<std::string> AbsentKindNames();

// Polls `transports` and the rig's peers until `done`, at most `limit_ms`; completions are appended by
// transport. Returns whether `done`.
using Completions = std::map<Transport*, std::vector<Completion>>;
bool PollUntil(Rig* rig, const std::vector<Transport*>& transports, Completions* completions,
               const std::function<bool()>& done, uint64_t limit_ms = 20'000);

// Whether this is the guest of scripts/soft-roce. There a megabyte takes 10 ms, so tests move less.
bool InGuest();
// Number of this process's RDMA objects in the kernel, by kind ("qp", "mr"); -1: unknown.
int RdmaObjects(const std::string& kind);

uint64_t NowUs();
// Bytes of available memory, from /proc/meminfo.
uint64_t MemoryAvailable();

}  // namespace ropeteam::test

#endif  // ROPETEAM_TESTS_TRANSPORT_RIG_H_

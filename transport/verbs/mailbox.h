// SPDX-License-Identifier: Apache-2.0
//
// A datagram queue pair with its buffers, for the messages that make and close connections. Datagrams may be
// lost, duplicated or reordered; the sender repeats them. Loop thread only.

#ifndef ROPETEAM_TRANSPORT_VERBS_MAILBOX_H_
#define ROPETEAM_TRANSPORT_VERBS_MAILBOX_H_

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "transport/verbs/device.h"

namespace ropeteam::verbs {

class Mailbox {
 public:
  // Receive buffers: the limit of datagrams between two polls. If a thousand transports send requests at
  // once, some are dropped, and the senders repeat them.
  static constexpr uint32_t kReceives = 256;
  static constexpr uint32_t kSends = 64;

  // The arguments must outlive the mailbox. `key`: see TransportAddress.
  Status Open(ibv_pd* domain, ibv_comp_channel* channel, const Port& port, uint32_t key);

  uint32_t queue_pair() const { return queue_pair_->qp_num; }
  ibv_cq* queue() const { return queue_.get(); }

  // Sends at most kMessageBytesMax bytes. False: kSends are outstanding, or the device refuses. The datagram
  // then counts as lost.
  bool Send(const std::shared_ptr<ibv_ah>& to, uint32_t queue_pair, uint32_t key, std::string_view bytes);
  // Calls on_message(std::string_view) for each received datagram, at most `datagrams_max`. Returns how many
  // completions there were, also of sends.
  template <typename F>
  size_t Receive(size_t datagrams_max, F on_message) {
    size_t total = 0;
    ibv_wc completion;
    while (total < datagrams_max && ibv_poll_cq(queue_.get(), 1, &completion) > 0) {
      total++;
      if (const std::string_view bytes = Take(completion); !bytes.empty()) on_message(bytes);
      Return(completion);
    }
    if (broken_) Restart();
    return total;
  }
  uint32_t sends_outstanding() const { return sends_outstanding_; }

 private:
  int Start();
  char* ReceiveSlot(uint64_t slot) { return buffer_.get() + slot * kReceiveBytes; }
  char* SendSlot(uint64_t slot) {
    return buffer_.get() + kReceives * kReceiveBytes + slot * kMessageBytesMax;
  }
  bool PostReceive(uint64_t slot);
  // The datagram of a completed receive; empty for other completions.
  std::string_view Take(const ibv_wc& completion);
  void Return(const ibv_wc& completion);
  void Restart();

  static constexpr size_t kGrhBytes = 40;  // in front of every received datagram, even if it has no GRH
  static constexpr size_t kReceiveBytes = kGrhBytes + kMessageBytesMax;

  std::unique_ptr<char[]> buffer_;
  Handle<ibv_mr> memory_;
  Handle<ibv_cq> queue_;
  Handle<ibv_qp> queue_pair_;  // destroyed before what it uses
  std::vector<uint32_t> send_slots_free_;
  std::shared_ptr<ibv_ah> sending_to_[kSends];  // held until the send has completed
  uint32_t sends_outstanding_ = 0;
  bool broken_ = false;  // the queue pair is in an error state
  uint8_t port_ = 1;
  uint32_t key_ = 0;
};

}  // namespace ropeteam::verbs

#endif  // ROPETEAM_TRANSPORT_VERBS_MAILBOX_H_

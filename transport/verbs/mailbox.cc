// SPDX-License-Identifier: Apache-2.0

#include "transport/verbs/mailbox.h"

#include <errno.h>

#include <cstring>

#include "core/base/log.h"

namespace ropeteam::verbs {
namespace {

constexpr uint64_t kSendFlag = uint64_t{1} << 32;  // in a work request's id, above the slot

}  // namespace

Status Mailbox::Open(ibv_pd* domain, ibv_comp_channel* channel, const Port& port, uint32_t key) {
  const size_t length = kReceives * kReceiveBytes + kSends * kMessageBytesMax;
  buffer_ = std::make_unique<char[]>(length);
  memory_.reset(ibv_reg_mr(domain, buffer_.get(), length, IBV_ACCESS_LOCAL_WRITE));
  if (!memory_) return RegistrationError(errno, port.name, length);
  queue_.reset(ibv_create_cq(domain->context, kReceives + kSends, nullptr, channel, 0));
  if (!queue_) return ErrnoError(errno, "device %s: completion queue for datagrams", port.name.c_str());
  ibv_qp_init_attr initial{};
  initial.send_cq = initial.recv_cq = queue_.get();
  initial.qp_type = IBV_QPT_UD;
  initial.sq_sig_all = 1;
  initial.cap.max_send_wr = kSends;
  initial.cap.max_recv_wr = kReceives;
  initial.cap.max_send_sge = initial.cap.max_recv_sge = 1;
  queue_pair_.reset(ibv_create_qp(domain, &initial));
  if (!queue_pair_) return ErrnoError(errno, "device %s: datagram queue pair", port.name.c_str());
  port_ = port.number;
  key_ = key;
  if (const int error = Start(); error != 0)
    return ErrnoError(error, "device %s: starting the datagram queue pair", port.name.c_str());
  return OkStatus();
}

// Takes the queue pair from RESET to ready, with all receive buffers posted and all send buffers free.
// Returns an errno.
int Mailbox::Start() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = port_;
  attributes.qkey = key_;
  int error = ibv_modify_qp(queue_pair_.get(), &attributes,
                            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
  attributes.qp_state = IBV_QPS_RTR;
  if (error == 0) error = ibv_modify_qp(queue_pair_.get(), &attributes, IBV_QP_STATE);
  attributes.qp_state = IBV_QPS_RTS;
  if (error == 0) error = ibv_modify_qp(queue_pair_.get(), &attributes, IBV_QP_STATE | IBV_QP_SQ_PSN);
  if (error != 0) return error;
  for (uint32_t slot = 0; slot < kReceives; slot++)
    if (!PostReceive(slot)) return EIO;
  send_slots_free_.clear();
  for (uint32_t slot = kSends; slot > 0; slot--) {
    send_slots_free_.push_back(slot - 1);
    sending_to_[slot - 1].reset();
  }
  sends_outstanding_ = 0;
  return 0;
}

// If the device cannot send a datagram, for example while a cable is cut, the queue pair stops. It is started
// again with the same number, which peers know. Outstanding datagrams are lost.
void Mailbox::Restart() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RESET;
  int error = ibv_modify_qp(queue_pair_.get(), &attributes, IBV_QP_STATE);
  ibv_wc stale;
  while (error == 0 && ibv_poll_cq(queue_.get(), 1, &stale) > 0) {
  }
  if (error == 0) error = Start();
  if (error != 0)
    LOG_DEBUG("verbs: the datagram queue pair stays stopped: %s (%d)", std::strerror(error), error);
  broken_ = error != 0;
}

bool Mailbox::PostReceive(uint64_t slot) {
  ibv_sge piece{reinterpret_cast<uintptr_t>(ReceiveSlot(slot)), kReceiveBytes, memory_->lkey};
  ibv_recv_wr request{};
  request.wr_id = slot;
  request.sg_list = &piece;
  request.num_sge = 1;
  ibv_recv_wr* bad = nullptr;
  return ibv_post_recv(queue_pair_.get(), &request, &bad) == 0;
}

bool Mailbox::Send(const std::shared_ptr<ibv_ah>& to, uint32_t queue_pair, uint32_t key,
                   std::string_view bytes) {
  ROPETEAM_CHECK(bytes.size() <= kMessageBytesMax);
  if (send_slots_free_.empty()) return false;
  const uint32_t slot = send_slots_free_.back();
  std::memcpy(SendSlot(slot), bytes.data(), bytes.size());
  ibv_sge piece{reinterpret_cast<uintptr_t>(SendSlot(slot)), static_cast<uint32_t>(bytes.size()),
                memory_->lkey};
  ibv_send_wr request{};
  request.wr_id = kSendFlag | slot;
  request.sg_list = &piece;
  request.num_sge = 1;
  request.opcode = IBV_WR_SEND;
  request.send_flags = IBV_SEND_SIGNALED;
  request.wr.ud.ah = to.get();
  request.wr.ud.remote_qpn = queue_pair;
  request.wr.ud.remote_qkey = key;
  ibv_send_wr* bad = nullptr;
  if (const int error = ibv_post_send(queue_pair_.get(), &request, &bad); error != 0) {
    LOG_DEBUG("verbs: sending a datagram: %s (%d)", std::strerror(error), error);
    return false;
  }
  send_slots_free_.pop_back();
  sending_to_[slot] = to;
  sends_outstanding_++;
  return true;
}

std::string_view Mailbox::Take(const ibv_wc& completion) {
  if ((completion.wr_id & kSendFlag) != 0 || completion.status != IBV_WC_SUCCESS ||
      completion.byte_len <= kGrhBytes || completion.byte_len > kReceiveBytes)
    return {};
  return {ReceiveSlot(completion.wr_id) + kGrhBytes, completion.byte_len - kGrhBytes};
}

void Mailbox::Return(const ibv_wc& completion) {
  const auto slot = static_cast<uint32_t>(completion.wr_id);
  if (completion.status != IBV_WC_SUCCESS) broken_ = true;
  if ((completion.wr_id & kSendFlag) == 0) {
    if (!broken_) PostReceive(slot);
    return;
  }
  sending_to_[slot].reset();
  send_slots_free_.push_back(slot);
  sends_outstanding_--;
}

}  // namespace ropeteam::verbs

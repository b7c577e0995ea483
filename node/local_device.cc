// SPDX-License-Identifier: Apache-2.0
//
// LocalServer's requests about device memory. Each session names the allocations that it hands over.

#include <cinttypes>

#include "core/base/bytes.h"
#include "core/base/log.h"
#include "node/local_server.h"

namespace ropeteam {
namespace {

unsigned long long Ull(uint64_t value) { return value; }

}  // namespace

bool LocalServer::OnDeviceRequest(SessionId id, Client& client, local::Type type, RequestId request,
                                  std::string_view payload) {
  if (type == local::Type::kGpuBuffer) {
    local::GpuBuffer message;
    if (!Decode(payload, message)) return false;
    OnGpuBuffer(id, client, request, message);
  } else if (type == local::Type::kGpuBufferEnd) {
    local::GpuBufferEnd message;
    if (!Decode(payload, message)) return false;
    // A refused allocation is not in the map, and the client may not know yet.
    if (const auto buffer = client.gpu_buffers.extract(message.buffer); !buffer.empty())
      config_.device_buffers->Remove(buffer.mapped().id);
  } else if (type == local::Type::kSaveDirect) {
    local::SaveDirect message;
    if (!Decode(payload, message)) return false;
    OnSaveDirect(id, client, message);
  } else {
    local::SaveSettle message;
    if (!Decode(payload, message)) return false;
    drive_([&](Engine& engine, TimeUs now) {
      engine.OnSaveSettle(now, id, request, message.save, TimeoutUs(message.timeout_ms));
    });
  }
  return true;
}

Status LocalServer::CheckGpuBuffer(const Client& client, const local::GpuBuffer& message,
                                   bool has_descriptor) const {
  if (config_.device_buffers == nullptr)
    return Error(Code::kUnsupported, "transport %s reads no device memory", config_.hello.transport.c_str());
  if (!has_descriptor)
    return Error(Code::kInvalidArgument, "device memory of %llu bytes came without a descriptor%s",
                 Ull(message.bytes),
                 client.session->descriptors_lost() ? ": this daemon could not take it over" : "");
  if (message.bytes == 0 || message.bytes > local::kGpuBufferBytesMax)
    return Error(Code::kInvalidArgument, "device memory of %llu bytes, limit %llu", Ull(message.bytes),
                 Ull(local::kGpuBufferBytesMax));
  if (message.buffer <= client.gpu_buffer_last)
    return Error(Code::kAlreadyExists, "device memory %llu, the last was %llu and they count up",
                 Ull(message.buffer), Ull(client.gpu_buffer_last));
  if (client.gpu_buffers.size() >= local::kGpuBuffersMax)
    return Error(Code::kNoSpace, "%zu allocations of device memory are handed over, limit %zu",
                 client.gpu_buffers.size(), local::kGpuBuffersMax);
  return OkStatus();
}

void LocalServer::OnGpuBuffer(SessionId id, Client& client, RequestId request,
                              const local::GpuBuffer& message) {
  UniqueFd descriptor = client.session->TakeDescriptor();
  const Status status = CheckGpuBuffer(client, message, descriptor.valid());
  if (!status.ok()) {
    --client.outstanding;
    return Reply(client, request, status.code(), status.message());
  }
  DeviceBuffers::Added added = [this, id, request, name = message.buffer, alive = std::weak_ptr<int>(alive_),
                                loop = loop_](const Status& result) {
    loop->Post([this, id, request, name, alive, result] {
      if (!alive.expired()) OnGpuBufferAdded(id, request, name, result);
    });
  };
  GpuBuffer& buffer = client.gpu_buffers[message.buffer];
  client.gpu_buffer_last = message.buffer;
  buffer.bytes = message.bytes;
  buffer.id = config_.device_buffers->Add(std::move(descriptor), message.bytes, std::move(added));
}

void LocalServer::OnGpuBufferAdded(SessionId id, RequestId request, uint64_t name, const Status& status) {
  const auto found = clients_.find(id);
  if (found == clients_.end()) return;  // the session has ended, with its buffers
  Client& client = found->second;
  --client.outstanding;
  const auto buffer = client.gpu_buffers.find(name);
  if (status.ok() && buffer != client.gpu_buffers.end()) {
    buffer->second.registered = true;
    if (!std::exchange(client.said_direct, true))
      LOG_INFO("session %" PRIu64 " device memory is put to replicas directly", id);
  } else if (!status.ok()) {
    if (buffer != client.gpu_buffers.end()) client.gpu_buffers.erase(buffer);
    if (status.code() != Code::kAborted && !std::exchange(client.said_staged, true))
      LOG_WARNING("session %" PRIu64 " device memory goes through the arena: %s", id,
                  status.ToString().c_str());
  }
  Reply(client, request, status.code(), status.message());
}

void LocalServer::OnSaveDirect(SessionId id, Client& client, const local::SaveDirect& message) {
  const auto found = client.gpu_buffers.find(message.buffer);
  // If the memory is not registered, or not yet, the chunks are put from the arena.
  if (found == client.gpu_buffers.end() || !found->second.registered) return;
  const GpuBuffer& buffer = found->second;
  const uint64_t chunks_max =
      message.offset > buffer.bytes ? 0 : (buffer.bytes - message.offset) / config_.hello.chunk_bytes;
  if (message.count > chunks_max)
    return client.session->Close(std::to_string(message.count) + " chunks at " +
                                 std::to_string(message.offset) + " of device memory of " +
                                 std::to_string(buffer.bytes) + " bytes");
  const SaveDirectInput input{message.save, buffer.id, message.offset, message.first, message.count};
  drive_([&](Engine& engine, TimeUs now) { engine.OnSaveDirect(now, id, input); });
}

}  // namespace ropeteam

// SPDX-License-Identifier: Apache-2.0
#include "tests/api/fake_daemon.h"

#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <utility>

#include "core/base/check.h"
#include "core/base/checksum.h"

namespace ropeteam::test {

using local::FrameHeader;
using local::Type;

// The content of an unwritten chunk. It reveals gaps that the library leaves unwritten.
constexpr int kOldBytes = 0xa5;

FakeDaemon::FakeDaemon(uint64_t chunk_bytes, uint64_t chunks, uint64_t tail_bytes)
    : chunk_bytes_(chunk_bytes), chunks_total_(chunks) {
  char directory[] = "/tmp/ropeteam-fake-XXXXXX";
  ROPETEAM_CHECK(::mkdtemp(directory) != nullptr);
  directory_ = directory;
  socket_ = directory_ + "/socket";
  memory_bytes_ = chunks_begin_ + chunks * chunk_bytes;
  arena_bytes_ = memory_bytes_ + tail_bytes;
  arena_ = ::memfd_create("fake-arena", MFD_CLOEXEC);
  ROPETEAM_CHECK(arena_ >= 0 && ::ftruncate(arena_, static_cast<off_t>(arena_bytes_)) == 0);
  void* memory = ::mmap(nullptr, memory_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, arena_, 0);
  ROPETEAM_CHECK(memory != MAP_FAILED);
  memory_ = static_cast<std::byte*>(memory);
  std::memset(memory_, kOldBytes, memory_bytes_);
  for (uint32_t i = 0; i < chunks; ++i) free_.insert(i);
  wake_ = ::eventfd(0, EFD_CLOEXEC);
  Start();
}

FakeDaemon::~FakeDaemon() {
  Kill();
  ::munmap(memory_, memory_bytes_);
  ::close(arena_);
  ::close(wake_);
  ::rmdir(directory_.c_str());
}

void FakeDaemon::Start() {
  listener_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, socket_.c_str(), socket_.size() + 1);
  ROPETEAM_CHECK(::bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
  ROPETEAM_CHECK(::listen(listener_, 64) == 0);
  stop_ = false;
  thread_ = std::thread(&FakeDaemon::Run, this);
}

void FakeDaemon::Kill() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  const uint64_t one = 1;
  ROPETEAM_CHECK(::write(wake_, &one, sizeof(one)) == sizeof(one));
  thread_.join();
  ::close(listener_);
  ::unlink(socket_.c_str());
}

void FakeDaemon::Configure(const std::function<void(FakeConfig&)>& change) {
  const std::lock_guard lock(mutex_);
  change(config_);
}

void FakeDaemon::Release() {
  const std::lock_guard lock(mutex_);
  config_.hold.clear();
  for (const Held& held : std::exchange(held_, {})) Answer(*held.connection, held.header, held.payload);
}

bool FakeDaemon::WaitFor(const std::function<bool(const FakeCounts&)>& holds) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::seconds(10), [&] { return holds(counts_); });
}

FakeCounts FakeDaemon::counts() {
  const std::lock_guard lock(mutex_);
  return counts_;
}
std::vector<std::string> FakeDaemon::Problems() {
  const std::lock_guard lock(mutex_);
  return problems_;
}
int FakeDaemon::Received(Type type) {
  const std::lock_guard lock(mutex_);
  return received_[type];
}
local::Hello FakeDaemon::last_hello() {
  const std::lock_guard lock(mutex_);
  return last_hello_;
}
local::Wait FakeDaemon::last_wait() {
  const std::lock_guard lock(mutex_);
  return last_wait_;
}
local::Latest FakeDaemon::last_latest() {
  const std::lock_guard lock(mutex_);
  return last_latest_;
}
uint64_t FakeDaemon::chunks_free() {
  const std::lock_guard lock(mutex_);
  return free_.size();
}
uint64_t FakeDaemon::ChunksUntouched() {
  const std::lock_guard lock(mutex_);
  const std::vector<std::byte> old(chunk_bytes_, std::byte{kOldBytes});
  uint64_t count = 0;
  for (uint32_t i = 0; i < chunks_total_; ++i) {
    if (std::memcmp(Chunk(i), old.data(), chunk_bytes_) == 0) ++count;
  }
  return count;
}
bool FakeDaemon::Has(Step step, Rank rank) {
  const std::lock_guard lock(mutex_);
  return shards_.contains({step, rank});
}
FakeShard FakeDaemon::shard(Step step, Rank rank) {
  const std::lock_guard lock(mutex_);
  return shards_.at({step, rank});
}

std::string FakeDaemon::ObjectBytes(Step step, Rank rank, const std::string& name) {
  const std::lock_guard lock(mutex_);
  const FakeShard& shard = shards_.at({step, rank});
  const Object* object = shard.manifest.Find(name);
  ROPETEAM_CHECK(object != nullptr);
  std::string bytes;
  for (uint64_t i = 0; i < object->length; ++i) {
    const uint64_t at = object->offset + i;
    bytes.push_back(static_cast<char>(Chunk(shard.chunks[at / chunk_bytes_])[at % chunk_bytes_]));
  }
  return bytes;
}

void FakeDaemon::Flip(Step step, Rank rank, uint64_t stream_offset) {
  const std::lock_guard lock(mutex_);
  const FakeShard& shard = shards_.at({step, rank});
  Chunk(shard.chunks[stream_offset / chunk_bytes_])[stream_offset % chunk_bytes_] ^= std::byte{0x10};
}

void FakeDaemon::Problem(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  problems_.emplace_back(text);
}

// ---- the loop

void FakeDaemon::Run() {
  for (;;) {
    std::vector<pollfd> polled{{wake_, POLLIN, 0}, {listener_, POLLIN, 0}};
    {
      const std::lock_guard lock(mutex_);
      for (const auto& connection : connections_) polled.push_back({connection->fd, POLLIN, 0});
    }
    ::poll(polled.data(), polled.size(), -1);
    const std::lock_guard lock(mutex_);
    if (polled[0].revents != 0) {
      uint64_t count = 0;
      ROPETEAM_CHECK(::read(wake_, &count, sizeof(count)) == sizeof(count));
    }
    if (stop_) break;
    if (polled[1].revents != 0) Accept();
    for (size_t i = 2; i < polled.size(); ++i) {
      if (polled[i].revents == 0) continue;
      auto found = std::find_if(connections_.begin(), connections_.end(),
                                [&](const auto& connection) { return connection->fd == polled[i].fd; });
      if (found == connections_.end() || Read(**found)) continue;
      // A dying daemon loses all connections.
      const bool died = (*found)->fd < 0;
      if (!died) End(**found);
      connections_.erase(found);
      if (died) {
        for (const auto& other : connections_) End(*other);
        connections_.clear();
      }
    }
    changed_.notify_all();
  }
  const std::lock_guard lock(mutex_);
  for (const auto& connection : connections_) End(*connection);
  connections_.clear();
  held_.clear();
  changed_.notify_all();
}

void FakeDaemon::Accept() {
  const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  if (fd < 0) return;
  connections_.push_back(std::make_unique<Connection>());
  connections_.back()->fd = fd;
  ++counts_.connections;
}

void FakeDaemon::End(Connection& connection) {
  if (connection.fd < 0) return;
  ::close(connection.fd);
  connection.fd = -1;
  ++counts_.disconnects;
  std::erase_if(held_, [&](const Held& held) { return held.connection == &connection; });
  for (const auto& [id, save] : connection.saves) free_.insert(save.chunks.begin(), save.chunks.end());
  for (const auto& [id, buffer] : connection.buffers) ::munmap(buffer.first, buffer.second);
  if (connection.descriptor >= 0) ::close(connection.descriptor);
}

// False: the connection has ended.
bool FakeDaemon::Read(Connection& connection) {
  char buffer[1 << 16];
  iovec io{buffer, sizeof(buffer)};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t got = ::recvmsg(connection.fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0) return errno == EAGAIN;
  if (const cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr && part->cmsg_type == SCM_RIGHTS) {
    if (connection.descriptor >= 0) Problem("two descriptors at once");
    std::memcpy(&connection.descriptor, CMSG_DATA(part), sizeof(int));
  }
  if (got == 0) return false;
  connection.in.append(buffer, static_cast<size_t>(got));
  for (;;) {
    FrameHeader header;
    if (connection.in.size() < sizeof(header)) return true;
    std::memcpy(&header, connection.in.data(), sizeof(header));
    if (header.magic != local::kLocalMagic || header.length > local::kFrameBytesMax) {
      Problem("frame with magic %08x and %u bytes", header.magic, header.length);
      return false;
    }
    if (connection.in.size() < sizeof(header) + header.length) return true;
    const std::string payload = connection.in.substr(sizeof(header), header.length);
    connection.in.erase(0, sizeof(header) + header.length);
    if (!Handle(connection, header, payload)) return false;
  }
}

bool FakeDaemon::Handle(Connection& connection, const FrameHeader& header, const std::string& payload) {
  ++received_[header.type];
  if (auto death = config_.die_at.find(header.type); death != config_.die_at.end() && --death->second <= 0) {
    config_.die_at.erase(death);
    End(connection);
    return false;
  }
  if (config_.silent) return true;
  if (config_.garbage) {
    SendRaw(connection, "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\n\r\n");
    return true;
  }
  if (config_.hold.contains(header.type)) {
    held_.push_back({&connection, header, payload});
    return true;
  }
  Answer(connection, header, payload);
  return true;
}

void FakeDaemon::Answer(Connection& connection, const FrameHeader& header, const std::string& payload) {
  const uint64_t id = header.request;
  if (auto refused = config_.refuse.find(header.type); refused != config_.refuse.end()) {
    if (connection.descriptor >= 0) ::close(std::exchange(connection.descriptor, -1));
    Send(connection, id, Type::kReply, refused->second);
    return;
  }
  switch (header.type) {
    case Type::kHello:
      return OnHello(connection, id, payload);
    case Type::kSaveBegin:
      return OnSaveBegin(connection, id, payload);
    case Type::kSaveExtend:
      return OnSaveExtend(connection, id, payload);
    case Type::kSaveFilled:
      return OnSaveFilled(connection, payload);
    case Type::kSaveCommit:
      return OnSaveCommit(connection, id, payload);
    case Type::kSaveAbort:
      return OnSaveAbort(connection, id, payload);
    case Type::kGpuBuffer:
      return OnGpuBuffer(connection, id, payload);
    case Type::kGpuBufferEnd:
      return OnGpuBufferEnd(connection, payload);
    case Type::kSaveDirect:
      return OnSaveDirect(connection, payload);
    case Type::kSaveSettle:
      return OnSaveSettle(connection, id, payload);
    case Type::kWait: {
      if (!Decode(payload, last_wait_)) Problem("wait that cannot be decoded");
      if (shards_.contains({last_wait_.step, connection.hello.rank})) return Reply(connection, id);
      return Reply(connection, id, Code::kNotFound, "this rank did not save the step");
    }
    case Type::kSetPolicy: {
      local::SetPolicy policy;
      if (!Decode(payload, policy)) Problem("policy that cannot be decoded");
      if (policy.keep_on_storage <= 100) return Reply(connection, id);
      return Reply(connection, id, Code::kInvalidArgument, "another rank has set 100");
    }
    case Type::kLatest:
      if (!Decode(payload, last_latest_)) Problem("latest that cannot be decoded");
      if (shards_.empty()) return Reply(connection, id, Code::kNotFound, "no step is complete");
      return Send(connection, id, Type::kLatestReply,
                  local::LatestReply{shards_.rbegin()->first.first, config_.incarnation,
                                     connection.hello.world_size});
    case Type::kStorageList: {
      local::StorageList message;
      if (!Decode(payload, message)) Problem("storage list that cannot be decoded");
      local::StorageListReply reply{config_.stored};
      if (reply.steps.size() > message.steps_max) reply.steps.resize(message.steps_max);
      return Send(connection, id, Type::kStorageListReply, reply);
    }
    case Type::kViewOpen:
      return OnViewOpen(connection, id, payload);
    case Type::kViewRead:
      return OnViewRead(connection, id, payload);
    case Type::kViewRepair:
      return OnViewRepair(connection, id, payload);
    case Type::kViewClose: {
      local::ViewClose message;
      if (!Decode(payload, message) || connection.views.erase(message.view) != 1) Problem("close of no view");
      ++counts_.view_closes;
      return;
    }
    case Type::kAdmin: {
      local::Admin message;
      if (!Decode(payload, message)) Problem("admin that cannot be decoded");
      return Send(
          connection, id, Type::kAdminReply,
          local::AdminReply{"{\"command\": " + std::to_string(static_cast<int>(message.command)) + "}"});
    }
    default:
      Problem("frame of type %u", static_cast<unsigned>(header.type));
  }
}

void FakeDaemon::SendRaw(Connection& connection, const std::string& bytes, int descriptor) {
  size_t sent = 0;
  while (sent < bytes.size()) {
    iovec io{const_cast<char*>(bytes.data()) + sent, config_.byte_by_byte ? 1 : bytes.size() - sent};
    msghdr message{};
    message.msg_iov = &io;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (descriptor >= 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      cmsghdr* part = CMSG_FIRSTHDR(&message);
      part->cmsg_level = SOL_SOCKET;
      part->cmsg_type = SCM_RIGHTS;
      part->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(part), &descriptor, sizeof(int));
      descriptor = -1;
    }
    const ssize_t more = ::sendmsg(connection.fd, &message, MSG_NOSIGNAL);
    if (more < 0) return;
    sent += static_cast<size_t>(more);
  }
}

void FakeDaemon::Reply(Connection& connection, uint64_t id, Code code, const std::string& message) {
  Send(connection, id, Type::kReply, local::Reply{code, message});
}

// ---- requests

void FakeDaemon::OnHello(Connection& connection, uint64_t id, const std::string& payload) {
  if (!Decode(payload, connection.hello)) Problem("hello that cannot be decoded");
  last_hello_ = connection.hello;
  local::HelloReply reply;
  reply.version = config_.hello_version;
  reply.job = "job";
  reply.node = "node";
  reply.incarnation = config_.incarnation;
  reply.replicas = 1;
  reply.chunk_bytes = chunk_bytes_;
  reply.arena_bytes = arena_bytes_ + config_.hello_arena_bytes_extra;
  reply.chunks_begin = chunks_begin_;
  reply.chunks_total = chunks_total_;
  reply.dmabuf = config_.dmabuf;
  reply.transport = "fake";
  Send(connection, id, Type::kHelloReply, reply, config_.hello_without_descriptor ? -1 : arena_);
}

bool FakeDaemon::Allocate(uint64_t count, std::vector<Extent>* extents, std::vector<uint32_t>* chunks) {
  if (free_.size() < count) return false;
  std::vector<uint32_t> order(free_.begin(), free_.end());
  if (config_.scattered) {
    // All even chunks in descending order, then all odd ones: no two consecutive ones are neighbours.
    std::stable_sort(order.begin(), order.end(),
                     [](uint32_t a, uint32_t b) { return std::pair(a % 2, ~a) < std::pair(b % 2, ~b); });
  }
  for (uint64_t i = 0; i < count; ++i) {
    const uint32_t chunk = order[i];
    free_.erase(chunk);
    chunks->push_back(chunk);
    if (!extents->empty() && extents->back().first + extents->back().count == chunk) {
      ++extents->back().count;
    } else {
      extents->push_back({chunk, 1});
    }
  }
  return true;
}

void FakeDaemon::OnSaveBegin(Connection& connection, uint64_t id, const std::string& payload) {
  local::SaveBegin message;
  if (!Decode(payload, message)) Problem("save begin that cannot be decoded");
  counts_.agreement = message.agreement;
  const uint64_t need = std::max<uint64_t>(1, ChunksFor(message.stream_bytes, chunk_bytes_));
  if (shards_.contains({message.step, connection.hello.rank})) {
    return Reply(connection, id, Code::kAlreadyExists, "this rank has saved the step");
  }
  OpenSave save;
  save.step = message.step;
  local::SaveGrant grant;
  if (!Allocate(need, &grant.extents, &save.chunks)) {
    return Reply(connection, id, Code::kNoSpace,
                 "needed " + std::to_string(need) + " chunks, free " + std::to_string(free_.size()) +
                     ", limit " + std::to_string(chunks_total_));
  }
  grant.save = next_id_++;
  connection.saves.emplace(grant.save, std::move(save));
  Send(connection, id, Type::kSaveGrant, grant);
}

void FakeDaemon::OnSaveExtend(Connection& connection, uint64_t id, const std::string& payload) {
  local::SaveExtend message;
  if (!Decode(payload, message)) Problem("extend that cannot be decoded");
  auto found = connection.saves.find(message.save);
  if (found == connection.saves.end()) return Problem("extend of no save");
  ++counts_.extends;
  local::SaveGrant grant;
  grant.save = message.save;
  if (!Allocate(message.chunks, &grant.extents, &found->second.chunks)) {
    return Reply(connection, id, Code::kNoSpace, "needed " + std::to_string(message.chunks) + " chunks more");
  }
  Send(connection, id, Type::kSaveGrant, grant);
}

void FakeDaemon::OnSaveFilled(Connection& connection, const std::string& payload) {
  local::SaveFilled message;
  if (!Decode(payload, message)) Problem("filled that cannot be decoded");
  auto found = connection.saves.find(message.save);
  if (found == connection.saves.end()) return Problem("filled of no save");
  ++counts_.filled_frames;
  counts_.filled_chunks += static_cast<int>(message.crcs.size());
  for (size_t i = 0; i < message.crcs.size(); ++i) {
    const auto index = static_cast<uint32_t>(message.first + i);
    if (index >= found->second.chunks.size()) return Problem("chunk %u is filled and was not granted", index);
    if (!found->second.announced.emplace(index, message.crcs[i]).second)
      Problem("chunk %u is filled twice", index);
    if (Crc32c(Chunk(found->second.chunks[index]), chunk_bytes_) != message.crcs[i]) {
      Problem("chunk %u was announced with another checksum than it has", index);
    }
  }
}

void FakeDaemon::OnSaveCommit(Connection& connection, uint64_t id, const std::string& payload) {
  local::SaveCommit message;
  if (!Decode(payload, message)) Problem("commit that cannot be decoded");
  auto found = connection.saves.find(message.save);
  if (found == connection.saves.end()) return Problem("commit of no save");
  OpenSave save = std::move(found->second);
  connection.saves.erase(found);
  FakeShard shard;
  shard.meta.id = {config_.incarnation, save.step, connection.hello.rank};
  shard.meta.world_size = connection.hello.world_size;
  shard.meta.replicas = 1;
  shard.meta.chunk_bytes = chunk_bytes_;
  shard.meta.stream_bytes = message.stream_bytes;
  shard.meta.manifest_offset = message.manifest_offset;
  shard.meta.object_count = message.object_count;
  shard.crcs = message.crcs;
  const uint64_t count = ChunksFor(message.stream_bytes, chunk_bytes_);
  if (count > save.chunks.size() || message.crcs.size() != count) {
    return Problem("commit of %zu chunks, %zu granted, %zu checksums", static_cast<size_t>(count),
                   save.chunks.size(), message.crcs.size());
  }
  if (!save.direct.empty() && !save.settled)
    Problem("a save with device memory was committed and never settled");
  for (const auto& [index, crc] : save.direct) {
    if (index >= count || message.crcs[index] != crc)
      Problem("chunk %u was other bytes in device memory", index);
  }
  for (const auto& [index, crc] : save.announced) {
    if (index >= count || message.crcs[index] != crc)
      Problem("chunk %u changed after it was announced", index);
  }
  free_.insert(save.chunks.begin() + static_cast<ptrdiff_t>(count), save.chunks.end());
  save.chunks.resize(count);
  shard.chunks = save.chunks;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t length = ChunkLength(message.stream_bytes, chunk_bytes_, i);
    if (Crc32c(Chunk(shard.chunks[i]), length) != message.crcs[i])
      Problem("chunk %zu does not match", size_t(i));
    shard.stream.append(reinterpret_cast<const char*>(Chunk(shard.chunks[i])), length);
  }
  Result<Manifest> manifest = Manifest::Parse(std::string_view(shard.stream).substr(message.manifest_offset),
                                              message.manifest_offset);
  if (!manifest.ok()) {
    Problem("manifest: %s", manifest.status().message().c_str());
    return Reply(connection, id, Code::kCorrupt, manifest.status().message());
  }
  shard.manifest = std::move(manifest).value();
  CheckSealed(shard);
  ++counts_.commits;
  const std::pair key(save.step, connection.hello.rank);
  shards_[key] = std::move(shard);
  Reply(connection, id);
}

// Checks what a checksum cannot show: bytes between objects are zero, and the counts match.
void FakeDaemon::CheckSealed(const FakeShard& shard) {
  if (shard.manifest.objects().size() != shard.meta.object_count) {
    Problem("%u objects announced, %zu in the manifest", shard.meta.object_count,
            shard.manifest.objects().size());
  }
  uint64_t end = 0;
  const auto check_gap = [&](uint64_t begin) {
    for (uint64_t at = end; at < begin; ++at) {
      if (shard.stream[at] != 0) return Problem("byte %zu between objects is not zero", size_t(at));
    }
  };
  for (const Object& object : shard.manifest.objects()) {
    check_gap(object.offset);
    end = object.offset + object.length;
  }
  check_gap(shard.meta.manifest_offset);
}

void FakeDaemon::OnGpuBuffer(Connection& connection, uint64_t id, const std::string& payload) {
  local::GpuBuffer message;
  if (!Decode(payload, message)) Problem("gpu buffer that cannot be decoded");
  const int descriptor = std::exchange(connection.descriptor, -1);
  if (descriptor < 0) return Problem("a gpu buffer without a descriptor");
  void* memory = ::mmap(nullptr, message.bytes, PROT_READ, MAP_SHARED, descriptor, 0);
  ::close(descriptor);
  if (memory == MAP_FAILED) return Reply(connection, id, Code::kIo, "cannot be mapped");
  ++counts_.gpu_buffers;
  if (!connection.buffers.emplace(message.buffer, std::pair(static_cast<std::byte*>(memory), message.bytes))
           .second) {
    Problem("two gpu buffers of one name");
  }
  Reply(connection, id);
}

void FakeDaemon::OnGpuBufferEnd(Connection& connection, const std::string& payload) {
  local::GpuBufferEnd message;
  if (!Decode(payload, message)) Problem("gpu buffer end that cannot be decoded");
  const auto found = connection.buffers.find(message.buffer);
  if (found == connection.buffers.end()) return Problem("the end of no gpu buffer");
  ::munmap(found->second.first, found->second.second);
  connection.buffers.erase(found);
  ++counts_.gpu_buffer_ends;
}

void FakeDaemon::OnSaveDirect(Connection& connection, const std::string& payload) {
  local::SaveDirect message;
  if (!Decode(payload, message)) Problem("direct that cannot be decoded");
  const auto save = connection.saves.find(message.save);
  const auto buffer = connection.buffers.find(message.buffer);
  if (save == connection.saves.end() || buffer == connection.buffers.end())
    return Problem("direct of nothing");
  const uint64_t bytes = message.count * chunk_bytes_;
  if (message.offset > buffer->second.second || bytes > buffer->second.second - message.offset ||
      message.first + message.count > save->second.chunks.size()) {
    return Problem("direct outside of its save or buffer");
  }
  counts_.direct_chunks += static_cast<int>(message.count);
  for (uint32_t i = 0; i < message.count; ++i) {
    const std::byte* source = buffer->second.first + message.offset + i * chunk_bytes_;
    save->second.direct[message.first + i] = Crc32c(source, chunk_bytes_);
  }
}

void FakeDaemon::OnSaveSettle(Connection& connection, uint64_t id, const std::string& payload) {
  local::SaveSettle message;
  if (!Decode(payload, message)) Problem("settle that cannot be decoded");
  const auto save = connection.saves.find(message.save);
  if (save == connection.saves.end()) return Problem("settle of no save");
  save->second.settled = true;
  ++counts_.settles;
  Reply(connection, id);
}

void FakeDaemon::OnSaveAbort(Connection& connection, uint64_t id, const std::string& payload) {
  local::SaveAbort message;
  if (!Decode(payload, message)) Problem("abort that cannot be decoded");
  ++counts_.aborts;
  auto found = connection.saves.find(message.save);
  if (found == connection.saves.end()) return Reply(connection, id, Code::kNotFound, "no such save");
  if (!found->second.direct.empty() && !found->second.settled) {
    Problem("a save with device memory was aborted and never settled");
  }
  free_.insert(found->second.chunks.begin(), found->second.chunks.end());
  connection.saves.erase(found);
  Reply(connection, id);
}

void FakeDaemon::OnViewOpen(Connection& connection, uint64_t id, const std::string& payload) {
  local::ViewOpen message;
  if (!Decode(payload, message)) Problem("view open that cannot be decoded");
  auto found = shards_.find({message.step, message.rank});
  if (found == shards_.end()) return Reply(connection, id, Code::kNotFound, "no holder of this shard");
  local::ViewGrant grant;
  grant.view = next_id_++;
  grant.meta = found->second.meta;
  if (!config_.partial || !message.partial) {
    grant.crcs = found->second.crcs;
    for (const uint32_t chunk : found->second.chunks) grant.extents.push_back({chunk, 1});
  }
  connection.views[grant.view] = found->first;
  Send(connection, id, Type::kViewGrant, grant);
}

void FakeDaemon::OnViewRead(Connection& connection, uint64_t id, const std::string& payload) {
  local::ViewRead message;
  if (!Decode(payload, message)) Problem("view read that cannot be decoded");
  const auto found = connection.views.find(message.view);
  if (found == connection.views.end()) return Problem("read of no view");
  free_.insert(connection.packed.begin(), connection.packed.end());
  connection.packed.clear();
  if (message.parts.empty()) return Reply(connection, id);
  if (message.parts.size() > kPackedPartsMax) Problem("a read of %zu parts", message.parts.size());
  ++counts_.view_reads;
  const FakeShard& shard = shards_.at(found->second);
  local::ViewBytes bytes;
  for (const PackedPart& part : message.parts) {
    if (part.pieces.empty() || !ValidPart(part, shard.meta))
      return Problem("a part that does not fit its shard");
    std::vector<Extent> extents;
    if (!Allocate(1, &extents, &bytes.chunks))
      return Reply(connection, id, Code::kNoSpace, "no chunk is free");
    std::string packed;
    for (const ChunkPiece& piece : part.pieces)
      for (uint32_t run = 0; run < piece.count; ++run)
        packed.append(shard.stream, piece.chunk * chunk_bytes_ + piece.begin + uint64_t{run} * piece.stride,
                      piece.length);
    bytes.crcs.push_back(Crc32c(packed.data(), packed.size()));
    if (config_.bad_ranges) packed.back() ^= 1;
    std::memcpy(Chunk(bytes.chunks.back()), packed.data(), packed.size());
    counts_.packed_bytes += packed.size();
  }
  connection.packed = bytes.chunks;
  Send(connection, id, Type::kViewBytes, bytes);
}

void FakeDaemon::OnViewRepair(Connection& connection, uint64_t id, const std::string& payload) {
  local::ViewRepair message;
  if (!Decode(payload, message)) Problem("repair that cannot be decoded");
  auto found = connection.views.find(message.view);
  if (found == connection.views.end()) return Problem("repair of no view");
  ++counts_.repairs;
  const FakeShard& shard = shards_.at(found->second);
  for (const uint32_t index : message.chunks) {
    if (index >= shard.chunks.size()) return Problem("repair of chunk %u", index);
    const uint64_t length = ChunkLength(shard.meta.stream_bytes, chunk_bytes_, index);
    if (Crc32c(Chunk(shard.chunks[index]), length) == shard.crcs[index])
      Problem("repair of good chunk %u", index);
    if (config_.ignore_repairs) continue;
    std::memcpy(Chunk(shard.chunks[index]), shard.stream.data() + index * chunk_bytes_, length);
  }
  Reply(connection, id);
}

}  // namespace ropeteam::test

// SPDX-License-Identifier: Apache-2.0
//
// A daemon with one thread, one arena and no network, for the tests of the client library. It follows the
// local protocol, or breaks it as a test requests. It compares what the library sends with the bytes in the
// arena, and records every deviation from docs/local-protocol.md (Problems()).
//
// Safe from any thread. Configure() changes the configuration under the lock.

#ifndef ROPETEAM_TESTS_API_FAKE_DAEMON_H_
#define ROPETEAM_TESTS_API_FAKE_DAEMON_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "api/client/local_protocol.h"
#include "core/base/bytes.h"
#include "core/shard/manifest.h"

namespace ropeteam::test {

struct FakeConfig {
  // Chunks are granted in order; if true, in an order in which no two consecutive chunks are neighbours in
  // the arena.
  bool scattered = false;
  uint32_t hello_version = local::kLocalProtocolVersion;
  bool hello_without_descriptor = false;
  uint64_t hello_arena_bytes_extra = 0;  // announces so many bytes more than the file has
  bool garbage = false;                  // answers with bytes that are not a frame
  bool silent = false;                   // reads, and never answers
  bool byte_by_byte = false;             // sends answers one byte at a time
  bool ignore_repairs = false;           // answers ok and repairs nothing
  bool partial = false;                  // does not have the shard when a partial view is opened
  bool bad_ranges = false;               // flips a bit of what it packs
  bool dmabuf = false;                   // announces that it reads device memory, and does
  Incarnation incarnation = 1;
  std::vector<local::ListedStep> stored;       // on storage
  std::map<local::Type, local::Reply> refuse;  // the answer, until removed
  std::set<local::Type> hold;                  // not answered until Release()
  std::map<local::Type, int>
      die_at;  // ends all connections without an answer at the n-th frame of the type from now on
};

struct FakeShard {
  ShardMeta meta;
  std::vector<uint32_t> chunks;
  std::vector<uint32_t> crcs;
  std::string stream;  // as committed; a repair restores it
  Manifest manifest;
};

struct FakeCounts {
  int connections = 0;
  int disconnects = 0;
  int commits = 0;
  int aborts = 0;
  int extends = 0;
  int filled_frames = 0;
  int filled_chunks = 0;
  int repairs = 0;
  uint64_t agreement = 0;  // of the last save
  int view_closes = 0;
  int view_reads = 0;
  uint64_t packed_bytes = 0;
  int gpu_buffers = 0;
  int gpu_buffer_ends = 0;
  int direct_chunks = 0;
  int settles = 0;
};

class FakeDaemon {
 public:
  // The arena's file has `tail_bytes` after the chunks. So it can be large while tests use only its
  // beginning.
  explicit FakeDaemon(uint64_t chunk_bytes = 64 * 1024, uint64_t chunks = 64, uint64_t tail_bytes = 0);
  ~FakeDaemon();

  const std::string& socket() const { return socket_; }
  uint64_t chunk_bytes() const { return chunk_bytes_; }

  void Configure(const std::function<void(FakeConfig&)>& change);
  // Answers the frames that `hold` kept back.
  void Release();
  // As kill -9: the socket, all connections and all saves are gone; sealed shards remain. Start() starts the
  // next daemon.
  void Kill();
  void Start();

  // Waits until `holds` returns true; false after ten seconds.
  bool WaitFor(const std::function<bool(const FakeCounts&)>& holds);
  FakeCounts counts();
  std::vector<std::string> Problems();
  // Over all connections: how often a type was received, and the last message of some types.
  int Received(local::Type type);
  local::Hello last_hello();
  local::Wait last_wait();
  local::Latest last_latest();
  uint64_t chunks_free();
  // Chunks that no save has written to yet.
  uint64_t ChunksUntouched();
  bool Has(Step step, Rank rank);
  FakeShard shard(Step step, Rank rank);
  // The object's bytes in the arena.
  std::string ObjectBytes(Step step, Rank rank, const std::string& name);
  // Changes one byte of the stream in the arena.
  void Flip(Step step, Rank rank, uint64_t stream_offset);

 private:
  struct OpenSave {
    Step step = 0;
    std::vector<uint32_t> chunks;
    std::map<uint32_t, uint32_t> announced;  // chunk of the stream → its checksum
    std::map<uint32_t, uint32_t> direct;  // chunk of the stream → checksum of its device memory
    bool settled = false;
  };
  struct Connection {
    int fd = -1;
    std::string in;
    local::Hello hello;
    std::map<uint64_t, OpenSave> saves;
    std::map<uint64_t, std::pair<Step, Rank>> views;
    std::vector<uint32_t> packed;                                 // chunks of the last ranged read
    int descriptor = -1;                                          // received with the bytes in `in`
    std::map<uint64_t, std::pair<std::byte*, uint64_t>> buffers;  // mapping and length
  };
  struct Held {
    Connection* connection;
    local::FrameHeader header;
    std::string payload;
  };

  void Run();
  void Accept();
  bool Read(Connection& connection);
  bool Handle(Connection& connection, const local::FrameHeader& header, const std::string& payload);
  void Answer(Connection& connection, const local::FrameHeader& header, const std::string& payload);
  void OnHello(Connection& connection, uint64_t id, const std::string& payload);
  void OnSaveBegin(Connection& connection, uint64_t id, const std::string& payload);
  void OnSaveExtend(Connection& connection, uint64_t id, const std::string& payload);
  void OnSaveFilled(Connection& connection, const std::string& payload);
  void OnSaveCommit(Connection& connection, uint64_t id, const std::string& payload);
  void OnSaveAbort(Connection& connection, uint64_t id, const std::string& payload);
  void OnViewOpen(Connection& connection, uint64_t id, const std::string& payload);
  void OnViewRead(Connection& connection, uint64_t id, const std::string& payload);
  void OnViewRepair(Connection& connection, uint64_t id, const std::string& payload);
  void OnGpuBuffer(Connection& connection, uint64_t id, const std::string& payload);
  void OnGpuBufferEnd(Connection& connection, const std::string& payload);
  void OnSaveDirect(Connection& connection, const std::string& payload);
  void OnSaveSettle(Connection& connection, uint64_t id, const std::string& payload);
  void CheckSealed(const FakeShard& shard);
  void End(Connection& connection);

  bool Allocate(uint64_t count, std::vector<Extent>* extents, std::vector<uint32_t>* chunks);
  std::byte* Chunk(uint32_t chunk) { return memory_ + chunks_begin_ + chunk * chunk_bytes_; }
  void SendRaw(Connection& connection, const std::string& bytes, int descriptor = -1);
  template <typename T>
  void Send(Connection& connection, uint64_t id, local::Type type, const T& message, int descriptor = -1) {
    local::FrameHeader header;
    const std::string payload = Encode(message);
    header.length = static_cast<uint32_t>(payload.size());
    header.type = type;
    header.request = id;
    SendRaw(connection, std::string(reinterpret_cast<const char*>(&header), sizeof(header)) + payload,
            descriptor);
  }
  void Reply(Connection& connection, uint64_t id, Code code = Code::kOk, const std::string& message = "");
  void Problem(const char* format, ...) __attribute__((format(printf, 2, 3)));

  const uint64_t chunk_bytes_;
  const uint64_t chunks_total_;
  const uint64_t chunks_begin_ = 8192;
  std::string directory_;
  std::string socket_;
  int arena_ = -1;
  std::byte* memory_ = nullptr;
  uint64_t arena_bytes_ = 0;
  uint64_t memory_bytes_ = 0;  // the part that is mapped here

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  FakeConfig config_;
  FakeCounts counts_;
  std::vector<std::string> problems_;
  std::map<local::Type, int> received_;
  local::Hello last_hello_;
  local::Wait last_wait_;
  local::Latest last_latest_;
  std::set<uint32_t> free_;
  std::map<std::pair<Step, Rank>, FakeShard> shards_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::vector<Held> held_;
  uint64_t next_id_ = 1;

  int listener_ = -1;
  int wake_ = -1;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace ropeteam::test

#endif  // ROPETEAM_TESTS_API_FAKE_DAEMON_H_

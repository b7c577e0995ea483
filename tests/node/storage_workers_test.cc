// SPDX-License-Identifier: Apache-2.0
#include "node/storage_workers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/fsuid.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <future>
#include <map>
#include <random>

#include "core/base/checksum.h"
#include "core/shard/manifest.h"
#include "storage/forwarding_sink.h"
#include "storage/sinks.h"

namespace ropeteam {
namespace {

constexpr uint64_t kChunkBytes = 64 << 10;
constexpr uint64_t kChunks = 1200;

int Nice() { return getpriority(PRIO_PROCESS, 0); }  // of this thread

// Calls of Stat() and List() do not return while the gate is closed, whatever their deadline and Stop().
// Records the nice values of the last threads that called it.
class HangingSink final : public storage::ForwardingSink {
 public:
  using ForwardingSink::ForwardingSink;

  void Close() {
    const std::lock_guard lock(mutex_);
    let_through_ = 0;
  }
  void LetThrough(uint64_t calls) {
    const std::lock_guard lock(mutex_);
    let_through_ = calls;
    changed_.notify_all();
  }
  void AwaitHanging() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return hanging_ != 0 && let_through_ == 0; });
  }
  bool stopped() const { return stopped_; }
  int nice_of_writer() const { return nice_of_writer_; }
  int nice_of_reader() const { return nice_of_reader_; }

  void SetYield(Yield yield) override {
    below().SetYield([this, yield = std::move(yield)](size_t bytes) {
      nice_of_writer_ = Nice();
      yield(bytes);
    });
  }
  Status Read(const std::string& name, uint64_t offset, std::span<const storage::Target> targets,
              storage::Deadline deadline) override {
    nice_of_reader_ = Nice();
    return below().Read(name, offset, targets, deadline);
  }

  // Files that Stat() and List() report in place of those that are there, by their name, with size and checksum.
  using Pretended = std::map<std::string, std::pair<uint64_t, std::optional<uint32_t>>>;
  void Pretend(Pretended files) { pretended_ = std::move(files); }

  Result<storage::FileInfo> Stat(const std::string& name, storage::Deadline deadline) override {
    Pass();
    if (const auto found = pretended_.find(name); found != pretended_.end())
      return storage::FileInfo{name, found->second.first, found->second.second};
    return below().Stat(name, deadline);
  }
  Result<storage::ListPage> List(const std::string& folder, const std::string& page,
                                 storage::Deadline deadline) override {
    Pass();
    Result<storage::ListPage> list = below().List(folder, page, deadline);
    for (const auto& [name, file] : pretended_)
      if (list.ok() && name.starts_with(folder + "/"))
        list->files.push_back({name, file.first, std::nullopt});
    return list;
  }
  void Stop() override {
    stopped_ = true;
    below().Stop();
  }

 private:
  void Pass() {
    std::unique_lock lock(mutex_);
    ++hanging_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return let_through_ != 0; });
    --let_through_;
    --hanging_;
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t let_through_ = UINT64_MAX;  // guarded by mutex_
  uint64_t hanging_ = 0;               // guarded by mutex_
  std::atomic<bool> stopped_{false};
  Pretended pretended_;
  std::atomic<int> nice_of_writer_{0}, nice_of_reader_{0};
};

// An arena, a directory, and workers between them.
class StorageWorkersTest : public ::testing::Test {
 protected:
  struct Answer {
    Status status;
    StorageDone done;
  };

  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "/storage-workers.XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override {
    workers_.reset();
    std::filesystem::remove_all(directory_);
  }

  StorageWorkers::Config ConfigOf(std::shared_ptr<storage::Sink> sink) {
    StorageWorkers::Config config;
    config.sink = std::move(sink);
    config.job = "job";
    config.memory = memory_;
    config.chunk_bytes = kChunkBytes;
    return config;
  }
  void Open(uint64_t bytes_per_s = 0) {
    Result<std::unique_ptr<storage::Sink>> sink = storage::OpenSink(directory_);
    ASSERT_TRUE(sink.ok()) << sink.status().ToString();
    const std::shared_ptr<storage::Sink> below = std::move(*sink);
    sink_ = std::make_shared<HangingSink>(below);
    lock_sink_ = std::make_shared<HangingSink>(below);
    StorageWorkers::Config config = ConfigOf(sink_);
    config.lock_sink = lock_sink_;
    config.bytes_per_s = bytes_per_s;
    Open(std::move(config));
  }
  void Open(std::shared_ptr<storage::Sink> sink) {
    StorageWorkers::Config config = ConfigOf(sink);
    config.lock_sink = std::move(sink);
    Open(std::move(config));
  }
  void Open(StorageWorkers::Config config) {
    workers_ = std::make_unique<StorageWorkers>(
        std::move(config), [this](uint64_t tag, Status status, StorageDone done) {
          const std::lock_guard lock(mutex_);
          asked_.at(tag).set_value({std::move(status), std::move(done)});
        });
  }
  std::future<Answer> Begin(StorageWork work) {
    std::future<Answer> answer;
    {
      const std::lock_guard lock(mutex_);
      answer = asked_[++tag_].get_future();
    }
    workers_->Submit({tag_, std::move(work)});
    return answer;
  }
  Answer Do(StorageWork work) { return Begin(std::move(work)).get(); }

  // Puts a rank's shard at the beginning of the arena, as libropeteam packs it.
  NameFiles Save(const std::vector<std::pair<std::string, uint64_t>>& objects) {
    std::mt19937 random(1);
    Manifest manifest;
    NameFiles shard;
    for (const auto& [name, length] : objects) {
      const Result<uint64_t> offset = manifest.Add(name, length);
      EXPECT_TRUE(offset.ok());
      for (uint64_t i = 0; i < length; ++i) memory_[*offset + i] = static_cast<std::byte>(random());
    }
    const std::string tail = manifest.Encode();
    std::memcpy(memory_.data() + manifest.manifest_offset(), tail.data(), tail.size());
    shard.meta.id = {1, 7, 0};
    shard.meta.world_size = 1;
    shard.meta.chunk_bytes = kChunkBytes;
    shard.meta.stream_bytes = manifest.manifest_offset() + tail.size();
    shard.meta.manifest_offset = manifest.manifest_offset();
    shard.meta.object_count = static_cast<uint32_t>(objects.size());
    const uint64_t chunks = ChunksFor(shard.meta.stream_bytes, kChunkBytes);
    shard.extents = {{0, static_cast<uint32_t>(chunks)}};
    for (uint64_t i = 0; i < chunks; ++i)
      shard.crcs.push_back(
          Crc32c(memory_.data() + i * kChunkBytes, ChunkLength(shard.meta.stream_bytes, kChunkBytes, i)));
    return shard;
  }
  // Takes the lock for these workers.
  std::string Proof() {
    const Answer held = Do(HoldStorage{});
    EXPECT_TRUE(held.status.ok()) << held.status.ToString();
    return std::get<StorageProof>(held.done.result).text;
  }
  // Writes the shard of the only rank, without a manifest.
  std::shared_ptr<StoredStep> Write(const NameFiles& shard) {
    Answer written = Do(WriteShard{shard, {}, Proof()});
    EXPECT_TRUE(written.status.ok()) << written.status.ToString();
    auto step = std::make_shared<StoredStep>();
    step->id = StepOf(shard.meta.id);
    step->world_size = 1;
    step->chunk_bytes = kChunkBytes;
    step->ranks = {std::get<StoredRank>(written.done.result)};
    return step;
  }
  void Persist(const NameFiles& shard) {
    const Answer manifest = Do(WriteManifest{Write(shard)});
    ASSERT_TRUE(manifest.status.ok()) << manifest.status.ToString();
  }
  static LoadChunks WholeOf(const NameFiles& shard) {
    LoadChunks load;
    load.shard = shard.meta.id;
    load.stream_bytes = shard.meta.stream_bytes;
    load.extents = shard.extents;
    for (uint32_t i = 0; i < shard.crcs.size(); ++i) load.chunks.push_back(i);
    return load;
  }
  std::string StepFile(const std::string& name) const {
    return directory_ + "/job/step-0000000007-i00000001/" + name;
  }

  std::string directory_;
  std::vector<std::byte> memory_ = std::vector<std::byte>(kChunks * kChunkBytes);
  std::mutex mutex_;
  std::map<uint64_t, std::promise<Answer>> asked_;
  uint64_t tag_ = 0;
  std::shared_ptr<HangingSink> sink_, lock_sink_;  // of one directory
  std::unique_ptr<StorageWorkers> workers_;
};

// Small objects, which are read again for their checksums; large objects, whose checksums are combined;
// separate files; gaps between objects; a rank's file of several parts.
TEST_F(StorageWorkersTest, AShardComesBackWithItsChunksChecksums) {
  ASSERT_NO_FATAL_FAILURE(Open());
  std::vector<std::pair<std::string, uint64_t>> objects = {
      {"a", 1},          {"b.json", 100}, {"c", 20000},        {"empty", 0},
      {"d/e.pt", 70001}, {"f", 3},        {"large", 20 << 20}, {"g", 17}};
  const NameFiles shard = Save(objects);
  ASSERT_NO_FATAL_FAILURE(Persist(shard));
  const auto chunks = static_cast<uint32_t>(shard.crcs.size());
  const std::vector<std::byte> saved(memory_.begin(), memory_.begin() + chunks * kChunkBytes);

  // Loads it into other chunks, in two extents.
  LoadChunks load;
  load.shard = shard.meta.id;
  load.stream_bytes = shard.meta.stream_bytes;
  load.extents = {{chunks + 5, 3}, {2 * chunks, chunks - 3}};
  for (uint32_t i = 0; i < chunks; ++i) load.chunks.push_back(i);
  std::fill(memory_.begin(), memory_.end(), std::byte{0xaa});
  const Answer whole = Do(load);
  ASSERT_TRUE(whole.status.ok()) << whole.status.ToString();
  const auto& loaded = std::get<LoadedChunks>(whole.done.result);
  EXPECT_EQ(loaded.crcs, shard.crcs);
  EXPECT_EQ(loaded.meta, [&] {
    ShardMeta meta = shard.meta;
    meta.replicas = loaded.meta.replicas;  // the store's, not the file's
    return meta;
  }());
  for (uint32_t i = 0; i < chunks; ++i)
    ASSERT_EQ(std::memcmp(memory_.data() + ChunkAt(load.extents, i) * kChunkBytes,
                          saved.data() + i * kChunkBytes, ChunkLength(load.stream_bytes, kChunkBytes, i)),
              0)
        << i;

  // Loads only some chunks; the others stay unchanged.
  load.chunks = {0, 2, 3, 200, chunks - 1};
  std::fill(memory_.begin(), memory_.end(), std::byte{0xaa});
  const Answer some = Do(load);
  ASSERT_TRUE(some.status.ok()) << some.status.ToString();
  std::vector<uint32_t> expected;
  for (const uint32_t chunk : load.chunks) expected.push_back(shard.crcs[chunk]);
  EXPECT_EQ(std::get<LoadedChunks>(some.done.result).crcs, expected);
  for (uint32_t i = 0; i < chunks; ++i) {
    const bool wanted = std::find(load.chunks.begin(), load.chunks.end(), i) != load.chunks.end();
    const std::byte first = memory_[ChunkAt(load.extents, i) * kChunkBytes];
    ASSERT_EQ(first, wanted ? saved[i * kChunkBytes] : std::byte{0xaa}) << i;
  }
}

// Saves take precedence all the time.
TEST_F(StorageWorkersTest, AShardIsWrittenThoughMoreUrgentWorkNeverEnds) {
  ASSERT_NO_FATAL_FAILURE(Open());
  workers_->SetUrgent(true);
  ASSERT_NO_FATAL_FAILURE(Persist(Save({{"a", 100000}, {"b.pt", 30000}})));
}

TEST_F(StorageWorkersTest, TheManifestOfTheLargestJobComesBack) {
  ASSERT_NO_FATAL_FAILURE(Open());
  auto step = std::make_shared<StoredStep>();
  step->id = {1, 7};
  step->world_size = storage::kStepRanksMax;
  step->chunk_bytes = kChunkBytes;
  HangingSink::Pretended files;
  for (uint32_t rank = 0; rank < step->world_size; ++rank) {
    StoredRank& stored = step->ranks.emplace_back();
    stored.stream_bytes = 1000ull << 20;
    stored.content = rank;
    for (const char* name : {"model", "optimizer", "random", "loader"}) {
      stored.files.push_back({"rank" + std::to_string(rank) + "-" + name + ".pt", 200ull << 20, rank, 0, 0});
      files["job/step-0000000007-i00000001/" + stored.files.back().path] = {200ull << 20, rank};
    }
  }
  sink_->Pretend(files);
  const Answer written = Do(WriteManifest{step});
  ASSERT_TRUE(written.status.ok()) << written.status.ToString();
  const Answer again = Do(WriteManifest{step});
  EXPECT_TRUE(again.status.ok()) << "compared with the one that lies there: " << again.status.ToString();
  auto other = std::make_shared<StoredStep>(*step);
  other->ranks.back().stream_bytes += 1;
  EXPECT_EQ(Do(WriteManifest{other}).status.code(), Code::kAlreadyExists);
}

// The holder's proof goes to the node that writes. That one sees an empty directory, because the store is not mounted.
TEST_F(StorageWorkersTest, AShardIsNotWrittenWhereTheLockIsNot) {
  ASSERT_NO_FATAL_FAILURE(Open());
  const std::string proof = Proof(), store = directory_;
  EXPECT_LE(proof.size(), 256u);
  const NameFiles shard = Save({{"a", 100000}, {"b.pt", 30000}});
  const std::unique_ptr<StorageWorkers> holder = std::move(workers_);
  directory_ = store + "/elsewhere";
  std::filesystem::create_directory(directory_);
  ASSERT_NO_FATAL_FAILURE(Open());
  const Status refused = Do(WriteShard{shard, {}, proof}).status;
  EXPECT_EQ(refused.code(), Code::kNotFound);
  EXPECT_THAT(refused.message(), ::testing::HasSubstr(directory_));
  EXPECT_THAT(refused.message(), ::testing::HasSubstr("is it mounted here?"));
  EXPECT_EQ(Do(ProveStorage{proof}).status.code(), Code::kNotFound);
  EXPECT_EQ(Do(WriteShard{shard, {}, "1:x"}).status.code(), Code::kInvalidArgument);
  EXPECT_EQ(Do(ProveStorage{"1:../../x"}).status.code(), Code::kInvalidArgument);
  EXPECT_TRUE(std::filesystem::is_empty(directory_));

  // Now it is mounted.
  std::filesystem::remove(directory_);
  std::filesystem::create_directory_symlink(store, directory_);
  EXPECT_EQ(Do(ProveStorage{proof}).status.ToString(), "ok");
  EXPECT_EQ(Do(WriteShard{shard, {}, proof}).status.ToString(), "ok");
  EXPECT_TRUE(std::filesystem::exists(store + "/job/step-0000000007-i00000001/b.pt"));
  workers_.reset();
  directory_ = store;
}

TEST_F(StorageWorkersTest, AStepDoesNotCountUntilAllItsFilesAreSeen) {
  ASSERT_NO_FATAL_FAILURE(Open());
  const std::shared_ptr<StoredStep> step = Write(Save({{"a", 100000}, {"d/b.pt", 30000}}));
  const std::string path = StepFile("d/b.pt"), manifest = StepFile("ropeteam-manifest.json");
  const auto refused = [&](const char* why) {
    const Status status = Do(WriteManifest{step}).status;
    EXPECT_EQ(status.code(), Code::kNotFound) << status.ToString();
    EXPECT_THAT(status.message(), ::testing::HasSubstr("d/b.pt"));
    EXPECT_THAT(status.message(), ::testing::HasSubstr(why));
    EXPECT_FALSE(std::filesystem::exists(manifest));
  };
  std::filesystem::rename(path, path + ".away");
  refused("lacks");
  std::filesystem::rename(path + ".away", path);
  std::filesystem::resize_file(path, 29999);
  refused("has 29999 bytes");
  std::filesystem::resize_file(path, 30000);
  EXPECT_EQ(Do(WriteManifest{step}).status.ToString(), "ok");
  EXPECT_TRUE(std::filesystem::exists(manifest));
}

TEST_F(StorageWorkersTest, AStepDoesNotCountWithAFileOfAnotherChecksum) {
  ASSERT_NO_FATAL_FAILURE(Open());
  const std::shared_ptr<StoredStep> step = Write(Save({{"a", 100000}, {"b.pt", 30000}, {"c.pt", 20000}}));
  const std::string folder = "job/step-0000000007-i00000001/";
  HangingSink::Pretended files;
  for (const StoredFile& file : step->ranks[0].files) files[folder + file.path] = {file.bytes, file.crc32c};
  files[folder + "b.pt"].second = *files[folder + "b.pt"].second ^ 1;
  sink_->Pretend(files);
  const Status status = Do(WriteManifest{step}).status;
  EXPECT_EQ(status.code(), Code::kNotFound) << status.ToString();
  EXPECT_THAT(status.message(), ::testing::HasSubstr(folder + "b.pt has the checksum"));
  EXPECT_FALSE(std::filesystem::exists(StepFile("ropeteam-manifest.json")));
  // Some stores tell the checksum of a small file only.
  files[folder + "b.pt"].second.reset();
  sink_->Pretend(files);
  EXPECT_EQ(Do(WriteManifest{step}).status.ToString(), "ok");
}

TEST_F(StorageWorkersTest, ALockThatIsLostWhileTheFilesAreLookedAtStopsTheManifest) {
  ASSERT_NO_FATAL_FAILURE(Open());
  const std::shared_ptr<StoredStep> step = Write(Save({{"a", 1000}}));
  sink_->Close();
  std::future<Answer> answer = Begin(WriteManifest{step});
  sink_->AwaitHanging();
  storage::JobLock other({.sink = storage::OpenSink(directory_).value(),
                          .job = "job",
                          .node = "other",
                          .take_over = true,
                          .process = {"another boot", "pid:[4026531836]", 1, 1},
                          .renew_by_itself = false});
  ASSERT_EQ(other.Hold().ToString(), "ok");
  sink_->LetThrough(UINT64_MAX);
  EXPECT_EQ(answer.get().status.code(), Code::kAlreadyExists);
  EXPECT_FALSE(std::filesystem::exists(StepFile("ropeteam-manifest.json")));
}

TEST_F(StorageWorkersTest, AMissingFileIsDamageOnlyWhileTheManifestIsThere) {
  ASSERT_NO_FATAL_FAILURE(Open());
  const NameFiles shard = Save({{"a", 100000}, {"b.pt", 30000}});
  ASSERT_NO_FATAL_FAILURE(Persist(shard));
  const LoadChunks load = WholeOf(shard);
  const ReadStored read{StepOf(shard.meta.id)};
  EXPECT_EQ(Do(read).status.ToString(), "ok");
  for (const char* name : {"b.pt", "rank-00000.safetensors"}) {
    EXPECT_EQ(Do(load).status.ToString(), "ok") << "and the manifest is kept";
    const std::string path = StepFile(name), manifest = StepFile("ropeteam-manifest.json");
    std::filesystem::rename(path, path + ".away");
    EXPECT_EQ(Do(load).status.code(), Code::kCorrupt) << name;
    EXPECT_EQ(Do(read).status.code(), Code::kCorrupt) << name;
    EXPECT_EQ(Do(load).status.code(), Code::kCorrupt) << name;
    std::filesystem::rename(manifest, manifest + ".away");
    EXPECT_EQ(Do(load).status.code(), Code::kNotFound) << name;
    EXPECT_EQ(Do(read).status.code(), Code::kNotFound) << name;
    EXPECT_EQ(Do(load).status.code(), Code::kNotFound) << name;
    std::filesystem::rename(manifest + ".away", manifest);
    std::filesystem::rename(path + ".away", path);
  }
  EXPECT_EQ(Do(read).status.ToString(), "ok");
}

// As while another node deletes the step: the manifest was read, then the folder is empty.
TEST_F(StorageWorkersTest, AStepThatVanishesWhileItIsReadIsNotDamaged) {
  ASSERT_NO_FATAL_FAILURE(Open());
  const NameFiles shard = Save({{"a", 100000}});
  ASSERT_NO_FATAL_FAILURE(Persist(shard));
  sink_->Close();
  std::future<Answer> answer = Begin(ReadStored{StepOf(shard.meta.id)});
  sink_->AwaitHanging();
  sink_->LetThrough(1);  // the size of the manifest; the listing comes next
  sink_->AwaitHanging();
  std::filesystem::remove_all(StepFile(""));
  sink_->LetThrough(UINT64_MAX);
  const Status status = answer.get().status;
  EXPECT_EQ(status.code(), Code::kNotFound) << status.ToString();
}

TEST_F(StorageWorkersTest, AMarkAndADamagedManifestAreDamage) {
  ASSERT_NO_FATAL_FAILURE(Open());
  const NameFiles shard = Save({{"a", 1000}});
  ASSERT_NO_FATAL_FAILURE(Persist(shard));
  const StepId id = StepOf(shard.meta.id);
  ASSERT_EQ(Do(MarkStored{id, "a test"}).status.ToString(), "ok");
  EXPECT_EQ(Do(ReadStored{id}).status.code(), Code::kCorrupt);
  std::filesystem::remove(StepFile("ropeteam-damaged.txt"));
  EXPECT_EQ(Do(ReadStored{id}).status.ToString(), "ok");
  std::filesystem::resize_file(StepFile("ropeteam-manifest.json"), 100);
  EXPECT_EQ(Do(ReadStored{id}).status.code(), Code::kCorrupt);
  EXPECT_EQ(Do(WholeOf(shard)).status.code(), Code::kCorrupt);
}

// Calls the store as another user, without root's rights. A thread has its own user where files are concerned.
class StrangersSink final : public storage::ForwardingSink {
 public:
  using ForwardingSink::ForwardingSink;
  Status Read(const std::string& name, uint64_t offset, std::span<const storage::Target> targets,
              storage::Deadline deadline) override {
    const Stranger here;
    return below().Read(name, offset, targets, deadline);
  }
  Result<storage::FileInfo> Stat(const std::string& name, storage::Deadline deadline) override {
    const Stranger here;
    return below().Stat(name, deadline);
  }
  Result<storage::ListPage> List(const std::string& folder, const std::string& page,
                                 storage::Deadline deadline) override {
    const Stranger here;
    return below().List(folder, page, deadline);
  }

 private:
  struct Stranger {
    Stranger() { setfsuid(65534); }
    ~Stranger() { setfsuid(geteuid()); }
  };
};

TEST_F(StorageWorkersTest, WhatANodeMayNotReadIsNotDamaged) {
  ASSERT_NO_FATAL_FAILURE(Open());
  const NameFiles shard = Save({{"a", 100000}, {"b.pt", 30000}});
  ASSERT_NO_FATAL_FAILURE(Persist(shard));
  const std::string proof = Proof();
  const std::unique_ptr<StorageWorkers> holder = std::move(workers_);
  Result<std::unique_ptr<storage::Sink>> sink = storage::OpenSink(directory_);
  ASSERT_TRUE(sink.ok());
  Open(std::make_shared<StrangersSink>(std::move(*sink)));
  const LoadChunks load = WholeOf(shard);
  const ReadStored read{StepOf(shard.meta.id)};
  std::filesystem::permissions(directory_, std::filesystem::perms(0755));
  EXPECT_EQ(Do(read).status.ToString(), "ok");
  EXPECT_EQ(Do(load).status.ToString(), "ok");
  EXPECT_EQ(Do(ProveStorage{proof}).status.ToString(), "ok");
  for (const std::string& path : {StepFile("b.pt"), StepFile(""), directory_}) {
    const auto before = std::filesystem::status(path).permissions();
    std::filesystem::permissions(path, std::filesystem::perms::none);
    const Answer refused = Do(load);
    EXPECT_EQ(refused.status.code(), Code::kIo) << path;
    EXPECT_THAT(refused.status.message(), ::testing::HasSubstr("Permission denied"));
    EXPECT_EQ(WordOf(refused.status.code()), StoredWord::kUnreadable);
    if (path != StepFile("b.pt")) {
      EXPECT_EQ(Do(read).status.code(), Code::kIo) << path;
    }
    if (path == directory_) {
      EXPECT_EQ(Do(ProveStorage{proof}).status.code(), Code::kIo);
      EXPECT_EQ(Do(WriteShard{shard, {}, proof}).status.code(), Code::kIo);
    }
    std::filesystem::permissions(path, before);
  }
  workers_.reset();
}

// Answers one kind of call with a code, as a store or a proxy does that refuses it.
class RefusingSink final : public storage::ForwardingSink {
 public:
  using ForwardingSink::ForwardingSink;
  enum class Call { kNone, kRead, kStat, kList };
  Status Read(const std::string& name, uint64_t offset, std::span<const storage::Target> targets,
              storage::Deadline deadline) override {
    if (refuses == Call::kRead) return Refusal();
    return below().Read(name, offset, targets, deadline);
  }
  Result<storage::FileInfo> Stat(const std::string& name, storage::Deadline deadline) override {
    if (refuses == Call::kStat) return Refusal();
    return below().Stat(name, deadline);
  }
  Result<storage::ListPage> List(const std::string& folder, const std::string& page,
                                 storage::Deadline deadline) override {
    if (refuses == Call::kList) return Refusal();
    return below().List(folder, page, deadline);
  }
  std::atomic<Call> refuses{Call::kNone};
  std::atomic<Code> code{Code::kOk};

 private:
  Status Refusal() const { return Error(code, "KMS.DisabledException"); }
};

TEST_F(StorageWorkersTest, WhatTheStoreRefusesIsNotDamaged) {
  using Call = RefusingSink::Call;
  Result<std::unique_ptr<storage::Sink>> opened = storage::OpenSink(directory_);
  ASSERT_TRUE(opened.ok());
  const auto sink = std::make_shared<RefusingSink>(std::move(*opened));
  Open(sink);
  const NameFiles shard = Save({{"a", 100000}, {"b.pt", 30000}});
  ASSERT_NO_FATAL_FAILURE(Persist(shard));
  const std::string proof = Proof();
  const LoadChunks load = WholeOf(shard);
  const ReadStored read{StepOf(shard.meta.id)};
  for (const Code code : {Code::kInvalidArgument, Code::kUnsupported}) {
    sink->code = code;
    for (const Call call : {Call::kRead, Call::kStat, Call::kList}) {
      sink->refuses = call;
      EXPECT_EQ(Do(read).status, Error(Code::kIo, "KMS.DisabledException"));
      // ReadStored has forgotten the manifest. A load reads it, and does not list the folder.
      if (call != Call::kList) {
        EXPECT_EQ(Do(load).status, Error(Code::kIo, "KMS.DisabledException"));
      }
      if (call == Call::kRead) {
        EXPECT_EQ(Do(ProveStorage{proof}).status, Error(Code::kIo, "KMS.DisabledException"));
      }
      if (call == Call::kList) {
        EXPECT_EQ(Do(ListStored{}).status, Error(Code::kIo, "KMS.DisabledException"));
      }
      sink->refuses = Call::kNone;
      ASSERT_EQ(Do(load).status.ToString(), "ok") << "from now on the manifest is kept";
      sink->refuses = call;
      if (call == Call::kRead) {
        EXPECT_EQ(Do(load).status, Error(Code::kIo, "KMS.DisabledException")) << "of a file";
      }
      sink->refuses = Call::kNone;
    }
  }
}

TEST_F(StorageWorkersTest, AStepBehindASymbolicLinkIsNotDamaged) {
  ASSERT_NO_FATAL_FAILURE(Open());
  const NameFiles shard = Save({{"a", 100000}});
  ASSERT_NO_FATAL_FAILURE(Persist(shard));
  std::filesystem::rename(StepFile(""), directory_ + "/moved");
  std::filesystem::create_directory_symlink(directory_ + "/moved",
                                            directory_ + "/job/step-0000000007-i00000001");
  const Status status = Do(ReadStored{StepOf(shard.meta.id)}).status;
  EXPECT_EQ(status.code(), Code::kIo);
  EXPECT_THAT(status.message(), ::testing::HasSubstr("symbolic links"));
}

TEST_F(StorageWorkersTest, ASourceThatIsNotHereSaysNothingOfItsSteps) {
  StorageWorkers::Config config = ConfigOf(nullptr);
  config.restore_from = directory_ + "/absent/job";
  Open(std::move(config));
  const Status status = Do(ReadStored{{1, 7}}).status;
  EXPECT_EQ(status.code(), Code::kIo);
  EXPECT_THAT(status.message(), ::testing::HasSubstr(directory_ + "/absent/job is not there"));
}

// Threads of the training and of the daemon must not wait for a processor because a step is being written.
TEST_F(StorageWorkersTest, PartsAreWrittenAtTheLowestPriorityAndReadAtTheDaemons) {
  ASSERT_NO_FATAL_FAILURE(Open());
  const NameFiles shard = Save({{"a", 100000}});
  ASSERT_TRUE(Do(WriteShard{shard, {}, Proof()}).status.ok());
  EXPECT_EQ(sink_->nice_of_writer(), 19);
  ASSERT_NO_FATAL_FAILURE(Persist(shard));
  LoadChunks load;
  load.shard = shard.meta.id;
  load.stream_bytes = shard.meta.stream_bytes;
  load.extents = shard.extents;
  ASSERT_TRUE(Do(load).status.ok());
  EXPECT_EQ(sink_->nice_of_reader(), Nice());
}

constexpr auto kStalledAfter = StorageWorkers::kStalledAfter;
using Clock = std::chrono::steady_clock;
using Tags = std::vector<uint64_t>;

TEST_F(StorageWorkersTest, AWorkThatHangsIsToldAndToldAgain) {
  ASSERT_NO_FATAL_FAILURE(Open());
  const std::string proof = Proof();
  sink_->Close();
  const auto before = Clock::now();
  std::future<Answer> answer = Begin(WriteShard{Save({{"a", 100000}}), {}, proof});
  sink_->AwaitHanging();
  EXPECT_EQ(workers_->Stalled(before + kStalledAfter), Tags{});
  const auto told = Clock::now() + kStalledAfter;
  EXPECT_EQ(workers_->Stalled(told), Tags{tag_});
  EXPECT_EQ(workers_->Stalled(told + StorageWatch::kToldAgain / 2), Tags{});
  EXPECT_EQ(workers_->Stalled(told + StorageWatch::kToldAgain), Tags{tag_});
  sink_->LetThrough(UINT64_MAX);
  EXPECT_TRUE(answer.get().status.ok());
  EXPECT_EQ(workers_->Stalled(told + 2 * StorageWatch::kToldAgain), Tags{});
}

TEST_F(StorageWorkersTest, AWorkThatIsSlowIsNotTold) {
  ASSERT_NO_FATAL_FAILURE(Open());
  const std::string proof = Proof();
  sink_->Close();
  std::future<Answer> answer =
      Begin(WriteShard{Save({{"a.pt", 100}, {"b.pt", 100}, {"c.pt", 100}}), {}, proof});
  sink_->AwaitHanging();
  for (int i = 1; i < 3; ++i) {
    const auto hung = Clock::now();
    sink_->LetThrough(1);
    sink_->AwaitHanging();
    EXPECT_EQ(workers_->Stalled(hung + kStalledAfter), Tags{}) << i;
  }
  sink_->LetThrough(UINT64_MAX);
  EXPECT_TRUE(answer.get().status.ok());
}

TEST_F(StorageWorkersTest, AnEndDoesNotWaitForACallThatHangs) {
  ASSERT_NO_FATAL_FAILURE(Open());
  const std::string proof = Proof();
  sink_->Close();
  std::future<Answer> answer = Begin(WriteShard{Save({{"a", 100000}}), {}, proof});
  sink_->AwaitHanging();
  EXPECT_FALSE(workers_->Stop(std::chrono::milliseconds(1)));
  EXPECT_TRUE(sink_->stopped());
  sink_->LetThrough(UINT64_MAX);
  workers_.reset();
  EXPECT_EQ(answer.get().status.code(), Code::kAborted);
}

TEST_F(StorageWorkersTest, AnEndDoesNotWaitForALockThatHangs) {
  ASSERT_NO_FATAL_FAILURE(Open());
  ASSERT_EQ(Do(HoldStorage{}).status.ToString(), "ok");
  lock_sink_->Close();
  EXPECT_FALSE(workers_->Stop(std::chrono::milliseconds(1)));
  EXPECT_TRUE(sink_->stopped());
  lock_sink_->LetThrough(UINT64_MAX);
}

// At this rate the second file would be written a day later.
TEST_F(StorageWorkersTest, AnEndDoesNotWaitForTheRate) {
  ASSERT_NO_FATAL_FAILURE(Open(/*bytes_per_s=*/1));
  const std::string proof = Proof();
  sink_->Close();
  std::future<Answer> answer = Begin(WriteShard{Save({{"a.pt", 100000}, {"b.pt", 100}}), {}, proof});
  sink_->AwaitHanging();  // so the lock is read before it is released
  sink_->LetThrough(UINT64_MAX);
  EXPECT_TRUE(workers_->Stop(std::chrono::minutes(1)));
  EXPECT_EQ(answer.get().status.code(), Code::kAborted);
}

constexpr auto kWritten = StorageWatch::Parts::kWritten;

// Queued work is not reported as stalled while its queue progresses.
TEST(StorageWatchTest, WhatWaitsBehindOthersTakesTheirProgress) {
  constexpr std::chrono::seconds kAfter{10};
  StorageWatch watch(kAfter);
  StorageWatch::Work* const waits = watch.Add(1);
  StorageWatch::Work* const moves = watch.Add(2);
  (void)watch.Add(3);  // no thread takes it
  const auto on_thread = [](const std::function<void()>& task) { std::thread(task).join(); };
  on_thread([&] {
    watch.Take(waits);
    watch.AddPart(waits, kWritten);
  });
  on_thread([&] { watch.Take(moves); });
  const auto before = Clock::now();
  on_thread([&] {
    watch.AddPart(moves, kWritten);
    watch.TakePart(moves, kWritten);
    watch.EndPart();
  });
  EXPECT_EQ(watch.Stalled(before + kAfter), Tags{});
  // Another queue's progress does not count for them.
  const auto written = Clock::now();
  StorageWatch::Work* const reads = watch.Add(4);
  on_thread([&] {
    watch.Take(reads);
    watch.AddPart(reads, StorageWatch::Parts::kRead);
    watch.TakePart(reads, StorageWatch::Parts::kRead);
    watch.EndPart();
    watch.Remove(reads);
  });
  EXPECT_EQ(watch.Stalled(written + kAfter), (Tags{1, 2, 3}));
  EXPECT_EQ(watch.Stalled(before + kAfter), Tags{}) << "so they are told again";
  // The progress of others does not count for a part that a thread has taken.
  on_thread([&] { watch.TakePart(waits, kWritten); });
  const auto after = Clock::now();
  on_thread([&] {
    watch.AddPart(moves, kWritten);
    watch.TakePart(moves, kWritten);
    watch.EndPart();
  });
  EXPECT_EQ(watch.Stalled(after + kAfter), Tags{1});
  EXPECT_EQ(watch.Stalled(Clock::now() + kAfter), (Tags{2, 3})) << "the queues hang, too";
}

TEST_F(StorageWorkersTest, AWholeShardWithADamagedFileIsCorrupt) {
  ASSERT_NO_FATAL_FAILURE(Open());
  const NameFiles shard = Save({{"a", 100000}, {"b.pt", 30000}});
  ASSERT_NO_FATAL_FAILURE(Persist(shard));
  const LoadChunks load = WholeOf(shard);
  for (const char* name : {"b.pt", "rank-00000.safetensors"}) {
    const std::string path = StepFile(name);
    const auto flip = [&] {
      FILE* file = std::fopen(path.c_str(), "r+");
      ASSERT_NE(file, nullptr);
      std::fseek(file, -1, SEEK_END);
      const int last = std::fgetc(file);
      std::fseek(file, -1, SEEK_END);
      std::fputc(last ^ 1, file);
      std::fclose(file);
    };
    flip();
    const Answer damaged = Do(load);
    EXPECT_EQ(damaged.status.code(), Code::kCorrupt);
    EXPECT_THAT(damaged.status.message(), ::testing::HasSubstr(std::string(name) + " has the checksum"));
    flip();
    EXPECT_EQ(Do(load).status.ToString(), "ok");
  }
}

// The daemon has no rule of its own.
TEST_F(StorageWorkersTest, WhatRanksSayIsDeleted) {
  ASSERT_NO_FATAL_FAILURE(Open());
  NameFiles shard = Save({{"a", 1000}});
  for (const Step step : {7, 8, 9}) {
    shard.meta.id.step = step;
    ASSERT_NO_FATAL_FAILURE(Persist(shard));
  }
  EXPECT_THAT(std::get<StoredList>(Do(PruneStored{}).done.result).steps, ::testing::IsEmpty());
  const Answer pruned = Do(PruneStored{{{1, 7}}, 1});
  EXPECT_THAT(std::get<StoredList>(pruned.done.result).steps, ::testing::ElementsAre(StepId{1, 8}));
}

}  // namespace
}  // namespace ropeteam

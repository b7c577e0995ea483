// SPDX-License-Identifier: Apache-2.0
//
// Which parts of the arena's file a rank maps.

#include "api/client/arena.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace ropeteam::client {
namespace {

constexpr uint64_t kChunk = 64 * 1024;
constexpr uint64_t kTables = 128 * 1024;
constexpr uint64_t kChunks = 6;

local::HelloReply Geometry() {
  local::HelloReply hello;
  hello.chunk_bytes = kChunk;
  hello.chunks_begin = kTables;
  hello.chunks_total = kChunks;
  hello.arena_bytes = kTables + kChunks * kChunk + 4096;
  return hello;
}

// A file in which every chunk has different bytes.
UniqueFd ArenaFd(const local::HelloReply& hello) {
  UniqueFd fd(::memfd_create("arena-test", MFD_CLOEXEC));
  EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(hello.arena_bytes)), 0);
  for (uint64_t chunk = 0; chunk < hello.chunks_total; ++chunk) {
    const std::string bytes(16, static_cast<char>('a' + chunk));
    const auto offset = static_cast<off_t>(hello.chunks_begin + chunk * hello.chunk_bytes);
    EXPECT_EQ(::pwrite(fd.get(), bytes.data(), bytes.size(), offset), 16);
  }
  return fd;
}

struct Mapping {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  std::string protection;
};

// This process's mappings of the file behind `fd`.
std::vector<Mapping> MappingsOf(int fd) {
  struct stat info {};
  EXPECT_EQ(::fstat(fd, &info), 0);
  std::vector<Mapping> mappings;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream fields(line);
    std::string range, protection, offset, device;
    uint64_t inode = 0;
    if (!(fields >> range >> protection >> offset >> device >> inode) || inode != info.st_ino) continue;
    if (line.find("arena-test") == std::string::npos) continue;
    const uint64_t begin = std::stoull(range, nullptr, 16);
    const uint64_t end = std::stoull(range.substr(range.find('-') + 1), nullptr, 16);
    mappings.push_back({std::stoull(offset, nullptr, 16), end - begin, protection});
  }
  return mappings;
}

TEST(Arena, TheTablesAreNotMapped) {
  const local::HelloReply hello = Geometry();
  UniqueFd fd = ArenaFd(hello);
  const int file = fd.get();
  Result<std::shared_ptr<Arena>> arena = Arena::Map(std::move(fd), hello);
  ASSERT_TRUE(arena.ok()) << arena.status().ToString();
  const std::vector<Mapping> mappings = MappingsOf(file);
  ASSERT_EQ(mappings.size(), 1u);
  EXPECT_EQ(mappings[0].offset, kTables);
  EXPECT_EQ(mappings[0].bytes, hello.arena_bytes - kTables);
  EXPECT_EQ(mappings[0].protection, "rw-s");
  EXPECT_EQ((*arena)->bytes(), hello.arena_bytes) << "the node's whole budget, tables included";
}

TEST(Arena, ChunksLieWhereTheDaemonSays) {
  const local::HelloReply hello = Geometry();
  UniqueFd fd = ArenaFd(hello);
  const int file = fd.get();
  Result<std::shared_ptr<Arena>> arena = Arena::Map(std::move(fd), hello);
  ASSERT_TRUE(arena.ok()) << arena.status().ToString();
  for (uint32_t chunk = 0; chunk < kChunks; ++chunk)
    EXPECT_EQ(static_cast<char>((*arena)->chunk(chunk)[15]), static_cast<char>('a' + chunk));
  const std::vector<uint32_t> scattered = {4, 1, 5};
  Result<Window> window = (*arena)->MapWindow(scattered, true);
  ASSERT_TRUE(window.ok()) << window.status().ToString();
  for (size_t i = 0; i < scattered.size(); ++i)
    EXPECT_EQ(static_cast<char>(window->data()[i * kChunk]), static_cast<char>('a' + scattered[i]));
  for (const Mapping& mapping : MappingsOf(file)) EXPECT_GE(mapping.offset, kTables);
}

TEST(Arena, ItsEndUnmapsWhatItMapped) {
  const local::HelloReply hello = Geometry();
  UniqueFd fd = ArenaFd(hello);
  const UniqueFd file(::dup(fd.get()));
  { ASSERT_TRUE(Arena::Map(std::move(fd), hello).ok()); }
  EXPECT_TRUE(MappingsOf(file.get()).empty());
}

}  // namespace
}  // namespace ropeteam::client

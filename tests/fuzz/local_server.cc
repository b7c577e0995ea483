// SPDX-License-Identifier: Apache-2.0
//
// The daemon's end of the local protocol over real sockets, with a real engine. Clients send frames in any
// order, and bytes that are not frames.

#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/values.h"
#include "tests/node/local_server_fixture.h"

namespace ropeteam::fuzz {
namespace {

using Requests =
    std::tuple<local::Hello, local::SaveBegin, local::SaveExtend, local::SaveFilled, local::SaveCommit,
               local::SaveAbort, local::Wait, local::Latest, local::ViewOpen, local::ViewRepair,
               local::ViewClose, local::Admin, local::GpuBuffer, local::GpuBufferEnd, local::SaveDirect,
               local::SaveSettle, local::Persist, local::StorageList, local::ViewRead, local::Drop,
               local::SetPolicy, local::Trace, local::Rejoin, local::Quarantine, local::Drain, local::Forget>;
constexpr Type kTypes[] = {Type::kHello,      Type::kSaveBegin,    Type::kSaveExtend, Type::kSaveFilled,
                           Type::kSaveCommit, Type::kSaveAbort,    Type::kWait,       Type::kLatest,
                           Type::kViewOpen,   Type::kViewRepair,   Type::kViewClose,  Type::kAdmin,
                           Type::kGpuBuffer,  Type::kGpuBufferEnd, Type::kSaveDirect, Type::kSaveSettle,
                           Type::kPersist,    Type::kStorageList,  Type::kViewRead,   Type::kDrop,
                           Type::kSetPolicy,  Type::kTrace,        Type::kRejoin,     Type::kQuarantine,
                           Type::kDrain,      Type::kForget};
static_assert(std::size(kTypes) == std::tuple_size_v<Requests>);
// The other types are answers. A new request belongs into both lists; kForget is the last type of all.
constexpr size_t kAnswerTypes = 9;
static_assert(std::size(kTypes) + kAnswerTypes == static_cast<size_t>(Type::kForget));

enum Op : uint8_t { kRequest, kBytes, kConnect, kDescriptor, kTime, kOps };

class World : LocalServerTest {
 public:
  World() {
    rejoin_ = [](const std::string&, bool) { return OkStatus(); };
    drain_ = [this](TimeUs) { draining_ = true; };
    SetUp();
  }
  ~World() override { TearDown(); }

  void Run(std::string_view input) {
    for (UniqueFd& client : clients_) client = Connect();
    FromBytes in(input);
    while (!in.done()) {
      Step(&in);
      OneTurn();
    }
    for (UniqueFd& client : clients_) client.reset();
    OneTurn();
    OneTurn();
    engine_->CheckInvariants();
    ROPETEAM_CHECK(!engine_->saving());  // saves end with their connections
  }

 private:
  void TestBody() override {}

  void Step(FromBytes* in) {
    const uint8_t op = in->Byte() % kOps;
    UniqueFd& client = clients_[in->Byte() % std::size(clients_)];
    if (op == kRequest || op == kDescriptor) {
      const size_t type = in->Byte() % std::size(kTypes);
      WithType<Requests>(type, [&](auto message) {
        in->Get(message);
        // Makes the current version likely: a Hello with another one is refused.
        if constexpr (std::is_same_v<decltype(message), local::Hello>)
          if (message.version == 1) message.version = local::kLocalProtocolVersion;
        SendFrame(client, kTypes[type], Encode(message), op == kDescriptor ? STDIN_FILENO : -1);
      });
    } else if (op == kBytes) {
      SendBytes(client.get(), in->Text());
    } else if (op == kConnect) {
      client = Connect();
    } else if (draining_) {
      server_->OnDrained("{}");
      draining_ = false;
    } else if (engine_->NextTimer() != UINT64_MAX) {
      const TimeUs due = engine_->NextTimer();
      Drive([&](Engine& engine, TimeUs) { engine.OnTimer(due); });
    }
  }

  void SendFrame(const UniqueFd& client, Type type, const std::string& payload, int descriptor) {
    SendBytes(client.get(), FrameBytes(type, ++request_, payload), descriptor);
  }

  // Handles everything that is readable now, and does not wait for more.
  void OneTurn() {
    loop_.Post([this] { loop_.Post([this] { loop_.Stop(); }); });
    loop_.Run();
  }

  UniqueFd clients_[2];
  uint64_t request_ = 0;
  bool draining_ = false;  // a client waits until this node leaves
};

void RunLocalServer(std::string_view input) { World().Run(input); }

std::vector<std::string> LocalServerSeeds() {
  const auto request = [](size_t client, size_t type, const auto& message) {
    return ToBytes().Byte(kRequest).Byte(client).Byte(type).Put(message).bytes();
  };
  local::Hello hello;
  hello.world_size = 1;
  hello.token = 42;
  local::SaveBegin begin{1, 5000};
  local::SaveCommit commit{1, 4096 + 100, 4096, 1, {1, 2}};
  const std::string saved = request(0, 0, hello) + request(0, 1, begin) + request(0, 4, commit);
  local::Hello admin;
  admin.kind = local::ClientKind::kAdmin;
  std::vector<std::string> seeds = {
      saved + request(0, 6, local::Wait{1, 3, 0}) + request(0, 7, local::Latest{3, 0}),
      saved + request(0, 8, local::ViewOpen{1, 0, 0}) + request(0, 9, local::ViewRepair{1, {0}, 0}) +
          request(0, 10, local::ViewClose{1}),
      request(0, 0, hello) + request(0, 1, begin) + request(0, 2, local::SaveExtend{1, 3}) +
          request(0, 3, local::SaveFilled{1, 0, {7}}) + request(0, 5, local::SaveAbort{1}),
      request(0, 0, hello) + request(0, 1, begin) + request(0, 14, local::SaveDirect{1, 1, 0, 0, 1}) +
          request(0, 15, local::SaveSettle{1, 0}),
      saved + request(0, 16, local::Persist{1, 0}) + request(0, 17, local::StorageList{1, 0}),
      ToBytes().Byte(kBytes).Byte(0).Put(std::string("GET / HTTP/1.0")).bytes(),
      ToBytes().Byte(kConnect).Byte(1).bytes() + request(1, 0, hello),
      ToBytes().Byte(kDescriptor).Byte(0).Byte(12).Put(local::GpuBuffer{1, 4096}).bytes(),
  };
  for (uint8_t command = 1; command <= 4; ++command) {
    local::Admin ask;
    ask.command = static_cast<local::AdminCommand>(command);
    seeds.push_back(saved + request(1, 0, admin) + request(1, 11, ask));
  }
  const std::string tool = saved + request(1, 0, admin);
  seeds.push_back(tool + request(1, 21, local::Trace{7, true, 1, 0}) + request(1, 24, local::Drain{1}) +
                  ToBytes().Byte(kTime).Byte(0).bytes());
  seeds.push_back(tool + request(1, 22, local::Rejoin{"127.0.0.1:1", true}) +
                  request(1, 23, local::Quarantine{1, false, 0}) +
                  request(1, 25, local::Forget{"node-1", 0}) + request(1, 19, local::Drop{1, 0}));
  return seeds;
}

const Target kLocalServer("local_server", RunLocalServer, LocalServerSeeds);

}  // namespace
}  // namespace ropeteam::fuzz

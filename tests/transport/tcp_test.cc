// SPDX-License-Identifier: Apache-2.0
//
// The tcp transport against bare sockets. As a stranger without the secret they can do nothing, as a member they harm
// only their own connection. As a peer they answer late, wrongly, or never.

#include <gmock/gmock.h>
#include <linux/filter.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <random>

#include "tests/transport/tcp_fixture.h"
#include "transport/front/checks.h"
#include "transport/peer_probe.h"
#include "transport/tcp/codec.h"
#include "transport/tcp/tcp_transport.h"

namespace ropeteam::tcp {
namespace {

using test::Endpoint;

TEST_F(TcpTest, AHelloIsAcceptedOnce) {
  const Hello hello = Valid();
  Raw first(this), again(this);
  EXPECT_TRUE(first.Enter(hello));
  again.Send(hello);
  EXPECT_TRUE(again.Closed());
  EXPECT_TRUE(first.Open());
}

TEST_F(TcpTest, AnAlteredHelloIsRefusedWithoutAnAnswer) {
  const Hello older = Valid();
  Raw newer(this);
  ASSERT_TRUE(newer.Enter(Valid()));
  Hello other_mac = Valid(), other_instance = Valid(), other_lane = Valid();
  other_mac.mac[15] ^= 1;
  other_instance.target++;
  other_instance.mac = MacOf(self_.secret, other_instance);
  other_lane.lane = kLanesMax;
  other_lane.mac = MacOf(self_.secret, other_lane);
  for (const Hello& hello : {other_mac, other_instance, other_lane, older}) {
    Raw raw(this);
    raw.Send(hello);
    EXPECT_TRUE(raw.Closed());
  }
}

TEST_F(TcpTest, DepartedAndUnlistedInstancesAreRefused) {
  const PeerId peer = transport_->Connect(AddressOf(kInitiator)).value();
  Raw before(this);
  ASSERT_TRUE(before.Enter(Valid()));
  transport_->Disconnect(peer);
  EXPECT_TRUE(before.Closed());
  Raw departed(this);
  departed.Send(Valid());
  EXPECT_TRUE(departed.Closed());
  transport_->Connect(AddressOf(kInitiator)).value();
  Raw returned(this);
  EXPECT_TRUE(returned.Enter(Valid()));
  transport_->SetPeers({AddressOf(kInitiator + 1)});
  EXPECT_TRUE(returned.Closed());
  Raw unlisted(this);
  unlisted.Send(Valid());
  EXPECT_TRUE(unlisted.Closed());
}

TEST_F(TcpTest, RandomBytesEndTheirConnectionOnly) {
  Raw member(this);
  ASSERT_TRUE(member.Enter(Valid()));
  std::mt19937_64 random(1);
  for (size_t sent = 0; sent < 1'000'000;) {
    uint64_t bytes[500];
    for (uint64_t& word : bytes) word = random();
    Raw raw(this);
    raw.Send(bytes);
    sent += sizeof bytes;
    ASSERT_TRUE(raw.Closed());
  }
  member.Send(Put(0, 1));
  member.Send('x');
  EXPECT_EQ(member.Answer().code, 0u);
}

// Requests of random fields, most of them valid. Each is answered as it should be, or ends its connection. FRAMES in the
// environment sets their number.
TEST_F(TcpTest, AMembersGarbageEndsItsConnectionOnly) {
  Raw other(this);
  ASSERT_TRUE(other.Enter(Valid()));
  std::mt19937_64 random(2);
  const auto one_in = [&random](uint64_t n) { return random() % n == 0; };
  std::unique_ptr<Raw> raw;
  const char* const frames = std::getenv("FRAMES");
  for (int i = 0, end = frames == nullptr ? 100'000 : std::atoi(frames); i < end; i++) {
    if (raw == nullptr) {
      raw = std::make_unique<Raw>(this);
      ASSERT_TRUE(raw->Enter(Valid(kInitiator, 1)));
    }
    Request request = Put(random() % (2 * kLength), 1 + random() % 16);
    request.op = 1 + static_cast<uint32_t>(random() % 2);
    request.id = random();
    if (one_in(10)) request.offset = random();
    if (one_in(10)) request.key = random();
    if (one_in(1'000)) request.op = static_cast<uint32_t>(random());
    if (one_in(1'000)) request.flags = static_cast<uint32_t>(random());
    if (one_in(1'000)) request.length = random();
    const bool put = request.op == static_cast<uint32_t>(Op::kPut);
    const struct {
      Request request;
      std::array<char, 16> payload{};
    } frame{request};
    raw->Send(frame, sizeof request + (put ? std::min<uint64_t>(request.length, 16) : 0));
    if (!tcp::Valid(request, kTcpOperationBytesDefault)) {
      ASSERT_TRUE(raw->Closed()) << i;
      raw.reset();
      continue;
    }
    const bool allowed = request.key == key_ && front::InRange(request.offset, request.length, kLength);
    const Reply reply = raw->Answer();
    ASSERT_EQ(reply.id, request.id) << i;
    ASSERT_EQ(reply.code, static_cast<uint32_t>(allowed ? ReplyCode::kOk : ReplyCode::kRefused)) << i;
    ASSERT_EQ(reply.length, allowed && !put ? request.length : 0) << i;
    std::array<char, 16> bytes;
    ASSERT_TRUE(raw->ReadBytes(&bytes, reply.length)) << i;
  }
  other.Send(Put(0, 1));
  other.Send('x');
  EXPECT_EQ(other.Answer().code, 0u);
}

// The hello is judged before its padding has come.
TEST_F(TcpTest, AnInstanceThatDepartsDuringItsHelloIsRefused) {
  Raw raw(this);
  const auto bytes = tcp::Padded(Valid());
  raw.SendBytes(bytes.data(), sizeof(Hello));
  int rounds = 0;
  Drive([&] { return ++rounds > 100; });
  EXPECT_TRUE(raw.Open());
  transport_->SetPeers({});
  raw.SendBytes(bytes.data() + sizeof(Hello), bytes.size() - sizeof(Hello));
  EXPECT_TRUE(raw.Closed());
}

TEST_F(TcpTest, AHalfHelloIsNotWaitedForLong) {
  Raw silent(this), half(this);
  half.Send(Valid(), sizeof(Hello) / 2);
  EXPECT_TRUE(half.Closed(4'000));
  EXPECT_TRUE(silent.Closed(4'000));
}

// All of this happens before the transport's first turn.
TEST_F(TcpTest, AFloodOfConnectionsKeepsNoMemberOut) {
  constexpr uint64_t kMembers = 300;
  std::vector<std::unique_ptr<Raw>> members, flood;
  std::vector<Hello> hellos;
  for (uint64_t i = 0; i < kMembers; i++) {
    members.push_back(std::make_unique<Raw>(this));
    hellos.push_back(Valid(kInitiator + i));
    members.back()->Send(hellos.back());
  }
  for (int i = 0; i < 100; i++) flood.push_back(std::make_unique<Raw>(this));
  for (uint64_t i = 0; i < kMembers; i++) ASSERT_TRUE(members[i]->Welcomed(hellos[i])) << i;
  EXPECT_TRUE(flood[0]->Closed(1'000)) << "the oldest make room";
}

TEST_F(TcpTest, AFloodOfConnectionsMakesNoPeerGone) {
  Endpoint initiator(CreateTcpTransport({}), kLength);
  const PeerId peer = initiator.transport->Connect(transport_->LocalAddress()).value();
  const RemoteRegionId remote =
      initiator.transport->ImportRegion(peer, transport_->ExportRegion(region_)).value();
  auto& done = done_[initiator.transport.get()];
  const auto drive = [&](size_t completions) {
    return PollUntil(nullptr, {initiator.transport.get(), transport_.get()}, &done_,
                     [&] { return done.size() >= completions; });
  };
  const auto put = [&] { return initiator.transport->Put(peer, initiator.region, 0, remote, 0, 8, 1).ok(); };
  ASSERT_TRUE(put() && drive(1));
  EXPECT_EQ(done[0].code, Code::kOk);
  transport_->SetPeers({});  // breaks the connection
  transport_->SetPeers({initiator.transport->LocalAddress()});
  ASSERT_TRUE(put());
  // The initiator's connection is the oldest in each turn of the target.
  for (const uint64_t end = test::NowUs() + 300'000; test::NowUs() < end && done.size() < 2;) {
    Completion completion;
    if (initiator.transport->Poll(&completion, 1) == 1) done.push_back(completion);
    std::vector<std::unique_ptr<Raw>> flood;
    for (int i = 0; i < 40; i++) flood.push_back(std::make_unique<Raw>(this));
    ASSERT_EQ(transport_->Poll(&completion, 1), 0u);
  }
  ASSERT_TRUE(drive(2));
  EXPECT_NE(done[1].code, Code::kPeerGone);
}

TEST_F(TcpTest, ARefusedRangeFailsAloneAndTheConnectionGoesOn) {
  Raw raw(this);
  ASSERT_TRUE(raw.Enter(Valid()));
  Request other_key = Put(0, 8);
  other_key.key++;
  for (const Request& put : {other_key, Put(kLength, 8), Put(kLength - 7, 8), Put(UINT64_MAX - 3, 8)}) {
    raw.Send(put);
    raw.Send(uint64_t{0});
    EXPECT_EQ(raw.Answer().code, static_cast<uint32_t>(ReplyCode::kRefused));
    Request get = put;
    get.op = static_cast<uint32_t>(Op::kGet);
    raw.Send(get);
    const Reply reply = raw.Answer();
    EXPECT_EQ(reply.code, static_cast<uint32_t>(ReplyCode::kRefused));
    EXPECT_EQ(reply.length, 0u);
  }
  EXPECT_TRUE(Untouched());
  raw.Send(Put(8, 8));
  raw.Send(uint64_t{0});
  const Reply reply = raw.Answer();
  EXPECT_EQ(reply.code, 0u);
  EXPECT_EQ(reply.id, 5u);
  EXPECT_FALSE(Untouched());
}

TEST_F(TcpTest, AnInvalidRequestEndsItsConnectionOnly) {
  Request none = Put(0, 8), flags = Put(0, 8);
  none.op = 3;
  flags.flags = 1;
  Raw member(this);
  ASSERT_TRUE(member.Enter(Valid()));
  uint32_t channel = 1;
  for (const Request& request : {none, flags, Put(0, 0), Put(0, kTcpOperationBytesDefault + 1)}) {
    Raw raw(this);
    ASSERT_TRUE(raw.Enter(Valid(kInitiator, channel++)));
    raw.Send(request);
    EXPECT_TRUE(raw.Closed());
  }
  EXPECT_TRUE(member.Open());
  EXPECT_TRUE(Untouched());
}

// As between fork() and exec(), a child process has a copy of every descriptor.
TEST_F(TcpTest, AConnectionEndsThoughAChildHasACopy) {
  Raw raw(this);
  ASSERT_TRUE(raw.Enter(Valid()));
  int release[2];
  ASSERT_EQ(pipe(release), 0);
  const pid_t child = fork();
  if (child == 0) {
    close(release[1]);
    (void)!read(release[0], release, 1);
    _exit(0);
  }
  transport_->SetPeers({});
  EXPECT_TRUE(raw.Closed());
  const uint64_t start = test::NowUs();
  transport_->Wait(50'000);
  EXPECT_GE(test::NowUs() - start, 40'000u) << "the ended connection wakes the loop";
  close(release[1]);
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
  close(release[0]);
}

TEST_F(TcpHalfPutTest, DisconnectEndsIt) {
  transport_->Disconnect(peer_);
  SendHalf();
  EXPECT_TRUE(raw_.Closed());
  EXPECT_TRUE(Untouched());
}

TEST_F(TcpHalfPutTest, DeregisterEndsItAndTheConnectionGoesOn) {
  ASSERT_TRUE(transport_->DeregisterRegion(region_).ok());
  SendHalf();
  EXPECT_EQ(raw_.Answer().code, static_cast<uint32_t>(ReplyCode::kRefused));
  EXPECT_TRUE(Untouched());
  EXPECT_TRUE(raw_.Open());
}

// Bare sockets listen at the addresses of the transport's peer, which has a region of kLength bytes.
class TcpPeerTest : public TcpTest {
 protected:
  static constexpr uint64_t kPiece = 4096;

  explicit TcpPeerTest(const char* listen_addresses) : TcpTest(ConfigOf(listen_addresses)) {
    address_.instance = kInitiator;
    address_.operation_bytes = kPiece;
    for (const EndpointAddress::Lane& own : self_.lanes) {
      IpAddress at = WithPort(own.address, 0);
      listeners_.push_back(Socket(SOCK_NONBLOCK));
      EXPECT_EQ(bind(listeners_.back(), at.get(), at.length), 0);
      EXPECT_EQ(listen(listeners_.back(), 64), 0);
      EXPECT_EQ(getsockname(listeners_.back(), at.get(), &at.length), 0);
      address_.lanes.push_back({at, 0});
    }
    Meet();
  }
  ~TcpPeerTest() override {
    for (const int listener : listeners_) close(listener);
  }
  static TcpConfig ConfigOf(const char* listen_addresses) {
    TcpConfig config;
    config.listen_address = listen_addresses;
    config.silence_ms = 500;
    return config;
  }
  void Meet() {
    peer_ = transport_->Connect(Encode(address_)).value();
    remote_ = transport_->ImportRegion(peer_, Encode(RegionKey{address_.instance, 1, kLength})).value();
  }
  void Submit(OperationKind kind, uint64_t length) {
    const auto call = kind == OperationKind::kPut ? &Transport::Put : &Transport::Get;
    ASSERT_TRUE((transport_.get()->*call)(peer_, region_, 0, remote_, 0, length, 1).ok());
  }
  // The next connection of the lane, of which the hello was read. One that ends without a hello is a probe.
  std::unique_ptr<Raw> Accept(size_t lane) {
    for (;;) {
      int fd = -1;
      const bool came =
          Drive([&] { return (fd = accept4(listeners_[lane], nullptr, nullptr, SOCK_CLOEXEC)) >= 0; });
      EXPECT_TRUE(came);
      auto raw = std::make_unique<Raw>(this, fd);
      if (!came || raw->Read(&hello_[lane])) return raw;
    }
  }
  void Answer(Raw* raw, size_t lane) {
    Welcome welcome;
    welcome.target = address_.instance;
    welcome.mac = MacOf(address_.secret, hello_[lane], welcome);
    raw->Send(welcome);
    // The transport's next turn finds it.
    int unacknowledged = 1;
    for (const uint64_t end = test::NowUs() + 10'000'000; unacknowledged > 0 && test::NowUs() < end;)
      ioctl(raw->fd(), SIOCOUTQ, &unacknowledged);
  }
  // Both are accepted before either is up, so that the first operation's pieces take turns on the lanes.
  std::vector<std::unique_ptr<Raw>> AcceptAll() {
    std::vector<std::unique_ptr<Raw>> lanes;
    for (size_t i = 0; i < listeners_.size(); i++) lanes.push_back(Accept(i));
    for (size_t i = 0; i < listeners_.size(); i++) Answer(lanes[i].get(), i);
    return lanes;
  }
  // The socket's kernel drops every packet to it.
  static void DropAll(int fd) {
    sock_filter drop = {BPF_RET | BPF_K, 0, 0, 0};
    const sock_fprog program{1, &drop};
    EXPECT_EQ(setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program), 0);
  }
  // Reads the next request, with its payload.
  Request Take(Raw* raw) {
    Request request;
    EXPECT_TRUE(raw->Read(&request));
    std::array<char, kPiece> payload;
    if (request.op == static_cast<uint32_t>(Op::kPut)) {
      EXPECT_EQ(request.length, kPiece);
      EXPECT_TRUE(raw->Read(&payload));
    }
    return request;
  }
  // Drives until the operations have completed, and returns the code of the last.
  Code CodeOf(size_t operations = 1) {
    EXPECT_TRUE(Drive([&] { return done().size() >= operations; }));
    return done().size() == operations ? done().back().code : Code::kInternal;
  }
  bool Pending(uint64_t for_ms) {
    return !Drive([&] { return !done().empty(); }, for_ms);
  }
  std::vector<Completion>& done() { return done_[transport_.get()]; }

  EndpointAddress address_;
  std::vector<int> listeners_;
  Hello hello_[2];
  PeerId peer_ = 0;
  RemoteRegionId remote_ = 0;
};
class TcpOneLaneTest : public TcpPeerTest {
 protected:
  TcpOneLaneTest() : TcpPeerTest("127.0.0.1") {}
};

TEST_F(TcpOneLaneTest, AnImpostorIsAGonePeer) {
  Submit(OperationKind::kPut, kPiece);
  auto raw = Accept(0);
  address_.secret[0] ^= 1;
  Answer(raw.get(), 0);
  EXPECT_EQ(CodeOf(), Code::kPeerGone);
}

// Short packets pass, so TCP connects. The hello does not, and no byte of the put is sent.
TEST_F(TcpOneLaneTest, APathThatDropsLongPacketsCarriesNoConnection) {
  sock_filter only_short[] = {{BPF_LD | BPF_W | BPF_LEN, 0, 0, 0},
                              {BPF_JMP | BPF_JGT | BPF_K, 0, 1, 1000},
                              {BPF_RET | BPF_K, 0, 0, 0},
                              {BPF_RET | BPF_K, 0, 0, UINT32_MAX}};
  const sock_fprog program{4, only_short};
  ASSERT_EQ(setsockopt(listeners_[0], SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program), 0);
  const uint64_t begun = test::NowUs();
  Submit(OperationKind::kPut, kPiece);
  EXPECT_EQ(CodeOf(), Code::kPeerGone);
  EXPECT_LT(test::NowUs() - begun, 4'000'000u) << "without waiting for a busy peer's answer";
  Raw raw(this, accept4(listeners_[0], nullptr, nullptr, SOCK_CLOEXEC));
  EXPECT_TRUE(raw.Closed()) << "no part of the hello has come";
}

TEST_F(TcpOneLaneTest, ARefusalBeforeASlowAnswerIsNotItsEnd) {
  Submit(OperationKind::kPut, kPiece);
  auto raw = std::move(AcceptAll()[0]);
  Take(raw.get());
  raw.reset();
  Accept(0).reset();
  raw = Accept(0);
  EXPECT_TRUE(Pending(300));
  Answer(raw.get(), 0);
  EXPECT_EQ(CodeOf(), Code::kLinkFailed);
}

TEST_F(TcpOneLaneTest, NoDescriptorHereIsNotItsEnd) {
  Submit(OperationKind::kPut, kPiece);
  auto raw = std::move(AcceptAll()[0]);
  Take(raw.get());
  rlimit limit;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none{0, limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  raw.reset();
  const int opened = dup(0);
  EXPECT_TRUE(Pending(300));
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_LT(opened, 0);
  raw = Accept(0);
  Answer(raw.get(), 0);
  EXPECT_EQ(CodeOf(), Code::kLinkFailed);
}

// The broadcast address of the loopback device is one to which the kernel refuses to connect, and no one listens.
constexpr const char* kUnreachable = "127.255.255.255:7";

TEST_F(TcpOneLaneTest, AnUnreachableAddressIsNotAtOnceItsEnd) {
  address_.lanes[0].address = ParseIpAddress(kUnreachable).value();
  Meet();
  Submit(OperationKind::kPut, kPiece);
  EXPECT_TRUE(Pending(300));
  EXPECT_EQ(CodeOf(), Code::kPeerGone);
}

TEST_F(TcpOneLaneTest, AProbeTellsARefusalFromNoRoute) {
  using Probe = PeerProbe::Answer;
  PeerProbe probe;
  const auto answer = [&](const IpAddress& to, uint64_t limit_ms = 10'000) {
    probe.Start(self_.lanes[0].address, to, test::NowUs());
    Probe last = Probe::kPending;
    Drive([&] { return (last = probe.Step()) != Probe::kPending; }, limit_ms);
    return last;
  };
  EXPECT_EQ(answer(ParseIpAddress(kUnreachable).value(), 100), Probe::kPending);
  EXPECT_EQ(answer(address_.lanes[0].address), Probe::kAlive);
  shutdown(listeners_[0], SHUT_RD);
  EXPECT_EQ(answer(address_.lanes[0].address), Probe::kRefused);
}

TEST_F(TcpOneLaneTest, ASilentHostIsGone) {
  const uint64_t start = test::NowUs();
  DropAll(listeners_[0]);
  Submit(OperationKind::kPut, kPiece);
  EXPECT_EQ(CodeOf(), Code::kPeerGone);
  EXPECT_GE(test::NowUs() - start, 1'000'000u) << "the first SYN may be lost";
}

TEST_F(TcpOneLaneTest, AHostThatFallsSilentIsGone) {
  Submit(OperationKind::kPut, kPiece);
  auto raw = std::move(AcceptAll()[0]);
  Take(raw.get());
  DropAll(listeners_[0]);
  DropAll(raw->fd());
  EXPECT_EQ(CodeOf(), Code::kPeerGone);
}

// The probe's path is alive, that of the connection is not. The put is not acknowledged.
TEST_F(TcpOneLaneTest, APutOnADeadPathEnds) {
  Submit(OperationKind::kPut, kPiece);
  auto raw = std::move(AcceptAll()[0]);
  raw->Send(Reply{Take(raw.get()).id});
  EXPECT_EQ(CodeOf(), Code::kOk);
  DropAll(raw->fd());
  Submit(OperationKind::kPut, kPiece);
  auto next = Accept(0);
  Answer(next.get(), 0);
  EXPECT_EQ(CodeOf(2), Code::kLinkFailed);
}

// The get was acknowledged, but its answer does not arrive.
TEST_F(TcpOneLaneTest, AGetOnADeadPathEnds) {
  Submit(OperationKind::kGet, kPiece);
  auto raw = std::move(AcceptAll()[0]);
  Take(raw.get());
  EXPECT_TRUE(Pending(100));  // an acknowledgement is delayed by up to 40 ms
  DropAll(raw->fd());
  auto next = Accept(0);
  Answer(next.get(), 0);
  EXPECT_EQ(CodeOf(), Code::kLinkFailed);
}

class TcpTwoLanesTest : public TcpPeerTest {
 protected:
  TcpTwoLanesTest() : TcpPeerTest("127.0.0.1,127.0.0.2") {}
};

// The check of the peer is over before the put's last piece is.
TEST_F(TcpTwoLanesTest, APutCompletesThoughItsBrokenLaneIsBackFirst) {
  Submit(OperationKind::kPut, 2 * kPiece);
  auto lanes = AcceptAll();
  Take(lanes[0].get());
  const Request last = Take(lanes[1].get());
  lanes[0].reset();
  lanes[0] = Accept(0);
  Answer(lanes[0].get(), 0);
  Submit(OperationKind::kPut, kPiece);
  Take(lanes[0].get());  // the lane is up
  EXPECT_TRUE(done().empty());
  lanes[1]->Send(Reply{last.id});
  EXPECT_EQ(CodeOf(), Code::kLinkFailed);
}

TEST_F(TcpTwoLanesTest, ALaneThatIsCutForGoodIsLeftOut) {
  Submit(OperationKind::kGet, 2 * kPiece);
  auto lanes = AcceptAll();
  Take(lanes[0].get());
  Request request = Take(lanes[1].get());
  shutdown(listeners_[0], SHUT_RD);  // refuses from now on
  lanes[0].reset();
  const auto answer = [&] {
    std::array<char, kPiece> payload;
    payload.fill(static_cast<char>(request.offset / kPiece));
    lanes[1]->Send(Reply{request.id, 0, kPiece});
    lanes[1]->Send(payload);
  };
  answer();
  request = Take(lanes[1].get());  // what the cut lane had
  EXPECT_EQ(request.offset, 0u);
  answer();
  EXPECT_EQ(CodeOf(), Code::kOk);
  EXPECT_EQ(memory_.data()[kPiece - 1], 0);
  EXPECT_EQ(memory_.data()[kPiece], 1);
  Submit(OperationKind::kPut, kPiece);
  lanes[1]->Send(Reply{Take(lanes[1].get()).id});
  EXPECT_EQ(CodeOf(2), Code::kOk);
}

TEST(TcpCodecTest, EveryFlippedBitAndEveryCutIsNoticed) {
  EndpointAddress address;
  address.instance = 7;
  address.operation_bytes = 1 << 20;
  address.lanes = {{ParseIpAddress("127.0.0.1:7").value(), 100}, {ParseIpAddress("[::1]:9").value(), 0}};
  const std::string bytes = Encode(address);
  EndpointAddress decoded;
  ASSERT_TRUE(Decode(bytes, &decoded).ok());
  EXPECT_EQ(decoded.instance, 7u);
  EXPECT_EQ(ToText(decoded.lanes[1].address), "[::1]:9");
  for (size_t i = 0; i < bytes.size(); i++) {
    EXPECT_FALSE(Decode(std::string_view(bytes).substr(0, i), &decoded).ok()) << i;
    std::string flipped = bytes;
    flipped[i] = static_cast<char>(flipped[i] ^ 1);
    EXPECT_FALSE(Decode(flipped, &decoded).ok()) << i;
  }
  address.lanes.resize(1);
  address.lanes[0].address = WithPort(address.lanes[0].address, 0);
  EXPECT_FALSE(Decode(Encode(address), &decoded).ok()) << "no port";
}

TEST(TcpConfigTest, RefusesWhatCannotBeListenedOn) {
  const auto code = [](const std::string& listen, const std::string& device = "") {
    TcpConfig config;
    config.listen_address = listen;
    config.device = device;
    return CreateTcpTransport(config).status().code();
  };
  EXPECT_EQ(code("0.0.0.0"), Code::kInvalidArgument);
  EXPECT_EQ(code("localhost"), Code::kInvalidArgument);
  EXPECT_EQ(code("127.0.0.1", "no-such-device"), Code::kInvalidArgument);
  EXPECT_EQ(code(""), Code::kInvalidArgument);
  EXPECT_EQ(code("127.0.0.1,127.0.0.2,127.0.0.3,127.0.0.4,127.0.0.5,127.0.0.6,127.0.0.7,127.0.0.8,127.0.0.9"),
            Code::kInvalidArgument);
}

}  // namespace
}  // namespace ropeteam::tcp

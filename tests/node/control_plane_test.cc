// SPDX-License-Identifier: Apache-2.0
#include "node/control_plane.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>

#include "node/control.grpc.pb.h"
#include "node/options.h"
#include "tests/membership/intruder.h"

namespace ropeteam {
namespace {

using ::testing::HasSubstr;

constexpr std::chrono::seconds kGiveUp(20);

// What one plane received; tests wait for it.
class Inbox {
 public:
  ControlPlane::OnMessage Receiver(bool handle = true) {
    return [this, handle](NodeId from, std::string envelope, std::function<void()> handled) {
      {
        const std::lock_guard lock(mutex_);
        messages_.emplace_back(from, std::move(envelope));
        if (!handle) unhandled_.push_back(std::move(handled));
      }
      changed_.notify_all();
      if (handle) handled();
    };
  }
  std::vector<std::pair<NodeId, std::string>> WaitFor(size_t count) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, kGiveUp, [&] { return messages_.size() >= count; }))
        << messages_.size() << " of " << count;
    return messages_;
  }
  size_t size() {
    const std::lock_guard lock(mutex_);
    return messages_.size();
  }
  void HandleAll() {
    std::vector<std::function<void()>> unhandled;
    {
      const std::lock_guard lock(mutex_);
      unhandled.swap(unhandled_);
    }
    for (const auto& handled : unhandled) handled();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::pair<NodeId, std::string>> messages_;
  std::vector<std::function<void()>> unhandled_;
};

std::unique_ptr<ControlPlane> Plane(NodeId self, ControlPlane::OnMessage receiver, uint16_t port = 0,
                                    std::shared_ptr<const Credentials> credentials = nullptr) {
  Result<std::unique_ptr<ControlPlane>> plane =
      ControlPlane::Create({self, "127.0.0.1", port, std::move(credentials)}, std::move(receiver));
  EXPECT_TRUE(plane.ok()) << plane.status().ToString();
  return std::move(*plane);
}

Member At(NodeId id, uint16_t port) {
  Member member;
  member.id = id;
  member.name = "node-" + std::to_string(id);
  member.control_address = JoinHostPort("127.0.0.1", port);
  return member;
}

TEST(ControlPlane, CarriesMessagesBothWaysInOrder) {
  Inbox inbox_a, inbox_b;
  const auto a = Plane(1, inbox_a.Receiver());
  const auto b = Plane(2, inbox_b.Receiver());
  a->SetMembers({At(2, b->port())});
  b->SetMembers({At(1, a->port())});
  for (int i = 0; i < 500; ++i) a->Send(2, "to b " + std::to_string(i));
  b->Send(1, std::string("zero \0 inside", 13));
  const auto at_b = inbox_b.WaitFor(500);
  for (size_t i = 0; i < 500; ++i) {
    EXPECT_EQ(at_b[i].first, 1u);
    EXPECT_EQ(at_b[i].second, "to b " + std::to_string(i));
  }
  const auto at_a = inbox_a.WaitFor(1);
  EXPECT_EQ(at_a[0].first, 2u);
  EXPECT_EQ(at_a[0].second, std::string("zero \0 inside", 13));
}

TEST(ControlPlane, CarriesALargeMessage) {
  Inbox inbox;
  const auto a = Plane(1, [](NodeId, std::string, const std::function<void()>& handled) { handled(); });
  const auto b = Plane(2, inbox.Receiver());
  a->SetMembers({At(2, b->port())});
  const std::string large(40u << 20, 'x');
  a->Send(2, large);
  EXPECT_EQ(inbox.WaitFor(1)[0].second, large);
}

TEST(ControlPlane, DropsWhatIsForNobodyInTheView) {
  Inbox inbox;
  const auto a = Plane(1, inbox.Receiver());
  const auto b = Plane(2, inbox.Receiver());
  a->Send(2, "before the view");
  a->SetMembers({At(2, b->port())});
  a->Send(3, "to a stranger");
  a->Send(2, "to a member");
  const auto messages = inbox.WaitFor(1);
  EXPECT_EQ(messages.size(), 1u);
  EXPECT_EQ(messages[0].second, "to a member");
}

TEST(ControlPlane, DropsWhatIsForAnotherInstance) {
  Inbox inbox;
  const auto a = Plane(1, inbox.Receiver());
  const auto b = Plane(2, inbox.Receiver());
  // The address is b's; the id is that of b's former run.
  a->SetMembers({At(99, b->port()), At(2, b->port())});
  a->Send(99, "for the dead");
  a->Send(2, "for the living");
  EXPECT_EQ(inbox.WaitFor(1)[0].second, "for the living");
}

TEST(ControlPlane, ConnectsAgainWhenThePeerIsBack) {
  Inbox inbox;
  const auto a = Plane(1, [](NodeId, std::string, const std::function<void()>& handled) { handled(); });
  auto b = Plane(2, inbox.Receiver());
  const uint16_t port = b->port();
  a->SetMembers({At(2, port)});
  a->Send(2, "first");
  inbox.WaitFor(1);
  b.reset();
  b = Plane(2, inbox.Receiver(), port);
  // Messages may be lost while the stream is broken; the Engine repeats them.
  for (int i = 0; inbox.size() < 2; ++i) {
    ASSERT_LT(i, 2000);
    a->Send(2, "again");
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(inbox.WaitFor(2)[1].second, "again");
}

TEST(ControlPlane, APeerThatIsNotThereBlocksNeitherSendingNorStopping) {
  const auto a = Plane(1, [](NodeId, std::string, const std::function<void()>& handled) { handled(); });
  a->SetMembers({At(2, 1)});  // nothing listens on port 1
  for (size_t i = 0; i < 3 * kControlQueueMessagesMax; ++i) a->Send(2, "lost");
  a->SetMembers({});
  a->Stop();
}

TEST(ControlPlane, ReadsNoFurtherThanItsBoundUntilMessagesAreHandled) {
  Inbox inbox;
  const auto a = Plane(1, [](NodeId, std::string, const std::function<void()>& handled) { handled(); });
  const auto b = Plane(2, inbox.Receiver(/*handle=*/false));
  a->SetMembers({At(2, b->port())});
  for (size_t i = 0; i < 3 * kControlUnhandledMessagesMax; ++i) a->Send(2, std::to_string(i));
  EXPECT_EQ(inbox.WaitFor(kControlUnhandledMessagesMax).size(), kControlUnhandledMessagesMax);
  for (int i = 0; i < 3; ++i) {
    EXPECT_LE(inbox.size(), (static_cast<size_t>(i) + 1) * kControlUnhandledMessagesMax);
    inbox.HandleAll();
    inbox.WaitFor(std::min<size_t>(static_cast<size_t>(i) + 2, 3) * kControlUnhandledMessagesMax);
  }
  EXPECT_EQ(inbox.WaitFor(3 * kControlUnhandledMessagesMax).back().second,
            std::to_string(3 * kControlUnhandledMessagesMax - 1));
}

TEST(ControlPlane, MessagesMayBeHandledAfterTheEnd) {
  Inbox inbox;
  const auto a = Plane(1, [](NodeId, std::string, const std::function<void()>& handled) { handled(); });
  auto b = Plane(2, inbox.Receiver(/*handle=*/false));
  a->SetMembers({At(2, b->port())});
  for (size_t i = 0; i < kControlUnhandledMessagesMax; ++i) a->Send(2, "late");
  inbox.WaitFor(kControlUnhandledMessagesMax);
  b.reset();
  inbox.HandleAll();
}

TEST(ControlPlane, APortThatIsTakenIsAnError) {
  const auto a = Plane(1, [](NodeId, std::string, const std::function<void()>& handled) { handled(); });
  const Result<std::unique_ptr<ControlPlane>> second = ControlPlane::Create(
      {2, "127.0.0.1", a->port()}, [](NodeId, std::string, const std::function<void()>&) {});
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(second.status().message(), HasSubstr(std::to_string(a->port())));
}

TEST(ControlPlane, AnotherProtocolVersionIsRefusedWithBothNamed) {
  Inbox inbox;
  const auto plane = Plane(2, inbox.Receiver());
  const auto stub = control::Control::NewStub(grpc::CreateChannel(
      "ipv4:" + JoinHostPort("127.0.0.1", plane->port()), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  const auto stream = stub->Exchange(&context);
  control::Envelope envelope;
  envelope.set_from(1);
  envelope.set_to(2);
  envelope.set_protocol_version(kControlProtocolVersion + 41);
  stream->Write(envelope);
  stream->WritesDone();
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr(std::to_string(kControlProtocolVersion + 41)));
  EXPECT_THAT(status.error_message(), HasSubstr(std::to_string(kControlProtocolVersion) + " here"));
  EXPECT_EQ(inbox.size(), 0u);
}

TEST(ControlPlane, WithAKeyHearsWhoeverHasItAndNobodyElse) {
  Inbox inbox;
  const auto credentials = CredentialsForTest('1');
  const auto a = Plane(
      1, [](NodeId, std::string, const std::function<void()>& handled) { handled(); }, 0, credentials);
  const auto b = Plane(2, inbox.Receiver(), 0, credentials);
  for (const Intruder& intruder : Intruders('1')) {
    // The intruder knows both ids, for example from a former view.
    const auto stub = control::Control::NewStub(
        grpc::CreateChannel("ipv4:" + JoinHostPort("127.0.0.1", b->port()), intruder.credentials));
    grpc::ClientContext context;
    const auto stream = stub->Exchange(&context);
    control::Envelope envelope;
    envelope.set_from(1);
    envelope.set_to(2);
    envelope.set_protocol_version(kControlProtocolVersion);
    envelope.set_engine_envelope("forged");
    stream->Write(envelope);
    stream->WritesDone();
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE) << intruder.what;
  }
  EXPECT_EQ(inbox.size(), 0u);
  a->SetMembers({At(2, b->port())});
  a->Send(2, "from a member");
  EXPECT_EQ(inbox.WaitFor(1)[0].second, "from a member");
}

TEST(ControlPlane, AMemberThatIsAskedSaysWhereItsCoordinatorIs) {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> places;
  const auto ignore = [](NodeId, std::string, const std::function<void()>& handled) { handled(); };
  Result<std::unique_ptr<ControlPlane>> a =
      ControlPlane::Create({1, "127.0.0.1", 0}, ignore, [&](const std::string& place) {
        const std::lock_guard lock(mutex);
        places.push_back(place);
        changed.notify_all();
      });
  ASSERT_TRUE(a.ok());
  Inbox inbox;
  const auto b = Plane(2, inbox.Receiver());
  (*a)->SetMembers({At(2, b->port())});
  (*a)->Ask(2);  // not answered: b does not know the address
  (*a)->Send(2, "a message behind it");
  EXPECT_EQ(inbox.WaitFor(1)[0].second, "a message behind it");
  b->SetCoordinator("10.0.0.9:29600");
  (*a)->Ask(2);
  {
    std::unique_lock lock(mutex);
    ASSERT_TRUE(changed.wait_for(lock, std::chrono::seconds(30), [&] { return !places.empty(); }));
    EXPECT_EQ(places[0], "10.0.0.9:29600");
  }
  EXPECT_TRUE((*a)->Unreached().empty());
  EXPECT_EQ(inbox.WaitFor(1).size(), 1u) << "a question is no message of the Engine";

  (*a)->SetMembers({At(3, 1)});
  (*a)->Ask(3);
  EXPECT_TRUE((*a)->Unreached().contains(3)) << "nobody listens there";
}

// A member that answers a question a hundred times.
class Talker final : public control::Control::Service {
 public:
  Talker() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~Talker() override { server_->Shutdown(std::chrono::system_clock::now()); }
  uint16_t port() const { return static_cast<uint16_t>(port_); }
  grpc::Status Exchange(grpc::ServerContext*,
                        grpc::ServerReaderWriter<control::Answer, control::Envelope>* stream) override {
    control::Answer answer;
    for (control::Envelope question; stream->Read(&question);)
      for (int i = 0; i < 100; ++i) {
        answer.set_coordinator("10.0.0.9:" + std::to_string(i));
        stream->Write(answer);
      }
    return grpc::Status::OK;
  }

 private:
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

TEST(ControlPlane, ToOneQuestionOneAnswerIsListenedTo) {
  Talker talker;
  std::mutex mutex;
  std::condition_variable changed;
  size_t answers = 0;
  const auto ignore = [](NodeId, std::string, const std::function<void()>& handled) { handled(); };
  Result<std::unique_ptr<ControlPlane>> a =
      ControlPlane::Create({1, "127.0.0.1", 0}, ignore, [&](const std::string&) {
        const std::lock_guard lock(mutex);
        ++answers;
        changed.notify_all();
      });
  ASSERT_TRUE(a.ok());
  (*a)->SetMembers({At(2, talker.port())});
  for (size_t asked = 1; asked <= 3; ++asked) {
    (*a)->Ask(2);
    std::unique_lock lock(mutex);
    ASSERT_TRUE(changed.wait_for(lock, std::chrono::seconds(30), [&] { return answers >= asked; }));
  }
  (*a)->Stop();
  EXPECT_EQ(answers, 3u);
}

TEST(ControlPlane, GarbageOnItsPortHarmsNobody) {
  Inbox inbox;
  const auto a = Plane(1, [](NodeId, std::string, const std::function<void()>& handled) { handled(); });
  const auto b = Plane(2, inbox.Receiver());
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(b->port());
  ASSERT_EQ(inet_pton(AF_INET, "127.0.0.1", &address.sin_addr), 1);
  const std::string preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  for (const std::string& garbage : {std::string(5000, '\xff'), preface + std::string(5000, '\x7f'),
                                     std::string("GET / HTTP/1.1\r\n\r\n")}) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    (void)!send(fd, garbage.data(), garbage.size(), MSG_NOSIGNAL);
    close(fd);
  }
  a->SetMembers({At(2, b->port())});
  a->Send(2, "still here");
  EXPECT_EQ(inbox.WaitFor(1)[0].second, "still here");
}

}  // namespace
}  // namespace ropeteam

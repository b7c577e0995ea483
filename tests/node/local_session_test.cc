// SPDX-License-Identifier: Apache-2.0
//
// Frames over a real socket pair and a real event loop. The loop runs in the test's thread until the
// condition holds, so nothing here sleeps.

#include "node/local_session.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/sockios.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <vector>

#include "core/base/bytes.h"

namespace ropeteam {
namespace {

using local::FrameHeader;
using local::Type;
using ::testing::HasSubstr;

constexpr TimeUs kGiveUpUs = 20'000'000;

class LocalSessionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(loop_.Init().ok());
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    client_.reset(ends[0]);
    LocalSession::Callbacks callbacks;
    callbacks.on_frame = [this](const FrameHeader& header, std::string_view payload) {
      frames_.emplace_back(header, std::string(payload));
      if (on_frame_) on_frame_(header);
      loop_.Stop();
    };
    callbacks.on_closed = [this](const std::string& reason) {
      ++closed_;
      reason_ = reason;
      loop_.Stop();
    };
    session_ = std::make_unique<LocalSession>(&loop_, UniqueFd(ends[1]), getpid(), std::move(callbacks));
    ASSERT_TRUE(session_->Start().ok());
  }

  static std::string Frame(Type type, uint64_t request, const std::string& payload) {
    FrameHeader header;
    header.type = type;
    header.request = request;
    header.length = static_cast<uint32_t>(payload.size());
    return std::string(reinterpret_cast<const char*>(&header), sizeof(header)) + payload;
  }
  void Write(const std::string& bytes) {
    ASSERT_EQ(send(client_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  // Sends the descriptors with the first byte.
  void WriteWith(const std::string& bytes, const std::vector<int>& descriptors) {
    iovec part{const_cast<char*>(bytes.data()), bytes.size()};
    std::vector<char> control(CMSG_SPACE(descriptors.size() * sizeof(int)));
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
    ASSERT_EQ(sendmsg(client_.get(), &message, MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  // Runs the loop until `done`, or fails.
  void RunUntil(const std::function<bool()>& done) {
    bool gave_up = false;
    while (!done() && !gave_up) {
      loop_.SetTimer(EventLoop::Now() + kGiveUpUs, [&] {
        gave_up = true;
        loop_.Stop();
      });
      loop_.Run();
    }
    ASSERT_FALSE(gave_up) << "nothing happened";
  }

  EventLoop loop_;
  UniqueFd client_;
  std::unique_ptr<LocalSession> session_;
  std::vector<std::pair<FrameHeader, std::string>> frames_;
  std::function<void(const FrameHeader&)> on_frame_;
  int closed_ = 0;
  std::string reason_;
};

TEST_F(LocalSessionTest, AFrameArrivesWholeHoweverItIsCut) {
  const std::string bytes = Frame(Type::kHello, 7, "hello there") + Frame(Type::kLatest, 8, "");
  for (const char byte : bytes) {
    Write(std::string(1, byte));
    // One turn of the loop reads this byte before the next one is written.
    loop_.Post([this] { loop_.Stop(); });
    loop_.Run();
    loop_.Post([this] { loop_.Post([this] { loop_.Stop(); }); });
    loop_.Run();
  }
  RunUntil([this] { return frames_.size() == 2; });
  EXPECT_EQ(frames_[0].first.request, 7u);
  EXPECT_EQ(frames_[0].first.type, Type::kHello);
  EXPECT_EQ(frames_[0].second, "hello there");
  EXPECT_EQ(frames_[1].first.type, Type::kLatest);
  EXPECT_EQ(closed_, 0);
}

// Files of different sizes, so that a received descriptor can be identified.
class Files {
 public:
  explicit Files(size_t count) {
    for (size_t i = 0; i < count; ++i) {
      files_.emplace_back(memfd_create("file", MFD_CLOEXEC));
      EXPECT_EQ(ftruncate(files_.back().get(), static_cast<off_t>(i + 1)), 0);
    }
  }
  int operator[](size_t index) const { return files_[index].get(); }
  static size_t IndexOf(const UniqueFd& descriptor) {
    struct stat info {};
    EXPECT_EQ(fstat(descriptor.get(), &info), 0);
    return static_cast<size_t>(info.st_size) - 1;
  }

 private:
  std::vector<UniqueFd> files_;
};

size_t OpenDescriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

TEST_F(LocalSessionTest, EachFrameFindsTheDescriptorThatCameWithIt) {
  const Files files(3);
  std::map<uint64_t, size_t> taken;
  on_frame_ = [&](const FrameHeader& header) {
    if (header.type != Type::kGpuBuffer) return;
    const UniqueFd descriptor = session_->TakeDescriptor();
    ASSERT_TRUE(descriptor.valid());
    EXPECT_EQ(fcntl(descriptor.get(), F_GETFD), FD_CLOEXEC);
    taken[header.request] = Files::IndexOf(descriptor);
  };
  Write(Frame(Type::kLatest, 1, "") + Frame(Type::kLatest, 2, "").substr(0, 10));
  Write(Frame(Type::kLatest, 2, "").substr(10));
  WriteWith(Frame(Type::kGpuBuffer, 3, "x"), {files[0]});
  // The descriptor arrives with the first byte of a frame, long before the frame can be handled.
  const std::string late = Frame(Type::kGpuBuffer, 4, "yyyy");
  WriteWith(late.substr(0, 1), {files[1]});
  RunUntil([this] { return frames_.size() == 3; });
  for (const char byte : late.substr(1)) Write(std::string(1, byte));
  WriteWith(Frame(Type::kGpuBuffer, 5, ""), {files[2]});
  RunUntil([this] { return frames_.size() == 5; });
  EXPECT_THAT(taken,
              ::testing::ElementsAre(::testing::Pair(3, 0), ::testing::Pair(4, 1), ::testing::Pair(5, 2)));
  EXPECT_EQ(closed_, 0);
  EXPECT_FALSE(session_->descriptors_lost());
}

TEST_F(LocalSessionTest, ADescriptorThatNoFrameTakesEndsTheSessionAndIsClosed) {
  const Files files(2);
  const size_t before = OpenDescriptors();
  on_frame_ = [&](const FrameHeader&) { (void)session_->TakeDescriptor(); };
  WriteWith(Frame(Type::kGpuBuffer, 1, ""), {files[0], files[1]});
  RunUntil([this] { return closed_ == 1; });
  EXPECT_THAT(reason_, HasSubstr("descriptor"));
  EXPECT_EQ(frames_.size(), 1u);
  EXPECT_LE(OpenDescriptors(), before);  // fewer, because the session closed its own
}

TEST_F(LocalSessionTest, DescriptorsWithFramesThatTakeNoneDoNotPileUp) {
  const Files files(1);
  const size_t before = OpenDescriptors();
  WriteWith(Frame(Type::kLatest, 1, "") + "ROPE", {files[0]});
  WriteWith("x", {files[0]});
  RunUntil([this] { return closed_ == 1; });
  EXPECT_LE(OpenDescriptors(), before);
}

TEST_F(LocalSessionTest, MoreDescriptorsThanAnybodyNeedsAreLostAndThatIsKnown) {
  const Files files(1);
  const size_t before = OpenDescriptors();
  WriteWith(Frame(Type::kGpuBuffer, 1, ""), std::vector<int>(100, files[0]));
  RunUntil([this] { return closed_ == 1; });
  EXPECT_TRUE(session_->descriptors_lost());
  EXPECT_LE(OpenDescriptors(), before);
}

TEST_F(LocalSessionTest, DescriptorsBehindTheEndAreClosed) {
  const Files files(1);
  const size_t before = OpenDescriptors();
  on_frame_ = [this](const FrameHeader&) {
    // Too much to be written at once, so the session lingers.
    for (int i = 0; i < 4; ++i) session_->Send(Type::kReply, 1, std::string(local::kFrameBytesMax, 'x'));
    session_->CloseAfterSend("enough");
  };
  Write(Frame(Type::kLatest, 1, ""));
  RunUntil([this] { return frames_.size() == 1; });
  ASSERT_EQ(closed_, 0);
  WriteWith(Frame(Type::kGpuBuffer, 2, ""), {files[0]});
  for (int unread = 1; unread != 0;) {
    loop_.Post([this] { loop_.Post([this] { loop_.Stop(); }); });
    loop_.Run();
    ASSERT_EQ(ioctl(client_.get(), SIOCOUTQ, &unread), 0);
  }
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST_F(LocalSessionTest, TheLargestFrameIsTaken) {
  const std::string payload(local::kFrameBytesMax, 'x');
  const std::string bytes = Frame(Type::kSaveCommit, 1, payload);
  size_t sent = 0;
  while (frames_.empty()) {
    const ssize_t count = send(client_.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (count > 0) sent += static_cast<size_t>(count);
    loop_.Post([this] { loop_.Post([this] { loop_.Stop(); }); });
    loop_.Run();
  }
  EXPECT_EQ(frames_[0].second, payload);
}

TEST_F(LocalSessionTest, GarbageClosesItAtItsFirstBytes) {
  Write("GET ");
  RunUntil([this] { return closed_ == 1; });
  EXPECT_THAT(reason_, HasSubstr("garbage"));
  EXPECT_TRUE(frames_.empty());
}

TEST_F(LocalSessionTest, AnOversizedFrameIsRefusedByItsHeaderAlone) {
  FrameHeader header;
  header.length = local::kFrameBytesMax + 1;
  Write(std::string(reinterpret_cast<const char*>(&header), sizeof(header)));
  RunUntil([this] { return closed_ == 1; });
  EXPECT_THAT(reason_, HasSubstr(std::to_string(local::kFrameBytesMax + 1)));
}

TEST_F(LocalSessionTest, AGarbledFrameAfterAGoodOneDoesNotTakeBackTheGoodOne) {
  Write(Frame(Type::kHello, 1, "a") + "garbage");
  RunUntil([this] { return closed_ == 1; });
  ASSERT_EQ(frames_.size(), 1u);
  EXPECT_EQ(frames_[0].second, "a");
}

TEST_F(LocalSessionTest, TheEndInTheMiddleOfAFrameClosesIt) {
  Write(Frame(Type::kHello, 1, "abcdef").substr(0, 26));
  client_.reset();
  RunUntil([this] { return closed_ == 1; });
  EXPECT_TRUE(frames_.empty());
}

TEST_F(LocalSessionTest, AnswersAndTheirDescriptorArriveInOrder) {
  const int zero = open("/dev/zero", O_RDONLY | O_CLOEXEC);
  session_->Send(Type::kReply, 1, "first");
  session_->Send(Type::kHelloReply, 2, "second", zero);
  char bytes[256];
  const std::string first = Frame(Type::kReply, 1, "first");
  const std::string second = Frame(Type::kHelloReply, 2, "second");
  ASSERT_EQ(recv(client_.get(), bytes, first.size(), 0), static_cast<ssize_t>(first.size()));
  EXPECT_EQ(std::string(bytes, first.size()), first);

  iovec part{bytes, sizeof(bytes)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ASSERT_EQ(recvmsg(client_.get(), &message, MSG_CMSG_CLOEXEC), static_cast<ssize_t>(second.size()));
  EXPECT_EQ(std::string(bytes, second.size()), second);
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  ASSERT_NE(header, nullptr);
  ASSERT_EQ(header->cmsg_type, SCM_RIGHTS);
  int received = -1;
  std::memcpy(&received, CMSG_DATA(header), sizeof(received));
  char byte = 'x';
  EXPECT_EQ(read(received, &byte, 1), 1);
  EXPECT_EQ(byte, '\0');
  close(received);
  close(zero);
}

TEST_F(LocalSessionTest, AReaderThatDoesNotReadIsDroppedAtItsBound) {
  const std::string answer(local::kFrameBytesMax, 'x');
  for (int i = 0; i < 100 && closed_ == 0; ++i) session_->Send(Type::kAdminReply, 1, answer);
  EXPECT_EQ(closed_, 1);
  EXPECT_THAT(reason_, HasSubstr("limit " + std::to_string(kSessionOutputBytesMax)));
  session_->Send(Type::kReply, 1, "into the void");  // ignored
}

TEST_F(LocalSessionTest, AnAnswerOverTheFrameLimitBecomesAnError) {
  session_->Send(Type::kAdminReply, 9, std::string(local::kFrameBytesMax + 1, 'x'));
  char bytes[4096];
  const ssize_t count = recv(client_.get(), bytes, sizeof(bytes), 0);
  ASSERT_GT(count, static_cast<ssize_t>(sizeof(FrameHeader)));
  local::Reply reply;
  ASSERT_TRUE(Decode(std::string_view(bytes, static_cast<size_t>(count)).substr(sizeof(FrameHeader)), reply));
  EXPECT_EQ(reply.code, Code::kInternal);
  EXPECT_EQ(closed_, 0);
}

TEST_F(LocalSessionTest, ClosingAfterSendDeliversWhatWasSent) {
  session_->Send(Type::kReply, 1, "last words");
  session_->CloseAfterSend("done with it");
  EXPECT_EQ(closed_, 1);
  char bytes[256];
  EXPECT_EQ(recv(client_.get(), bytes, sizeof(bytes), 0), static_cast<ssize_t>(sizeof(FrameHeader) + 10));
  EXPECT_EQ(recv(client_.get(), bytes, sizeof(bytes), 0), 0) << "and then the end";
}

TEST_F(LocalSessionTest, ItMayBeClosedFromWithinItsOwnFrame) {
  on_frame_ = [this](const FrameHeader&) { session_->Close("not as the protocol says"); };
  Write(Frame(Type::kHello, 1, "a") + Frame(Type::kHello, 2, "b"));
  RunUntil([this] { return closed_ == 1; });
  EXPECT_EQ(frames_.size(), 1u);
}

// The rank is dead, but its forked child holds the socket open. Only the end of the process itself can be
// noticed.
TEST(LocalSessionProcess, ItsEndIsSeenThoughAForkedChildHoldsTheSocket) {
  EventLoop loop;
  ASSERT_TRUE(loop.Init().ok());
  const UniqueFd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // An abstract address: nothing to clean up.
  const int length =
      std::snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1, "ropeteam-test-%d", getpid());
  const auto address_bytes =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(length));
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), address_bytes), 0);
  ASSERT_EQ(listen(listener.get(), 1), 0);
  int hold[2];
  int forked[2];
  ASSERT_EQ(pipe(hold), 0);
  ASSERT_EQ(pipe(forked), 0);

  const pid_t rank = fork();
  if (rank == 0) {
    close(hold[1]);
    const int connection = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connect(connection, reinterpret_cast<sockaddr*>(&address), address_bytes) != 0) _exit(1);
    if (fork() == 0) {
      char byte;
      (void)!read(hold[0], &byte, 1);  // until the test is over
      _exit(0);
    }
    (void)!write(forked[1], "f", 1);
    pause();
    _exit(0);
  }
  close(hold[0]);
  UniqueFd accepted(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  ASSERT_TRUE(accepted.valid());
  char byte = 0;
  ASSERT_EQ(read(forked[0], &byte, 1), 1);
  std::string reason;
  LocalSession::Callbacks callbacks;
  callbacks.on_frame = [](const FrameHeader&, std::string_view) {};
  callbacks.on_closed = [&](const std::string& why) {
    reason = why;
    loop.Stop();
  };
  LocalSession session(&loop, std::move(accepted), rank, std::move(callbacks));
  ASSERT_TRUE(session.Start().ok());
  const TimeUs killed_at = EventLoop::Now();
  kill(rank, SIGKILL);
  loop.SetTimer(killed_at + kGiveUpUs, [&] { loop.Stop(); });
  loop.Run();
  EXPECT_THAT(reason, HasSubstr("process"));
  EXPECT_EQ(waitpid(rank, nullptr, 0), rank);
  for (const int fd : {hold[1], forked[0], forked[1]}) close(fd);
}

}  // namespace
}  // namespace ropeteam

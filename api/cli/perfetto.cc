// SPDX-License-Identifier: Apache-2.0
#include "api/cli/perfetto.h"

#include <algorithm>
#include <cstring>
#include <tuple>

namespace ropeteam::cli {
namespace {

// The part of the Protocol Buffers encoding that is needed here. A message is the concatenation of its
// fields.
class Message {
 public:
  Message& Number(uint32_t field, uint64_t value) {
    Varint(field << 3 | 0);
    Varint(value);
    return *this;
  }
  Message& Fixed64(uint32_t field, uint64_t value) {
    Varint(field << 3 | 1);
    char bytes[sizeof(value)];
    std::memcpy(bytes, &value, sizeof(value));
    bytes_.append(bytes, sizeof(value));
    return *this;
  }
  Message& Bytes(uint32_t field, const std::string& value) {  // a string, or a message
    Varint(field << 3 | 2);
    Varint(value.size());
    bytes_ += value;
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  void Varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_.push_back(static_cast<char>(value | 0x80));
    bytes_.push_back(static_cast<char>(value));
  }
  std::string bytes_;
};

// Trace
constexpr uint32_t kPacket = 1;
// TracePacket
constexpr uint32_t kTimestamp = 8;
constexpr uint32_t kSequenceId = 10;
constexpr uint32_t kTrackEvent = 11;
constexpr uint32_t kTrackDescriptor = 60;
// TrackDescriptor
constexpr uint32_t kUuid = 1;
constexpr uint32_t kTrackName = 2;
constexpr uint32_t kProcess = 3;
constexpr uint32_t kParentUuid = 5;
// ProcessDescriptor
constexpr uint32_t kPid = 1;
constexpr uint32_t kProcessName = 6;
// TrackEvent
constexpr uint32_t kDebugAnnotations = 4;
constexpr uint32_t kType = 9;
constexpr uint32_t kTrackUuid = 11;
constexpr uint32_t kCategories = 22;
constexpr uint32_t kEventName = 23;
constexpr uint32_t kFlowIds = 47;
// DebugAnnotation
constexpr uint32_t kStringValue = 6;
constexpr uint32_t kAnnotationName = 10;

// All packets have one writer.
constexpr uint64_t kSequence = 1;

std::string AsPacket(Message* packet) {
  packet->Number(kSequenceId, kSequence);
  return Message().Bytes(kPacket, packet->bytes()).bytes();
}

}  // namespace

PerfettoTrace::Track PerfettoTrace::AddProcess(const std::string& name) {
  const Message process = Message().Number(kPid, ++processes_).Bytes(kProcessName, name);
  const Message descriptor = Message().Number(kUuid, ++tracks_).Bytes(kProcess, process.bytes());
  Message packet = Message().Bytes(kTrackDescriptor, descriptor.bytes());
  descriptors_ += AsPacket(&packet);
  return tracks_;
}

PerfettoTrace::Track PerfettoTrace::AddTrack(Track parent, const std::string& name) {
  const Message descriptor =
      Message().Number(kUuid, ++tracks_).Number(kParentUuid, parent).Bytes(kTrackName, name);
  Message packet = Message().Bytes(kTrackDescriptor, descriptor.bytes());
  descriptors_ += AsPacket(&packet);
  return tracks_;
}

void PerfettoTrace::AddEvent(Track track, uint64_t at_ns, Type type, const Event* event) {
  Message encoded = Message().Number(kType, type).Number(kTrackUuid, track);
  if (event != nullptr) {
    encoded.Bytes(kCategories, "ropeteam").Bytes(kEventName, event->name);
    if (event->flow != 0) encoded.Fixed64(kFlowIds, event->flow);
    if (!event->detail.empty())
      encoded.Bytes(kDebugAnnotations,
                    Message().Bytes(kAnnotationName, "detail").Bytes(kStringValue, event->detail).bytes());
  }
  Message packet = Message().Number(kTimestamp, at_ns).Bytes(kTrackEvent, encoded.bytes());
  packets_.push_back({at_ns, type == kSliceEnd, AsPacket(&packet)});
}

void PerfettoTrace::AddSlice(Track track, uint64_t begin_ns, uint64_t end_ns, const Event& event) {
  AddEvent(track, begin_ns, kSliceBegin, &event);
  AddEvent(track, std::max(end_ns, begin_ns + 1), kSliceEnd, nullptr);  // a slice must end after its begin
}

void PerfettoTrace::AddInstant(Track track, uint64_t at_ns, const Event& event) {
  AddEvent(track, at_ns, kInstant, &event);
}

std::string PerfettoTrace::Take() {
  std::stable_sort(packets_.begin(), packets_.end(), [](const Packet& a, const Packet& b) {
    return std::tuple(a.at_ns, !a.end) < std::tuple(b.at_ns, !b.end);
  });
  std::string file = std::move(descriptors_);
  for (const Packet& packet : packets_) file += packet.bytes;
  packets_.clear();
  return file;
}

}  // namespace ropeteam::cli

// SPDX-License-Identifier: Apache-2.0
//
// A file that ui.perfetto.dev opens: the few messages of Perfetto's trace format that a timeline needs, with the field
// numbers of its published protos/perfetto/trace/trace_packet.proto and track_event/. Times are nanoseconds.

#ifndef ROPETEAM_API_CLI_PERFETTO_H_
#define ROPETEAM_API_CLI_PERFETTO_H_

#include <cstdint>
#include <string>
#include <vector>

namespace ropeteam::cli {

class PerfettoTrace {
 public:
  using Track = uint64_t;
  struct Event {
    std::string name;
    std::string detail;  // shown when the event is chosen; may be empty
    uint64_t flow = 0;   // events with the same one are joined by arrows; 0: none
  };

  // A group of tracks, as of one process.
  Track AddProcess(const std::string& name);
  Track AddTrack(Track parent, const std::string& name);
  // Slices of one track must not overlap.
  void AddSlice(Track track, uint64_t begin_ns, uint64_t end_ns, const Event& event);
  void AddInstant(Track track, uint64_t at_ns, const Event& event);

  // The file's bytes, events in the order of time.
  std::string Take();

 private:
  enum Type : uint64_t { kSliceBegin = 1, kSliceEnd = 2, kInstant = 3 };
  struct Packet {
    uint64_t at_ns = 0;
    bool end = false;  // goes before others of the same time
    std::string bytes;
  };
  void AddEvent(Track track, uint64_t at_ns, Type type, const Event* event);
  std::string descriptors_;
  std::vector<Packet> packets_;
  uint64_t tracks_ = 0;
  uint64_t processes_ = 0;
};

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_PERFETTO_H_

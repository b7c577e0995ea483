# SPDX-License-Identifier: Apache-2.0
"""`ropeteam trace` writes a step's trace on all nodes; it is read with Perfetto's published messages."""

from __future__ import annotations

import os
import pathlib
import signal

import pytest
from harness import ask, payload, wait_until

from ropeteam import Level

perfetto = pytest.importorskip(
    "perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="the Python package perfetto is not installed"
)
SIZE = 9_000_000  # three chunks of 4 MiB


def events_of(path: pathlib.Path) -> list[tuple[str, str, str, int, int, set[int]]]:
    """(node, track, name, begin, end, flows) of each event, in nanoseconds. A slice must end in its own track."""
    trace = perfetto.Trace()
    trace.ParseFromString(path.read_bytes())
    kinds = perfetto.TrackEvent.Type
    nodes, tracks, open_slices, found = {}, {}, {}, []
    last = 0
    for packet in trace.packet:
        descriptor = packet.track_descriptor
        if descriptor.HasField("process"):
            nodes[descriptor.uuid] = descriptor.process.process_name.split(" ")[0]
        elif packet.HasField("track_descriptor"):
            tracks[descriptor.uuid] = (nodes[descriptor.parent_uuid], descriptor.name)
        else:
            event = packet.track_event
            assert packet.timestamp >= last, "packets are in the order of time"
            last = packet.timestamp
            entry = [*tracks[event.track_uuid], event.name, packet.timestamp, packet.timestamp, set(event.flow_ids)]
            if event.type == kinds.TYPE_SLICE_END:
                open_slices.pop(event.track_uuid)[4] = packet.timestamp
                continue
            if event.type == kinds.TYPE_SLICE_BEGIN:
                assert event.track_uuid not in open_slices, "slices of one track do not overlap"
                open_slices[event.track_uuid] = entry
            found.append(entry)
    assert not open_slices
    return [tuple(entry) for entry in found]


def test_every_stage_of_a_step_is_in_its_trace(cluster, tmp_path):
    nodes = cluster(2)
    with nodes[0].open(0, 1) as rope:
        rope.save(6, {"data": payload(1, SIZE)}, wait=Level.COMMITTED)
        rope.save(7, {"data": payload(2, SIZE)}, wait=Level.COMMITTED)
    wait_until(lambda: "step 7 committed" in nodes[1].log_text(), "the other node to be told")
    file = tmp_path / "step.pftrace"
    done = ask("trace", "--socket", nodes[1].socket, "--output", str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step 7: ") and " of 2 nodes, " in done.stdout and done.stderr == ""
    events = events_of(file)

    def one(node: str, track: str, name: str) -> tuple:
        matching = [event for event in events if event[:3] == (node, track, name)]
        assert len(matching) == 1, (node, track, name, events)
        return matching[0]

    save = one("node-0", "rank 0", "save")
    begin = one("node-0", "rank 0", "begin")
    assert any(event[2].startswith("filled chunk") for event in events)
    local = one("node-0", "rank 0", "LOCAL")
    puts = [one("node-0", "put to node-1", f"put chunk {chunk}") for chunk in range(3)]
    checks = [one("node-1", "check from node-0", f"check chunk {chunk}") for chunk in range(3)]
    held = one("node-1", "copies from node-0", "held")
    ack = one("node-0", "rank 0", "acknowledged by node-1")
    replicated = one("node-0", "rank 0", "REPLICATED")
    committed = one("node-0", "rank 0", "COMMITTED")
    for node in ("node-0", "node-1"):
        one(node, "step", "COMMITTED")
    # Events of one node are ordered by its clock; the slice of a save contains all of them.
    assert begin[3] == save[3] <= local[3] <= ack[3] <= replicated[3] <= committed[3] <= save[4]
    assert all(put[3] <= put[4] <= ack[3] for put in puts)
    assert all(check[3] <= check[4] <= held[3] for check in checks)
    # Flows connect events of different nodes.
    assert all(put[5] == check[5] and len(put[5]) == 1 for put, check in zip(puts, checks))
    assert held[5] == ack[5] and len({*held[5], *(flow for put in puts for flow in put[5])}) == 4
    # Both daemons read the same clock here, so the measured difference is at most the uncertainty.
    uncertainty = 1000 * int(done.stdout.split("clocks aligned to ")[1].split(" us")[0])
    assert all(put[4] - uncertainty - 1000 <= check[3] for put, check in zip(puts, checks))


def test_a_step_that_nobody_knows_is_said(cluster, tmp_path):
    nodes = cluster(1)
    done = ask("trace", "--socket", nodes[0].socket)
    assert done.returncode == 1 and "no step is committed" in done.stderr
    done = ask("trace", "12", "--socket", nodes[0].socket, "--output", str(tmp_path / "f"))
    assert done.returncode == 1 and "has recorded events of step 12" in done.stderr
    assert not (tmp_path / "f").exists()


def test_a_node_that_does_not_answer_is_left_out(cluster, tmp_path):
    nodes = cluster(2, options=["--dead-after-ms", "60000"])
    with nodes[0].open(0, 1) as rope:
        rope.save(1, {"data": b"x"}, wait=Level.COMMITTED)
    os.kill(nodes[1].process.pid, signal.SIGSTOP)
    try:
        done = ask("trace", "--socket", nodes[0].socket, "--timeout", "1", "--output", str(tmp_path / "f"))
    finally:
        os.kill(nodes[1].process.pid, signal.SIGCONT)
    assert done.returncode == 0 and "node-1 is left out" in done.stderr
    assert {event[0] for event in events_of(tmp_path / "f")} == {"node-0"}

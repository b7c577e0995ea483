# SPDX-License-Identifier: Apache-2.0
"""The Python package against real daemons."""

from __future__ import annotations

import os
import re
import threading
import time

import pytest

import ropeteam
from ropeteam import Level


def payload(rank: int, step: int, size: int) -> bytes:
    """Bytes that depend on rank and step, and that a shifted copy does not match."""
    seed = (rank * 7919 + step * 104729) & 0xFFFF
    block = bytes((seed + i * i) & 0xFF for i in range(4093))
    return (block * (size // len(block) + 1))[:size]


def save_all(ranks, step: int, size: int) -> None:
    """Each rank saves its own bytes; the sizes differ by rank."""
    for rank, rope in enumerate(ranks):
        rope.save(step, {"data": payload(rank, step, size + 1000 * rank), "empty": b"", "at": {"step": step}})
    for rope in ranks:
        rope.wait(step, Level.COMMITTED)


def test_one_node_saves_and_reads(cluster):
    (node,) = cluster(1).nodes
    with node.open(0, 1) as rope:
        assert rope.latest() is None
        info = rope.info()
        assert (info.rank, info.world_size, info.incarnation) == (0, 1, 1)
        data = payload(0, 1, 9_000_001)
        rope.save(1, {"data": data, "one": b"x", "state": {"position": 5}}, wait=Level.COMMITTED)
        assert rope.latest() == ropeteam.StepInfo(1, 1, 1)
        shard = rope.load()
        assert dict(shard) == {"data": data, "one": b"x", "state": {"position": 5}}
        with rope.view(1) as view:
            mapped = view.map("data")
            assert mapped == data
            assert view.read("data", 8_999_999) == data[-2:]
            with pytest.raises(ropeteam.InvalidArgument):
                view.read("data", 9_000_000, 2)


def test_every_rank_s_shard_can_be_read_from_every_node(cluster):
    nodes = cluster(4)
    ranks = [nodes[rank].open(rank, 4, "run") for rank in range(4)]
    save_all(ranks, 1, 5_000_000)
    for rope in ranks:
        assert rope.latest() == ropeteam.StepInfo(1, 1, 4)
        for rank in range(4):
            assert rope.load(1, rank)["data"] == payload(rank, 1, 5_000_000 + 1000 * rank)
    for rope in ranks:
        rope.close()


def test_ranks_that_do_not_agree_commit_nothing(cluster):
    nodes = cluster(2)
    ranks = [nodes[rank].open(rank, 2, "run") for rank in range(2)]
    for rank, rope in enumerate(ranks):
        rope.save(1, {"data": payload(rank, 1, 100_000)}, agreement=0xABC)
    for rope in ranks:
        rope.wait(1, Level.COMMITTED)
    for rank, rope in enumerate(ranks):
        rope.save(2, {"data": payload(rank, 2, 100_000)}, agreement=rank + 7)
    for rope in ranks:
        with pytest.raises(ropeteam.Aborted, match="rank 0 gave agreement 0x7, rank 1 gave agreement 0x8"):
            rope.wait(2, Level.COMMITTED)
    assert ranks[0].latest() == ropeteam.StepInfo(1, 1, 2)
    save_all(ranks, 3, 100_000)
    for rope in ranks:
        rope.close()


def test_a_node_that_is_lost_with_its_memory_loses_no_committed_step(cluster):
    nodes = cluster(4)
    ranks = [nodes[rank].open(rank, 4, "first") for rank in range(4)]
    for step in (1, 2, 3):
        save_all(ranks, step, 3_000_000)
    nodes[2].kill(drop_memory=True)
    nodes.wait_members(3)
    for rope in ranks:
        rope.close()
    nodes[2].start()
    nodes.wait_members(4)
    again = [nodes[rank].open(rank, 4, "second") for rank in range(4)]
    for rank, rope in enumerate(again):
        assert rope.latest() == ropeteam.StepInfo(3, 1, 4)
        assert rope.load()["data"] == payload(rank, 3, 3_000_000 + 1000 * rank)
    save_all(again, 4, 3_000_000)  # the replacement takes part
    assert again[0].latest().step == 4
    for rope in again:
        rope.close()


def test_a_daemon_killed_and_restarted_serves_what_it_held(cluster):
    (node,) = cluster(1).nodes
    data = payload(0, 1, 6_000_000)
    with node.open(0, 1, "first") as rope:
        rope.save(1, {"data": data}, wait=Level.COMMITTED)
        unsealed = rope.begin(2, bytes=4_000_000, objects=1)
        unsealed.put("data", bytes(4_000_000))
        node.kill()
        with pytest.raises(ropeteam.RopeteamError):
            unsealed.commit()
        node.start()
        assert rope.load(1)["data"] == data  # the same handle: the library connects to the new daemon
        assert rope.latest().step == 1


def test_a_full_arena_refuses_the_save_and_keeps_the_older_steps(cluster):
    (node,) = cluster(1, memory="64M").nodes
    with node.open(0, 1) as rope:
        rope.save(1, {"data": payload(0, 1, 1_000_000)}, wait=Level.COMMITTED)
        report = node.local_status()
        with pytest.raises(ropeteam.InvalidArgument, match="larger than the arena of 60.0 MiB: .* needs --memory"):
            rope.begin(2, bytes=1 << 30, objects=1)
        with pytest.raises(ropeteam.NoSpace) as raised:
            rope.begin(2, bytes=14 << 22, objects=1)
        said = re.search(
            r"needed (\d+) chunks \((\d+) bytes\), free (\d+) \((\d+) bytes\), limit (\d+) \((\d+) bytes, by --memory\)",
            str(raised.value),
        )
        assert said, raised.value
        needed = 15  # chunks of 4 MiB, one of them for the manifest: the whole arena
        free, limit = report["chunks_free"], report["chunks_total"]
        expected = [needed, needed << 22, free, free << 22, limit, limit << 22]
        assert [int(number) for number in said.groups()] == expected
        assert free == limit - 1, "one chunk holds step 1"
        assert rope.latest().step == 1
        rope.save(2, {"data": b"small"}, wait=Level.COMMITTED)


def test_a_rank_of_an_older_incarnation_is_refused_in_words(cluster):
    (node,) = cluster(1).nodes
    zombie = node.open(0, 1, "first")
    zombie.save(1, {"data": b"1"}, wait=Level.COMMITTED)
    with node.open(0, 1, "second") as rope:
        with pytest.raises(ropeteam.Stale) as raised:
            zombie.save(2, {"data": b"2"})
        assert len(str(raised.value)) > 20
        assert rope.latest().step == 1
        rope.save(2, {"data": b"two"}, wait=Level.COMMITTED)
        assert rope.load()["data"] == b"two"
    zombie.close()


def test_a_rank_that_saves_alone_is_stopped_after_256_steps(cluster):
    nodes = cluster(1, options=["--chunk-size", "4K"])
    with nodes[0].open(0, 2, "run") as alone:
        for step in range(1, 257):
            alone.save(step, {"data": b"x"})
        with pytest.raises(ropeteam.NoSpace, match="256 steps .* the other ranks have not saved them"):
            alone.save(257, {"data": b"x"})


def test_two_runs_with_one_token_are_two_incarnations(cluster):
    nodes = cluster(2)
    first = [nodes[rank].open(rank, 2, "kept") for rank in range(2)]
    save_all(first, 1, 100_000)
    first[0].save(2, {"data": b"of the first run"}, wait=Level.REPLICATED)
    with pytest.raises(ropeteam.AlreadyExists, match="open here already"):
        nodes[0].open(0, 2, "kept")
    for rope in first:
        rope.close()
    second = [nodes[rank].open(rank, 2, "kept") for rank in range(2)]
    assert second[0].info().incarnation == second[1].info().incarnation
    assert [rope.latest().step for rope in second] == [1, 1]
    save_all(second, 2, 100_000)
    assert second[1].load(2, 0)["data"] == payload(0, 2, 100_000)
    # A rank that is started again alone begins another incarnation, and the others are told so.
    second[0].close()
    alone = nodes[0].open(0, 2, "kept")
    with pytest.raises(ropeteam.Stale):
        second[1].save(3, {"data": b"of the second run"})
    second[1].close()
    alone.close()


def test_a_step_is_saved_once(cluster):
    (node,) = cluster(1).nodes
    with node.open(0, 1) as rope:
        rope.save(1, {"a": b"1"})
        with pytest.raises(ropeteam.AlreadyExists):
            rope.save(1, {"a": b"2"})
        with pytest.raises(ropeteam.InvalidArgument, match="name used twice in the shard: twice"):
            with rope.begin(2) as save:
                save.put("twice", b"1")
                save.put("twice", b"2")
        rope.wait(1, Level.COMMITTED)
        assert rope.load()["a"] == b"1"


def test_waiting_looks_once_with_a_timeout_of_zero_and_leaves_other_threads_running(cluster):
    nodes = cluster(2)
    rope = nodes[0].open(0, 2, "run")
    other = nodes[1].open(1, 2, "run")
    rope.save(1, {"a": b"1"})
    with pytest.raises(ropeteam.DeadlineExceeded):
        rope.wait(1, Level.COMMITTED, timeout=0)  # the other rank has not saved
    counted, stop = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.is_set():
            counted += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    before = counted
    with pytest.raises(ropeteam.DeadlineExceeded):
        rope.wait(1, Level.COMMITTED, timeout=0.3)
    seen = counted - before
    stop.set()
    thread.join()
    assert seen > 20
    other.save(1, {"a": b"2"})
    rope.wait(1, Level.COMMITTED)
    rope.close()
    other.close()


def test_no_daemon_is_unavailable(tmp_path):
    with pytest.raises(ropeteam.Unavailable):
        ropeteam.open(str(tmp_path / "none.sock"), rank=0, world_size=1, timeout=1)


def test_reserved_memory_and_many_objects(cluster):
    (node,) = cluster(1).nodes
    with node.open(0, 1) as rope:
        with rope.begin(1, bytes=2_000_000 + 10_000 * 3, objects=10_001) as save:
            save.reserve("reserved", 2_000_000)[:] = payload(0, 1, 2_000_000)
            for index in range(10_000):
                save.put(f"object/{index}", b"%3d" % (index % 1000))
        rope.wait(1, Level.COMMITTED)
        with rope.view(1) as view:
            assert len(view) == 10_001
            assert view.read("reserved") == payload(0, 1, 2_000_000)
            assert view.read("object/9999") == b"999"


def test_a_forked_child_opens_its_own(cluster):
    (node,) = cluster(1).nodes
    with node.open(0, 1, "run") as rope:
        rope.save(1, {"a": b"1"}, wait=Level.COMMITTED)
        child = os.fork()
        if child == 0:
            try:
                rope.latest()
            except ropeteam.InvalidArgument:
                os._exit(0)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert rope.load()["a"] == b"1"

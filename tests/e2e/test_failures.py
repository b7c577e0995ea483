# SPDX-License-Identifier: Apache-2.0
"""The failure stories with real processes, which are killed, get bits flipped, or receive garbage."""

from __future__ import annotations

import json
import mmap
import os
import random
import re
import socket

import pytest
from harness import WAIT_S, Daemon, ScriptedRank, payload, usable, verify, wait_until

import ropeteam
from ropeteam import Level


def arena_file(node: Daemon):
    (path,) = node.arena.glob("*.arena")
    return path


def flip(node: Daemon, content: bytes, at: int) -> None:
    """Flips a bit in byte `at` of `content` in the node's arena."""
    with open(arena_file(node), "r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
        begin = arena.find(content[at : at + 64])
        assert begin >= 0, f"{node.name} does not hold these bytes"
        arena[begin] ^= 0x10
        assert arena.find(content[at : at + 64], begin) == -1, "the bytes are there twice"


def chunks_free(node: Daemon) -> int:
    return int(node.local_status()["chunks_free"])


def counters(node: Daemon) -> dict[str, int]:
    return dict(node.local_status()["counters"])


@pytest.mark.parametrize("point", ["begun", "half put", "put", "local", "replicated", "committed"])
def test_a_daemon_killed_at_any_point_of_a_save_keeps_what_was_sealed(cluster, point):
    nodes = cluster(2)
    old, new = payload(1, 5_000_000), payload(2, 9_000_000)
    rope = nodes[1].open(0, 1, "run")
    rope.save(1, {"data": old}, wait=Level.COMMITTED)
    save = rope.begin(2, bytes=len(new), objects=1)
    if point != "begun":
        save.put("first", new[: len(new) // 2])
    if point in ("put", "local", "replicated", "committed"):
        save.put("second", new[len(new) // 2 :])
    if point in ("local", "replicated", "committed"):
        save.commit()
    if point == "replicated":
        rope.wait(2, Level.REPLICATED)
    if point == "committed":
        rope.wait(2, Level.COMMITTED)
    nodes[1].kill()
    save.close()
    nodes[1].start()
    sealed = point in ("local", "replicated", "committed")
    assert rope.latest().step == (2 if sealed else 1)
    if sealed:
        shard = rope.load(2)
        assert shard["first"] + shard["second"] == new
        rope.wait(2, Level.COMMITTED)  # the save in progress is completed
    assert rope.load(1)["data"] == old
    rope.save(3, {"data": b"and on"}, wait=Level.COMMITTED)
    rope.close()


def test_the_coordinator_dies_and_returns_and_disturbs_nobody(cluster):
    nodes = cluster(3)
    ranks = [nodes[rank].open(rank, 3, "run") for rank in range(3)]
    for rank, rope in enumerate(ranks):
        rope.save(1, {"data": payload(rank, 3_000_000)})
    for rope in ranks:
        rope.wait(1, Level.COMMITTED)
    save = ranks[1].begin(2, bytes=3_000_000, objects=1)
    nodes[0].kill()  # it is coordinator, leader, and holder of a copy; its memory stays
    save.put("data", payload(11, 3_000_000))
    save.commit()
    nodes[0].start()
    nodes.wait_members(3)
    assert [rope.latest().step for rope in ranks] == [1, 1, 1]
    ranks[0].save(2, {"data": payload(10, 3_000_000)})
    ranks[2].save(2, {"data": payload(12, 3_000_000)})
    for rope in ranks:
        rope.wait(2, Level.COMMITTED)
        rope.close()


def test_a_flipped_bit_is_repaired_inside_the_read(cluster):
    nodes = cluster(2)
    data = payload(3, 9_000_000)
    with nodes[0].open(0, 1, "run") as rope:
        rope.save(1, {"data": data}, wait=Level.COMMITTED)
        flip(nodes[0], data, 5_000_000)
        assert rope.load(1)["data"] == data
        with (
            open(arena_file(nodes[0]), "rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as arena,
        ):
            assert arena.find(data[5_000_000:5_000_064]) >= 0  # repaired in the arena, not only in the answer
        assert verify(nodes[0]).returncode == 0


def test_a_flipped_bit_in_a_replica_is_found_and_repaired(cluster):
    nodes = cluster(2)
    data = payload(4, 6_000_000)
    with nodes[0].open(0, 1, "run") as rope:
        rope.save(1, {"data": data}, wait=Level.COMMITTED)
        flip(nodes[1], data, 4_500_000)
        found = verify(nodes[0])
        assert found.returncode == 1
        assert "node-1" in found.stdout + found.stderr
        wait_until(lambda: verify(nodes[0]).returncode == 0, "the replica's repair")


def test_verify_misses_the_copy_of_a_node_that_is_gone(cluster):
    nodes = cluster(2)
    with nodes[0].open(0, 1, "run") as rope:
        rope.save(1, {"data": payload(5, 1_000_000)}, wait=Level.COMMITTED)
        assert verify(nodes[0]).returncode == 0
        nodes[1].kill(drop_memory=True)
        nodes.wait_members(1)
        found = verify(nodes[0])
        assert found.returncode == 1
        assert "missing: step 1 rank 0 has 1 of 2 copies\n" in found.stdout


def test_a_flipped_bit_that_nobody_reads_is_found_and_repaired_by_the_scrub(cluster):
    nodes = cluster(2, options=["--scrub-rate", "1G"])
    data = payload(14, 6_000_000)
    with nodes[0].open(0, 1, "run") as rope:
        rope.save(1, {"data": data}, wait=Level.COMMITTED)
        flip(nodes[0], data, 4_500_000)
        flip(nodes[1], data, 1_500_000)
        for node in nodes:
            wait_until(lambda node=node: counters(node)["chunks_repaired"] == 1, f"{node.name}'s repair")
            with (
                open(arena_file(node), "rb") as file,
                mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as arena,
            ):
                assert arena.find(data[:4_000_000]) >= 0
                assert arena.find(data[4_500_000:4_500_064]) >= 0
            assert "scrub found chunks that do not match" in node.log_text()
        assert verify(nodes[0]).returncode == 0
        assert rope.load(1)["data"] == data


def test_damaged_tables_are_written_again_and_end_no_daemon(cluster):
    """This process maps the arena's file and damages every slot and descriptor, and the superblock."""
    nodes = cluster(2, options=["--scrub-rate", "1G"])
    data = payload(15, 6_000_000)
    with nodes[0].open(0, 1, "run") as rope:
        rope.save(1, {"data": data}, wait=Level.COMMITTED)
        with open(arena_file(nodes[1]), "r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
            chunks = int.from_bytes(arena[144:152], "little")
            tables = 4096 + 136 * chunks
            assert 0 < chunks < 64
            whole = arena[:tables]
            arena[:tables] = bytes(byte ^ 0x40 for byte in whole)
        # These saves use damaged slots, unless the background pass has already repaired them.
        for step in (2, 3):
            rope.save(step, {"data": data}, wait=Level.COMMITTED)
        # Every slot and the superblock are repaired, except slots that a save overwrote before they were
        # checked.
        wait_until(lambda: counters(nodes[1])["table_repairs"] >= chunks - 2, "the tables' repair")
        assert "arena table superblock 0 byte 8 was" in nodes[1].log_text()
        nodes[1].kill()
        nodes.wait_members(1)
        nodes[1].start()
        nodes.wait_members(2)
        adopted = re.search(r"arena adopted shards (\d+) rejected (\d+)", nodes[1].log_text())
        assert adopted is not None
        assert int(adopted[1]) >= 2
        assert adopted[2] == "0"
        assert verify(nodes[0]).returncode == 0
        assert rope.load(3)["data"] == data


def test_with_both_copies_bad_the_older_step_is_offered_and_the_error_names_the_sources(cluster):
    nodes = cluster(2)
    old, new = payload(5, 3_000_000), payload(6, 3_000_000)
    with nodes[0].open(0, 1, "run") as rope:
        rope.save(1, {"data": old}, wait=Level.COMMITTED)
        rope.save(2, {"data": new}, wait=Level.COMMITTED)
        flip(nodes[0], new, 1_000_000)
        flip(nodes[1], new, 1_000_000)
        with pytest.raises(ropeteam.Corrupt) as raised:
            rope.load(2)
        assert "node-1" in str(raised.value)
        wait_until(lambda: rope.latest().step == 1, "the older step as the latest")
        assert rope.load(1)["data"] == old


def test_a_rank_killed_in_the_middle_of_a_put_leaves_nothing_behind(cluster):
    nodes = cluster(2)
    data = payload(9, 3_000_000)
    with nodes[0].open(0, 2, "run") as rope:
        rope.save(1, {"data": data})
        script = f"""
            import ropeteam, signal, sys
            rope = ropeteam.open({nodes[1].socket!r}, rank=1, world_size=2, incarnation_token="run")
            rope.save(1, {{"data": b"of rank 1"}}, wait=ropeteam.Level.COMMITTED)
            print("saved")
            sys.stdin.readline()
            save = rope.begin(2, bytes=20_000_000, objects=2)
            save.put("half", bytes(10_000_000))
            print("saving")
            signal.pause()
        """
        with ScriptedRank(script) as victim:
            assert victim.says() == "saved"
            rope.save(2, {"data": b"x" * 1000}, wait=Level.REPLICATED)  # its copy on node 1 now has its chunk
            before = chunks_free(nodes[1])
            victim.go_on()
            assert victim.says() == "saving"
            wait_until(lambda: chunks_free(nodes[1]) < before, "the save's chunks to be taken")
        wait_until(lambda: chunks_free(nodes[1]) == before, "the dead rank's chunks to be free")
        with pytest.raises(ropeteam.DeadlineExceeded):
            rope.wait(2, Level.COMMITTED, timeout=0)
        assert rope.latest() == ropeteam.StepInfo(1, 1, 2), "the step before is the latest"
        assert rope.load()["data"] == data
        assert rope.load(1, 1)["data"] == b"of rank 1"
        assert rope.save(3, {"data": b"y"}) == 1  # the other rank can still save


def send_garbage(address, pieces: int = 4) -> None:
    random_bytes = random.Random(7)
    for _ in range(pieces):
        with socket.socket() as peer:
            peer.settimeout(WAIT_S)
            peer.connect(address)
            try:
                peer.sendall(random_bytes.randbytes(random_bytes.randrange(1, 100_000)))
            except OSError:
                continue  # the daemon has already closed the connection, as it should
    with socket.socket() as silent:
        silent.connect(address)  # this one sends nothing


# UCX parses what arrives at its port. Over tcp, tests/security/test_ports.py sends much more.
def test_garbage_on_ucxs_port_harms_nobody(cluster):
    usable("ucx")
    nodes = cluster(2, options=["--transport", "ucx"])
    data = payload(8, 5_000_000)
    with nodes[0].open(0, 1, "run") as rope:
        rope.save(1, {"data": data}, wait=Level.COMMITTED)
        listening = nodes[0].listening()
        assert len(listening) >= 3, listening  # coordinator, control, data
        for address in listening:
            # UCX uses the first address of the interface that has the given address.
            assert address[0] in ("127.0.0.1", nodes[0].address), "it listens on nothing else"
            send_garbage(address)
        assert rope.load(1)["data"] == data
        rope.save(2, {"data": data[::-1]}, wait=Level.COMMITTED)
        assert nodes[0].process.poll() is None
        assert verify(nodes[0]).returncode == 0
        assert os.path.exists(nodes[0].socket)

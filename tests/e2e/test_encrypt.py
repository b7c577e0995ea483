# SPDX-License-Identifier: Apache-2.0
"""--encrypt-replicas: what can be read of a shard on the network and in a holder's memory. The control
connections can be read in no case."""

from __future__ import annotations

import collections
import mmap
import os
import pathlib
import socket
import struct
import subprocess
import threading

import pytest
from harness import BUILD, WAIT_S, Cluster, Daemon, payload, verify, wait_until
from ropeteam import Level

# Every frame and every chunk contains this whole pattern.
PATTERN = b"<these are weights that nobody but their rank should read......>"
NAME = "layers.17.attention.weight"
JOB = "a-job-that-only-its-control-connections-name"
DATA = PATTERN * (6_000_000 // len(PATTERN))
CHUNK = 1 << 20
OPTIONS = ["--encrypt-replicas", "--chunk-size", "1M"]

ETH_P_ALL = 3
SOL_PACKET, PACKET_STATISTICS, SO_RCVBUFFORCE = 263, 6, 33


class Capture:
    """Counts these words in every frame on the loopback device; fails if frames were lost."""

    def __init__(self, *words: bytes) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 256 << 20)
        self._socket.bind(("lo", 0))
        self._words = words
        self._end = os.urandom(32)
        self._thread = threading.Thread(target=self._run)
        self.bytes = 0
        self.found: collections.Counter[bytes] = collections.Counter()

    def _run(self) -> None:
        while self._end not in (frame := self._socket.recv(1 << 17)):
            self.bytes += len(frame)
            self.found.update({word: frame.count(word) for word in self._words})

    def __enter__(self) -> Capture:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(self._end, ("127.0.0.1", 9))
        self._thread.join()
        _, lost = struct.unpack("II", self._socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
        self._socket.close()
        assert lost == 0, "frames were lost: what is not found may have been there"


def need_capture() -> None:
    if os.geteuid() != 0:
        pytest.skip("capturing frames takes root")


def held(node: Daemon, what: bytes) -> int:
    """How often the node's arena contains these bytes."""
    (path,) = node.arena.glob("*.arena")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as arena:
        return arena[:].count(what)


def flip(node: Daemon, *places: int) -> None:
    """Flips one bit of the byte at each of these places in the arena's file."""
    (path,) = node.arena.glob("*.arena")
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
        for place in places:
            arena[place] ^= 0x10


def chunks(node: Daemon) -> dict[int, bytes]:
    """The first 64 bytes of each chunk of the node's arena, by its place in the file."""
    (path,) = node.arena.glob("*.arena")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as arena:
        return {at: arena[at : at + 64] for at in range(CHUNK, len(arena) - 63, CHUNK)}


def save(nodes: Cluster, step: int, data: bytes) -> None:
    """Rank 0 saves `data`, rank 1 other bytes."""
    with nodes[0].open(0, 2, "run") as first, nodes[1].open(1, 2, "run") as second:
        first.save(step, {NAME: data})
        second.save(step, {"other": payload(step, 1_500_000)})
        first.wait(step, Level.COMMITTED)


def load(node: Daemon, step: int) -> bytes:
    with node.open(0, 2, "run") as rope:
        return bytes(rope.load(step)[NAME])


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_capture_of_the_network_and_a_holders_memory_have_nothing_of_a_chunk(cluster, encrypted):
    need_capture()
    with Capture(PATTERN, NAME.encode(), JOB.encode()) as seen:
        nodes = cluster(2, options=OPTIONS if encrypted else OPTIONS[1:], job=JOB)
        save(nodes, 1, DATA)
        there = held(nodes[1], PATTERN) + held(nodes[1], NAME.encode())
        assert held(nodes[0], PATTERN) >= len(DATA) // len(PATTERN), "the rank's own copy is in clear"
        nodes[0].kill(drop_memory=True)
        nodes[0].start()
        nodes.wait_members(2)
        assert load(nodes[0], 1) == DATA  # the holder's copy, over the network
    assert seen.bytes > 2 * len(DATA)
    assert seen.found[JOB.encode()] == 0
    if encrypted:
        assert (seen.found.total(), there) == (0, 0)
        assert "replicas encrypted" in nodes[0].status()["daemon"]["security"]["data"]
    else:
        assert seen.found[PATTERN] > 0 and there > 0, "the capture or the search is blind"


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_members_data_connection_reaches_only_ciphertext(cluster, tmp_path: pathlib.Path, encrypted):
    key = tmp_path / "job.key"
    key.write_text("5a" * 32)
    key.chmod(0o600)
    nodes = cluster(2, options=[*(OPTIONS if encrypted else OPTIONS[1:]), "--job-key-file", str(key)])
    save(nodes, 1, DATA)
    (path,) = nodes[0].arena.glob("*.arena")
    count = path.stat().st_size // CHUNK - 1  # the tables take less than a chunk
    output = tmp_path / "read"
    member = [str(BUILD / "tests" / "node" / "grasping_member"), nodes.job, str(key), nodes.coordinator]
    member += ["tcp --encrypt-replicas" if encrypted else "tcp", str(CHUNK), str(count), "node-0", str(output)]
    done = subprocess.run(
        [*member, *(["put"] if encrypted else [])], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 0, done.stdout
    words = [line.split() for line in done.stdout.splitlines()]
    reached = {what: {int(each[1]) for each in words if each[0] == what} for what in ("read", "written", "failed")}
    got = output.read_bytes()
    if not encrypted:
        assert reached == {"read": set(range(count)), "written": set(), "failed": set()}
        assert got.count(PATTERN) >= len(DATA) // len(PATTERN) - len(DATA) // CHUNK, "members read plaintext copies"
        return
    # What rank 1 has saved is here as ciphertext: 1.5 MB and their manifest.
    assert len(reached["read"]) == 2 and reached["written"] == reached["failed"] == set()
    assert PATTERN not in got and NAME.encode() not in got
    arena = path.read_bytes()
    for chunk in reached["read"]:
        at = chunk * CHUNK
        assert got[at : at + CHUNK] == arena[CHUNK + at : CHUNK + at + CHUNK]
    assert arena.count(PATTERN) >= len(DATA) // len(PATTERN) - len(DATA) // CHUNK, "it is in the arena"
    assert not any(begin.startswith(b"\xee" * 8) for begin in chunks(nodes[0]).values())
    assert load(nodes[0], 1) == DATA


def test_bad_chunks_of_both_kinds_are_found_and_repaired(cluster):
    nodes = cluster(2, options=OPTIONS)
    data = payload(7, 5_000_000)
    save(nodes, 1, data)
    assert verify(nodes[0]).returncode == 0
    # The saver's own copy is repaired from the holder's ciphertext during the read.
    (own,) = [at for at, begin in chunks(nodes[0]).items() if begin == data[CHUNK : CHUNK + 64]]
    flip(nodes[0], own)
    assert load(nodes[0], 1) == data
    assert verify(nodes[0]).returncode == 0
    # Damage of the holder's copy is found by the checksum of the ciphertext. Only ciphertext is on both nodes: the
    # holder's copy, and the buffer from which it was sent.
    sent = set(chunks(nodes[0]).values())
    shared = [at for at, begin in chunks(nodes[1]).items() if begin in sent and any(begin)]
    flip(nodes[1], *shared)
    assert verify(nodes[0]).returncode == 1
    wait_until(lambda: verify(nodes[0]).returncode == 0, "the replica's repair")
    assert load(nodes[0], 1) == data
    # A daemon that was killed finds its copies again, and another node reads them.
    nodes[1].kill()
    nodes[1].start()
    nodes.wait_members(2)
    wait_until(lambda: verify(nodes[0]).returncode == 0, "the copies of the daemon that was killed")
    assert load(nodes[1], 1) == data


def refused(node: Daemon, said: str) -> None:
    node.start(wait=False)
    process, node.process = node.process, None
    assert process.wait(WAIT_S) != 0
    assert said in node.log_text()


def test_a_node_without_the_option_is_refused_in_words(cluster):
    nodes = cluster(2, options=OPTIONS)
    nodes[1].stop()
    nodes[1].options.remove("--encrypt-replicas")
    refused(nodes[1], "arena was made with --encrypt-replicas, this daemon was started without")
    nodes[1].options.append("--arena-reset")
    refused(nodes[1], " --encrypt-replicas: all nodes of a job need the same")
    nodes[1].options[:] = OPTIONS
    refused(nodes[1], "arena was made without --encrypt-replicas, this daemon was started with")
    nodes[1].options.append("--insecure")
    refused(nodes[1], "--encrypt-replicas needs a job key")

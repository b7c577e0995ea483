# SPDX-License-Identifier: Apache-2.0
"""Many saves must not accumulate memory, and the lengths of a large save must not overflow."""

from __future__ import annotations

import mmap
import os
import pathlib
import random
import re
from collections.abc import Iterator

import pytest
from harness import BUILD, LIBRARY, WAIT_S, ScriptedRank

from ropeteam import Level

GIB = 1 << 30
# A sanitizer keeps freed memory for a while, and takes minutes for gigabytes.
plain_build = pytest.mark.skipif(
    not LIBRARY.is_relative_to(BUILD), reason=f"{BUILD.name} is built with a sanitizer"
)


def anonymous_kib(pid: int) -> int:
    """Anonymous resident memory of the process, without the shared arena and the program."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE).group(1))


@plain_build
def test_two_hundred_saves_cost_no_memory(cluster):
    nodes = cluster(2)
    script = f"""
        import sys, ropeteam
        data = bytes(3_000_000)
        with ropeteam.open({nodes[0].socket!r}, rank=0, world_size=1) as rope:
            for step in range(1, 201):
                rope.save(step, {{"data": data, "at": {{"step": step}}}}, wait=ropeteam.Level.COMMITTED)
                if step in (50, 200):
                    print(step)
                    sys.stdin.readline()
    """
    measured = {}
    with ScriptedRank(script) as rank:
        for step in ("50", "200"):
            assert rank.says() == step
            pids = {"rank": rank.process.pid, **{node.name: node.process.pid for node in nodes.nodes}}
            measured[step] = {name: anonymous_kib(pid) for name, pid in pids.items()}
            rank.go_on()
        assert rank.process.wait(WAIT_S) == 0
    grown = {name: measured["200"][name] - measured["50"][name] for name in measured["50"]}
    assert all(kib < 4096 for kib in grown.values()), (grown, measured)


def pieces(length: int) -> Iterator[tuple[slice, bytes]]:
    """Pieces of 1 MiB, all different, with `length` bytes in total."""
    block = random.Random(3).randbytes((1 << 20) - 8)
    for at in range(0, length, 1 << 20):
        piece = (at.to_bytes(8, "little") + block)[: length - at]
        yield slice(at, at + len(piece)), piece


@plain_build
def test_a_shard_above_three_gibibytes_comes_back_whole_from_the_other_node(cluster):
    length = 3 * GIB + 1
    # The smallest arena that holds the shard: 769 chunks of 4 MiB and the tables. It is enough because nothing else is
    # kept or in progress.
    memory_mib = 3080
    available = int(re.search(r"MemAvailable:\s+(\d+)", pathlib.Path("/proc/meminfo").read_text()).group(1))
    if available < 16 << 20:
        pytest.skip(f"16 GiB of memory are needed, {available >> 20} GiB are available")
    shm = os.statvfs("/dev/shm")
    if shm.f_bavail * shm.f_frsize < 2 * memory_mib << 20:
        pytest.skip(f"two arenas of {memory_mib} MiB do not fit into /dev/shm")
    nodes = cluster(2, memory=f"{memory_mib}M", options=["--keep-steps", "1", "--dead-after-ms", "10000"])
    with mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for place, piece in pieces(length):
            memory[place] = piece
        with nodes[1].open(1, 2, "run") as rope, nodes[0].open(0, 2, "run") as other:
            rope.save(1, {"data": memory}, wait=Level.REPLICATED, timeout=4 * WAIT_S)
            memory.madvise(mmap.MADV_DONTNEED)
            assert not any(memory[2 * GIB : 2 * GIB + 4096]), "it is empty again"
            nodes[1].kill(drop_memory=True)  # so that the bytes must come from the other node
            nodes.wait_members(1)
            with other.view(1, 1, timeout=4 * WAIT_S) as view:
                assert view.length("data") == length
                view.read_into("data", memory)
        assert all(memory[place] == piece for place, piece in pieces(length))

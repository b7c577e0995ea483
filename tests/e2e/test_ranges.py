# SPDX-License-Identifier: Apache-2.0
"""Ranged reads of shards that a node does not have return the right bytes, and transfer only these."""

from __future__ import annotations

import pytest
import ropeteam
from harness import payload, wait_until
from ropeteam import Level, Range

ROWS, COLUMNS = 2048, 4096  # bytes: a matrix of 8 MiB, two chunks


@pytest.fixture
def saved(cluster):
    """Starts ranks 0 to 3 on four nodes with one replica; each rank saves "a" and "b". Returns nodes and
    ranks."""

    def start(options=None):
        nodes = cluster(4, memory="128M", options=["--replicas", "1", *(options or [])])
        ranks = [nodes[rank].open(rank, 4, "run") for rank in range(4)]
        for rank, rope in enumerate(ranks):
            rope.save(1, {name: matrix(rank, name) for name in "ab"})
        for rope in ranks:
            rope.wait(1, Level.COMMITTED)
        return nodes, ranks

    return start


def matrix(rank: int, name: str) -> bytes:
    return payload(2 * rank + (name == "b"), ROWS * COLUMNS)


def lacking(nodes, rank: int) -> list[int]:
    """The nodes that have no copy of the rank's shard."""
    return [node for node in range(4) if all(c["id"]["rank"] != rank for c in copies(nodes[node]))]


def copies(node) -> list[dict]:
    return node.local_status()["copies"]


def fetched(node) -> int:
    return node.local_status()["counters"]["fetch_bytes"]


def columns_of(data: bytes, first: int, count: int) -> bytes:
    return b"".join(data[row * COLUMNS + first : row * COLUMNS + first + count] for row in range(ROWS))


def test_only_the_bytes_that_are_asked_for_cross_the_wire(saved):
    nodes, ranks = saved()
    reader = lacking(nodes, 0)[0]
    before = fetched(nodes[reader])
    rows, columns, both = bytearray(500 * COLUMNS), bytearray(ROWS * 1000), bytearray(20)
    with ranks[reader].view(1, 0, partial=True) as view:
        assert view.names() == ["a", "b"]
        assert view.length("a") == ROWS * COLUMNS
        view.read_ranges(
            [
                Range("a", rows, 700 * COLUMNS, len(rows)),
                Range("b", columns, 13, 1000, count=ROWS, stride=COLUMNS, target_stride=1000),
                Range("b", both, 0, 10, count=2, stride=ROWS * COLUMNS - 10, target_stride=10),
            ]
        )
        assert view.read("a", 5, 7) == matrix(0, "a")[5:12]
    b = matrix(0, "b")
    assert rows == matrix(0, "a")[700 * COLUMNS : 1200 * COLUMNS]
    assert columns == columns_of(b, 13, 1000)
    assert both == b[:10] + b[-10:]
    needed = len(rows) + len(columns) + len(both) + 7
    assert needed <= fetched(nodes[reader]) - before <= 1.01 * needed
    assert reader in lacking(nodes, 0)  # a ranged read keeps no copy


def test_a_holder_that_is_bad_repairs_itself_and_another_gives_the_range(saved):
    nodes, ranks = saved(["--scrub-rate", "0"])
    reader = lacking(nodes, 0)[0]
    (path,) = (path for path in nodes[0].arena.iterdir() if path.stat().st_size > 1 << 24)
    data = path.read_bytes()
    with path.open("r+b") as arena:
        for at in range(1000, ROWS * COLUMNS, 1 << 20):  # every part that it may be asked for
            arena.seek(data.find(matrix(0, "a")[at : at + 100]))
            arena.write(b"other bytes")
    before = fetched(nodes[reader])
    target = bytearray(ROWS * COLUMNS)
    with ranks[reader].view(1, 0, partial=True) as view:
        view.read_ranges([Range("a", target, 0, len(target))])  # it is read in parts from both holders
    assert target == matrix(0, "a")
    assert fetched(nodes[reader]) - before <= 1.01 * len(target)
    wait_until(lambda: nodes[0].local_status()["counters"]["chunks_repaired"] > 0, "the repair")


def test_reads_go_on_when_a_holder_dies_and_fetch_the_shard_when_ranges_cannot_be_had(saved):
    nodes, ranks = saved()
    reader, holders = lacking(nodes, 0)[0], set(range(4)) - set(lacking(nodes, 0))
    target = bytearray(64)
    with ranks[reader].view(1, 0, partial=True) as view:
        nodes[max(holders)].kill(drop_memory=True)
        for offset in range(0, 6_000_000, 1_000_000):
            view.read_ranges([Range("a", target, offset, 64)])
            assert target == matrix(0, "a")[offset : offset + 64]
        assert view.map("b") == matrix(0, "b")  # fetches the whole shard
        assert any(c["id"]["rank"] == 0 for c in copies(nodes[reader]))
        view.read_ranges([Range("a", target, 77, 64)])
        assert target == matrix(0, "a")[77 : 77 + 64]


def test_a_shard_that_is_here_is_opened_as_ever(saved):
    nodes, ranks = saved()
    before = fetched(nodes[0])
    with ranks[0].view(1, partial=True) as view:
        assert view.map("a") == matrix(0, "a")
    assert fetched(nodes[0]) == before
    with pytest.raises(ropeteam.NotFound):
        ranks[0].view(2, 1, partial=True)

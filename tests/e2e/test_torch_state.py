# SPDX-License-Identifier: Apache-2.0
"""save_state() and load_state() on worlds of several sizes and layouts, with real daemons; see
torch_worlds.py."""

from __future__ import annotations

import pytest
import torch_ranks
from harness import Cluster
from ropeteam import Level

torch = pytest.importorskip("torch", reason="torch is not installed")
import torch_worlds  # noqa: E402


def run(case, ranks: int, nodes: Cluster, *arguments):
    """Runs a case of torch_worlds.py; all ranks must return the same, which is the result."""
    first, *others = torch_ranks.run(ranks, None, case, [node.socket for node in nodes.nodes], *arguments)
    assert all(each == first for each in others)
    return first


def test_a_step_loads_on_any_number_of_ranks_and_any_mesh(cluster):
    assert len(run(torch_worlds.reshard, 6, cluster(2))) == 12


def test_what_several_ranks_have_is_stored_once_and_compared(cluster):
    nodes = cluster(2)
    found = run(torch_worlds.replicas, 4, nodes)
    assert [layout for layout, _, _ in found] == ["ddp", "hsdp", "tp", "ddp"]
    for layout, sizes, whole in found:
        if layout == "ddp":
            assert sum(sizes) == whole
            assert max(sizes) < 1.3 * min(sizes), "spread evenly"
        # The optimizer's step count of a parameter, 4 bytes, is saved with each of its shards. There are 7
        # parameters, so with up to 4 shards each, at most 3 * 7 * 4 bytes are saved in addition.
        assert whole <= sum(sizes) <= whole + 3 * 7 * 4, found

    differ = run(torch_worlds.differ, 4, nodes)
    # If all ranks have the same state, the leader finds it: the first step is never committed, and every rank
    # is warned.
    assert differ["ddp"] == [([102, 103], 1)] * 4
    # If pairs have the same state, the rank that did not save the different part finds it after the commit.
    said = differ["hsdp"]
    assert [committed for committed, _ in said] == [[111, 112, 113]] * 4
    assert sorted(warned for _, warned in said) == [0, 0, 0, 1] and said[1][1] == said[3][1] == 0


def test_a_rank_reads_little_more_than_it_needs(cluster):
    """Four ranks save on nodes 0 to 3. The ranks of nodes 4 and 5, which hold nothing, load other parts."""
    import ropeteam.torch as rt

    rows, columns = 4096, 1024
    nodes = cluster(6, memory="64M", options=["--replicas", "1"])
    whole = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    ranks = [nodes[rank].open(rank, 4, "saves") for rank in range(4)]
    for rank, part in enumerate(whole.chunk(4)):
        piece = rt.Piece(part, whole.shape, (rank * rows // 4, 0))
        rt.save_tensors(ranks[rank], 1, {"w": piece, "position": rank})
    for rope in ranks:
        rope.wait(1, Level.COMMITTED)
        rope.close()
    ranks = [nodes[4 + rank].open(rank, 2, "loads") for rank in range(2)]
    parts = {
        "fewer rows than one rank saved": lambda rank: (slice(rank * 512, rank * 512 + 500), slice(None)),
        "half of the rows": lambda rank: (slice(rank * rows // 2, (rank + 1) * rows // 2), slice(None)),
        "half of the columns": lambda rank: (
            slice(None),
            slice(rank * columns // 2, (rank + 1) * columns // 2),
        ),
    }
    for what, part in parts.items():
        for rank, rope in enumerate(ranks):
            expected = whole[part(rank)]
            piece = rt.Piece(
                torch.zeros(expected.shape), whole.shape, [each.start or 0 for each in part(rank)]
            )
            before = nodes[4 + rank].local_status()["counters"]["fetch_bytes"]
            assert rt.load_tensors(rope, {"w": piece}) == 1
            assert torch.equal(piece.tensor, expected), what
            brought = nodes[4 + rank].local_status()["counters"]["fetch_bytes"] - before
            ratio = brought / (expected.numel() * 4)
            print(f"{what}: {ratio:.4f} of the bytes that are needed")
            assert 1 <= ratio <= 1.1, what

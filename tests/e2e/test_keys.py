# SPDX-License-Identifier: Apache-2.0
"""Replacing the key of a job that encrypts its replicas: the procedure of docs/security.md, step by step."""

from __future__ import annotations

import itertools
import pathlib
import secrets
import sys

import pytest
from harness import ROOT, Cluster, ask, save_everywhere, saved, verify, wait_until

sys.path.insert(0, str(ROOT / "scripts" / "lib"))

from chaos_nodes import write_keys  # noqa: E402

# The same step is restored many times, and nothing newer is committed: every copy must be encrypted again.
OPTIONS = ["--encrypt-replicas", "--chunk-size", "1M", "--quarantine-after", "0"]
NODES = 3
STEP = 5


class Job:
    """Three nodes, each with a key file of its own, and step STEP committed by one rank on each."""

    def __init__(self, cluster, directory: pathlib.Path, key: str) -> None:
        self.files = [directory / f"node-{node}.key" for node in range(NODES)]
        for file in self.files:
            write_keys(file, key)
        self.nodes: Cluster = cluster(
            NODES,
            options=OPTIONS,
            node_options=[["--job-key-file", str(file)] for file in self.files],
        )
        self._launches = itertools.count()
        ranks = self.open()
        save_everywhere(ranks, STEP)
        self.close(ranks)

    def open(self) -> list:
        token = f"run-{next(self._launches)}"
        return [self.nodes[rank].open(rank, NODES, token) for rank in range(NODES)]

    @staticmethod
    def close(ranks: list) -> None:
        for rope in ranks:
            rope.close()

    def restart_with(self, node: int, *keys: str) -> None:
        write_keys(self.files[node], *keys)
        self.nodes[node].stop()
        self.nodes[node].start()
        self.nodes.wait_members()

    def lose(self, node: int) -> None:
        """kill -9, and its memory is gone. An empty daemon takes its place."""
        self.nodes[node].kill(drop_memory=True)
        self.nodes[node].start()
        self.nodes.wait_members(NODES)

    def everyone_restores(self) -> None:
        ranks = self.open()
        assert [rope.latest().step for rope in ranks] == [STEP] * NODES
        for rank, rope in enumerate(ranks):
            assert rope.load(STEP)["data"] == saved(STEP, rank)
        self.close(ranks)

    def redundant(self) -> None:
        wait_until(lambda: self.nodes[0].status()["latest"]["copies_min"] == 2, "two copies of every shard")

    def keys(self) -> list[dict]:
        return self.nodes[0].status()["keys"]

    def removable(self) -> None:
        """Waits until `ropeteam status` says that the old key may be removed."""
        wait_until(
            lambda: "it may be removed" in ask("status", "--socket", self.nodes[0].socket).stdout,
            "the old key to be without copies",
        )


# The numbers of the restarts after which a node is lost; the third one ends step 1. A loss makes its copies again, so
# fewer losses leave more to the background. After the last restart two nodes are lost, one after the other.
@pytest.mark.parametrize("losses", [{*range(9)}, set(), {1}, {2}, {4}, {5}, {7}], ids=str)
def test_the_pages_procedure_with_losses_between_its_steps(cluster, tmp_path, losses):
    old, new = secrets.token_hex(32), secrets.token_hex(32)
    job = Job(cluster, tmp_path, old)
    lost = itertools.cycle(range(NODES))
    for step, keys in enumerate([(old, new), (new, old), (new,)]):
        if len(keys) == 1:
            job.removable()
        for node in range(NODES):
            job.restart_with(node, *keys)
            job.redundant()
            if NODES * step + node in losses:
                job.lose(next(lost))
                job.everyone_restores()
                job.redundant()
    for node in (0, 1):
        job.lose(node)
        job.everyone_restores()
        job.redundant()
    assert verify(job.nodes[0]).returncode == 0
    (only,) = job.keys()
    assert only["copies"] >= NODES and only["unreadable"] == 0 and len(only["first_on"]) == NODES


def test_a_key_that_is_removed_too_early_is_named_and_its_copies_do_not_count(cluster, tmp_path):
    old, new = secrets.token_hex(32), secrets.token_hex(32)
    job = Job(cluster, tmp_path, old)
    job.nodes[1].stop()
    write_keys(job.files[1], new)  # its arena has a copy of the old key
    for node in (0, 2):
        job.restart_with(node, old, new)
    for node in (0, 2):
        job.restart_with(node, new, old)
    job.nodes[1].start()
    job.nodes.wait_members(NODES)
    wait_until(lambda: "copies in this arena do not count" in job.nodes[1].log_text(), "the warning")
    job.redundant()
    shown = ask("status", "--socket", job.nodes[0].socket).stdout
    assert "DO NOT COUNT: the key is not on node-1; put it back there" in shown
    said = verify(job.nodes[0])
    assert said.returncode == 0, "every rank has copies enough"
    assert "which the node lacks (replica)" in said.stdout
    job.lose(0)
    job.everyone_restores()

# SPDX-License-Identifier: Apache-2.0
"""Storage that the nodes see differently: refused by permission, or not mounted on one node."""

from __future__ import annotations

import os
import pathlib
import shutil

import pytest
from harness import Daemon, wait_until
from test_storage import (  # noqa: F401
    Directory,
    bucket,
    bytes_of,
    lose,
    manifests,
    persist_and_lose,
    restored_with,
    save,
    start_again,
    world,
)

import ropeteam
from ropeteam import Level

OPTIONS = ["--replicas", "1", "--persist-every", "1"]


@pytest.fixture
def store(tmp_path) -> Directory:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a mount of one daemon takes root and unshare (Debian: util-linux)")
    return Directory(tmp_path / "store")


def without_mount(node: Daemon, store: Directory) -> pathlib.Path:
    """From its next start on, the node has an empty directory in the place of the store."""
    empty = store.path.with_suffix(".empty")
    empty.mkdir(exist_ok=True)
    bind = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
    node.prefix = ["unshare", "--mount", "sh", "-c", bind, "sh", str(empty), str(store.path)]
    return empty


def test_manifests_that_are_refused_are_waited_for(bucket, cluster):  # noqa: F811
    nodes = cluster(2, options=[*OPTIONS, "--storage", bucket.url])
    persist_and_lose(nodes, [1, 2])
    refused = {"operation": "GetObject", "key": "manifest"}
    bucket.fault(kind="status", match=refused, status=403, count=1_000_000)
    start_again(nodes)
    ranks = world(nodes, "second")
    with pytest.raises((ropeteam.Unavailable, ropeteam.DeadlineExceeded), match="403"):
        ranks[0].latest(timeout=15)
    for rope in ranks:
        rope.close()
    bucket.fault(clear=True)
    restored_with(nodes, lambda rank: bytes_of(rank, 2), step=2, run="third")


@pytest.mark.parametrize("without", [0, 2])
def test_every_launch_restores_the_newest_step(store, cluster, without):
    """One of three nodes, the leader or another one, has an empty directory."""
    nodes = cluster(3, options=[*OPTIONS, "--storage", store.url])
    persist_and_lose(nodes, [1, 2])
    without_mount(nodes[without], store)
    for launch in range(3):
        start_again(nodes)
        restored_with(nodes, lambda rank: bytes_of(rank, 2), step=2, run=f"again {launch}")
        lose(nodes)


def test_nodes_without_the_directory_condemn_no_step(store, cluster, tmp_path):
    """Two of three nodes have no --storage, and nothing at the job's path. Two nodes would be enough to condemn a step."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    there = Directory(mounted / "store")
    nodes = cluster(3, options=OPTIONS, node_options=[["--storage", there.url], [], []])
    persist_and_lose(nodes, [1, 2])
    for node in nodes[1], nodes[2]:
        node.prefix = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(mounted)]
    start_again(nodes)
    ranks = world(nodes, "second")
    for rope in ranks[1:]:
        with pytest.raises(ropeteam.IoError, match=f"{there.path} is not there"):
            rope.storage_steps()
    for rope in ranks:
        rope.close()
    restored_with(nodes, lambda rank: bytes_of(rank, 2), step=2, run="third")


@pytest.mark.parametrize("without", [0, 2])
def test_persisted_is_told_of_what_is_on_storage(store, cluster, without):
    nodes = cluster(3, options=[*OPTIONS, "--storage", store.url])
    nodes[without].stop()
    empty = without_mount(nodes[without], store)
    nodes[without].start()
    nodes.wait_members(3)
    ranks = world(nodes, "first")
    for step in (1, 2):
        save(ranks, step)
        for rope in ranks:
            rope.wait(step, Level.PERSISTED)
    for rope in ranks:
        rope.close()
    assert len(manifests(store)) == 2
    assert not [path for path in empty.rglob("*") if path.suffix in (".safetensors", ".rope")]
    lose(nodes)
    nodes[without].prefix = []
    start_again(nodes)
    restored_with(nodes, lambda rank: bytes_of(rank, 2), step=2)


def test_what_no_other_node_sees_is_not_persisted(store, cluster):
    """Two nodes have a directory each: neither can tell which one is the store."""
    nodes = cluster(2, options=[*OPTIONS, "--storage", store.url])
    nodes[1].stop()
    without_mount(nodes[1], store)
    nodes[1].start()
    nodes.wait_members(2)
    ranks = world(nodes, "first")
    save(ranks, 1)
    wait_until(
        lambda: "no other node sees the lock" in nodes[0].status()["policy"]["trouble"], "status says why"
    )
    assert not manifests(store)
    nodes[1].stop()
    nodes[1].prefix = []
    nodes[1].start()
    nodes.wait_members(2)
    wait_until(lambda: manifests(store), "the step is persisted when both nodes see the store", 60)

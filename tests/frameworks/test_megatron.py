# SPDX-License-Identifier: Apache-2.0
"""ropeteam.megatron under the real Megatron-Core: two ranks on two nodes."""

from __future__ import annotations

import shutil

import pytest
from harness import free_port

pytest.importorskip("megatron.core")


@pytest.mark.parametrize(
    "settings",
    [
        {"WAY": "easy"},
        {"WAY": "easy", "TP": "2"},
        {"WAY": "easy", "DISTRIBUTED": "1"},
        {"WAY": "strategy"},
        {"WAY": "strategy", "TP": "2"},
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_a_killed_world_goes_on_to_the_bit(cluster, train, tmp_path, settings):
    settings = {"ranks": 2, "STEPS": "5", **settings}
    whole = train(cluster(2, job="whole"), "mc.py", **settings).ok()
    nodes = cluster(2)
    train(nodes, "mc.py", **settings, DIE_AT="4").killed()
    for rank in range(2):  # nothing on disk is needed
        shutil.rmtree(tmp_path / f"checkpoints-{rank}", ignore_errors=True)
    resumed = train(nodes, "mc.py", **settings).ok()
    for rank in range(2):
        assert resumed.one("start", rank) == 3, "step 4 was not whole"
        assert resumed.losses(rank) == {step: whole.losses(rank)[step] for step in (4, 5)}
        assert resumed.one("digest", rank) == whole.one("digest", rank)


def test_other_parallel_sizes_load(cluster, train):
    nodes = cluster(2)
    parallel = {"ranks": 2, "WAY": "easy", "TP": "2"}
    first = train(nodes, "mc.py", **parallel, STEPS="2").ok()
    alone = {"WAY": "easy", "STEPS": "3", "RANK": "0", "WORLD_SIZE": "1", "FROZEN": "1"}
    alone.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    refused = train(nodes, "mc.py", **alone)
    assert refused.status != 0 and "concat=True" in refused.output
    # One rank loads the two parts concatenated and saves them; then two ranks load their parts of that.
    assert train(nodes, "mc.py", **alone, CONCAT="1").ok().one("start") == 2
    again = train(nodes, "mc.py", **parallel, STEPS="4", CONCAT="1").ok()
    for rank in range(2):
        assert again.one("start", rank) == 3
        assert again.one("weights", rank) == first.one("digest", rank)

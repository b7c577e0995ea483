# SPDX-License-Identifier: Apache-2.0
"""ropeteam.torchtitan under the real torchtitan's checkpoint manager: FSDP2 on two ranks and two nodes."""

from __future__ import annotations

import pytest

pytest.importorskip("torchtitan")


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_killed_world_goes_on_to_the_bit(cluster, train, tmp_path, mode):
    settings = {"ranks": 2, "MODE": mode}
    whole = train(cluster(2, job="whole"), "tt.py", **settings, STEPS="6").ok()
    assert whole.one("loaded") is False
    nodes = cluster(2)
    train(nodes, "tt.py", **settings, STEPS="6", DIE_AT="4").killed()
    resumed = train(nodes, "tt.py", **settings, STEPS="6").ok()
    for rank in range(2):
        assert resumed.one("start", rank) == 3, "step 4 was not whole"
        assert resumed.losses(rank) == {step: whole.losses(rank)[step] for step in (4, 5, 6)}
        for what in ("weights", "tokens"):
            assert resumed.one(what, rank) == whole.one(what, rank)
        assert resumed.one("failed", rank) == 0
    assert not (tmp_path / "checkpoint").exists(), "nothing on disk"


def test_the_export_at_the_end_is_torchtitans_and_a_step_can_be_chosen(cluster, train, tmp_path):
    nodes = cluster(2)
    first = train(nodes, "tt.py", ranks=2, STEPS="3", LAST="1").ok()
    assert (tmp_path / "checkpoint" / "step-3" / ".metadata").is_file()
    # It contains only the model, so training can resume only from the step before.
    again = train(nodes, "tt.py", ranks=2, STEPS="3", LOAD="2").ok()
    assert again.one("start") == 2 and again.one("weights") == first.one("weights")

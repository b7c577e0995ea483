# SPDX-License-Identifier: Apache-2.0
"""ropeteam.deepspeed under the real DeepSpeed: ZeRO 0 to 3, two ranks on two nodes."""

from __future__ import annotations

import pytest
from harness import ROOT, ask

pytest.importorskip("deepspeed")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_killed_world_goes_on_to_the_bit(cluster, train, tmp_path, stage):
    settings = {"ranks": 2, "STAGE": str(stage), "STEPS": "6"}
    whole = train(cluster(2, job="whole"), "ds.py", **settings).ok()
    assert whole.one("path") is None
    nodes = cluster(2)
    # The other job's file `latest` is still there; this job does not have the step that it names.
    killed = train(nodes, "ds.py", **settings, DIE_AT="4").killed()
    assert killed.one("path") is None and max(killed.losses()) == 4
    (tmp_path / "checkpoints" / "latest").unlink()  # nothing on disk is needed
    resumed = train(nodes, "ds.py", **settings).ok()
    for rank in range(2):
        assert resumed.one("start", rank) == 3, "step 4 was not whole"
        assert resumed.one("client_state", rank) == "[3, {'x': tensor(3)}]"
        assert resumed.losses(rank) == {step: whole.losses(rank)[step] for step in (4, 5, 6)}
        for what in ("state", "scheduler"):
            assert resumed.one(what, rank) == whole.one(what, rank)
    assert resumed.one("path").startswith("checkpoints/global_step3/")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()] == []


def test_what_is_exported_is_deepspeeds_own_checkpoint(cluster, train, tmp_path):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    settings = {"ranks": 2, "STAGE": "2", "DROPOUT": "0"}  # DeepSpeed alone does not keep random generators
    nodes = cluster(2)
    train(nodes, "ds.py", **settings, STEPS="3", WEIGHTS="1").ok()
    assert (tmp_path / "weights" / "model.bin").stat().st_size > 0, "a file asked for by its path is one"
    (tmp_path / "out").mkdir()
    done = ask("export", "3", str(tmp_path / "out"), "--socket", nodes[0].socket)
    assert done.returncode == 0, done.stderr
    (step,) = (tmp_path / "out" / "test").glob("step-*")
    own = tmp_path / "own"
    own.mkdir()
    step.rename(own / "global_step3")
    weights = get_fp32_state_dict_from_zero_checkpoint(str(own), "global_step3")
    assert sorted(weights) == ["0.bias", "0.weight", "1.bias", "1.weight", "3.bias", "3.weight"]

    # DeepSpeed without Ropeteam can resume from it, too.
    (own / "latest").write_text("global_step3")
    with_it = train(nodes, "ds.py", **settings, STEPS="4").ok()
    alone = train(None, "ds.py", **settings, STEPS="4", ALONE=str(own)).ok()
    assert with_it.one("start") == alone.one("start") == 3
    assert alone.losses() == with_it.losses() and alone.one("state") == with_it.one("state")


def test_a_step_by_its_tag_and_what_cannot_be_loaded(cluster, train):
    nodes = cluster(1)
    settings = {"ranks": 2, "STAGE": "1", "DTYPE": "fp32"}
    first = train(nodes, "ds.py", **settings, STEPS="3").ok()
    older = train(nodes, "ds.py", **settings, STEPS="3", TAG="global_step3").ok()
    assert older.one("start") == 3 and older.one("scheduler") == first.one("scheduler")
    refused = train(nodes, "ds.py", **settings, STEPS="4", STATE="object")
    assert refused.status != 0 and "cannot be saved" in refused.output


def test_the_example_goes_on_where_it_was(cluster, train):
    socket = cluster(1)[0].socket
    settings = {"ranks": 2, "ROPETEAM_SOCKET": socket, "DS_ACCELERATOR": "cpu"}
    example = ROOT / "examples" / "deepspeed_train.py"
    first = train(None, example, "--steps", "3", "--hidden", "16", **settings).ok()
    assert "rank 1 begins behind step 0" in first.output and "rank 0: 48 samples" in first.output
    second = train(None, example, "--steps", "5", "--hidden", "16", **settings).ok()
    assert "rank 1 begins behind step 3" in second.output and "rank 0: 80 samples" in second.output

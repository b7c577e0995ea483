# SPDX-License-Identifier: Apache-2.0
"""PyTorch Lightning: training is killed, and its node is lost with its memory. After resuming it computes the
same as uninterrupted training."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from harness import ROOT

pytest.importorskip("lightning", reason="lightning is not installed")


#: Ranks, the step in which it is killed, options. With two ranks an epoch has 6 steps.
CASES = {
    "async": (1, 7, {"async": True}),
    "2 ranks": (2, 5, {}),
    "2 ranks at the end of an epoch": (2, 7, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_training_that_is_killed_resumes_to_the_bit(cluster, train, case):
    ranks, kill, options = CASES[case]
    nodes = cluster(2)
    how = {"ranks": ranks, "OPTIONS": json.dumps(options)}
    whole = train(None, "pl.py", ALONE="1", **how).ok()
    killed = train(nodes, "pl.py", KILL=str(kill), **how).killed()
    assert killed.one("begins_at") == 0, "nothing was saved yet, and that is no error"
    nodes[0].kill(drop_memory=True)
    nodes[0].start()
    nodes.wait_members()
    resumed = train(nodes, "pl.py", **how).ok()
    begins_at = kill - 1
    for rank in range(ranks):
        assert resumed.one("begins_at", rank) == begins_at
        assert resumed.losses(rank) == {
            step: loss for step, loss in whole.losses(rank).items() if step > begins_at
        }
        for key in ("model", "optimizer"):
            assert resumed.one(key, rank) == whole.one(key, rank), key
    assert resumed.one("files") == []
    assert (resumed.one("stats")["saved"], resumed.one("stats")["failed"]) == ((10 - begins_at) // 2, 0)


def test_weights_alone_are_committed_too(cluster, train):
    """For weights alone Lightning calls no hook of a callback."""
    done = train(cluster(2), "pl.py", ranks=2, OPTIONS='{"weights_only": true}').ok()
    assert [done.one("stats", rank)["committed"] for rank in (0, 1)] == [10, 10]


def test_several_ranks_need_the_callback(cluster, train):
    done = train(cluster(1), "pl.py", ranks=2, OPTIONS='{"callback": false}')
    assert done.status != 0 and "it needs Trainer(callbacks=[rope.callback, …])" in done.output


def test_save_top_k_of_a_monitor_is_a_warning(caplog):
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from ropeteam.lightning import RopeteamCheckpointIO

    strategy = SimpleNamespace(save_checkpoint=None)
    for best in ({}, {"monitor": "loss", "save_top_k": -1}, {"monitor": "loss", "save_top_k": 3}):
        trainer = SimpleNamespace(strategy=strategy, is_global_zero=True)
        trainer.checkpoint_callbacks = [ModelCheckpoint(**best)]
        RopeteamCheckpointIO().callback.setup(trainer, torch.nn.Module(), "fit")
    assert [each.getMessage()[:31] for each in caplog.records] == ["save_top_k=3 of loss has no eff"]


def test_a_checkpoint_is_found_by_its_name_or_not_at_all(cluster, monkeypatch, tmp_path):
    import torch
    from ropeteam.lightning import RopeteamCheckpointIO

    (node,) = cluster(1).nodes
    monkeypatch.setenv("ROPETEAM_SOCKET", node.socket)
    rope = RopeteamCheckpointIO()
    assert rope.latest() is None
    with pytest.raises(FileNotFoundError, match="no step="):
        rope.load_checkpoint("last.ckpt")
    rope.save_checkpoint({"global_step": 3, "state_dict": {"w": torch.ones(2)}}, "a/best.ckpt")
    rope.teardown()
    assert rope.latest() == "ropeteam-step=3.ckpt"
    for path in ("a/best.ckpt", "b/epoch=1-step=3-v1.ckpt", "last.ckpt", rope.latest()):
        assert rope.load_checkpoint(path)["state_dict"]["w"].tolist() == [1, 1]
    rope.remove_checkpoint("a/best.ckpt")
    for path in ("a/best.ckpt", "epoch=1-step=4.ckpt"):
        with pytest.raises(FileNotFoundError):
            rope.load_checkpoint(path)
    torch.save({"global_step": 9}, tmp_path / "file.ckpt")
    assert rope.load_checkpoint(tmp_path / "file.ckpt") == {"global_step": 9}
    rope.remove_checkpoint(tmp_path / "file.ckpt")
    assert not (tmp_path / "file.ckpt").exists()


def test_the_example_goes_on_where_it_was(cluster, train):
    how = {"ROPETEAM_SOCKET": cluster(1)[0].socket, "ranks": 2}
    example = ROOT / "examples" / "lightning_train.py"
    for steps, began_with in ((10, None), (15, "ropeteam-step=10.ckpt")):
        done = train(None, example, "--steps", str(steps), "--accelerator", "cpu", **how).ok()
        for rank in range(2):
            assert f"rank {rank}: began with {began_with}, {steps} steps, loss" in done.output

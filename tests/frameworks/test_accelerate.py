# SPDX-License-Identifier: Apache-2.0
"""Accelerate: killed with -9, its node lost with its memory, and resumed, a loop computes what it would
have."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("accelerate", reason="accelerate is not installed")

CASES = {
    "skip_first_batches": {"dropout": 0.2},
    "stateful data loader": {"stateful": True},
    "two models": {"gan": True},
}


@pytest.mark.parametrize(
    "ranks, case", [(1, "two models"), (1, "stateful data loader"), (2, "skip_first_batches")]
)
def test_a_loop_that_is_killed_resumes_to_the_bit(cluster, train, ranks, case):
    nodes = cluster(2)
    options = {"ranks": ranks, "OPTIONS": json.dumps(CASES[case])}
    whole = train(None, "acc.py", ALONE="1", **options).ok()
    killed = train(nodes, "acc.py", KILL="5", **options).killed()
    assert killed.one("begins_at") == -1, "nothing was saved yet, and that is no error"
    nodes[0].kill(drop_memory=True)
    nodes[0].start()
    nodes.wait_members()
    resumed = train(nodes, "acc.py", **options).ok()
    for rank in range(ranks):
        assert resumed.one("begins_at", rank) == 4
        losses = whole.losses(rank)
        assert resumed.losses(rank) == {step: loss for step, loss in losses.items() if step > 4}
        for key in ("model", "optimizer", "scheduler"):
            assert resumed.one(key, rank) == whole.one(key, rank), key


def test_what_cannot_be_saved_is_refused(cluster, monkeypatch):
    import torch
    from ropeteam import InvalidArgument, NotFound, Unsupported
    from ropeteam.accelerate import Accelerator

    (node,) = cluster(1).nodes
    monkeypatch.setenv("ROPETEAM_SOCKET", node.socket)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    scheduler = accelerator.prepare(
        torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), 1.0), 1)
    )
    with pytest.raises(InvalidArgument, match="does not end in the number"):
        accelerator.save_state("latest")
    assert accelerator.load_state() is None
    assert accelerator.save_state() == "checkpoint_0" and accelerator.save_state() == "checkpoint_1"
    assert accelerator.maybe_finalize(blocking=True)
    with pytest.raises(NotFound):
        accelerator.load_state("step_7")
    with torch.no_grad():
        model.weight.zero_()
    assert accelerator.load_state() == 1 and model.weight.any()
    assert accelerator.save_state() == "checkpoint_2"
    accelerator._schedulers.remove(scheduler)
    with pytest.raises(InvalidArgument, match="1 schedulers were saved, and 0 are prepared"):
        accelerator.load_state("checkpoint_1")
    hook = accelerator.register_save_state_pre_hook(lambda models, weights, directory: None)
    with pytest.raises(Unsupported, match="register_for_checkpointing"):
        accelerator.save_state()
    hook.remove()
    accelerator.end_training()

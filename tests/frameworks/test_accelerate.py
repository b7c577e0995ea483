# SPDX-License-Identifier: Apache-2.0
"""Accelerate: a loop is killed, and its node is lost with its memory. After resuming it computes the same as
an uninterrupted loop."""

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


def test_storage_keeps_total_limit_unless_the_daemons_say_otherwise(cluster, monkeypatch, tmp_path, caplog):
    import torch
    from accelerate.utils import ProjectConfiguration
    from harness import wait_until
    from ropeteam import InvalidArgument, Level
    from ropeteam.accelerate import Accelerator

    def await_after_four_saves(expected: list[str], flags: list[str], **options) -> None:
        storage = tmp_path / f"storage-{len(flags)}"
        storage.mkdir()
        (node,) = cluster(1, options=["--storage", str(storage), *flags]).nodes
        monkeypatch.setenv("ROPETEAM_SOCKET", node.socket)
        project = ProjectConfiguration(total_limit=2)
        accelerator = Accelerator(cpu=True, project_config=project, ropeteam_options=options)
        accelerator.prepare(torch.nn.Linear(2, 2))
        for step in range(4):
            accelerator.save_state()
            accelerator._opened().wait(step, Level.PERSISTED)

        def steps() -> list[str]:
            return sorted(path.name[5:15].lstrip("0") for path in storage.glob("*/step-*"))

        wait_until(lambda: steps() == expected, "the older steps to be deleted")
        accelerator.end_training()
        assert steps() == expected

    await_after_four_saves(["2", "3"], [])
    assert caplog.text == ""
    await_after_four_saves(["1", "2", "3"], ["--keep-on-storage", "3"])
    refused = "keep_on_storage 2, this job's daemons were started with --keep-on-storage 3"
    assert f"total_limit=2 is not in effect on storage: {refused}" in caplog.text
    with pytest.raises(InvalidArgument, match="persist_every 7, .* started with --persist-every 5"):
        await_after_four_saves([], ["--persist-every", "5", "--keep-within", "1h"], storage_every=7)


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

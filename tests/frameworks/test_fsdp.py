# SPDX-License-Identifier: Apache-2.0
"""A model sharded by FSDP2, with each library that supports it: each rank saves its own part. After a rank
was killed and a node lost with its memory, training resumes and computes the same. Other numbers of ranks
load the whole state."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest


@dataclass
class Library:
    program: tuple[str, ...]
    alone: tuple[str, ...]  # how the program is called without Ropeteam
    kill: int  # the step in which it is killed, after a saved one
    options: dict[str, Any]
    others: int  # another number of ranks


SHARDED = {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2}, "greater_is_better": True}
LIBRARIES = {
    "transformers": Library(("hf.py", "callback"), ("hf.py", "alone"), 7, SHARDED, 3),
    "accelerate": Library(("acc.py",), ("acc.py",), 5, {"fsdp": 2, "width": 4096, "dropout": 0.2}, 3),
    "lightning": Library(("pl.py",), ("pl.py",), 7, {"sharded": True, "width": 4096}, 1),
}


@pytest.fixture(params=LIBRARIES)
def library(request) -> Library:
    pytest.importorskip(request.param)
    return LIBRARIES[request.param]


def killed_after_a_save(nodes, train, library: Library, tmp_path):
    """Kills two ranks on two nodes. The first node is lost with its memory, and a new one replaces it."""
    how = {"OPTIONS": json.dumps(library.options), "RESUME": "1", "ROPE": '{"log_file": "log-{rank}"}'}
    killed = train(nodes, *library.program, KILL=str(library.kill), ranks=2, **how).killed()
    for rank in range(2):
        for line in (tmp_path / f"log-{rank}").read_text().splitlines():
            assert json.loads(line)["bytes"] < 0.8 * killed.one("bytes", rank), "its own part, not all"
    nodes[0].kill(drop_memory=True)
    nodes[0].start()
    nodes.wait_members()
    return killed, how


def wholes(run) -> dict[int, tuple[str, str]]:
    """The digests of the whole state after each step: weights, and the optimizer's state."""
    reports = (each for each in run.reports[0] if "whole_at" in each)
    return {each["whole_at"]: (each["weights"], each["rest"]) for each in reports}


def test_a_sharded_model_resumes_to_the_bit(cluster, train, library, tmp_path):
    whole = train(None, *library.alone, ranks=2, OPTIONS=json.dumps(library.options), ALONE="1").ok()
    nodes = cluster(2)
    _, how = killed_after_a_save(nodes, train, library, tmp_path)
    resumed = train(nodes, *library.program, ranks=2, **how).ok()
    for rank in range(2):
        assert resumed.one("begins_at", rank) == library.kill - 1
        losses = whole.losses(rank)
        later = {step: loss for step, loss in losses.items() if step >= library.kill}
        assert later and resumed.losses(rank) == later
        for key in ("model", "optimizer"):
            assert resumed.one(key, rank) == whole.one(key, rank), key
    if library.program[0] == "hf.py":
        assert resumed.one("best_step") < library.kill - 1, "the model at the end is an older step's"


def test_another_number_of_ranks_goes_on(cluster, train, library, tmp_path):
    (tmp_path / "storage").mkdir()
    nodes = cluster(2, options=["--storage", str(tmp_path / "storage")])
    killed, how = killed_after_a_save(nodes, train, library, tmp_path)
    resumed = train(nodes, *library.program, ranks=library.others, **how).ok()
    step = library.kill - 1
    assert resumed.one("begins_at") == step
    assert wholes(resumed)[step] == wholes(killed)[step]
    assert max(resumed.losses()) > step
    if library.program[0] == "hf.py":  # the best step's parts were kept by another number of ranks
        best = resumed.one("best_step")
        assert best < step and resumed.one("best_weights") == wholes(killed)[best][0]
        assert "save_total_limit=2 is not in effect on storage: ranks of another mesh" in killed.output
        assert "--keep-on-storage 2 --keep-best eval_loss:max" in killed.output


def test_fsdp1_is_refused_with_what_to_set(tmp_path, monkeypatch):
    import torch
    from accelerate.utils import DistributedType
    from lightning.pytorch.strategies import FSDPStrategy
    from ropeteam import Unsupported
    from ropeteam.accelerate import Accelerator
    from ropeteam.lightning import RopeteamCheckpointIO
    from ropeteam.transformers import RopeteamCallback
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    trainer = Trainer(model=torch.nn.Linear(1, 1), args=args, train_dataset=[])
    trainer.is_fsdp_enabled = True  # as "version": 1 sets it on a machine with GPUs
    with pytest.raises(Unsupported, match='"fsdp_version": 2'):
        RopeteamCallback().attach(trainer)
    with pytest.raises(Unsupported, match="use ModelParallelStrategy"):
        lightning = SimpleNamespace(strategy=FSDPStrategy())
        RopeteamCheckpointIO().callback.setup(lightning, torch.nn.Module(), "fit")
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    with pytest.raises(Unsupported, match=r"FullyShardedDataParallelPlugin\(fsdp_version=2\)"):
        Accelerator(cpu=True).save_state("step_1")

# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer: training is killed, and its node is lost with its memory. After resuming it computes the same
as uninterrupted training."""

from __future__ import annotations

import json

import pytest
from harness import ROOT, WAIT_S, ask, wait_until

pytest.importorskip("transformers", reason="transformers is not installed")

#: With this the best step is an early one.
WORST_IS_BEST = json.dumps({"greater_is_better": True})
PLAIN = {"eval_strategy": "no", "load_best_model_at_end": False, "metric_for_best_model": None}


def same(resumed, whole, rank: int = 0) -> None:
    """Checks that these are bit-identical: the losses and gradients of each step, the weights, the optimizer, and the
    losses of the evaluations."""
    steps = {each["step"]: each for each in whole.reports[rank] if "loss" in each}
    again = {each["step"]: each for each in resumed.reports[rank] if "loss" in each}
    assert max(again) == max(steps) and all(again[step] == steps[step] for step in again)
    for key in ("model", "optimizer", "best_step"):
        assert resumed.one(key, rank) == whole.one(key, rank), key
    found, expected = ([each["eval_loss"] for each in run.one("history", rank)] for run in (resumed, whole))
    assert found == expected


def saved_steps(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def lose(nodes, ordinal: int = 0) -> None:
    """The node is lost with its memory, and a new one replaces it."""
    nodes[ordinal].kill(drop_memory=True)
    nodes[ordinal].start()
    nodes.wait_members()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_that_is_killed_resumes_to_the_bit(cluster, train, ranks, tmp_path):
    nodes = cluster(2)
    whole = train(None, "hf.py", "alone", ranks=ranks, OPTIONS=WORST_IS_BEST).ok()
    options = {"ranks": ranks, "RESUME": "1", "OPTIONS": WORST_IS_BEST}
    killed = train(nodes, "hf.py", "callback", KILL="7", **options).killed()
    assert killed.one("begins_at") == 0, "nothing was saved yet, and that is no error"
    lose(nodes)
    resumed = train(nodes, "hf.py", "callback", **options).ok()
    for rank in range(ranks):
        assert resumed.one("begins_at", rank) == 6
        same(resumed, whole, rank)
    best = resumed.one("best_step")
    assert best < 6, "it is not the step that was resumed from"
    stats = resumed.one("stats")
    assert (stats["saved"], stats["failed"], stats["committed"]) == (1, 0, 8)
    assert resumed.one("best") == f"out-callback/checkpoint-{best}"
    assert resumed.one("directories") == [f"checkpoint-{best}"], "only the best model is written"
    assert (tmp_path / "out-callback" / f"checkpoint-{best}" / "model.safetensors").exists()


def test_a_wrapped_trainer_goes_on_from_storage_when_all_memory_is_lost(cluster, train, tmp_path):
    storage = tmp_path / "storage"
    storage.mkdir()
    nodes = cluster(1, options=["--storage", str(storage)])
    options = json.dumps({**PLAIN, "save_strategy": "no"})
    whole = train(None, "hf.py", "alone", OPTIONS=options).ok()
    rope = json.dumps({"save_mem_interval": 2, "save_storage_interval": 3, "log_file_path": "log-{rank}"})
    train(nodes, "hf.py", "wrapper", KILL="5", OPTIONS=options, ROPE=rope).killed()
    assert saved_steps(tmp_path / "log-0") == [2, 4]
    wait_until(lambda: list(storage.glob("*/step-*/ropeteam-manifest.json")), "step 4 on storage")
    (manifest,) = storage.glob("*/step-*/ropeteam-manifest.json")
    assert manifest.parent.name.startswith("step-0000000004-")
    lose(nodes)
    resumed = train(nodes, "hf.py", "wrapper", RESUME="1", OPTIONS=options, ROPE=rope).ok()
    assert resumed.one("begins_at") == 4
    same(resumed, whole)


def test_storage_keeps_save_total_limit_and_the_best_model_is_found_without_its_step(cluster, train, tmp_path):
    storage = tmp_path / "storage"
    storage.mkdir()
    nodes = cluster(1, options=["--storage", str(storage)])
    options = json.dumps({"greater_is_better": True, "save_total_limit": 1})
    whole = train(None, "hf.py", "alone", OPTIONS=options).ok()

    def stay(*steps: int) -> None:
        found = storage.glob
        wait_until(
            lambda: sorted(int(path.name[5:15]) for path in found("*/step-*")) == list(steps), f"{steps} on storage"
        )

    train(nodes, "hf.py", "callback", KILL="7", OPTIONS=options).killed()
    stay(6)
    nodes[0].options += ["--keep-on-storage", "5"]
    lose(nodes)
    resumed = train(nodes, "hf.py", "callback", RESUME="1", OPTIONS=options).ok()
    assert resumed.one("begins_at") == 6 and resumed.one("best_step") < 6
    same(resumed, whole)
    refused = "keep_on_storage 1, this job's daemons were started with --keep-on-storage 5"
    assert f"save_total_limit=1 is not in effect on storage: {refused}" in resumed.output
    stay(6, 8)


@pytest.mark.parametrize("strategy", ["epoch", "best"])
def test_a_trainer_saves_when_its_arguments_say_so(cluster, train, strategy, tmp_path):
    nodes = cluster(1)
    options = {"save_strategy": strategy, "eval_strategy": "epoch", "per_device_train_batch_size": 8}
    options.update(greater_is_better=strategy == "best", save_total_limit=None, load_best_model_at_end=False)
    whole = train(None, "hf.py", "alone", OPTIONS=json.dumps(options)).ok()
    rope = json.dumps({"log_file": "log"})
    how = {"OPTIONS": json.dumps(options), "ROPE": rope}
    train(nodes, "hf.py", "callback", KILL="7", **how).killed()
    done = train(nodes, "hf.py", "callback", RESUME="out/checkpoint-3", **how).ok()
    assert done.one("begins_at") == 3
    same(done, whole)
    assert {f"checkpoint-{step}" for step in saved_steps(tmp_path / "log")} == set(whole.one("directories"))


def test_a_trainer_trains_on_when_its_daemon_is_gone(cluster, train):
    nodes = cluster(1)
    how = {"OPTIONS": json.dumps(PLAIN), "KILL_DAEMON": str(nodes[0].process.pid)}
    done = train(nodes, "hf.py", "callback", **how).ok()
    nodes[0].process.wait(WAIT_S)
    nodes[0].process = None
    assert done.one("stats")["failed"] >= 3 and len(done.losses()) == 8
    assert "is not safe, training goes on" in done.output


@pytest.mark.parametrize("kind, ranks", [("gpt2", 2), ("bert", 1)])
def test_from_pretrained_opens_an_export(cluster, train, kind, ranks, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

    nodes = cluster(1)
    train(nodes, "hf_pretrained.py", kind, ranks=ranks).ok()
    tokens, logits = torch.load(tmp_path / "logits.pt")
    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    for name, more in (("whole", []), ("sharded", ["--max-shard-size", "20KB"])):
        to = tmp_path / name
        done = ask("export", "latest", str(to), "--format", "hf", "--socket", nodes[0].socket, *more)
        assert done.returncode == 0, done.stderr
        assert "tied, written once" in done.stdout
        assert (to / "model.safetensors.index.json").exists() == (name == "sharded")
        model, found = auto.from_pretrained(to, output_loading_info=True)
        assert not found["missing_keys"] and not found["unexpected_keys"] and not found["mismatched_keys"]
        with torch.no_grad():
            assert torch.equal(model.eval()(input_ids=tokens).logits, logits)
        assert model.config.architectures == [type(model).__name__]
        assert AutoTokenizer.from_pretrained(to)("w3 w7 x")["input_ids"][:3] == [3, 7, 0]
        assert (to / "generation_config.json").exists() == (kind == "gpt2")


def test_a_trainer_that_cannot_be_served_is_refused(tmp_path):
    import torch
    from ropeteam import InvalidArgument
    from ropeteam.transformers import RopeteamCallback, TrainerWrapper
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    trainer = Trainer(model=torch.nn.Linear(1, 1), args=args, train_dataset=[])
    trainer.add_callback(RopeteamCallback())
    with pytest.raises(InvalidArgument, match="callbacks="):
        trainer.callback_handler.on_train_begin(args, trainer.state, trainer.control)
    with pytest.raises(InvalidArgument, match="memory_every 0"):
        RopeteamCallback(memory_every=0)
    with pytest.raises(InvalidArgument, match="ropeteam run"):
        TrainerWrapper(Trainer(model=torch.nn.Linear(1, 1), args=args, train_dataset=[])).train()


def test_the_example_goes_on_where_it_was(cluster, train, tmp_path):
    nodes = cluster(1)
    example = ROOT / "examples" / "hf_question_answering.py"
    options = ["--use_cpu", "--logging_steps", "1", "--eval_strategy", "no", "--output_dir", "out"]
    for steps, computed in ((7, 7), (12, 5)):
        how = {"ROPETEAM_SOCKET": nodes[0].socket}
        done = train(None, example, "--max_steps", str(steps), *options, **how).ok()
        assert f"rank 0: {steps} steps" in done.output and "eval_exact_match" in done.output
        assert done.output.count("'grad_norm'") == computed
    assert (tmp_path / "out" / "model.safetensors").exists()

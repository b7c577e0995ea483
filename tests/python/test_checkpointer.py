# SPDX-License-Identifier: Apache-2.0
"""Checkpointer over the fake library: what it saves and restores, and what it does when a save fails."""

from __future__ import annotations

import json
import logging
import random
import re

import pytest

import ropeteam
from ropeteam import Code

torch = pytest.importorskip("torch", reason="torch is not installed")
import ropeteam.torch as rt  # noqa: E402
from ropeteam.torch import _restored  # noqa: E402


@pytest.fixture
def rope(fake):
    with ropeteam.open(rank=0, world_size=1) as client:
        yield client


class Reader:
    """A data source with a position, like StatefulDataLoader."""

    def __init__(self):
        self.position = 0

    def next(self):
        self.position += 1
        return torch.sin(torch.arange(12.0) + self.position).view(3, 4)

    def state_dict(self):
        return {"position": self.position, "seen": {(0, self.position): {1, 2}}}

    def load_state_dict(self, state):
        assert state["seen"] == {(0, state["position"]): {1, 2}}
        self.position = state["position"]


class Training:
    """All state that a step depends on, including values that JSON cannot represent."""

    def __init__(self, optimizer="adamw"):
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 2))
        make = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
            "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
        }[optimizer]
        self.optimizer = make(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4, 4], gamma=0.5)
        self.reader, self.scaler = Reader(), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.extra = {"scaler": self.scaler, "losses": [], "best": (float("inf"), None)}

    def checkpointer(self, client, **options):
        return rt.Checkpointer(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, dataloader=self.reader,
            extra=self.extra, client=client, **options,
        )  # fmt: skip

    def run(self):
        data = self.reader.next()

        def closure():
            self.optimizer.zero_grad()
            loss = self.model(data).square().mean() * (1 + random.random())
            loss.backward()
            return loss

        loss = self.optimizer.step(closure).item()
        self.scheduler.step()
        self.extra["losses"].append(loss)
        self.extra["best"] = min(self.extra["best"], (loss, self.reader.position))
        return loss


@pytest.mark.parametrize("optimizer", ["adamw", "lbfgs"])
def test_training_goes_on_to_the_bit(rope, optimizer):
    torch.manual_seed(1)
    random.seed(1)
    whole = Training(optimizer)
    ckpt = whole.checkpointer(rope)
    assert ckpt.load_latest() == 0 and ckpt.loaded is None
    for step in range(3):
        whole.run()
        assert ckpt.step(step, metadata={"loss": whole.extra["losses"][-1]})
    expected = [whole.run() for _ in range(4)]

    torch.manual_seed(77)
    random.seed(77)
    fresh = Training(optimizer)
    again = fresh.checkpointer(rope)
    assert again.load_latest() == 3
    assert again.loaded.step == 2 and again.loaded.metadata == {"loss": whole.extra["losses"][2]}
    assert [fresh.run() for _ in range(4)] == expected
    assert fresh.extra["losses"] == whole.extra["losses"] and fresh.extra["best"] == whole.extra["best"]


def test_what_is_saved_is_counted_and_logged(rope, tmp_path):
    training = Training()
    log = tmp_path / "log.{rank}.jsonl"
    ckpt = training.checkpointer(rope, memory_every=2, log_file=log)
    assert [ckpt.step(step) for step in range(5)] == [True, False, True, False, True]
    assert ckpt.save(5)
    lines = [json.loads(line) for line in (tmp_path / "log.0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 4, 5]
    assert all(line["result"] == "saved" and line["bytes"] > 100 and line["blocked_s"] > 0 for line in lines)
    stats = ckpt.stats
    assert (stats.saved, stats.skipped, stats.failed, stats.last_error) == (4, 0, 0, "")
    assert stats.bytes == sum(line["bytes"] for line in lines)
    assert stats.blocked_s == pytest.approx(sum(line["blocked_s"] for line in lines), abs=1e-4)


def test_files_are_saved_with_each_step_and_change_nothing_else(rope):
    training = Training()
    ckpt = training.checkpointer(rope, files={"hf/config.json": b"{}"})
    assert ckpt.step(0) and ckpt.step(1)
    assert rope.load(1)["hf/config.json"] == b"{}"
    assert Training().checkpointer(rope).load_latest() == 2


def test_a_log_file_that_cannot_be_written_stops_nothing(rope, tmp_path, caplog):
    ckpt = Training().checkpointer(rope, log_file=tmp_path / "no" / "such")
    assert ckpt.step(0) and ckpt.step(1)
    assert caplog.text.count("log file of checkpoints is not written any more") == 1


def test_models_optimizers_and_schedulers_by_name(rope):
    def make(seed):
        torch.manual_seed(seed)
        models = {name: torch.nn.Linear(3, 3) for name in ("generator", "critic")}
        optimizers = {
            name: torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for name, each in models.items()
        }
        schedulers = {name: torch.optim.lr_scheduler.StepLR(each, 2) for name, each in optimizers.items()}
        readers = {"real": Reader(), "noise": Reader()}
        return dict(model=models, optimizer=optimizers, scheduler=schedulers, dataloader=readers)

    def run(parts):
        parts["dataloader"]["noise"].next()
        for name, model in parts["model"].items():
            model(torch.ones(2, 3)).square().sum().backward()
            parts["optimizer"][name].step()
            parts["optimizer"][name].zero_grad()
            parts["scheduler"][name].step()

    parts, fresh = make(1), make(2)
    ckpt = rt.Checkpointer(**parts, client=rope)
    for step in range(2):
        run(parts)
        ckpt.step(step)
    assert rt.Checkpointer(**fresh, client=rope).load_latest() == 2
    run(parts)
    run(fresh)
    for name in ("generator", "critic"):
        assert torch.equal(fresh["model"][name].weight, parts["model"][name].weight)
        assert fresh["scheduler"][name].state_dict() == parts["scheduler"][name].state_dict()
    assert [each.position for each in fresh["dataloader"].values()] == [0, 3]


class Foreign:
    """An optimizer that is not torch's."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_an_optimizer_that_is_not_torchs_is_saved_by_its_state_dict(rope):
    model, known, foreign = torch.nn.Linear(1, 1), None, Foreign()
    known = torch.optim.SGD(model.parameters(), lr=0.5)
    foreign.count = 3
    rt.Checkpointer(model=model, optimizer={"a": known, "b": foreign}, client=rope).step(0)
    known.param_groups[0]["lr"], foreign.count = 0.1, 0
    rt.Checkpointer(model=model, optimizer={"a": known, "b": foreign}, client=rope).load_latest()
    assert (known.param_groups[0]["lr"], foreign.count) == (0.5, 3)
    foreign.count = 0
    rt.Checkpointer(model=model, optimizer=foreign, client=rope).step(1)
    foreign.count = 9
    rt.Checkpointer(model=model, optimizer=foreign, client=rope).load_latest()
    assert foreign.count == 0


def test_random_generators_are_left_alone_when_asked(rope):
    model = torch.nn.Linear(1, 1)
    rt.Checkpointer(model=model, rng=False, client=rope).step(0)
    before = torch.get_rng_state()
    rt.Checkpointer(model=model, rng=False, client=rope).load_latest()
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(name.startswith("rng/") for name in rope.view(0))


@pytest.mark.parametrize(
    "options, error, says",
    [
        ({"memory_every": 0}, ropeteam.InvalidArgument, "memory_every 0"),
        ({"storage_every": -1}, ropeteam.InvalidArgument, "storage_every -1"),
        ({"keep": 0}, ropeteam.InvalidArgument, "keep 0"),
        ({"keep": 3}, ropeteam.InvalidArgument, "started with --keep-on-storage 2"),
        ({"storage_every": 3}, ropeteam.InvalidArgument, "started with --persist-every 2"),
        ({"when_full": "drop"}, ropeteam.InvalidArgument, "when_full 'drop'"),
        ({"model": Reader()}, TypeError, "is a Reader, not a torch.nn.Module"),
        ({"scheduler": [1]}, TypeError, "scheduler is a list: it has no state_dict"),
        ({"dataloader": {"train": iter([])}}, TypeError, "dataloader 'train' is a list_iterator"),
        ({"extra": {"fn": lambda: 0}}, TypeError, "extra/fn is a builtins.function, which cannot be saved"),
    ],
)
def test_mistakes_are_told_at_construction(rope, options, error, says):
    with pytest.raises(error, match=says):
        rt.Checkpointer(**{"model": torch.nn.Linear(1, 1), "client": rope, **options})


def test_a_program_that_has_another_state_is_told_so_at_once(rope):
    model = torch.nn.Linear(1, 1)
    ckpt = rt.Checkpointer(model=model, client=rope)
    ckpt.step(0)
    ckpt.step(1)
    with pytest.raises(ropeteam.InvalidArgument, match="saved without a dataloader"):
        rt.Checkpointer(model=model, dataloader=Reader(), client=rope).load_latest()
    rt.save_state(rope, 2, model)
    with pytest.raises(ropeteam.InvalidArgument, match="not saved by a Checkpointer"):
        rt.Checkpointer(model=model, client=rope).load_latest()


def test_a_model_with_another_layer_is_told_so_and_no_older_step_is_tried(rope, caplog):
    ckpt = rt.Checkpointer(model=torch.nn.Sequential(torch.nn.Linear(1, 1)), client=rope)
    assert ckpt.step(0) and ckpt.step(1)
    deeper = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    with pytest.raises(
        ropeteam.InvalidArgument, match="another model; only in the model: model/1.weight, model/1"
    ):
        rt.Checkpointer(model=deeper, client=rope).load_latest()
    assert not caplog.records


# ---- saves that fail


def test_a_failed_save_is_a_warning_and_the_next_one_is_tried(fake, rope, caplog):
    ckpt = Training().checkpointer(rope)
    for step, call in enumerate(["save_begin", "save_put", "save_commit", ""]):
        fake.fake_fail(call.encode(), Code.UNAVAILABLE)
        assert ckpt.step(step) is (call == "")
    assert (ckpt.stats.saved, ckpt.stats.failed) == (1, 3)
    assert "needed 12 chunks" in ckpt.stats.last_error
    # Only failures 1, 2, 4, 8, … are logged.
    assert [record.getMessage()[:6] for record in caplog.records] == ["step 0", "step 1"]
    assert all(record.name == "ropeteam" and record.levelno == logging.WARNING for record in caplog.records)
    assert rt.Checkpointer(model=torch.nn.Linear(1, 1), client=rope) and rope.latest().step == 3


def test_a_state_dict_that_raises_stops_nothing(rope, caplog):
    training = Training()
    ckpt = training.checkpointer(rope)
    training.reader.state_dict = lambda: 1 / 0
    assert ckpt.step(0) is False
    del training.reader.state_dict
    assert ckpt.step(1) is True
    training.extra["bad"] = object()
    assert ckpt.step(2) is False
    assert "extra/bad is a builtins.object" in caplog.text and "division" in caplog.text
    assert ckpt.stats.failed == 2


def test_after_the_world_has_restarted_nothing_is_tried_any_more(fake, rope, caplog):
    ckpt = Training().checkpointer(rope)
    fake.fake_fail(b"save_begin", Code.STALE)
    assert ckpt.step(0) is False
    assert ckpt.step(1) is False and ckpt.stats.failed == 2
    assert rope.latest() is None


class Store:
    """Replaces the Client: an arena with room for `room` uncommitted saves. The newest save is committed once it is
    waited for; older ones are committed already."""

    rank, closed, has_storage = 0, False, True

    def __init__(self, room=1, commits=True):
        self.room, self.commits, self.steps, self.open, self.persisted = room, commits, [], [], []
        self.dead = set()
        self.policies, self.refuses, self.refusal = [], 0, ropeteam.InvalidArgument("the flag says otherwise")

    def info(self):
        return ropeteam.Info(0, 1, 1, 4096, 1 << 30)

    def persist(self, step, timeout):
        self.persisted.append(step)

    def set_policy(self, persist_every, keep_on_storage, timeout):
        self.policies.append((persist_every, keep_on_storage))
        if self.refuses in (persist_every, keep_on_storage):
            raise self.refusal

    def storage_steps(self, limit):
        if not self.has_storage:
            raise ropeteam.Unsupported("this job has no storage")
        return []

    def save(self, step, objects, **options):
        if len(self.open) >= self.room:
            raise ropeteam.NoSpace("needed 12 chunks, free 3, limit 64")
        self.steps.append(step)
        self.open.append(step)
        return 100

    def wait(self, step, level, timeout):
        assert level == ropeteam.Level.COMMITTED
        if step in self.dead:
            self.open.remove(step)
            raise ropeteam.Aborted("another rank has passed it")
        if step in self.open:
            if not self.commits or (timeout == 0 and step == self.open[-1]):
                raise ropeteam.DeadlineExceeded("not yet")
            self.open.remove(step)


def checkpointer(store, **options):
    return rt.Checkpointer(model=torch.nn.Linear(1, 1), client=store, **options)


def test_wait_waits_for_the_commit_that_makes_room():
    store = Store(room=1)
    ckpt = checkpointer(store)
    assert all(ckpt.step(step) for step in range(6))
    assert store.steps == list(range(6)) and ckpt.stats.committed == 4
    assert ckpt.finish() == 5
    assert (ckpt.stats.saved, ckpt.stats.skipped, ckpt.stats.failed) == (6, 0, 0)


def test_wait_gives_up_after_its_time_and_then_costs_none_until_a_save_succeeds(caplog):
    store = Store(room=1, commits=False)
    ckpt = checkpointer(store, timeout=0.2)
    assert ckpt.step(0) and not ckpt.step(1)
    waited = ckpt.stats.blocked_s
    assert waited >= 0.2
    assert not any(ckpt.step(step) for step in range(2, 12))
    assert ckpt.stats.blocked_s - waited < 0.2
    assert ckpt.stats.failed == 11 and "needed 12 chunks" in caplog.text
    store.commits, store.open = True, []
    assert ckpt.step(12) and ckpt.stats.committed == 0
    assert ckpt.finish() == 12


def test_a_state_that_never_fits_is_not_waited_for_long():
    ckpt = checkpointer(Store(room=0), timeout=60)
    assert not ckpt.step(0)
    assert ckpt.stats.blocked_s < 10 and ckpt.stats.failed == 1


def test_skip_saves_every_second_step_then_every_fourth_and_all_again():
    store = Store(room=1, commits=False)
    ckpt = checkpointer(store, when_full="skip", memory_every=2)
    results = [ckpt.step(step) for step in range(18)]
    assert store.steps == [0] and not any(results[1:])
    assert ckpt.stats.skipped == 8 and ckpt.stats.failed == 0
    store.commits = True
    # The interval grew at steps 2, 4, 8 and 16 to 32. Ranks that skipped other steps also save multiples of 32.
    assert [step for step in range(18, 97) if ckpt.step(step)] == [32, 64, 96]
    store.room = 10
    for step in range(97, 1000):
        ckpt.step(step)
    assert store.steps[-3:] == [994, 996, 998]


def test_skip_saves_less_often_when_other_ranks_skip_its_steps():
    store = Store(room=10)
    ckpt = checkpointer(store, when_full="skip")
    store.dead = set(range(1, 100, 2))
    for step in range(30):
        ckpt.step(step)
    # It tries repeatedly to save more often, and returns to even steps if that fails; all even steps are saved.
    assert len([step for step in store.steps if step % 2 == 1]) < 8
    assert ckpt.stats.committed >= 24


def test_raise_is_the_one_error_that_leaves_the_loop():
    ckpt = checkpointer(Store(room=1, commits=False), when_full="raise")
    assert ckpt.step(0)
    with pytest.raises(ropeteam.NoSpace):
        ckpt.step(1)
    assert (ckpt.stats.saved, ckpt.stats.skipped, ckpt.stats.failed) == (1, 1, 0)


def test_the_newest_save_that_is_never_committed_counts_as_failed(caplog):
    store = Store(room=10)
    store.dead = {0, 1}
    ckpt = checkpointer(store)
    ckpt.step(0)
    ckpt.step(1)
    assert ckpt.finish() is None
    assert ckpt.stats.failed >= 1 and "another rank has passed it" in caplog.text


@pytest.mark.parametrize(
    "options, policies",
    [
        ({"storage_every": 10, "keep": 5}, [(10, 5)]),
        ({"storage_every": 0, "keep": 5}, [(None, 5)]),
        ({"storage_every": 0}, []),
        ({}, [(500, None)]),
    ],
)
def test_the_daemons_are_told_once_what_storage_gets_and_keeps(options, policies):
    store = Store(room=1000)
    ckpt = checkpointer(store, **options)
    for step in range(490, 510):
        ckpt.step(step, persist=step == 495)
    assert (store.policies, store.persisted) == (policies, [495])


def test_the_default_interval_gives_way_and_what_was_given_does_not():
    store = Store()
    store.refuses = 500
    assert checkpointer(store) and checkpointer(store, keep=5)
    assert store.policies == [(500, None), (500, 5), (None, 5)]
    for refused, options in (("500", {"storage_every": 500}), ("5", {"keep": 5})):
        store.refuses = int(refused)
        with pytest.raises(ropeteam.InvalidArgument, match="the flag says otherwise"):
            checkpointer(store, **options)


def test_a_policy_that_the_leader_does_not_confirm_is_a_warning_of_one_rank(caplog):
    store = Store()
    store.refuses, store.refusal = 500, ropeteam.DeadlineExceeded("no leader")
    assert checkpointer(store).step(0)
    assert caplog.text.count("not in effect on storage: storage_every 500: no leader") == 1
    store.rank = 1
    assert checkpointer(store) and caplog.text.count("not in effect") == 1


@pytest.mark.parametrize("has_storage", [False, True])  # True: another daemon is older
def test_a_job_without_storage_is_one_warning_where_storage_was_asked_for(caplog, has_storage):
    store = Store(room=10)
    store.refuses, store.refusal, store.has_storage = 500, ropeteam.Unsupported("it has none"), has_storage
    assert checkpointer(store).step(0)
    default = "not in effect on storage: storage_every 500: it has none"
    assert [record.getMessage() for record in caplog.records] == [default] * has_storage
    caplog.clear()
    ckpt = checkpointer(store, storage_every=500, keep=5)
    assert ckpt.step(1) and ckpt.step(2) and ckpt.stats.failed == 0
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning == "not in effect on storage: storage_every 500, keep 5: it has none"


def test_storage_that_does_not_answer_fails_no_save(fake, rope, caplog):
    ckpt = Training().checkpointer(rope)
    fake.fake_fail(b"persist", Code.DEADLINE_EXCEEDED)
    assert ckpt.step(1, persist=True) and "step 1 is saved, and not written to storage" in caplog.text


def test_finalizing_looks_or_waits():
    store = Store(room=10)
    ckpt = checkpointer(store)
    assert ckpt.maybe_finalize()
    ckpt.step(0)
    assert not ckpt.maybe_finalize() and ckpt.stats.committed is None
    assert ckpt.maybe_finalize(blocking=True) and ckpt.stats.committed == 0
    with ckpt:
        ckpt.step(torch.tensor(1))  # is accepted as an integer
        assert type(store.steps[-1]) is int
        for save in (ckpt.step, ckpt.save):
            with pytest.raises(ropeteam.InvalidArgument, match="step '2': an integer"):
                save("2")
    assert ckpt.stats.committed == 1
    with pytest.raises(ropeteam.InvalidArgument, match="finished"):
        ckpt.step(2)


def test_what_is_not_committed_at_the_end_is_a_warning(caplog):
    ckpt = checkpointer(Store(commits=False))
    ckpt.step(0)
    assert ckpt.finish(timeout=0.01) is None
    assert "not committed before the end" in caplog.text


def test_leaving_by_an_exception_does_not_wait():
    store = Store(commits=False)
    with pytest.raises(KeyError):
        with checkpointer(store, timeout=1000) as ckpt:
            ckpt.step(0)
            raise KeyError


# ---- opening


def test_alone_it_opens_a_world_of_one(fake, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("ROPETEAM_SOCKET", "/tmp/s")
    with Training().checkpointer(None) as ckpt:
        assert ckpt.step(0)
        assert (fake.fake_timeout(), fake.fake_handles()) == (30_000, 1)
        ckpt.close()
        assert fake.fake_handles() == 0


def test_without_a_daemon_it_says_what_to_do_or_goes_on(fake, monkeypatch, caplog, tmp_path):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("ROPETEAM_SOCKET", raising=False)
    fake.fake_fail(b"open", Code.INVALID_ARGUMENT)
    with pytest.raises(ropeteam.Unavailable, match="ropeteam run -- … or required=False|`ropeteam run -- …`"):
        Training().checkpointer(None)
    fake.fake_fail(b"open", Code.UNAVAILABLE)
    with Training().checkpointer(None, required=False, log_file=tmp_path / "log") as ckpt:
        assert ckpt.load_latest() == 0
        assert not ckpt.step(0) and ckpt.stats.skipped == 1
        assert ckpt.maybe_finalize()
    assert caplog.text.count("training goes on without checkpoints") == 1
    assert json.loads((tmp_path / "log").read_text())["result"] == "skipped"


# ---- falling back


def test_when_the_newest_step_cannot_be_loaded_an_older_one_is(fake, rope, caplog):
    training = Training()
    ckpt = training.checkpointer(rope, memory_every=2)
    weights = {}
    for step in (2, 4, 6):
        training.run()
        ckpt.step(step)
        weights[step] = training.model[0].weight.detach().clone()
    fresh = Training()
    fake.fake_fail(b"view_read", Code.CORRUPT)
    assert fresh.checkpointer(rope, memory_every=2).load_latest() == 5
    assert torch.equal(fresh.model[0].weight, weights[4]) and len(fresh.extra["losses"]) == 2
    assert "step 6 cannot be loaded, an older one is tried: needed 12 chunks" in caplog.text
    assert "step 4 was loaded in place of step 6" in caplog.text


def test_when_no_step_can_be_loaded_each_is_named(fake, rope):
    training = Training()
    training.checkpointer(rope).step(0)
    fake.fake_fail(b"view_open", Code.CORRUPT)
    with pytest.raises(ropeteam.Corrupt, match="no step can be loaded: step 0: needed 12 chunks"):
        training.checkpointer(rope).load_latest()


def test_a_leader_that_cannot_answer_is_an_error_not_a_beginning(fake, rope):
    fake.fake_fail(b"latest", Code.DEADLINE_EXCEEDED)
    with pytest.raises(ropeteam.DeadlineExceeded):
        Training().checkpointer(rope).load_latest()


# ---- what a restore says


def test_a_restore_is_told_in_one_line(rope, caplog, capsys, monkeypatch):
    caplog.set_level(logging.INFO, "ropeteam")
    model = torch.nn.Linear(256, 1024, bias=False)
    ckpt = rt.Checkpointer(model=model, client=rope)
    for step, place in (
        (0, "its node's memory"),
        (1, "the memory of other nodes"),
    ):  # as the fake library says
        assert ckpt.step(step)
        caplog.clear()
        assert rt.Checkpointer(model=model, client=rope).load_latest() == step + 1
        [line] = [record.getMessage() for record in caplog.records]
        assert re.fullmatch(
            rf"step {step} is restored from {place}: 1\.0 MiB in \d+\.\d\d s; the next step is {step + 1}",
            line,
        )
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda log: False)  # a program without logging
    rt.Checkpointer(model=model, client=rope).load_latest()
    assert capsys.readouterr().err.startswith("ropeteam: step 1 is restored from the memory of other nodes: ")


def test_a_line_for_many_ranks_counts_them():
    line = _restored.text(5, ["memory", "storage", "memory"], 1 << 30, 2)
    assert "from its node's memory (2 of 3 ranks), storage (1 of 3 ranks): 1024.0 MiB in 2.00 s" in line
    assert _restored.farthest({"memory", "peers"}) == "peers" and _restored.farthest({""}) == ""
    assert _restored.text(5, [""], 0, 0).startswith("step 5 is restored: ")


def test_a_run_that_finds_its_last_step_done_is_told_so(rope, caplog, monkeypatch):
    monkeypatch.setenv("ROPETEAM_JOB", "sweep")
    model = torch.nn.Linear(1, 1)
    for trains in (True, False):
        with rt.Checkpointer(model=model, client=rope) as ckpt:
            for step in range(ckpt.load_latest(), 3):
                assert trains and ckpt.step(step)
    [warning] = [each.getMessage() for each in caplog.records if "trained no step" in each.getMessage()]
    assert warning.startswith("step 2 was restored, and this run has trained no step after it")
    assert "ropeteam clean --job sweep" in warning

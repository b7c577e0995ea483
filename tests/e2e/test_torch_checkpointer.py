# SPDX-License-Identifier: Apache-2.0
"""Checkpointer against real daemons: training that is killed resumes bit-identically, and a full arena does not stop
it."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
import struct

import pytest
import torch_ranks
from harness import forked_ranks, wait_until

pytest.importorskip("torch", reason="torch is not installed")

# Two models with dropout, schedulers, a reader with a position, and random numbers of Python and numpy: state that is
# not restored changes the losses.
TRAIN = """
import os, pathlib, random, signal, sys
import numpy, torch
from torch.nn.parallel import DistributedDataParallel
import ropeteam.torch

out, steps, kill_at = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
for seed in (torch.manual_seed, random.seed, numpy.random.seed):
    seed(5 + rank)

class Reader:
    position = 0
    def next(self):
        self.position += 1
        return torch.sin(torch.arange(24.0) * self.position + rank).view(3, 8)
    def state_dict(self):
        return {"position": self.position}
    def load_state_dict(self, state):
        self.position = state["position"]

models = {
    "encoder": DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.4))),
    "decoder": DistributedDataParallel(torch.nn.Linear(8, 8)),
}
optimizers = {
    "encoder": torch.optim.AdamW(models["encoder"].parameters(), lr=0.05),
    "decoder": torch.optim.SGD(models["decoder"].parameters(), lr=0.05, momentum=0.9),
}
schedulers = {name: torch.optim.lr_scheduler.MultiStepLR(each, [3, 6]) for name, each in optimizers.items()}
reader = Reader()
with ropeteam.torch.Checkpointer(
    model=models, optimizer=optimizers, scheduler=schedulers, dataloader=reader, log_file=out / "log.{rank}"
) as ckpt:
    start = ckpt.load_latest()
    print(f"rank {rank} begins with step {start}", flush=True)
    for step in range(start, steps):
        noise = random.random() + numpy.random.rand()
        loss = (models["decoder"](models["encoder"](reader.next())) - noise).square().mean()
        loss.backward()
        if step == kill_at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for name in models:
            optimizers[name].step()
            optimizers[name].zero_grad()
            schedulers[name].step()
        with open(out / f"loss.{rank}", "a") as file:
            file.write(f"{step} {loss.item().hex()}\\n")
        assert ckpt.step(step), ckpt
    assert ckpt.finish() == steps - 1 and ckpt.stats.failed == 0, ckpt
torch.distributed.destroy_process_group()
"""


def test_a_killed_rank_changes_no_loss(run_ropeteam, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    losses = {}
    for name, kills in (("whole", [-1]), ("killed", [4, -1])):
        out = tmp_path / name
        out.mkdir()
        begins = []
        for kill in kills:
            done = run_ropeteam(
                *forked_ranks(2), str(script), str(out), "8", str(kill),
                options=["--job", name, "--node", name], GLOO_SOCKET_IFNAME="lo",
            )  # fmt: skip
            assert (done.returncode == 0) == (kill < 0), done.stderr[-4000:]
            begins += re.findall(r"rank 0 begins with step (\d+)", done.stdout)
        assert begins == ["0", "4"][: len(kills)]
        # Rank 0 may have finished the step in which rank 1 died. It then computes it again, with the same loss.
        losses[name] = [sorted(set((out / f"loss.{rank}").read_text().splitlines())) for rank in range(2)]
        assert [len(each) for each in losses[name]] == [8, 8]
    assert losses["killed"] == losses["whole"]


def test_a_full_arena_does_not_stop_training(cluster, caplog):
    """Saves wait for a second copy while the node that would hold it is not running."""
    import ropeteam
    import torch
    from ropeteam.torch import Checkpointer

    nodes = cluster(2, memory="64M")
    model = torch.nn.Linear(1024, 2048)  # 8 MiB
    with nodes[0].open(0, 1, "run") as rope:
        strict = Checkpointer(model=model, client=rope, when_full="raise")
        assert strict.step(0) and strict.maybe_finalize(blocking=True, timeout=60)
        nodes[1].kill()
        step = 1
        with pytest.raises(ropeteam.NoSpace, match="needed"):
            while strict.step(step):
                step += 1
        assert step > 3 and strict.stats.skipped == 1

        skipping = Checkpointer(model=model, client=rope, when_full="skip")
        assert not any(skipping.step(step) for step in range(step, step + 20))
        assert (skipping.stats.saved, skipping.stats.skipped, skipping.stats.failed) == (0, 20, 0)

        waiting = Checkpointer(model=model, client=rope, timeout=0.3)
        assert not any(waiting.step(step) for step in range(step + 20, step + 40))
        assert waiting.stats.failed == 20 and waiting.stats.blocked_s < 10
        assert "is not safe, training goes on" in caplog.text

        nodes[1].start()  # now the same loop saves again
        with torch.no_grad():
            model.weight.add_(1)
        steps = iter(range(step + 40, 10**9))
        wait_until(lambda: waiting.step(next(steps)), "room")
        newest = waiting.finish(60)
        assert newest == next(steps) - 1
        other = torch.nn.Linear(1024, 2048)
        assert Checkpointer(model=other, client=rope).load_latest() == newest + 1
        assert torch.equal(other.weight, model.weight)


def test_a_daemon_that_is_gone_and_comes_back_is_used_again(cluster, caplog):
    import torch
    from ropeteam.torch import Checkpointer

    (node,) = cluster(1).nodes
    with node.open(0, 1, "run") as rope:
        ckpt = Checkpointer(model=torch.nn.Linear(2, 2), client=rope)
        assert ckpt.step(0)  # the node is killed before the result is known
        node.kill()
        assert not ckpt.step(1) and not ckpt.step(2)
        node.start()
        steps = iter(range(3, 10**9))
        wait_until(lambda: ckpt.step(next(steps)), "a save")
        newest = ckpt.finish()
        assert newest == next(steps) - 1 and ckpt.stats.saved == 2
        assert caplog.text.count("daemon") >= 2


def test_the_daemons_write_and_keep_what_a_checkpointer_says(cluster, tmp_path):
    import ropeteam
    import torch
    from ropeteam import Level
    from ropeteam.torch import Checkpointer

    def opened(*flags: str):
        store = tmp_path / f"store{len(flags)}"
        store.mkdir()
        (node,) = cluster(1, options=["--storage", str(store), *flags]).nodes
        return node, store, node.open(0, 1, "run")

    model = torch.nn.Linear(2, 2)
    node, store, rope = opened()
    with rope:
        ckpt = Checkpointer(model=model, client=rope, memory_every=3, storage_every=4, keep=2)
        for step, due in ((3, False), (6, True), (9, True), (12, True), (15, False)):
            assert ckpt.step(step)
            if due:  # 4, 8 and 12 were passed
                rope.wait(step, Level.PERSISTED)
            else:
                with pytest.raises(ropeteam.Aborted, match=r"not due \(persist_every 4\)"):
                    rope.wait(step, Level.PERSISTED)
        kept = [f"step-{step:010d}" for step in (9, 12)]
        stored = store.glob
        wait_until(lambda: sorted(path.name[:15] for path in stored("test/step-*")) == kept, "step 6 to go")

    node, _, rope = opened("--persist-every", "10", "--keep-on-storage", "3")
    with rope:
        started = "this job's daemons were started with"
        for options, names in (
            ({"storage_every": 4, "keep": 3}, f"persist_every 4, {started} --persist-every 10"),
            ({"storage_every": 10, "keep": 2}, f"keep_on_storage 2, {started} --keep-on-storage 3"),
            ({"keep": 2}, f"keep_on_storage 2, {started} --keep-on-storage 3"),
        ):
            with pytest.raises(ropeteam.InvalidArgument, match=names):
                Checkpointer(model=model, client=rope, **options)
        Checkpointer(model=model, client=rope)  # the default interval does not conflict with the flag
        Checkpointer(model=model, client=rope, storage_every=10, keep=3)
        policy = node.status()["policy"]
        assert (policy["persist_every"], policy["persist_every_by"], policy["keep_by"]) == (10, "flag", "flag")


def test_the_last_step_is_on_storage_where_the_end_waits_for_it(cluster, tmp_path, caplog):
    import torch
    from ropeteam.torch import Checkpointer

    (node,) = cluster(1, options=["--storage", str(tmp_path)]).nodes
    for run, persist in enumerate((False, True)):
        with node.open(0, 1, f"run {run}") as rope:
            ckpt = Checkpointer(model=torch.nn.Linear(2, 2), client=rope, storage_every=0)
            assert ckpt.step(run) and ckpt.finish(persist=persist) == run
        assert len(list(tmp_path.glob("test/step-*/ropeteam-manifest.json"))) == int(persist)
    assert not caplog.records

    (node,) = cluster(1).nodes
    with node.open(0, 1, "run") as rope:
        ckpt = Checkpointer(model=torch.nn.Linear(2, 2), client=rope, storage_every=0)
        assert ckpt.step(7) and ckpt.finish(persist=True) == 7
    assert [each.getMessage() for each in caplog.records] == [
        "step 7 is in memory, and not on storage: this job has no storage to persist to"
    ]


def resume(socket: str) -> tuple[int, float, list[str]]:
    """Loads the latest step and trains two more: returns the first one, the loaded value, and the warnings."""
    import ropeteam.torch
    import torch

    os.environ["ROPETEAM_SOCKET"] = socket
    rank = torch.distributed.get_rank()
    weights = torch.nn.Linear(1000, 250, bias=False)
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("ropeteam").addHandler(handler)
    ckpt = ropeteam.torch.Checkpointer(model=weights)
    start = ckpt.load_latest()
    value = weights.weight[0, 0].item() if start else 0.0
    for step in range(start, start + 2):
        torch.nn.init.constant_(weights.weight, 100 * rank + step)
        assert ckpt.step(step)
    assert ckpt.finish() == start + 1
    return start, value, warned


def test_ranks_agree_on_the_step_that_all_can_load(cluster):
    """Rank 1's bytes of the newest step are damaged in the arena, so both ranks load the previous step."""
    (node,) = cluster(1).nodes
    assert torch_ranks.run(2, None, resume, node.socket) == [(0, 0.0, [])] * 2
    of_rank_1 = struct.pack("<f", 101.0) * 200_000
    with open(next(node.arena.glob("*.arena")), "r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
        begin = arena.find(of_rank_1)
        assert begin >= 0 and arena.find(of_rank_1, begin + len(of_rank_1)) == -1
        arena[begin + 1000] ^= 1
    for rank, (start, value, warned) in enumerate(torch_ranks.run(2, None, resume, node.socket)):
        assert (start, value) == (1, 100.0 * rank)
        told = "\n".join(warned)
        assert "step 1 cannot be loaded, an older one is tried: rank 1: " in told
        assert "step 0 was loaded in place of step 1" in told


def go_back(socket: str) -> int:
    """Rank 0 has saved step 1 when both ranks load again and train step 1 once more, to other weights."""
    import ropeteam
    import ropeteam.torch
    import torch

    os.environ["ROPETEAM_SOCKET"] = socket
    rank = torch.distributed.get_rank()
    weights = torch.nn.Linear(1000, 250, bias=False)
    ckpt = ropeteam.torch.Checkpointer(model=weights)
    assert ckpt.load_latest() == 0
    assert ckpt.step(0)
    ckpt._client.wait(0, ropeteam.Level.COMMITTED)
    assert rank == 1 or ckpt.step(1)
    torch.distributed.barrier()
    start = ckpt.load_latest()
    torch.nn.init.constant_(weights.weight, 1000 + rank)
    assert ckpt.step(1)
    assert ckpt.finish() == 1
    return start


def test_a_program_that_goes_back_mixes_no_two_runs(cluster):
    (node,) = cluster(1).nodes
    assert torch_ranks.run(2, None, go_back, node.socket) == [1, 1]
    restored = torch_ranks.run(2, None, resume, node.socket)
    assert [(start, value) for start, value, _ in restored] == [(2, 1000.0), (2, 1001.0)]


def test_an_older_step_is_refused_at_once_in_the_same_words(cluster, monkeypatch):
    """It would be released as soon as it was saved. A number that begins again in each epoch is such a step."""
    import ropeteam
    import torch
    import torch.distributed.checkpoint as dcp
    from ropeteam.dcp import StorageWriter
    from ropeteam.torch import Checkpointer, save_state

    (node,) = cluster(1).nodes
    monkeypatch.setenv("ROPETEAM_SOCKET", node.socket)
    model = torch.nn.Linear(4, 4)
    with node.open(0, 1) as rope:
        ckpt = Checkpointer(model=model, client=rope)
        assert ckpt.step(98) and ckpt.step(99)
        rope.wait(99)
        calls = {
            "Client.save": lambda: rope.save(3, {"a": b"1"}),
            "Client.begin": lambda: rope.begin(98),
            "save_state": lambda: save_state(rope, 3, model),
            "Checkpointer": lambda: ckpt.step(98),
            "another Checkpointer": lambda: Checkpointer(model=model, client=rope).step(3),
            "dcp.save": lambda: dcp.save({"w": torch.ones(3)}, storage_writer=StorageWriter(rope, 3)),
        }
        with contextlib.suppress(ImportError):
            import fsspec

            ropeteam.register_fsspec()
            fs = fsspec.filesystem("ropeteam", client=rope)
            calls["fsspec"] = lambda: fs.open("ropeteam://3/a", "wb")
        for name, call in calls.items():
            with pytest.raises(BaseException) as raised:
                call()
            assert re.search(r"step \d+ is not newer than 99: use one counter across epochs", str(raised.value)), name
        with pytest.raises(ropeteam.AlreadyExists, match="step 99 is not newer than 99"):
            rope.save(99, {"a": b"1"})
        assert rope.latest().step == 99
    # After a restart the program may go back: 51 is the newest step then, although 99 existed.
    with node.open(0, 1) as rope:
        assert rope.latest().step == 99
        rope.save(51, {"a": b"1"}, wait=ropeteam.Level.COMMITTED)
    with node.open(0, 1) as rope:
        assert rope.latest().step == 51


def test_a_restore_says_from_where(cluster, caplog):
    import torch
    from ropeteam.torch import Checkpointer

    caplog.set_level(logging.INFO, "ropeteam")
    nodes = cluster(4)
    model = torch.nn.Linear(512, 512, bias=False)
    with nodes[0].open(0, 1, "run") as rope:
        assert Checkpointer(model=model, client=rope).step(7)
        rope.wait(7)
        with rope.view(7) as view:
            assert view.origin == "memory"
    # The rank moves to a node without a copy.
    other = next(node for node in nodes if not node.local_status()["copies"])
    with other.open(0, 1, "again") as rope:
        ckpt = Checkpointer(model=model, client=rope)
        assert ckpt.load_latest() == 8
        assert ckpt.loaded.origins == {"peers"} and ckpt.loaded.bytes == 1 << 20
        [line] = [each.getMessage() for each in caplog.records if "is restored" in each.getMessage()]
        assert line.startswith("step 7 is restored from the memory of other nodes: 1.0 MiB in ")

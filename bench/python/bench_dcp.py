#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Saves one training state in every way that a PyTorch user has, in one run.

    bench/python/bench_dcp.py [--size 1G] [--tensors 400] [--ranks 1] [--runs 15] [--json] [--plot FILE]

The ways ("doors"): torch.save, dcp.save and dcp.async_save to a file system; and Ropeteam by save_state, by
torch.distributed.checkpoint, by the Checkpointer and by fsspec, with two daemons on this machine. Per door:

    blocked   how long a save blocks the training loop
    safe      from the call to verified copies on another node; a save to files is never safe
    durable   from the call to storage: fsync has returned, or PERSISTED
    restore   loads the newest save into the same tensors, from this node
    growth    of the training process's anonymous memory from the 5th to the 50th save
    lines     of code that a program needs for it

With one rank, two rows more (many_tensors.py) say what a save of 10,000 tensors costs the training thread.

The doors save in turns, so that a disturbance of this machine slows all of them. The first pass is discarded:
afterwards staging memory, arena and page cache are warm. With several ranks the state is sharded by rows, all
ranks save at the same time, and a pass counts the slowest. --files is the directory for files; it must not be
on a tmpfs. Pinned staging needs CUDA; without it dcp.async_save stages in ordinary memory, which it keeps
between saves.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import many_tensors
from rows import row, show
from two_nodes import BUILD, two_nodes

WARM_SAVES, GROWN_SAVES = 5, 50
TIMEOUT_S = 300.0


def parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number of bytes, or of K, M or G, is needed")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=parse_size, default=1 << 30, help="bytes of the whole state [1G]")
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--runs", type=int, default=15, help="measured passes [15]")
    parser.add_argument("--durable-runs", type=int, default=3, help="passes that wait for storage [3]")
    parser.add_argument("--growth", action="store_true", help="also 50 saves of each door")
    parser.add_argument(
        "--files", type=pathlib.Path, default=pathlib.Path.cwd(), help="where files go [here]"
    )
    parser.add_argument("--json", action="store_true", help="a JSON object a row")
    parser.add_argument("--plot", type=pathlib.Path, help="draw blocked, safe and durable there")
    parser.add_argument("--doors", default=",".join(door.name for door in DOORS), help="which, by name [all]")
    options = parser.parse_args()
    options.doors = options.doors.split(",")
    if unknown := set(options.doors) - {door.name for door in DOORS}:
        parser.error(
            f"--doors {','.join(sorted(unknown))}: there are {', '.join(door.name for door in DOORS)}"
        )
    return options


class Door:
    """One way to save. `code` is what a program needs for it; its lines are counted."""

    name = ""
    code = ""

    def __init__(self, bench: Ranks) -> None:
        self.bench = bench

    def save(self, step: int) -> None:
        """The part of a save that blocks the training loop."""
        raise NotImplementedError

    def safe(self, step: int) -> None:
        """Waits for copies on another node. Only Ropeteam's doors have this."""
        import ropeteam

        self.bench.rope.wait(step, ropeteam.Level.REPLICATED, TIMEOUT_S)

    def durable(self, step: int) -> None:
        import ropeteam

        self.bench.rope.persist(step)
        self.bench.rope.wait(step, ropeteam.Level.PERSISTED, TIMEOUT_S)

    def settle(self, step: int) -> None:
        """Waits until this save has ended completely."""
        import ropeteam

        self.bench.rope.wait(step, ropeteam.Level.COMMITTED, TIMEOUT_S)

    def restore(self, step: int) -> None:
        raise NotImplementedError


class _Files(Door):
    """A door to a directory of this node's file system. Every save uses the same directory, so its blocks
    exist."""

    def __init__(self, bench: Ranks) -> None:
        super().__init__(bench)
        self.directory = bench.files / self.name.replace(".", "-")
        self.directory.mkdir(exist_ok=True)

    def settle(self, step: int) -> None:
        pass


class TorchSave(_Files):
    name = "torch.save"
    code = """
        torch.save(model.state_dict(), f"{directory}/rank-{rank}.pt")
        model.load_state_dict(torch.load(f"{directory}/rank-{rank}.pt"))
    """

    def save(self, step: int) -> None:
        import torch

        torch.save(self.bench.locals, self._path())

    def durable(self, step: int) -> None:
        with open(self._path(), "rb") as file:
            os.fsync(file.fileno())

    def restore(self, step: int) -> None:
        import torch

        loaded = torch.load(self._path(), weights_only=True)
        for name, tensor in self.bench.locals.items():
            tensor.copy_(loaded[name])

    def _path(self) -> pathlib.Path:
        return self.directory / f"rank-{self.bench.rank}.pt"


class DcpSave(_Files):
    name = "dcp.save"
    code = """
        dcp.save({"model": model.state_dict()}, checkpoint_id=directory)
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=directory)
        model.load_state_dict(state["model"])
    """

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.bench.state, storage_writer=self._writer())  # sync_files: durable at return

    def durable(self, step: int) -> None:
        pass

    def restore(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self.bench.state, storage_reader=dcp.FileSystemReader(self.directory))

    def _writer(self) -> Any:
        import torch.distributed.checkpoint as dcp

        return dcp.FileSystemWriter(self.directory, overwrite=True)


class DcpAsyncSave(DcpSave):
    name = "dcp.async_save"
    code = """
        stager = DefaultStager(StagingOptions(use_pinned_memory=cuda, use_shared_memory=False,
                                              use_async_staging=False, use_non_blocking_copy=cuda))
        if saving is not None:
            saving.result()
        saving = dcp.async_save({"model": model.state_dict()}, checkpoint_id=directory, async_stager=stager)
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=directory)
        model.load_state_dict(state["model"])
    """

    def __init__(self, bench: Ranks) -> None:
        super().__init__(bench)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        cuda = bench.cuda
        self._stager = DefaultStager(StagingOptions(cuda, False, False, cuda))
        self._saving: Future[Any] | None = None

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        self._saving = dcp.async_save(
            self.bench.state, storage_writer=self._writer(), async_stager=self._stager
        )

    def durable(self, step: int) -> None:
        self.settle(step)

    def settle(self, step: int) -> None:
        assert self._saving is not None
        self._saving.result(TIMEOUT_S)


class SaveState(Door):
    name = "save_state"
    code = """
        rope = ropeteam.torch.open_distributed()
        loaded = ropeteam.torch.load_state(rope, model)
        ropeteam.torch.save_state(rope, step, model)
    """

    def save(self, step: int) -> None:
        import ropeteam.torch

        ropeteam.torch.save_state(self.bench.rope, step, self.bench.model)

    def restore(self, step: int) -> None:
        import ropeteam.torch

        ropeteam.torch.load_state(self.bench.rope, self.bench.model, step=step)


class RopeteamDcp(Door):
    name = "ropeteam.dcp"
    code = """
        rope = ropeteam.torch.open_distributed()
        dcp.load(state := {"model": model.state_dict()}, storage_reader=StorageReader(rope))
        model.load_state_dict(state["model"])
        saving = dcp.async_save({"model": model.state_dict()}, storage_writer=StorageWriter(rope, step))
    """

    def __init__(self, bench: Ranks) -> None:
        super().__init__(bench)
        self._saving: Future[Any] | None = None

    def save(self, step: int) -> None:
        import ropeteam.dcp
        import torch.distributed.checkpoint as dcp

        writer = ropeteam.dcp.StorageWriter(self.bench.rope, step)
        self._saving = dcp.async_save(self.bench.state, storage_writer=writer)

    def safe(self, step: int) -> None:
        self._sealed()
        super().safe(step)

    def durable(self, step: int) -> None:
        self._sealed()
        super().durable(step)

    def settle(self, step: int) -> None:
        self._sealed()
        super().settle(step)

    def restore(self, step: int) -> None:
        import ropeteam.dcp
        import torch.distributed.checkpoint as dcp

        reader = ropeteam.dcp.StorageReader(self.bench.rope, step)
        dcp.load(self.bench.state, storage_reader=reader)

    def _sealed(self) -> None:
        assert self._saving is not None
        self._saving.result(TIMEOUT_S)


class Checkpointer(Door):
    name = "Checkpointer"
    code = """
        ckpt = ropeteam.torch.Checkpointer(model=model)
        start = ckpt.load_latest()
        ckpt.step(step)
    """

    def __init__(self, bench: Ranks) -> None:
        super().__init__(bench)
        import ropeteam.torch

        # The bench itself persists steps.
        self._ckpt = ropeteam.torch.Checkpointer(model=bench.model, client=bench.rope, storage_every=0)

    def save(self, step: int) -> None:
        self._ckpt.step(step)

    def restore(self, step: int) -> None:
        self._ckpt.load_latest()


class Fsspec(Door):
    name = "fsspec"
    code = """
        with fsspec.open(f"ropeteam://{step}/model-{rank}.pt", "wb") as file:
            ropeteam.torch.save(model.state_dict(), file)
        with fsspec.open(f"ropeteam://latest/model-{rank}.pt", "rb") as file:
            model.load_state_dict(torch.load(file))
    """

    def __init__(self, bench: Ranks) -> None:
        super().__init__(bench)
        import fsspec
        import ropeteam

        ropeteam.register_fsspec()
        self._files = fsspec.filesystem("ropeteam", client=bench.rope)

    def save(self, step: int) -> None:
        import ropeteam.torch

        with self._files.open(self._path(step), "wb") as file:
            ropeteam.torch.save(self.bench.locals, file)

    def restore(self, step: int) -> None:
        import torch

        with self._files.open(self._path(step), "rb") as file:
            loaded = torch.load(file, weights_only=True)
        for name, tensor in self.bench.locals.items():
            tensor.copy_(loaded[name])

    def _path(self, step: int) -> str:
        return f"ropeteam://{step}/model-{self.bench.rank}.pt"


DOORS = [TorchSave, DcpSave, DcpAsyncSave, SaveState, RopeteamDcp, Checkpointer, Fsspec]
YARDSTICK = DcpAsyncSave.name


class Ranks:
    """The measurement that each rank runs."""

    def __init__(self, options: argparse.Namespace) -> None:
        import ropeteam.torch
        import torch
        import torch.distributed as dist

        self.options = options
        self.files = options.files
        self.cuda = torch.cuda.is_available()
        dist.init_process_group("gloo")
        self.group = dist.new_group()  # dcp.async_save uses the default one in the background
        self.rank = dist.get_rank()
        torch.manual_seed(self.rank)
        self.model = torch.nn.ParameterList(self._tensors(dist.get_world_size())).requires_grad_(False)
        self.state = {"model": self.model.state_dict()}
        self.locals = {
            name: value.to_local() if hasattr(value, "to_local") else value
            for name, value in self.model.state_dict().items()
        }
        self.rope = ropeteam.torch.open_distributed()
        self.step = 0

    def _tensors(self, world: int) -> list[Any]:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        rows = max(1, self.options.size // self.options.tensors // world // 4 // 1024)
        tensors = [torch.randn(rows, 1024) for _ in range(self.options.tensors)]
        if world == 1:
            return tensors
        mesh = init_device_mesh("cpu", (world,))
        return [DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False) for tensor in tensors]

    def timed(self, action: Callable[[], None]) -> float:
        """Milliseconds of the slowest rank; all ranks begin together."""
        import torch
        import torch.distributed as dist

        dist.barrier(self.group)
        begin = time.perf_counter()
        action()
        taken = torch.tensor([(time.perf_counter() - begin) * 1e3])
        dist.all_reduce(taken, dist.ReduceOp.MAX, self.group)
        return float(taken)

    def saved(self, door: Door, then: Callable[[int], None] | None = None) -> float:
        self.step += 1
        step = self.step

        def action() -> None:
            door.save(step)
            if then is not None:
                then(step)

        taken = self.timed(action)
        door.settle(step)
        return taken

    def run(self) -> None:
        import torch.distributed as dist

        doors = [door(self) for door in DOORS if door.name in self.options.doors]
        samples: dict[str, dict[str, list[float]]] = {}

        def note(kind: str, door: Door, value: float) -> None:
            samples.setdefault(kind, {}).setdefault(door.name, []).append(value)

        own = [door for door in doors if not isinstance(door, _Files)]
        for turn in range(self.options.runs + 1):
            for door in doors:
                blocked = self.saved(door)
                if turn:
                    note("blocked", door, blocked)
                    note("restore", door, self.timed(lambda door=door: door.restore(self.step)))
                    if door in own:
                        note("safe", door, self.saved(door, door.safe))
        for _ in range(self.options.durable_runs):
            for door in doors:
                note("durable", door, self.saved(door, door.durable))
        if self.options.growth:
            for door in doors:
                note("growth", door, self._growth(door))
        if self.rank == 0:
            self._report(samples)
        if dist.get_world_size() == 1:
            few, size, runs = self.options.tensors, self.options.size, self.options.runs
            for entry in many_tensors.measure(self.rope, few, size, runs, self.step):
                show(entry, self.options.json)

    def _growth(self, door: Door) -> float:
        """MiB of anonymous memory that 45 further saves took; the arena is not anonymous."""
        before = 0.0
        for count in range(1, GROWN_SAVES + 1):
            self.saved(door)
            if count == WARM_SAVES:
                before = _anonymous_mib()
        return _anonymous_mib() - before

    def _report(self, samples: dict[str, dict[str, list[float]]]) -> None:
        units = {"growth": "MiB"}
        lines = {
            door.name: [float(len(textwrap.dedent(door.code).strip().splitlines()))]
            for door in DOORS
            if door.name in self.options.doors
        }
        for kind, by_door in {**samples, "lines": lines}.items():
            for name, figures in by_door.items():
                unit = "count" if kind == "lines" else units.get(kind, "ms")
                beside = by_door.get(YARDSTICK, ()) if kind == "blocked" and name != YARDSTICK else ()
                label = f"dcp/{kind}/{name}" if not beside else f"dcp/blocked_vs_async_save/{name}"
                show(row(label, unit, figures, YARDSTICK if beside else "", beside), self.options.json)


def _anonymous_mib() -> float:
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]


def plot(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts" / "lib"))
    from plotting import import_pyplot

    pyplot = import_pyplot()
    kinds = ["blocked", "safe", "durable", "restore"]
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(4 * len(kinds), 4), sharey=True)
    for kind, axis in zip(kinds, axes):
        figures = {
            each["name"].split("/")[-1]: each["median"]
            for each in rows
            if each["name"].startswith(f"dcp/{kind}")
        }
        names = [door.name for door in DOORS]
        axis.barh(names, [figures.get(name, 0) for name in names])
        axis.set_title(f"{kind}, ms")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    options = arguments()
    if os.environ.get("ROPETEAM_BENCH_RANK"):
        Ranks(options).run()
        return
    import json

    files = pathlib.Path(tempfile.mkdtemp(prefix="bench-dcp-", dir=options.files))
    # Two committed steps, one being saved, one being persisted; and what 10,000 tensors take besides their bytes.
    memory = f"{128 + (options.size * 5 >> 20)}M"
    own = [sys.executable, __file__, "--json", "--files", str(files)]
    for name in ("size", "tensors", "runs", "durable_runs"):
        own += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    own += ["--doors", ",".join(options.doors), *(["--growth"] if options.growth else [])]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = ["env", "ROPETEAM_BENCH_RANK=1", f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '1')}"]
    command.append(f"ROPETEAM_COPY_THREADS={os.environ.get('ROPETEAM_COPY_THREADS', '')}")  # empty: not set
    command += [*launch, str(options.ranks), *own[1:]]
    rows = []
    try:
        if not options.json:
            print(
                f"{'row':<38} {'unit':<5} {'median':>10} {'min':>10} {'max':>10} runs  {'beside':>10}  ratio"
            )
        with two_nodes(command, memory=memory, files=files, storage=True) as ranks:
            assert ranks.stdout is not None
            for line in ranks.stdout:
                rows.append(json.loads(line))
                show(rows[-1], options.json)
            if ranks.wait() != 0:
                sys.exit(f"bench_dcp.py: the ranks ended with {ranks.returncode}; the build is {BUILD}")
        copy = subprocess.run(
            [BUILD / "bench" / "ropeteam-bench", "--json", "--runs", str(options.runs), "copy"],
            capture_output=True,
            text=True,
            check=True,
        )
        _against_copy(rows, copy.stdout, options)
    finally:
        shutil.rmtree(files, ignore_errors=True)
    if options.plot:
        plot(rows, options.plot)


def _against_copy(rows: list[dict[str, Any]], copied: str, options: argparse.Namespace) -> None:
    """Compares the DCP door with the time of ropeteam-bench's fused copy of as many bytes in the same run."""
    import json

    rates = {each["name"]: each["median"] for each in map(json.loads, copied.splitlines())}
    fused_ms = options.size / options.ranks / rates["copy/fused_vs_memcpy"] / 1e6
    wanted = (f"dcp/blocked_vs_async_save/{RopeteamDcp.name}", f"dcp/blocked/{RopeteamDcp.name}")
    blocked = next((each for each in rows if each["name"] in wanted), None)
    if blocked is None:
        return
    show(
        row("dcp/blocked_vs_fused_copy", "ms", [blocked["median"]], "ropeteam-bench copy", [fused_ms]),
        options.json,
    )


if __name__ == "__main__":
    main()

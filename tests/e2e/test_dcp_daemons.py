# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint on several ranks and real daemons: other world sizes, the checkpoint process,
failures, and steps on storage that torch opens alone."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
import torch_ranks as ranks  # noqa: E402
from harness import WAIT_S, ask, clean_environment  # noqa: E402
from ropeteam import Level  # noqa: E402
from ropeteam.dcp import StorageReader, StorageWriter, latest  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: E402

# Several worlds load a step and commit none; the step must not be quarantined for that.
KEEP = ["--quarantine-after", "99"]


def numbers(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(step=1):
    """The state that all worlds share, each in its own sharding. On 4 ranks it is uneven, and some ranks have
    no row of `short`."""
    return {
        "rows": numbers(step, 10, 6),
        "columns": numbers(step + 1, 5, 14),
        "short": numbers(step + 2, 3),
        "half": numbers(step + 3, 9, 2, 3, dtype=torch.bfloat16),
        "replicated": numbers(step + 4, 11),
        "grid": numbers(step + 5, 12, 10),
        "plain": numbers(step + 6, 4, 4),
    }


def sharded(state, empty=False):
    """Shards the state as FSDP2 does (rows of one dimension), as tensor parallelism does (columns), and as
    both do if the world's size is even."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    line = init_device_mesh("cpu", (size,))
    grid = init_device_mesh("cpu", (2, size // 2)) if size % 2 == 0 else line
    kinds = {
        "rows": (line, [Shard(0)]),
        "columns": (line, [Shard(1)]),
        "short": (line, [Shard(0)]),
        "half": (line, [Shard(1 if size % 3 == 0 else 0)]),
        "replicated": (line, [Replicate()]),
        "grid": (grid, [Shard(0), Shard(1)] if grid is not line else [Shard(1)]),
    }
    made = {}
    for name, tensor in state.items():
        tensor = torch.zeros_like(tensor) if empty else tensor.clone()
        made[name] = distribute_tensor(tensor, *kinds[name], src_data_rank=None) if name in kinds else tensor
    return made


def assert_same(one, other):
    for name in one:
        mine, saved = (x.to_local() if hasattr(x, "to_local") else x for x in (one[name], other[name]))
        assert mine.shape == saved.shape and mine.dtype == saved.dtype
        assert torch.equal(mine.contiguous().view(torch.uint8), saved.contiguous().view(torch.uint8)), name


# ---- what the ranks do


def save_by(rope, step, way):
    state = {**sharded(whole(step)), "value": {"step": step}}
    if way == "save":
        dcp.save(state, storage_writer=StorageWriter(rope, step))
    elif way == "own metadata":
        dcp.save(state, storage_writer=StorageWriter(rope, step), use_collectives=False)
    else:
        # The first save is staged in memory, the second in the arena. Training continues at once.
        for each in (step - 1, step):
            dcp.async_save(
                state,
                storage_writer=StorageWriter(rope, each),
                async_checkpointer_type=dcp.state_dict_saver.AsyncCheckpointerType(way),
            ).result()
        begun = dcp.async_save(state, storage_writer=StorageWriter(rope, step + 1, persist=False))
        for tensor in state.values():
            if isinstance(tensor, torch.Tensor):
                (tensor.to_local() if hasattr(tensor, "to_local") else tensor).zero_()
        begun.result()
        rope.wait(step + 1, Level.COMMITTED, WAIT_S)
        assert_same(loaded(rope, step + 1), sharded(whole(step)))
    rope.wait(step, Level.COMMITTED, WAIT_S)


def loaded(rope, step, **more):
    state = {**sharded(whole(), empty=True), **more}
    dcp.load(state, storage_reader=StorageReader(rope, step))
    return state


def load(rope, step):
    found = latest(rope)
    state = loaded(rope, found.step if step is None else step, value={"step": 0})
    value = state.pop("value")
    assert_same(state, sharded(whole(value["step"])))
    return found.step, value


def fails_at_one(rope):
    """Rank 1 cannot save its shard of several steps: more steps than a Client may have open saves."""
    state = sharded(whole())
    for step in range(1, 7):
        if rope.rank == 1:
            rope.save(step, {"taken": b"x"})
        try:
            if step % 2:
                dcp.save(state, storage_writer=StorageWriter(rope, step))
            else:
                dcp.async_save(state, storage_writer=StorageWriter(rope, step)).result()
        except dcp.api.CheckpointException as error:
            assert "RANK 1" in str(error) and "AlreadyExists" in str(error), error
        else:
            raise AssertionError(f"step {step} was saved")
    save_by(rope, 10, "save")


class Failing(DefaultSavePlanner):
    def create_global_plan(self, plans):
        raise RuntimeError("no plan")


def fails_in_the_checkpoint_process(rope):
    """Saves fail in the planner, more of them than a Client may have open, staged in memory and in the
    arena."""
    kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
    state = sharded(whole())
    for step in range(1, 8):
        planner = DefaultSavePlanner() if step == 1 else Failing()
        future = dcp.async_save(
            state, storage_writer=StorageWriter(rope, step), planner=planner, async_checkpointer_type=kind
        )
        try:
            future.result()
        except dcp.api.CheckpointException as error:
            assert step > 1 and "no plan" in str(error), error
        else:
            assert step == 1
    save_by(rope, 10, "save")


def changes_at_one(rope):
    """Only one rank writes what both have. When the state of rank 1 changes, rank 0 has to write more."""
    state = sharded(whole())
    answers = []
    for step in range(1, 6):
        if rope.rank == 1 and step == 3:
            del state["replicated"]
        try:
            dcp.async_save(state, storage_writer=StorageWriter(rope, step)).result()
            rope.wait(step, Level.COMMITTED, WAIT_S)
            answers.append("good")
        except dcp.api.CheckpointException as error:
            answers.append("This save is given up" in str(error) and "Aborted" in str(error))
    assert_same(loaded(rope, 5), sharded(whole()))
    return answers


def two_groups(rope):
    """Each half of the world has a checkpoint of its own, as pipeline stages may have; then each rank has
    one."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = rope.rank // 2
    state = {"stage": torch.full((4,), float(half)), f"only {half}": numbers(half, 7, 3)}
    dcp.save(state, storage_writer=StorageWriter(rope, 1), process_group=halves[half])
    dcp.save({"own": torch.full((3,), float(rope.rank))}, storage_writer=StorageWriter(rope, 2), no_dist=True)
    for step in (1, 2):
        rope.wait(step, Level.COMMITTED, WAIT_S)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(into, storage_reader=StorageReader(rope, 1), process_group=halves[half])
    assert_same(into, state)
    into = {"own": torch.zeros(3)}
    dcp.load(into, storage_reader=StorageReader(rope, 2), no_dist=True)
    assert into["own"].tolist() == [float(rope.rank)] * 3


def save_to_storage(rope, step):
    dcp.save(
        {**sharded(whole(step)), "value": {"step": step}},
        storage_writer=StorageWriter(rope, step, persist=True, metadata={"loss": 0.5}),
    )
    rope.wait(step, Level.PERSISTED, WAIT_S)


# ---- tests


@pytest.mark.parametrize("way", ["save", "own metadata", "thread"])
def test_what_4_ranks_saved_is_loaded_by_1_2_3_4_and_6_bit_for_bit(cluster, way):
    socket = cluster(1, options=KEEP)[0].socket
    ranks.run(4, socket, save_by, 10, way)
    newest = 11 if way == "thread" else 10
    for size in (1, 2, 3, 4, 6):
        assert ranks.run(size, socket, load, 10) == [(newest, {"step": 10})] * size


def test_the_checkpoint_process_saves_through_its_parent(cluster):
    socket = cluster(1, options=KEEP)[0].socket
    ranks.run(2, socket, save_by, 10, "process")
    assert ranks.run(3, socket, load, 10) == [(11, {"step": 10})] * 3


def test_a_rank_that_fails_fails_the_save_of_all_and_nothing_else(cluster):
    socket = cluster(1, options=KEEP)[0].socket
    ranks.run(2, socket, fails_at_one)
    assert ranks.run(2, socket, load, 10) == [(10, {"step": 10})] * 2


def test_what_fails_in_the_checkpoint_process_stays_open_nowhere(cluster):
    socket = cluster(1, options=KEEP)[0].socket
    ranks.run(2, socket, fails_in_the_checkpoint_process)
    assert ranks.run(1, socket, load, 10) == [(10, {"step": 10})]


def test_a_plan_that_changed_with_another_ranks_state_fails_one_save(cluster):
    answers = ranks.run(2, cluster(1)[0].socket, changes_at_one)
    assert answers == [["good", "good", True, "good", "good"]] * 2


def test_groups_of_ranks_have_checkpoints_of_their_own(cluster):
    ranks.run(4, cluster(1)[0].socket, two_groups)


WITHOUT_ROPETEAM = """
import sys, warnings
sys.modules["ropeteam"] = None  # cannot be imported
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
for step, out in zip(sys.argv[1::2], sys.argv[2::2]):
    dcp_to_torch_save(step, out)
"""


def opened_by_torch_alone(steps: list[pathlib.Path], out: pathlib.Path) -> list[dict]:
    """What torch's FileSystemReader loads from these directories if Ropeteam cannot be imported."""
    outs = [out / f"{number}.pt" for number in range(len(steps))]
    command = [sys.executable, "-c", WITHOUT_ROPETEAM]
    command += [str(path) for pair in zip(steps, outs) for path in pair]
    done = subprocess.run(
        command, env=clean_environment(), cwd="/", capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(each, weights_only=True) for each in outs]


def test_a_step_on_storage_opens_with_torch_alone_and_loads_when_all_memory_is_lost(cluster, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    nodes = cluster(1, options=["--storage", str(store), *KEEP])
    ranks.run(4, nodes[0].socket, save_to_storage, 10)
    (folder,) = (store / "test").glob("step-*")
    assert {file.name for file in folder.iterdir()} >= {
        ".metadata",
        *(f"__{rank}_0.distcp" for rank in range(4)),
    }
    (tmp_path / "to").mkdir()
    exported = ask("export", "10", str(tmp_path / "to"), "--storage", str(store))
    assert exported.returncode == 0, exported.stderr
    copied = tmp_path / "to" / "test" / folder.name
    for found in opened_by_torch_alone([folder, copied], tmp_path):
        assert found.pop("value") == {"step": 10}
        assert_same(found, whole(10))
    nodes[0].kill(drop_memory=True)
    nodes[0].start()
    assert ranks.run(3, nodes[0].socket, load, None) == [(10, {"step": 10})] * 3

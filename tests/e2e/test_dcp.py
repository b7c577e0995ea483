# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint on several ranks and real daemons: other world sizes, the checkpoint process,
failures, and steps on storage that torch opens alone."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from dcp_ranks import Ranks  # noqa: E402
from harness import WAIT_S, environment  # noqa: E402
from ropeteam import Level  # noqa: E402
from ropeteam.dcp import StorageReader, StorageWriter, latest  # noqa: E402


# Several worlds load a step and commit none: it is not to blame.
KEEP = ["--quarantine-after", "99"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    pool = Ranks(6, environment(), tmp_path_factory.mktemp("worlds"))
    yield pool
    pool.close()


def numbers(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(step=1):
    """The state that all worlds share, each in its own sharding. Uneven on 4 ranks, and `short` leaves some
    without any."""
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
    """As FSDP2 (rows of one dimension), tensor parallelism (columns), and both where the world's size is
    even."""
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
        # The first is staged in memory, the second in the arena. Training goes on at once.
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


# ---- tests


@pytest.mark.parametrize("way", ["save", "own metadata", "thread"])
def test_what_4_ranks_saved_is_loaded_by_1_2_3_4_and_6_bit_for_bit(cluster, ranks, way):
    socket = cluster(1, options=KEEP)[0].socket
    ranks.run(4, socket, save_by, 10, way)
    newest = 11 if way == "thread" else 10
    for size in (1, 2, 3, 4, 6):
        assert ranks.run(size, socket, load, 10) == [(newest, {"step": 10})] * size


def test_the_checkpoint_process_saves_through_its_parent(cluster, ranks):
    socket = cluster(1, options=KEEP)[0].socket
    ranks.run(2, socket, save_by, 10, "process")
    assert ranks.run(3, socket, load, 10) == [(11, {"step": 10})] * 3

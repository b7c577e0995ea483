# SPDX-License-Identifier: Apache-2.0
"""The functions that torch_ranks.py runs for test_torch_state.py: they save and load as ranks of worlds of several
sizes and layouts.

Rank r is on the node of socket r modulo their number. Each world is a process group of the first ranks. The other ranks
only take part in creating its mesh."""

from __future__ import annotations

import contextlib
import logging

import ropeteam.torch as rt
import torch
import torch.distributed as dist
from ropeteam import Aborted, Level
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(13, 8)
        self.up = torch.nn.Linear(8, 12)
        self.down = torch.nn.Linear(12, 8)
        self.head = torch.nn.Linear(8, 13, bias=False)
        self.register_buffer("scale", torch.rand(3))

    def forward(self, x):
        return self.head(self.down(torch.relu(self.up(self.embed(x)))))


def mesh_of(*shape: int, names: tuple[str, ...] = ()) -> DeviceMesh:
    """A mesh of the first ranks; every process must call this."""
    count = torch.Size(shape).numel()
    return DeviceMesh("cpu", torch.arange(count).reshape(shape), mesh_dim_names=names or None)


def tensor_parallel(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


LAYOUTS = {
    "fsdp": lambda model, mesh: fully_shard(model, mesh=mesh),
    "hsdp": lambda model, mesh: fully_shard(model, mesh=mesh),
    "tp": tensor_parallel,
    "2d": lambda model, mesh: (tensor_parallel(model, mesh["tp"]), fully_shard(model, mesh=mesh["dp"])),
    "ddp": lambda model, mesh: torch.nn.parallel.DistributedDataParallel(
        model, process_group=mesh.get_group(), broadcast_buffers=False
    ),
}


def make(layout: str, mesh: DeviceMesh, seed: int, tied: bool = False):
    torch.manual_seed(seed)
    model = Net()
    if tied:
        model.head.weight = model.embed.weight
    made = LAYOUTS[layout](model, mesh)
    model = made if layout == "ddp" else model
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9))


def train(model, optimizer, steps: int) -> None:
    for step in range(steps):
        x = torch.arange(26).reshape(2, 13) % (11 + step)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()


def everything(model, optimizer) -> dict[str, torch.Tensor]:
    """The whole state by name. It is a collective call of the model's mesh."""
    inner = rt._state.as_one(model)
    found = {name: full(value) for name, value in inner.state_dict().items()}
    names = {parameter: name for name, parameter in inner.named_parameters()}
    for parameter, entries in optimizer.state.items():
        found.update({f"{names[parameter]}/{key}": full(value) for key, value in entries.items()})
    return found


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys(), (sorted(one), sorted(other))
    for name in one:
        assert torch.equal(one[name], other[name]), name


@contextlib.contextmanager
def opened(sockets, group):
    with rt.open_distributed(sockets[dist.get_rank() % len(sockets)], group=group, timeout=60) as client:
        yield client
    dist.barrier(group)  # every rank has closed its client


def saves(client, step, model, optimizer, **more) -> None:
    rt.save_state(client, step, model, optimizer, data={"rank": client.rank}, **more)
    client.wait(step, Level.COMMITTED, 60)


def reshard(sockets) -> list[str]:
    """Loads, trains and saves in one world after the other; returns their layouts."""
    worlds = [
        ("fsdp", (4,)), ("fsdp", (1,)), ("fsdp", (2,)), ("fsdp", (3,)), ("fsdp", (6,)),
        ("tp", (4,)), ("ddp", (2,)), ("hsdp", (2, 2)), ("2d", (2, 2)), ("fsdp", (3,)), ("2d", (3, 2)),
        ("ddp", (1,)),
    ]  # fmt: skip
    reference, good = [None], []
    for number, (layout, shape) in enumerate(worlds):
        mesh = mesh_of(*shape, names=("dp", "tp")[: len(shape)])
        group = dist.new_group(list(range(mesh.size())))
        if mesh.get_coordinate() is not None:
            model, optimizer = make(layout, mesh, seed=number)
            with opened(sockets, group) as client:
                loaded = rt.load_state(client, model, optimizer)
                if number:
                    last_world = torch.Size(worlds[number - 1][1]).numel()
                    own = client.rank if client.rank < last_world else client.rank * last_world // mesh.size()
                    assert (loaded.step, loaded.data) == (number, {"rank": own}), loaded
                    equal(everything(model, optimizer), reference[0])
                else:
                    assert loaded is None
                train(model, optimizer, 2)
                reference = [everything(model, optimizer)]
                saves(client, number + 1, model, optimizer)
        dist.broadcast_object_list(reference, src=0)
        good.append(layout)
    return good


def stored(client, step: int) -> int:
    """Bytes of model and optimizer that this rank saved."""
    with client.view(step) as view:
        return sum(view.length(name) for name in view if name.startswith(("model/", "optimizer/")))


def replicas(sockets) -> list[tuple]:
    """For each layout: the bytes that each rank stored, and the bytes of the whole state."""
    reference: list = [None]
    found = []
    for number, (layout, shape) in enumerate([("ddp", (4,)), ("hsdp", (2, 2)), ("tp", (4,)), ("ddp", (4,))]):
        mesh = mesh_of(*shape, names=("dp", "tp")[: len(shape)])
        model, optimizer = make(layout, mesh, seed=7)
        with opened(sockets, mesh_group := dist.new_group(range(4))) as client:
            if rt.load_state(client, model, optimizer) is not None:
                equal(everything(model, optimizer), reference[0])
            train(model, optimizer, 1)
            saves(client, 2 * number + 1, model, optimizer)
            reference = [everything(model, optimizer)]
            saves(client, 2 * number + 2, model, optimizer)  # it checks the result of the first save
            sizes = [None] * 4
            dist.all_gather_object(sizes, stored(client, 2 * number + 2), group=mesh_group)
            once = sum(each.numel() * each.element_size() for each in reference[0].values())
            buffers = 3 * 12  # every rank saves its own buffer of 12 bytes
            found.append((layout, sizes, once + buffers))
    return found


def differ(sockets) -> dict[str, list[tuple]]:
    """One number of rank 2 differs from its replica's. Returns by layout, for each rank: the committed steps, and the
    number of warnings."""
    found = {}
    for number, (layout, shape) in enumerate([("ddp", (4,)), ("hsdp", (2, 2))]):
        mesh = mesh_of(*shape, names=("dp", "tp")[: len(shape)])
        model, optimizer = make(layout, mesh, seed=7)
        with torch.no_grad():
            first = next(model.parameters())
            (first.to_local() if isinstance(first, DTensor) else first).view(-1)[:1] += dist.get_rank() == 2
        with opened(sockets, dist.new_group(range(4))) as client, warnings_of("ropeteam") as warned:
            committed = []
            for step in range(101 + 10 * number, 104 + 10 * number):
                rt.save_state(client, step, model, optimizer)
                try:
                    client.wait(step, Level.COMMITTED, 60)
                    committed.append(step)
                except Aborted as error:
                    assert "do not agree" in str(error), error
                dist.barrier()
            before = [each.clone() for each in model.state_dict().values()]
            rt.load_state(client, model, optimizer, step=step)
            for one, other in zip(before, model.state_dict().values()):
                assert (
                    torch.equal(one.to_local(), other.to_local())
                    if isinstance(one, DTensor)
                    else one.equal(other)
                )
            said = [None] * 4
            dist.all_gather_object(said, (committed, len(warned)))
            found[layout] = said
    return found


def exported(sockets, directory) -> None:
    """Saves models of several layouts to storage, and their whole state to the file whole-STEP."""
    for step, (layout, shape) in enumerate([("fsdp", (3,)), ("2d", (2, 2)), ("ddp", (4,))], 1):
        mesh = mesh_of(*shape, names=("dp", "tp")[: len(shape)])
        group = dist.new_group(list(range(mesh.size())))
        if mesh.get_coordinate() is None:
            continue
        model, optimizer = make(layout, mesh, seed=step, tied=True)
        train(model, optimizer, 1)
        inner = rt._state.as_one(model)
        inner.scale.fill_(dist.get_rank())  # every rank has its own buffer
        with opened(sockets, group) as client:
            saves(client, step, model, optimizer, persist=True)
            client.wait(step, Level.PERSISTED, 60)
            whole = {name: full(value) for name, value in inner.state_dict().items()}
            if client.rank == 0:
                torch.save(whole, directory / f"whole-{step}")


@contextlib.contextmanager
def warnings_of(name: str):
    warned: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = warned.append
    logging.getLogger(name).addHandler(handler)
    yield warned
    logging.getLogger(name).removeHandler(handler)

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import random

import pytest

import ropeteam

torch = pytest.importorskip("torch", reason="torch is not installed")
import ropeteam.torch as rt  # noqa: E402

DTYPES = [
    value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
    and not str(value).startswith(("torch.q", "torch.bits", "torch.uint1bit"))
]


@pytest.fixture
def rope(fake):
    with ropeteam.open(rank=0, world_size=1) as client:
        yield client


def raw(tensor):
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def make(dtype, shape):
    try:
        tensor = torch.empty(shape, dtype=dtype)
        flat = tensor.view(-1).view(torch.uint8)
    except (RuntimeError, TypeError) as error:
        pytest.skip(f"this torch cannot make a {dtype}: {error}")
    flat.copy_(torch.arange(flat.numel()) % 2)
    return tensor


@pytest.mark.parametrize("dtype", sorted(set(DTYPES), key=str), ids=str)
def test_each_dtype_comes_back_to_the_bit(rope, dtype):
    tensor = make(dtype, (3, 2))
    rope.save(1, {"t": tensor})
    back = rope.load()["t"]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert back.untyped_storage().tolist() == tensor.untyped_storage().tolist()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4)], ids=str)
def test_each_shape_comes_back(rope, shape):
    tensor = torch.randn(shape)
    rope.save(1, {"t": tensor})
    target = torch.empty(shape)
    shard = rope.load(into={"t": target})
    assert shard["t"] is target and torch.equal(target, tensor)
    assert torch.equal(rope.load()["t"], tensor)


def test_a_contiguous_tensor_is_read_where_it_lies(fake, rope, monkeypatch):
    from ropeteam import _native

    seen = []
    lib = _native.library()
    put = lib.save_put_many

    def spy(handle, objects, count):
        seen.extend((each.part.data, each.part.length) for each in objects[:count])
        return put(handle, objects, count)

    monkeypatch.setattr(lib, "save_put_many", spy)
    tensor = torch.arange(12.0)
    rope.save(1, {"whole": tensor, "part": tensor[4:6], "flipped": tensor.view(3, 4).t()})
    assert seen[0] == (tensor.data_ptr(), 48)
    assert seen[1] == (tensor.data_ptr() + 16, 8)
    assert seen[2][0] != tensor.data_ptr() and seen[2][1] == 48
    assert torch.equal(rope.load()["flipped"], tensor.view(3, 4).t())


def test_lazy_conjugates_are_saved_as_what_they_mean(rope):
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    rope.save(1, {"conj": tensor.conj(), "neg": tensor.conj().imag})
    shard = rope.load()
    assert shard["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert shard["neg"].tolist() == [-2.0, 4.0]


def test_parameters_and_views_of_them_load_in_place(rope):
    parameter = torch.nn.Parameter(torch.randn(4, 4))
    rope.save(1, {"p": parameter, "row": parameter[1]})
    target = torch.nn.Parameter(torch.zeros(4, 4))
    rope.load(into={"p": target}, names=[])
    assert torch.equal(target, parameter) and target.requires_grad


@pytest.mark.parametrize(
    "target", [torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(4, 2)[:, 0]]
)
def test_targets_that_do_not_fit_are_refused(rope, target):
    rope.save(1, {"t": torch.ones(4)})
    with pytest.raises(ropeteam.InvalidArgument):
        rope.load(into={"t": target})
    assert not target.any()


@pytest.mark.parametrize("tensor", [torch.ones(3, device="meta"), torch.eye(3).to_sparse()])
def test_tensors_without_bytes_here_are_refused(rope, tensor):
    with pytest.raises(ropeteam.Unsupported, match="t:"):
        rope.save(1, {"t": tensor})
    assert rope.latest() is None


def test_reserved_memory_can_be_a_tensor(rope):
    with rope.begin(1) as save:
        target = torch.frombuffer(save.reserve("r", 32), dtype=torch.float32)
        torch.arange(8.0, out=target)
        del target
    with rope.view(1) as view:
        mapped = torch.frombuffer(bytearray(view.map("r")), dtype=torch.float32)
    assert mapped.tolist() == list(range(8))


# ---- training state


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.drop = torch.nn.Dropout(0.5)
        self.last = torch.nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x))))


def train(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(8, 6)).square().mean() * (1 + random.random())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=1e-2),
    "tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2)),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_loaded_training_state_goes_on_to_the_bit(rope, kind):
    torch.manual_seed(3)
    random.seed(3)
    model = Net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, 3)
    rt.save_state(rope, 3, model, optimizer, data={"position": 24}, metadata={"loss": 0.5})
    expected = train(model, optimizer, 4)

    torch.manual_seed(99)
    random.seed(99)
    fresh = Net()
    fresh_optimizer = OPTIMIZERS[kind](fresh.parameters())
    loaded = rt.load_state(rope, fresh, fresh_optimizer)
    assert loaded == rt.Loaded(step=3, data={"position": 24}, metadata={"loss": 0.5})
    assert train(fresh, fresh_optimizer, 4) == expected


def test_two_models_and_their_optimizers_do_not_collide(rope):
    def make():
        models = {"generator": torch.nn.Linear(6, 6), "critic": torch.nn.Linear(6, 6)}
        optimizers = {
            name: torch.optim.Adam(model.parameters(), lr=0.1 * (index + 1))
            for index, (name, model) in enumerate(models.items())
        }
        return models, optimizers

    def run(models, optimizers):
        for _ in range(3):
            models["critic"](models["generator"](torch.randn(4, 6))).square().mean().backward()
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
        return [model.weight.detach().clone() for model in models.values()]

    models, optimizers = make()
    run(models, optimizers)
    data = {"seen": {(1, 2): torch.arange(3)}, "epoch": 3}
    rt.save_state(rope, 1, models, optimizers, data=data)
    expected = run(models, optimizers)
    fresh, fresh_optimizers = make()
    loaded = rt.load_state(rope, fresh, fresh_optimizers)
    assert loaded.data["epoch"] == 3 and loaded.data["seen"][1, 2].tolist() == [0, 1, 2]
    for left, right in zip(run(fresh, fresh_optimizers), expected):
        assert torch.equal(left, right)


def test_loading_fills_an_optimizer_that_has_state_in_place(rope):
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 2)
    rt.save_state(rope, 1, model, optimizer)
    kept = copy.deepcopy(optimizer.state_dict())
    moment = optimizer.state[model.first.weight]["exp_avg"]
    train(model, optimizer, 2)
    rt.load_state(rope, model, optimizer, step=1)
    assert optimizer.state[model.first.weight]["exp_avg"] is moment
    for index, entries in kept["state"].items():
        for key, value in entries.items():
            assert torch.equal(optimizer.state_dict()["state"][index][key], value)


def test_nothing_to_load_is_none(rope):
    assert rt.load_state(rope, Net()) is None


def test_another_model_is_refused_before_anything_changes(rope):
    rt.save_state(rope, 1, Net())
    other = torch.nn.Linear(6, 5)
    before = other.weight.detach().clone()
    with pytest.raises(ropeteam.InvalidArgument, match="; only in the step: .*; only in the model: model/weight"):
        rt.load_state(rope, other, step=1)
    assert torch.equal(other.weight, before)


def test_open_distributed_needs_a_process_group(fake):
    with pytest.raises(ropeteam.InvalidArgument, match="init_process_group"):
        rt.open_distributed()


def test_open_distributed_gives_every_world_another_token(fake, tmp_path):
    import torch.distributed as dist

    tokens = []
    for world in range(2):
        store = dist.FileStore(str(tmp_path / f"store{world}"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            with rt.open_distributed() as client:
                assert (client.rank, client.info().world_size) == (0, 1)
            tokens.append(fake.fake_token())
        finally:
            dist.destroy_process_group()
    assert len(set(tokens)) == 2 and all(len(token) == 32 for token in tokens)

# SPDX-License-Identifier: Apache-2.0
"""Parts of tensors: compared with DTensor's own splitting, and saved by several ranks of one process over the
fake library."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import ropeteam

torch = pytest.importorskip("torch", reason="torch is not installed")
import ropeteam.torch as rt  # noqa: E402
from ropeteam.torch import _boxes  # noqa: E402
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard  # noqa: E402


def split(whole, mesh, coordinate, placements):
    """The part of `whole` at `coordinate` of the mesh, as distribute_tensor() makes it."""
    for size, place, placement in zip(mesh, coordinate, placements):
        if not placement.is_replicate():
            whole = placement._split_tensor(whole, size, with_padding=False, contiguous=True)[0][place]
    return whole


def layout(shape, mesh, coordinate, placements):
    made = list(_boxes.whole(shape))
    for size, place, placement in zip(mesh, coordinate, placements):
        if not placement.is_replicate():
            split_factor = getattr(placement, "split_factor", 1)
            made[placement.dim] = _boxes.shard(made[placement.dim], size, place, split_factor)
    return tuple(made)


def any_layout(dice, dimensions):
    mesh = [dice.randint(1, 4) for _ in range(dice.randint(1, 3))]
    kinds = [lambda d: Replicate(), Shard, Shard, lambda d: _StridedShard(d, split_factor=dice.randint(1, 4))]
    placements = [
        dice.choice(kinds if dimensions else kinds[:1])(dice.randrange(dimensions or 1)) for _ in mesh
    ]
    return mesh, placements


@pytest.mark.parametrize("seed", range(8))
def test_parts_of_any_layout_are_copied_out_of_any_other(seed):
    dice = random.Random(seed)
    for _ in range(60):
        shape = [dice.randint(0 if dice.random() < 0.1 else 1, 9) for _ in range(dice.randint(0, 3))]
        whole = torch.arange(math.prod(shape)).reshape(shape)
        (mesh, placements), (other_mesh, other) = (any_layout(dice, len(shape)) for _ in range(2))
        places = itertools.product(*map(range, mesh))
        parts = [(layout(shape, mesh, at, placements), split(whole, mesh, at, placements)) for at in places]
        dice.shuffle(parts)
        for at in itertools.product(*map(range, other_mesh)):
            wanted, expected = layout(shape, other_mesh, at, other), split(whole, other_mesh, at, other)
            assert _boxes.layout_shape(wanted) == tuple(expected.shape)
            found, left, copied = torch.full((expected.numel(),), -1), _boxes.boxes(wanted), 0
            for have, part in parts:
                copies, left = _boxes.cover(left, expected.shape, _boxes.boxes(have), part.shape)
                for each in copies:
                    for run in range(each.runs):
                        source = part.reshape(-1)[each.source + run * each.stride :][: each.length]
                        found[each.target + run * each.target_stride :][: each.length] = source
                        copied += each.length
            assert not left and torch.equal(found, expected.reshape(-1))
            assert copied == expected.numel(), "nothing is read twice"


# ---- over the fake library


def pieces(whole, count, rank, dimension=0):
    """{"w": the rank's part of `whole`}; parts may be uneven."""
    at = layout(whole.shape, [count], [rank], [Shard(dimension)])
    part = split(whole, [count], [rank], [Shard(dimension)]).clone()
    return {"w": rt.Piece(part, whole.shape, [runs[0][0] for runs in at])}


@pytest.fixture
def saved_by_four(ranks):
    whole = torch.randn(10, 6)
    for client in ranks(4):
        rt.save_tensors(
            client, 1, {**pieces(whole, 4, client.rank), "same": torch.ones(2), "own": client.rank}
        )
    return whole


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("dimension", [0, 1])
def test_pieces_load_on_any_number_of_ranks(ranks, saved_by_four, count, dimension):
    for client in ranks(count):
        into = pieces(torch.zeros(10, 6), count, client.rank, dimension)
        into["same"] = torch.zeros(2)
        assert rt.load_tensors(client, into) == 1
        assert torch.equal(into["w"].tensor, pieces(saved_by_four, count, client.rank, dimension)["w"].tensor)
        assert torch.equal(into["same"], torch.ones(2))


def test_the_same_layout_looks_at_no_other_shard(ranks, saved_by_four, monkeypatch):
    seen = []
    view = ropeteam.Client.view
    monkeypatch.setattr(
        ropeteam.Client, "view", lambda self, *args, **kw: seen.append(args) or view(self, *args, **kw)
    )
    client = ranks(4)[2]
    rt.load_tensors(client, {**pieces(torch.zeros(10, 6), 4, 2), "same": torch.zeros(2)})
    assert [each[:2] for each in seen] == [(1, 2)]


def test_a_target_that_is_not_contiguous_is_filled(ranks, saved_by_four):
    target = torch.zeros(6, 10).t()
    rt.load_tensors(ranks(1)[0], {"w": target})
    assert torch.equal(target, saved_by_four)


@pytest.mark.parametrize(
    ("target", "error", "says"),
    [
        (
            torch.zeros(10, 7),
            ropeteam.InvalidArgument,
            "float32 of shape .10, 6., the target is float32 of shape .10, 7.",
        ),
        (torch.zeros(10, 6).int(), ropeteam.InvalidArgument, "the target is int32"),
    ],
)
def test_targets_that_do_not_fit_change_nothing(ranks, saved_by_four, target, error, says):
    other = torch.zeros(2)
    with pytest.raises(error, match=says):
        rt.load_tensors(ranks(1)[0], {"same": other, "w": target})
    assert not other.any()


def test_what_nobody_saved_is_missing(ranks, saved_by_four):
    client, other = ranks(1)[0], torch.zeros(2)
    with pytest.raises(ropeteam.InvalidArgument, match="no rank of step 1 saved new") as raised:
        rt.load_tensors(client, {"same": other, "new": torch.zeros(1)})
    assert not other.any(), raised
    rt.load_tensors(client, {"same": other, "new": torch.zeros(1)}, strict=False)
    assert other.all()


def test_a_rank_may_have_several_pieces_of_a_tensor(ranks):
    whole = torch.randn(6, 4)
    for client, rows in zip(ranks(2), ([0, 1, 4], [2, 3, 5])):
        pieces = {f"w#{n}": rt.Piece(whole[row : row + 1], (6, 4), (row, 0)) for n, row in enumerate(rows)}
        rt.save_tensors(client, 1, pieces)
    for client in ranks(2):
        into = {"w": torch.zeros(6, 4)}
        rt.load_tensors(client, into, step=1)
        assert torch.equal(into["w"], whole)


def test_a_part_that_nobody_saved_is_named(ranks):
    client = ranks(1)[0]
    rt.save_tensors(client, 1, {"w": rt.Piece(torch.ones(4), [10], [3])})
    with pytest.raises(ropeteam.NotFound, match=r"begins at \(0,\), of size \(3,\)"):
        rt.load_tensors(client, {"w": torch.zeros(10)})


@pytest.mark.parametrize(("shape", "offsets"), [([4], [1]), ([4], [0, 0]), ([4], [-1])])
def test_a_piece_outside_its_tensor_is_refused(ranks, shape, offsets):
    with pytest.raises(ropeteam.InvalidArgument, match="lies outside"):
        rt.save_tensors(ranks(1)[0], 1, {"w": rt.Piece(torch.ones(4), shape, offsets)})


def test_tied_tensors_are_saved_once_and_load_untied(ranks):
    client = ranks(1)[0]
    weight = torch.randn(8, 4)
    rt.save_tensors(client, 1, {"head": weight, "embed": weight, "row": weight[0]})
    with client.view(1) as view:
        assert view.names() == ["head", "row"]
    into = {"head": torch.zeros(8, 4), "embed": torch.zeros(8, 4)}
    rt.load_tensors(client, into)
    assert torch.equal(into["embed"], weight) and torch.equal(into["head"], weight)


class Stage(torch.nn.Module):
    """A pipeline stage: the model's layers from `first` up to, but not including, `last`."""

    def __init__(self, first, last):
        super().__init__()
        self.layers = torch.nn.ModuleDict({str(n): torch.nn.Linear(4, 4) for n in range(first, last)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def stage(first, last):
    model = Stage(first, last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (1 + first))
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_pipeline_stages_load_as_fewer_more_and_none(ranks):
    before = [stage(first, first + 2) for first in (0, 2, 4)]
    for client, (model, optimizer) in zip(ranks(3), before):
        rt.save_state(client, 1, model, optimizer)
    expected = {name: value for model, _ in before for name, value in model.state_dict().items()}
    moments = {}
    for model, optimizer in before:
        names = {parameter: name for name, parameter in model.named_parameters()}
        moments.update({names[parameter]: entry["exp_avg"] for parameter, entry in optimizer.state.items()})
    for cuts in ([(0, 6)], [(0, 3), (3, 6)], [(0, 1), (1, 2), (2, 5), (5, 6)]):
        for client, (first, last) in zip(ranks(len(cuts)), cuts):
            model = Stage(first, last)
            optimizer = torch.optim.AdamW(model.parameters())
            rt.load_state(client, model, optimizer)
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, expected[name])
                assert torch.equal(optimizer.state[parameter]["exp_avg"], moments[name])
                assert optimizer.state[parameter]["step"] == 1


def test_a_whole_model_loads_as_stages_only_when_told(ranks):
    model, optimizer = stage(0, 4)
    rt.save_state(ranks(1)[0], 1, model, optimizer)
    part = Stage(2, 4)
    client = ranks(2)[1]
    with pytest.raises(ropeteam.InvalidArgument, match="another model; only in the step: model/layers.0.bias, "):
        rt.load_state(client, part)
    loaded = rt.load_state(client, part, strict="missing")
    assert loaded.unexpected[:1] == ("model/layers.0.bias",) and not loaded.missing
    assert torch.equal(part.layers["3"].weight, model.layers["3"].weight)


def test_keys_that_differ_are_ignored_when_told(ranks):
    model, optimizer = stage(0, 2)
    client = ranks(1)[0]
    rt.save_state(client, 1, model, optimizer)
    other, other_optimizer = stage(1, 3)
    kept = other.layers["2"].weight.clone()
    loaded = rt.load_state(client, other, strict=False)
    assert loaded.missing == ("model/layers.2.weight", "model/layers.2.bias")
    assert loaded.unexpected == ("model/layers.0.bias", "model/layers.0.weight")
    assert torch.equal(other.layers["1"].weight, model.layers["1"].weight)
    assert torch.equal(other.layers["2"].weight, kept)


def test_version_1_of_the_index_still_loads(ranks, monkeypatch):
    from ropeteam import _values

    model, optimizer = stage(0, 2)
    client = ranks(2)[1]
    encode = _values.encode_index

    def version_1(infos, world_size):
        return encode(infos, world_size).replace(b'"version":2,"world_size":2', b'"version":1')

    with monkeypatch.context() as old:
        old.setattr("ropeteam._client.encode_index", version_1)
        state = rt.training_state(model, optimizer)
        head = state["optimizer"]  # is changed to the format before parts were introduced
        options = {
            key: list(v) if isinstance(v, tuple) else v for key, v in optimizer.param_groups[0].items()
        }
        head["groups"] = [{**options, "params": head["groups"][0]["params"]}]
        client.save(1, state)
    fresh = Stage(0, 2)
    fresh_optimizer = torch.optim.AdamW(fresh.parameters())
    rt.load_state(client, fresh, fresh_optimizer, step=1)
    assert torch.equal(fresh.layers["1"].weight, model.layers["1"].weight)
    assert fresh_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    name = fresh.layers["0"].bias
    assert torch.equal(
        fresh_optimizer.state[name]["exp_avg"], optimizer.state[model.layers["0"].bias]["exp_avg"]
    )


def test_lbfgs_counters_and_numpy_integers_are_saved(ranks):
    numpy = pytest.importorskip("numpy")
    client = ranks(1)[0]
    model = Stage(0, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=numpy.int64(4), history_size=3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    rt.save_state(client, 1, model, optimizer, data=scheduler.state_dict())
    expected = optimizer.step(closure).item(), [p.detach().clone() for p in model.parameters()]
    fresh = Stage(0, 1)
    fresh_optimizer = torch.optim.LBFGS(fresh.parameters())
    loaded = rt.load_state(client, fresh, fresh_optimizer, step=1)
    fresh_scheduler = torch.optim.lr_scheduler.MultiStepLR(fresh_optimizer, [1])
    fresh_scheduler.load_state_dict(loaded.data)
    assert fresh_scheduler.milestones == scheduler.milestones
    model, optimizer = fresh, fresh_optimizer
    assert optimizer.step(closure).item() == expected[0]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected[1]))


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = {"rows": (1, 2), "last": torch.zeros(2)}

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


def test_a_models_extra_state_comes_back(ranks):
    client = ranks(1)[0]
    model = torch.nn.Sequential(Counting(), torch.nn.Linear(2, 2))
    model[0].seen = {"rows": (3, 4), "last": torch.ones(2)}
    rt.save_state(client, 1, model)
    fresh = torch.nn.Sequential(Counting(), torch.nn.Linear(2, 2))
    rt.load_state(client, fresh)
    assert fresh[0].seen["rows"] == (3, 4) and torch.equal(fresh[0].seen["last"], torch.ones(2))

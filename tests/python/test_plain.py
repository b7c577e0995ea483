# SPDX-License-Identifier: Apache-2.0
"""flatten() and unflatten() with state of every kind, and state that cannot be saved."""

from __future__ import annotations

import copy
import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import pytest

import ropeteam

torch = pytest.importorskip("torch", reason="torch is not installed")
np = pytest.importorskip("numpy", reason="numpy is not installed")
from ropeteam.torch._plain import flatten, unflatten  # noqa: E402


def round_trip(state):
    """Flattens and unflattens with strict JSON and cloned tensors, as a save and a load do."""
    tensors, skeleton = flatten(state)
    encoded = json.dumps(skeleton, allow_nan=False)
    return unflatten(json.loads(encoded), {name: tensor.detach().clone() for name, tensor in tensors.items()})


def same(left, right, where="state"):
    assert type(left) is type(right), where
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape, where
        assert torch.equal(left, right) or (left.isnan() == right.isnan()).all(), where
        assert left.requires_grad == right.requires_grad, where
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype and left.shape == right.shape, where
        assert left.tobytes() == right.tobytes() and right.flags.writeable, where
    elif isinstance(left, np.generic):
        assert left.dtype == right.dtype and left.tobytes() == right.tobytes(), where
    elif isinstance(left, dict):
        assert list(left) == list(right), where  # also compares the order
        for key in left:
            same(left[key], right[key], f"{where}/{key}")
        assert getattr(left, "default_factory", None) is getattr(right, "default_factory", None), where
    elif isinstance(left, (list, tuple, deque)):
        assert len(left) == len(right) and getattr(left, "maxlen", None) == getattr(right, "maxlen", None), (
            where
        )
        for index, (one, other) in enumerate(zip(left, right)):
            same(one, other, f"{where}/{index}")
    elif isinstance(left, float) and math.isnan(left):
        assert math.isnan(right), where
    elif isinstance(left, (float, complex)):
        assert repr(left) == repr(right), where  # distinguishes -0.0 from 0.0
    else:
        assert left == right, where


VALUES = [
    None,
    True,
    0,
    -(2**63),
    2**64,
    -(7**6000),  # has more digits than Python's json reads
    0.1,
    -0.0,
    5e-324,
    math.inf,
    -math.inf,
    math.nan,
    complex(-0.0, math.inf),
    "",
    "übung\0 \ud800",
    b"",
    bytes(range(256)) * 3,
    bytearray(b"abc"),
    [1, [2.0, "x"], []],
    (),
    (1, (2, [3])),
    {1, 2, "x"},
    frozenset({(1, 2)}),
    deque([1, 2, 3], maxlen=3),
    deque(),
    range(3, 30, 4),
    slice(None, 3),
    {},
    {"a": {"b": [1]}},
    {"$": "int", "hex": "no"},
    {1: "int", "1": "str", (0, "x"): "tuple", None: 0, False: 1, 2.5: 2, b"k": 3},
    {"epochs": {0: {1: [(2, 3)]}}},
    OrderedDict([("z", 1), ("a", 2)]),
    Counter("abracadabra"),
    defaultdict(list, {"x": [1]}),
    defaultdict(None, {3: 4}),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.channels_last,
    torch.strided,
    torch.device("cuda", 3),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_plain_value_comes_back(value):
    same(value, round_trip(value))
    same({"outer": [value]}, round_trip({"outer": [value]}))


NUMPY = [
    np.float64(0.1),
    np.float32("nan"),
    np.int64(-5),
    np.uint8(255),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.str_("text"),
    np.bytes_(b"raw"),
    np.longdouble("0.1"),
    np.datetime64("2026-01-02T03:04"),
    np.timedelta64(5, "D"),
    np.arange(6).reshape(2, 3),
    np.array(3.5),
    np.zeros((0, 4), np.float16),
    np.arange(1000.0).reshape(10, 100)[:, ::2],
    np.asfortranarray(np.arange(2000).reshape(40, 50)),
    np.arange(200, dtype=">i4"),
    np.array(["a", "bcd"]),
    np.array([(1, 2.5)], dtype=[("step", "<i8"), ("loss", "<f4")]),
    np.array([((1, [1, 2]),)], dtype=[("outer", [("a", "<i2"), ("b", "<i4", (2,))])]),
    np.array(["2026-01-01"], dtype="datetime64[ns]"),
    np.array([True] * 400),
]


@pytest.mark.parametrize(
    "value", NUMPY, ids=lambda value: f"{type(value).__name__}-{value.dtype}-{value.shape}"
)
def test_numpy_comes_back_to_the_bit(value):
    same(value, round_trip(value))
    assert round_trip(value.dtype) == value.dtype


def test_a_read_only_array_comes_back():
    array = np.arange(500)
    array.flags.writeable = False
    assert (round_trip(array) == array).all()


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_random_generators_go_on_where_they_were(kind):
    generator = np.random.Generator(getattr(np.random, kind)(5))
    generator.random(3)
    back = round_trip({"generator": generator})["generator"]
    assert (back.random(7) == generator.random(7)).all() and type(back.bit_generator).__name__ == kind


def test_legacy_and_other_random_states_go_on_where_they_were():
    legacy = np.random.RandomState(3)
    legacy.standard_normal(3)  # after an odd number of calls the state contains a normal deviate
    plain = random.Random(3)
    plain.gauss(0, 1)
    ours = torch.Generator().manual_seed(3)
    torch.rand(5, generator=ours)
    back = round_trip([legacy, plain, ours, random.getstate(), torch.get_rng_state(), np.random.get_state()])
    assert (back[0].standard_normal(5) == legacy.standard_normal(5)).all()
    assert [back[1].gauss(0, 1) for _ in range(3)] == [plain.gauss(0, 1) for _ in range(3)]
    assert torch.equal(torch.rand(5, generator=back[2]), torch.rand(5, generator=ours))
    same(random.getstate(), back[3])
    same(np.random.get_state(), back[5])


# ---- tensors


def test_tensors_are_the_live_ones_named_by_their_place():
    weight = torch.randn(3)
    array = np.arange(1000.0)
    tensors, skeleton = flatten({"state": {0: {"exp_avg": weight}}, "list": [weight[1:], array]})
    assert list(tensors) == ["state/0/exp_avg", "list/0", "list/1"]
    assert tensors["state/0/exp_avg"] is weight
    assert tensors["list/1"].data_ptr() == array.ctypes.data
    assert "exp_avg" in json.dumps(skeleton)


def test_tensors_that_share_memory_are_saved_once_and_share_it_again():
    weight = torch.randn(3)
    other = torch.randn(3)
    state = {"a": weight, "tied": weight.detach(), "b": other, "again": [other], "view": weight[:2]}
    assert sorted(flatten(state)[0]) == ["a", "b", "view"]
    back = round_trip(state)
    assert back["a"] is back["tied"] and back["b"] is back["again"][0]
    same(state, back)


def test_empty_tensors_are_not_taken_for_the_same():
    state = [torch.empty(0), torch.empty(0, 3, dtype=torch.int64), torch.empty(0)]
    same(state, round_trip(state))


def test_a_lazy_conjugate_is_not_its_source():
    tensor = torch.tensor([1 + 2j])
    tensors, _ = flatten([tensor, tensor.conj()])
    assert len(tensors) == 2


def test_parameters_and_gradients_stay_what_they_are():
    tied = torch.nn.Parameter(torch.randn(2))
    state = [
        tied,
        tied,
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.randn(2, requires_grad=True),
    ]
    back = round_trip(state)
    same(state, back)
    assert back[0] is back[1]


def test_a_sparse_tensor_goes_by_the_restricted_pickle():
    sparse = torch.eye(30).to_sparse()
    assert torch.equal(round_trip({"s": sparse})["s"].to_dense(), torch.eye(30))


def test_names_that_collide_or_are_long_stay_apart():
    state = {
        1: torch.zeros(1),
        "1": torch.ones(1),
        "a/b": torch.full((1,), 2.0),
        "a": {"b": torch.full((1,), 3.0)},
    }
    state["x" * 300] = [torch.full((1,), 4.0), torch.full((1,), 5.0)]
    tensors, _ = flatten(state)
    assert len(tensors) == 6 and all(len(name) < 200 for name in tensors)
    same(state, round_trip(state))


# ---- state of training programs


def linear():
    torch.manual_seed(1)
    return torch.nn.Linear(4, 3)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), betas=(0.8, 0.9)),
    "AdamW": lambda p: torch.optim.AdamW([{"params": [each], "lr": 0.1 * i} for i, each in enumerate(p)]),
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, history_size=3, line_search_fn="strong_wolfe"),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_goes_on_from_its_state_dict(kind):
    def train(model, optimizer, steps):
        for step in range(steps):
            data = torch.sin(torch.arange(20.0) + step).view(5, 4)

            def closure():
                optimizer.zero_grad()
                loss = (model(data) - 1).square().mean()  # noqa: B023
                loss.backward()
                return loss

            optimizer.step(closure)

    model = linear()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, 4)
    state = optimizer.state_dict()
    back = round_trip({"model": model.state_dict(), "optimizer": state})
    same(state, back["optimizer"])
    train(model, optimizer, 3)
    fresh = linear()
    fresh_optimizer = OPTIMIZERS[kind](fresh.parameters())
    fresh.load_state_dict(back["model"])
    fresh_optimizer.load_state_dict(back["optimizer"])
    train(fresh, fresh_optimizer, 3)
    assert torch.equal(fresh.weight, model.weight)


class Warmup:
    """A callable whose state LambdaLR keeps."""

    def __init__(self, steps):
        self.steps = steps
        self.seen = {3, 4}

    def __call__(self, step):
        return min(1.0, (step + 1) / self.steps)


lr = torch.optim.lr_scheduler
SCHEDULERS = {
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda step: 0.9**step),
    "LambdaLR-object": lambda o: lr.LambdaLR(o, Warmup(4)),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr.StepLR(o, 2),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [2, 2, 5]),
    "ConstantLR": lambda o: lr.ConstantLR(o),
    "LinearLR": lambda o: lr.LinearLR(o),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "CyclicLR-exp": lambda o: lr.CyclicLR(o, 0.01, 0.1, step_size_up=3, mode="exp_range", gamma=0.99),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, total_iters=2), lr.MultiStepLR(o, [4])], [2]
    ),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.ConstantLR(o), lr.ExponentialLR(o, 0.9)]),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_goes_on_from_its_state_dict(kind):
    def make():
        optimizer = torch.optim.SGD(linear().parameters(), lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[kind](optimizer)

    def rates(optimizer, scheduler, steps):
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    optimizer, scheduler = make()
    rates(optimizer, scheduler, 3)
    back = round_trip([optimizer.state_dict(), scheduler.state_dict()])
    fresh_optimizer, fresh = make()
    fresh_optimizer.load_state_dict(back[0])
    fresh.load_state_dict(back[1])
    assert rates(fresh_optimizer, fresh, 6) == rates(optimizer, scheduler, 6)


def test_a_grad_scaler_and_averaged_weights_come_back():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1, requires_grad=True)).backward()
    scaler.update(4.0)
    averaged = torch.optim.swa_utils.AveragedModel(linear())
    averaged.update_parameters(linear())
    state = {"scaler": scaler.state_dict(), "ema": averaged.state_dict()}
    same(copy.deepcopy(state), round_trip(state))


def test_a_data_loaders_state_comes_back():
    """The state has the form of torchdata's StatefulDataLoader: nested, with workers and a sampler's
    generator."""
    snapshot = {
        "_snapshot": {
            "_snapshot_step": 7,
            "_last_yielded_worker_id": 1,
            "_main_snapshot": {"_num_workers": 2, "_sampler_iter_state": None, "_base_seed": 2**63 - 1},
            "_worker_snapshots": {
                f"worker_{i}": {
                    "worker_id": i,
                    "dataset_state": {"rng": torch.get_rng_state(), "at": np.int64(i)},
                }
                for i in range(2)
            },
        },
        "_steps_since_snapshot": 0,
        "_iterator_finished": False,
        "seen": {("shard", 3): {5, 6}},
    }
    same(snapshot, round_trip(snapshot))


# ---- what cannot be saved


class Custom:
    pass


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        Custom(),
        lambda: 0,
        Point(1, 2),
        np.array([Custom()]),
        defaultdict(lambda: 0),
        open,
        torch.nn.Linear(1, 1),
        iter([]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_need_code_is_refused_with_its_place(value):
    with pytest.raises(TypeError, match="scheduler/0/fn is a .* cannot be saved"):
        flatten({"scheduler": [{"fn": value}]})


def test_a_class_that_torch_was_told_to_load_is_saved():
    value = Custom()
    value.x = [1, torch.ones(2)]
    with torch.serialization.safe_globals([Custom]):
        back = round_trip({"custom": value})["custom"]
    assert type(back) is Custom and back.x[0] == 1 and torch.equal(back.x[1], torch.ones(2))


def test_a_state_that_contains_itself_is_refused():
    state = []
    state.append(state)
    with pytest.raises(TypeError, match="contains itself"):
        flatten({"loop": state})


def test_no_pickle_that_is_loaded_runs_code(tmp_path):
    import base64
    import os
    import pickle

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    encoded = base64.b64encode(pickle.dumps(Evil(), protocol=2)).decode()
    evil = {"$": "pickle", "data": {"$": "bytes", "base64": encoded}}
    with pytest.raises(ropeteam.Unsupported, match="add_safe_globals"):
        unflatten(evil, {})
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "skeleton, error",
    [
        ({"$": "tensor", "name": "gone"}, ropeteam.NotFound),
        ({"$": "later"}, ropeteam.Unsupported),
        ({"$": "dict"}, ropeteam.Corrupt),
        ({"$": "torch.dtype", "value": "load"}, ropeteam.Corrupt),
        ({"$": "numpy.random", "kind": "Generator", "state": {"bit_generator": "seed"}}, ropeteam.Corrupt),
        ({"$": "defaultdict", "items": [], "factory": "eval"}, ropeteam.Corrupt),
        ({"$": "ndarray", "dtype": "|O", "shape": [1], "data": {"base64": "AAAAAAAAAAA="}}, ropeteam.Corrupt),
        ({"$": "ndarray", "dtype": "<f8", "shape": [9], "data": {"base64": "AAAA"}}, ropeteam.Corrupt),
    ],
    ids=str,
)
def test_a_skeleton_that_is_not_one_is_an_error_of_ours(skeleton, error):
    with pytest.raises(error):
        unflatten(skeleton, {})

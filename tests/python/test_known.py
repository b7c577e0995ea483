# SPDX-License-Identifier: Apache-2.0
"""A save with the structure of the previous one reuses its description. Tested over the fake library."""

from __future__ import annotations

import gc
import json
import random
import weakref

import pytest
import ropeteam

torch = pytest.importorskip("torch", reason="torch is not installed")
import ropeteam.torch as rt  # noqa: E402
from ropeteam.torch._known import Known  # noqa: E402


@pytest.fixture
def rope(ranks):
    return ranks(1)[0]


@pytest.fixture
def known(monkeypatch):
    """For each save that tried to reuse the last description: whether it could."""
    answers = []
    real = Known.contents

    def contents(self, objects):
        made = real(self, objects)
        answers.append(made is not None)
        return made

    monkeypatch.setattr(Known, "contents", contents)
    return answers


def state(**changed):
    """Values by name: two tensors, one of them under two names, an empty tensor and a JSON value."""
    weight = torch.arange(12.0).reshape(3, 4)
    whole = {"w": weight, "tied": weight, "b": torch.ones(5), "none": torch.empty(0), "n": {"a": 1}}
    return {name: each for name, each in {**whole, **changed}.items() if each is not None}


def assert_loads(rope, step, wanted):
    with rope.view(step) as view:
        for name, value in wanted.items():
            if isinstance(value, torch.Tensor):
                into = {name: torch.full_like(value, 77, memory_format=torch.contiguous_format)}
                rt.load_tensors(rope, into, step=step)
                assert torch.equal(into[name], value), name
            elif isinstance(value, bytes):
                assert view.read(name) == value
            else:
                encoded = json.dumps(value, separators=(",", ":")).encode()
                assert view.read(name) == encoded


def test_the_next_save_takes_new_bytes_addresses_and_values(rope, known):
    first = state()
    rt.save_tensors(rope, 1, first)
    first["b"].add_(3)
    first["n"] = {"longer": list(range(50))}
    rt.save_tensors(rope, 2, first)
    moved = {name: each.clone() if name == "b" else each for name, each in first.items()}
    rt.save_tensors(rope, 3, moved)
    assert known == [True, True]
    assert_loads(rope, 1, {"b": torch.ones(5), "n": {"a": 1}})
    assert_loads(rope, 3, moved)
    with rope.view(1) as before, rope.view(2) as after:
        assert list(before) == list(after) == ["w", "b", "none", "n"]
        assert before.index() == after.index()


CHANGES = {
    "a dtype": lambda: state(b=torch.ones(5, dtype=torch.float64)),
    "a shape": lambda: state(b=torch.ones(6)),
    "one more": lambda: state(more=torch.ones(2)),
    "one less": lambda: state(b=None),
    "another order": lambda: dict(reversed(state().items())),
    "no longer tied": lambda: state(tied=torch.full((3, 4), 5.0)),
    "one more tied": lambda: (lambda s: {**s, "b": s["w"].view(-1)[:5]})(state()),
    "tied elsewhere": lambda: (lambda s: {**s, "tied": s["w"] + 1, "b": s["w"].view(-1)[:5]})(state()),
    "not contiguous": lambda: state(w=torch.arange(12.0).reshape(4, 3).t(), tied=None),
    "conjugate": lambda: state(b=torch.full((5,), 1 + 2j).conj()),
    "bytes": lambda: state(n=b"plain"),
    "a tensor": lambda: state(n=torch.ones(3)),
    "a value": lambda: state(b=[1, 2]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_described_again(rope, known, change):
    rt.save_tensors(rope, 1, state())
    changed = CHANGES[change]()
    rt.save_tensors(rope, 2, changed)
    assert known == [False]
    assert_loads(rope, 2, changed)


@pytest.mark.parametrize(
    "make", [lambda: torch.arange(12.0).reshape(4, 3).t(), lambda: torch.full((2,), 3j).conj()]
)
def test_what_has_to_be_copied_first_is_described_each_time(rope, known, make):
    for step in (1, 2, 3):
        rt.save_tensors(rope, step, {"w": make()})
        assert_loads(rope, step, {"w": make()})
    assert known == [False, False]


def test_a_training_state_of_the_same_model_is_known(rope, known):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1, 6):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        rt.save_state(rope, step, model, optimizer, data={"seen": "x" * step})
        wanted = [each.clone() for each in model.state_dict().values()], random.random(), torch.rand(1)
    assert known == [True] * 4
    fresh = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    loaded = rt.load_state(rope, fresh, torch.optim.AdamW(fresh.parameters()))
    assert loaded.data == {"seen": "xxxxx"}
    found = list(fresh.state_dict().values()), random.random(), torch.rand(1)
    assert all(torch.equal(*each) for each in zip(found[0], wanted[0])) and found[1:] == wanted[1:]


def test_no_tensor_is_kept(rope):
    tensor = torch.ones(3)
    kept = weakref.ref(tensor)
    for step in (1, 2):
        rt.save_tensors(rope, step, {"w": tensor})
    del tensor
    gc.collect()
    assert kept() is None


def test_replicas_are_known_once_they_were_compared(ranks, known, monkeypatch):
    given = []
    save = ropeteam.Client.save
    monkeypatch.setattr(ropeteam.Client, "wait", lambda *_: None)
    monkeypatch.setattr(
        ropeteam.Client,
        "save",
        lambda self, *args, agreement=0, **more: (
            given.append(agreement),
            save(self, *args, agreement=agreement, **more),
        )[1],
    )
    whole = {"a": torch.ones(8), "b": torch.zeros(9)}
    clients = ranks(2)
    for step in range(1, 5):
        for client in clients:
            pieces = {name: rt.Piece(each, each.shape, [0], (0, 1)) for name, each in whole.items()}
            rt.save_tensors(client, step, pieces)
    # The first save has checksums of the values. The second is described again, without them.
    assert known == [True] * 4
    assert given[0::2] == given[1::2] and given[2] == given[4] == given[6] != given[0] != 0
    for client in clients:
        rt.save_tensors(client, 5, pieces, verify="every")
    assert known == [True] * 4 and given[8] == given[9] != given[6]
    into = {name: torch.full_like(each, 7) for name, each in whole.items()}
    rt.load_tensors(clients[0], into, step=4)
    assert all(torch.equal(into[name], whole[name]) for name in whole)


# ---- Client.save()


def many(**changed):
    return {**{f"t{i}": torch.full((3,), float(i)) for i in range(70)}, "n": {"a": 1}, "b": b"xy", **changed}


def test_client_save_remembers_the_structure_of_many_objects(rope, known):
    rope.save(1, many())
    rope.save(2, many(t3=torch.arange(3.0), n={"a": 2}, b=b"longer"))
    assert known == [True]
    assert_loads(
        rope, 2, {"t3": torch.arange(3.0), "n": {"a": 2}, "b": b"longer", "t69": torch.full((3,), 69.0)}
    )
    rope.save(3, many(t3=torch.ones(2, 2)))  # another shape
    assert_loads(rope, 3, {"t3": torch.ones(2, 2), "t4": torch.full((3,), 4.0)})
    assert known == [True, False]
    rope.save(4, many(t3=torch.ones(4, 2).t()[:, :2].t()))
    rope.save(5, {"few": torch.ones(1)})
    assert known == [True, False, True, False] and rope._known is None


def test_values_that_a_mapping_makes_are_held_while_they_are_saved(rope):
    class Made(dict):
        def items(self):
            return ((name, torch.full((1000,), float(value))) for name, value in dict.items(self))

        def values(self):
            return (value for _, value in self.items())

    for step in (1, 2):
        rope.save(step, Made({f"t{i}": i + step for i in range(70)}))
    assert_loads(rope, 2, {f"t{i}": torch.full((1000,), float(i + 2)) for i in range(70)})

# SPDX-License-Identifier: Apache-2.0
"""State that several ranks have is saved by one of them. The ranks are in one process, over the fake
library."""

from __future__ import annotations

import logging

import pytest
import ropeteam

torch = pytest.importorskip("torch", reason="torch is not installed")
import ropeteam.torch as rt  # noqa: E402
from ropeteam.torch import _replicas  # noqa: E402


@pytest.fixture
def committed(monkeypatch):
    """Every save is committed at once, except steps for which the test sets another outcome in the returned
    dict."""
    outcome = {}

    def wait(self, step, level, timeout):
        if outcome.get(step):
            raise outcome[step]

    monkeypatch.setattr(ropeteam.Client, "wait", wait)
    return outcome


def tensors(count, size=100):
    return {f"w{n}": torch.full((size + n,), float(n)) for n in range(count)}


def pieces(whole, replicas):
    return {name: rt.Piece(each, each.shape, [0], replicas) for name, each in whole.items()}


def saved(client, step):
    with client.view(step) as view:
        return {name: view.length(name) for name in view}


def test_replicas_are_spread_evenly_and_every_rank_loads_all(ranks):
    whole = tensors(10)
    clients = ranks(3)
    for client in clients:
        rt.save_tensors(client, 1, pieces(whole, (0, 1, 2)))
    stored = [saved(client, 1) for client in clients]
    names = [name for each in stored for name in each]
    assert sorted(names) == sorted(whole)
    sizes = [sum(each.values()) for each in stored]
    assert max(sizes) - min(sizes) <= 4 * 109, "by at most the largest"
    for client in clients:
        into = {name: torch.zeros_like(each) for name, each in whole.items()}
        rt.load_tensors(client, into)
        assert all(torch.equal(into[name], whole[name]) for name in whole)


def test_all_has_each_rank_save_its_own(ranks):
    for client in ranks(2):
        rt.save_tensors(client, 1, pieces(tensors(4), (0, 1)), replicas="all")
        assert len(saved(client, 1)) == 4


def test_a_tied_replica_is_stored_once_by_one_rank(ranks):
    weight = torch.randn(5)
    clients = ranks(2)
    for client in clients:
        own = weight.clone()
        rt.save_tensors(client, 2, pieces({"head": own, "embed": own}, (0, 1)))
    assert [list(saved(client, 2)) for client in clients] == [["head"], []]
    into = {"embed": torch.zeros(5)}
    rt.load_tensors(clients[1], into, step=2)
    assert torch.equal(into["embed"], weight)


@pytest.mark.parametrize("wrong", [{"replicas": "some"}, {"replicas": None}, {"verify": "always"}])
def test_other_words_are_refused(ranks, wrong):
    with pytest.raises(ropeteam.InvalidArgument, match="some|None|always"):
        rt.save_tensors(ranks(1)[0], 1, {"w": torch.ones(1)}, **wrong)


def test_what_it_saves_is_said_once_by_rank_0(ranks, caplog):
    with caplog.at_level(logging.INFO, "ropeteam"):
        for client in ranks(4):
            for step in (1, 2):
                rt.save_tensors(client, step, pieces(tensors(4, 100_000), (0, 1, 2, 3)))
    assert [each.message for each in caplog.records] == ["1.53 of 1.53 MiB saved once instead of 4 times"]


def agreements(clients, monkeypatch, step, objects, **options):
    """Saves on all ranks; returns the agreement that each rank gave."""
    given = []
    save = ropeteam.Client.save
    with monkeypatch.context() as watched:
        watched.setattr(
            ropeteam.Client,
            "save",
            lambda self, *args, agreement=0, **more: (given.append(agreement), save(self, *args, **more)),
        )
        for client, each in zip(clients, objects):
            rt.save_tensors(client, step, each, **options)
    return given


def test_ranks_agree_where_their_bytes_are_the_same(ranks, monkeypatch, committed):
    clients, same = ranks(2), pieces(tensors(3), (0, 1))
    other = pieces(tensors(3), (0, 1))
    other["w1"].tensor[7] += 1
    first = agreements(clients, monkeypatch, 1, [same, same])
    assert first[0] == first[1] != 0
    later = agreements(clients, monkeypatch, 2, [same, other])
    assert later[0] == later[1] != first[0], "sums are compared at the first save alone"
    every = agreements(clients, monkeypatch, 3, [same, other], verify="every")
    assert every[0] != every[1]
    new = agreements(ranks(2), monkeypatch, 4, [same, other])
    assert new[0] != new[1]
    never = agreements(ranks(2), monkeypatch, 5, [same, other], verify="never")
    assert never[0] == never[1]
    fewer = {name: each for name, each in same.items() if name != "w2"}
    assert len(set(agreements(ranks(2), monkeypatch, 6, [same, fewer], verify="never"))) == 2
    alone = [pieces(tensors(3), ()) for _ in clients]
    assert agreements(ranks(2), monkeypatch, 7, alone) == [0, 0]


def test_a_step_that_the_leader_refused_has_all_saved_by_all(ranks, committed, caplog):
    clients, objects = ranks(2), pieces(tensors(4), (0, 1))
    for step in (1, 2, 3):
        for client in clients:
            rt.save_tensors(client, step, objects)
        committed[1] = ropeteam.Aborted("the ranks do not agree on step 1")
    assert [len(saved(client, 1)) for client in clients] == [2, 2]
    assert [len(saved(client, step)) for step in (2, 3) for client in clients] == [4, 4, 4, 4]
    assert sum("each rank saves all of its own" in each.message for each in caplog.records) == 2, (
        "once a rank"
    )


@pytest.mark.parametrize("error", [ropeteam.DeadlineExceeded("not yet"), ropeteam.Aborted("a newer step")])
def test_a_step_of_which_nothing_is_known_changes_nothing(ranks, committed, caplog, error):
    clients, objects = ranks(2), pieces(tensors(4), (0, 1))
    for step in (1, 2, 3):
        committed[step] = error
        for client in clients:
            rt.save_tensors(client, step, objects)
    assert [len(saved(client, 3)) for client in clients] == [2, 2]
    assert not caplog.records


def test_groups_of_ranks_compare_what_was_saved(ranks, committed, caplog):
    """Ranks 0 and 2 should have the same state, and ranks 1 and 3; the state of rank 2 differs."""
    clients = ranks(4)
    for step in (1, 2):
        for client in clients:
            objects = pieces(tensors(4, 100 + client.rank % 2), (client.rank % 2, client.rank % 2 + 2))
            if client.rank == 2:
                for each in objects.values():
                    each.tensor[3] += 1
            rt.save_tensors(client, step, objects)
    assert [len(saved(client, 1)) for client in clients] == [2, 2, 2, 2]
    assert [len(saved(client, 2)) for client in clients] == [4, 2, 4, 2]
    assert [each.message.split(":")[1] for each in caplog.records] == [
        " rank 2 has other bytes in ['w1', 'w2']",
        " rank 0 has other bytes in ['w0', 'w3']",
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.uint8])
@pytest.mark.parametrize("place", [0, 8, -1])
def test_a_sum_tells_of_any_byte(dtype, place):
    tensor = torch.zeros(19).to(dtype)[1:18]
    changed = tensor.clone()
    changed[place] = 1
    sums = _replicas._sums({"a": tensor, "b": changed, "c": tensor.clone()})
    assert sums["a"] == sums["c"] != sums["b"]

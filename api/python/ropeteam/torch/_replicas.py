# SPDX-License-Identifier: Apache-2.0
"""Tensors that several ranks have are saved by one of these ranks.

Placements and process groups tell which ranks have the same tensor, and each rank computes from that which
rank saves it: all come to the same result without communication. When a decision is new, sums over the bytes
check that they are equal. If all ranks have the same tensor, the leader compares the sums (`agreement` of
Client.save()) and never commits a step with a difference. If groups of ranks do (HSDP, replicas of pipeline
stages), each rank compares its sums with those in the index of the rank that saved, once the step is
committed. A rank that finds a difference saves everything itself from then on.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .._client import DEFAULT_TIMEOUT, Client, Level
from .._errors import Aborted, DeadlineExceeded, InvalidArgument, RopeteamError, Unsupported
from .._values import Part, Source, Value, is_tensor, part_info
from ._known import Known
from ._pieces import Held, Piece, held

_LOG = logging.getLogger("ropeteam")
_VERIFY = ("first", "every", "never")


def save_tensors(
    client: Client,
    step: int,
    objects: Mapping[str, Value | Piece],
    *,
    replicas: Any = "auto",
    verify: str = "first",
    replicated: Mapping[str, Sequence[int]] | None = None,
    **options: Any,
) -> int:
    """Client.save() that also takes Pieces. For Pieces and DTensors it records which part of the whole they
    are, so that load_tensors() finds them on any number of ranks. Tensors that several ranks have are saved
    by one of them.

    replicas: with "all" each rank saves all of its own. verify: when to compare replicas; see save_state().
    replicated: for tensors without this information, the ranks of torch.distributed that have the same.
    options: those of Client.save().
    """
    if verify not in _VERIFY:
        raise InvalidArgument(f"verify {verify!r}: one of {', '.join(_VERIFY)}")
    if replicas is None or (isinstance(replicas, str) and replicas not in ("auto", "all")):
        raise InvalidArgument(f'replicas {replicas!r}: "auto", "all" or a process group')
    remembered = _REMEMBERED.get(client)
    if remembered is None:
        remembered = _REMEMBERED[client] = _Remembered(client)
    remembered.look()
    alone = remembered.alone or (isinstance(replicas, str) and replicas == "all")
    with torch.no_grad():  # once for all tensors
        return remembered.save(step, objects, replicated or {}, alone, verify, options)


@dataclass(frozen=True)
class _Last:
    """A save whose repetition needs no new decision."""

    options: Any  # those that decide what is shared
    decision: Any
    agreement: int
    known: Known


class _Remembered:
    """The state kept between the saves of a Client."""

    def __init__(self, client: Client) -> None:
        self._client = weakref.ref(client)  # which has this
        self._ranks = _client_ranks(client)
        self.alone = False  # replicas differed: every rank saves everything
        self._owners: dict[Any, dict[str, int]] = {}  # by what was to be decided
        self._verified: Any = None  # the last decision whose replicas were compared
        self._attempted: Any = None  # the last decision that a save was made with
        self._last: _Last | None = None
        #: A save of which it is not known yet whether the ranks had the same: its step, what is verified when
        #: they had, and the sums of what other ranks saved of it.
        self._pending: tuple[int, Any, dict[int, dict[str, int]]] | None = None

    def save(
        self,
        step: int,
        objects: Mapping[str, Any],
        replicated: Mapping[str, Sequence[int]],
        alone: bool,
        verify: str,
        options: Mapping[str, Any],
    ) -> int:
        client = self._client()
        assert client is not None
        last = self._last_if_like((alone, replicated), verify)
        contents = None if last is None else last.known.contents(objects)
        if last is not None and contents is not None:
            if last.decision and self._pending is None:
                self._pending = (step, self._verified, {})
            return self._save(step, contents, last.agreement, options)
        made: dict[str, Any] = dict(objects)
        tensors = {
            name: held(each, name)
            for name, each in objects.items()
            if is_tensor(each) or isinstance(each, Piece)
        }
        tied = _tied(tensors)
        shared = {} if alone else self._shared(client.rank, objects, tensors, replicated)
        shared = {name: who for name, who in shared.items() if tied[name] == name}
        decision = tuple(
            (name, _bytes(tensors[name]), str(tensors[name].tensor.dtype), who)
            for name, who in shared.items()
        )
        owners = self._decide(client.rank, decision, sum(map(_bytes, tensors.values())))
        first, self._attempted = decision != self._attempted, decision
        wanted = verify == "every" or (verify == "first" and (first or decision != self._verified))
        sums = _sums({name: tensors[name].tensor for name in shared}) if wanted else {}
        world = client.info().world_size if shared else 0
        everywhere = {name: owner for name, owner in owners.items() if len(shared[name]) == world}
        for name, has in tensors.items():
            at = (owners.get(tied[name], client.rank), tied[name])
            shape = None if has.part is None else has.global_shape
            other = None if at == (client.rank, name) else at
            compared = None if name in everywhere else sums.get(name)
            made[name] = Part(has.tensor, shape, has.part, other, compared)
        if shared and self._pending is None:
            elsewhere: dict[int, dict[str, int]] = defaultdict(dict)
            for name, value in sums.items():
                if name not in everywhere and owners[name] != client.rank:
                    elsewhere[owners[name]][name] = value
            self._pending = (step, decision if sums else self._verified, elsewhere)
        # With the sums only where every rank gives them: at the first save of a decision all do.
        given = sums if first or verify == "every" else {}
        said = [(name, owner, _bytes(tensors[name]), given.get(name)) for name, owner in everywhere.items()]
        agreement = _agreement(said)
        saved = self._save(step, made, agreement, options)
        if not sums:
            infos = {
                name: part_info(made[name]) if name in tensors else Source(each, name).info
                for name, each in objects.items()
            }
            known = Known(objects, infos, tied, client.info().world_size)
            self._last = _Last((alone, replicated), decision, agreement, known)
        return saved

    def _last_if_like(self, options: Any, verify: str) -> _Last | None:
        """The last save, if the next one shares the same and needs no sums."""
        last = self._last
        # The first save of a decision gives its sums, on every rank: what they agree on must not depend on
        # what one rank knows.
        if last is None or last.options != options or last.decision != self._attempted:
            return None
        verified = verify == "never" or (verify == "first" and last.decision == self._verified)
        return last if verified or not last.decision else None

    def _save(self, step: int, objects: Any, agreement: int, options: Mapping[str, Any]) -> int:
        client = self._client()
        assert client is not None
        try:
            return client.save(step, objects, agreement=agreement, **options)
        except Unsupported as error:  # a node of the job has an older daemon, whose leader would not compare
            if agreement:
                self._fall_back(str(error))
            raise

    def _shared(
        self,
        rank: int,
        objects: Mapping[str, Any],
        tensors: Mapping[str, Held],
        replicated: Mapping[str, Sequence[int]],
    ) -> dict[str, tuple[int, ...]]:
        """For each tensor that several ranks have: those ranks."""
        shared = {}
        for name, has in tensors.items():
            who: Sequence[int] = replicated.get(name, has.replicas)
            if len(who) < 2:
                continue
            if not isinstance(objects[name], Piece):
                who = _mapped(who, self._ranks)
            if len(who) > 1 and rank in who and has.tensor.numel():
                shared[name] = tuple(who)
        return shared

    def _decide(self, rank: int, decision: Any, total: int) -> dict[str, int]:
        """Decides which rank saves which tensor: of the ranks that have it, the one with the fewest bytes so
        far, the largest tensors first (Graham, Bounds on Multiprocessing Timing Anomalies, 1969: longest
        processing time first). Each set of ranks is decided separately, because other ranks do not know of
        it."""
        owners = self._owners.get(decision)
        if owners is None:
            owners = {}
            load: dict[tuple[int, ...], dict[int, int]] = {}
            for name, size, _, who in sorted(decision, key=lambda each: (-each[1], each[0])):
                loads = load.setdefault(who, dict.fromkeys(who, 0))
                owners[name] = min(who, key=lambda each: (loads[each], each))
                loads[owners[name]] += size
            self._owners = {decision: owners}
            if decision and rank == 0:
                size = sum(each[1] for each in decision)
                copies = max(len(each[3]) for each in decision)
                scale, unit = (2**30, "GiB") if total >= 2**30 else (2**20, "MiB")
                _LOG.info(
                    "%.2f of %.2f %s saved once instead of %d times",
                    size / scale,
                    total / scale,
                    unit,
                    copies,
                )
        return owners

    def look(self) -> None:
        """Checks whether the replicas were equal, as far as that is known by now. Never waits and never
        raises: the next save tries again."""
        client = self._client()
        if self._pending is None or client is None:
            return
        step, decision, elsewhere = self._pending
        try:
            client.wait(step, Level.COMMITTED, 0)
        except DeadlineExceeded:
            return
        except Aborted as error:
            self._pending = None
            if "do not agree" in str(error):
                self._fall_back(str(error))
            return
        except RopeteamError:
            self._pending = None
            return
        self._pending = None
        try:
            for owner, sums in elsewhere.items():
                with client.view(step, owner, DEFAULT_TIMEOUT, partial=True) as view:
                    index = view.index().objects
                differing = [
                    name for name, value in sums.items() if index.get(name, {}).get("sum", value) != value
                ]
                absent = [name for name in sums if name not in index or "at" in index[name]]
                if differing or absent:
                    return self._fall_back(
                        f"rank {owner} has other bytes in {sorted({*differing, *absent})[:5]}"
                    )
        except RopeteamError:
            return
        self._verified = decision

    def _fall_back(self, why: str) -> None:
        self.alone = True
        _LOG.warning(
            "tensors that were taken for the same on several ranks differ, each rank saves all of its own "
            "from now on: %s",
            why,
        )


_REMEMBERED: weakref.WeakKeyDictionary[Client, _Remembered] = weakref.WeakKeyDictionary()


def _client_ranks(client: Client) -> Mapping[int, int]:
    """The Client's ranks by torch.distributed's ranks; empty if they are unrelated."""
    if not dist.is_initialized():
        return {}
    ranks = client._group_ranks
    if ranks is None:  # opened by hand
        world = client.info().world_size
        same = (dist.get_world_size(), dist.get_rank()) == (world, client.rank)
        ranks = range(world) if same else ()
    return {rank: index for index, rank in enumerate(ranks)}


def _mapped(who: Iterable[int], ranks: Mapping[int, int]) -> tuple[int, ...]:
    """Ranks of torch.distributed as the Client's; empty if one is outside its world."""
    mapped = [ranks.get(rank, -1) for rank in who]
    return () if -1 in mapped else tuple(sorted(mapped))


def _tied(tensors: Mapping[str, Held]) -> dict[str, str]:
    """For each name, the first name for the same memory."""
    first: dict[int, list[str]] = {}  # by address: names of different tensors that begin there
    tied: dict[str, str] = {}
    for name, has in tensors.items():
        there = first.setdefault(has.tensor.data_ptr(), []) if has.tensor.numel() else []
        same = [other for other in there if _same_memory(tensors[other].tensor, has.tensor)]
        tied[name] = same[0] if same else name
        if not same:
            there.append(name)
    return tied


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of two tensors at one address."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
    )


def _bytes(has: Held) -> int:
    return int(has.tensor.numel() * has.tensor.element_size())


def _sums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """For each tensor the sum of its bytes, eight at a time: one pass over the memory in place."""
    sums = []
    for tensor in tensors.values():
        raw = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        if raw.storage_offset() % 8:
            raw = raw.clone()
        whole = raw.numel() // 8 * 8
        sums.append(raw[:whole].view(torch.int64).sum() + raw[whole:].sum(dtype=torch.int64))
    return dict(zip(tensors, torch.stack([each.cpu() for each in sums]).tolist())) if sums else {}


def _agreement(said: list[Any]) -> int:
    """A value that is equal on all ranks with equal content. 0, which means no agreement, if there is no
    content."""
    digest = hashlib.blake2b(repr(said).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") or 1) if said else 0

# SPDX-License-Identifier: Apache-2.0
"""StorageWriter: torch.distributed.checkpoint saves into this rank's shard of a step."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Union

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import storage as dcp_storage
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .._client import Client, Level
from .._errors import Aborted, InvalidArgument, RopeteamError
from .._values import JsonValue, encode_metadata
from ._layout import Layout, Options, lay_out
from ._prepared import prepare
from ._sink import Guard, LocalSink, RemoteSink, Sink, save_is_over_in_this_thread, serve, until_thread_ends
from ._staging import (
    Handover,
    Known,
    Memory,
    State,
    Structure,
    is_default,
    memory_of,
    plan_key,
    stage_in_memory,
)

#: The coordinator's file, and each rank's own if use_collectives is False.
METADATA = filesystem._metadata_fn
#: Where a DCP rank is not the Ropeteam rank of the same number: {"version": 1, "coordinator": 2, "ranks":
#: [2, 3]}. Only
#: the coordinator, itself a Ropeteam rank, has "ranks".
NOTE = ".ropeteam/dcp"
NOTE_VERSION = 1

#: Bytes reserved for .metadata: for one item with a long name, and for the rest.
_METADATA_ITEM_BYTES = 700
_METADATA_BYTES = 8192

#: .metadata, NOTE, and the step's metadata.
_OWN_OBJECTS = 3
#: Steps for which a coordinator keeps the ranks' results.
_RESULTS_KEPT = 2

CheckpointId = Union[int, str, "os.PathLike[str]"]


def as_step(checkpoint_id: CheckpointId) -> int:
    """A step from what DCP calls a checkpoint_id. InvalidArgument: not a number."""
    text = checkpoint_id if isinstance(checkpoint_id, int) else os.path.basename(os.fspath(checkpoint_id))
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(f"checkpoint_id {checkpoint_id!r}: a step's number is needed") from None


@dataclasses.dataclass
class _Prefix(filesystem._StoragePrefix):  # type: ignore[misc]
    """Sent with a rank's plan from the coordinator to the rank."""

    coordinator: int = 0  # its Ropeteam rank


@dataclasses.dataclass(frozen=True)
class _Rank:
    """One of a rank's results: its Ropeteam rank, if DCP's rank differs."""

    rank: int


@dataclasses.dataclass(frozen=True)
class _As:
    """A rank's results for this step."""

    step: int


class _Results(list[Any]):
    """DCP holds it until finish() has ended, or until the save has failed because of another rank."""

    guard: Guard | None = None

    def __reduce__(self) -> Any:
        return list, (list(self),)


@dataclasses.dataclass
class _Staged:
    """The result of stage() for the following save."""

    #: If copied to memory: the copy, and whether the original is in host memory.
    state: State | None = None
    on_host: bool = False
    #: If put into the arena: the plan used, its planner, and the results for write_data().
    plan: SavePlan | None = None
    planner: type[SavePlanner] | None = None
    results: list[WriteResult] = dataclasses.field(default_factory=list)
    #: If it failed.
    error: Exception | None = None


class StorageWriter(dcp_storage.StorageWriter, AsyncStager):  # type: ignore[misc]
    """Saves one step by ``dcp.save`` or ``dcp.async_save``, as ``storage_writer=StorageWriter(rope, step)``.

    Every rank of the world makes one with its Client and the same step; each save needs a new one. It becomes
    the rank's shard: files as FileSystemWriter writes them, ``__0_0.distcp`` and so on, and on the
    coordinator ``.metadata``. The tensors' bytes go straight into the arena. When dcp.save returns, each
    rank's shard is LOCAL; ``rope.wait(step)`` waits until the step is COMMITTED.

    It is also the stager of dcp.async_save. It copies the state into the arena before async_save returns, if
    this Client's previous async save had a state of the same structure. Otherwise it first copies it into
    ordinary memory, which is freed after the save.

    step: alternatively ``checkpoint_id=step`` of dcp.save. async_save stages before it passes the id, so
    there the first way is faster.
    single_file_per_rank, thread_count, serialization_format: the layout of the files, as in FileSystemWriter.
    No more threads are used.
    metadata: the step's, as in Client.save(); the coordinator's counts.
    persist: write the step to storage once it is committed, as in Client.save().

    dcp.save, or the future of async_save, raises errors on all ranks, as torch's CheckpointException, which
    is a BaseException. It has each rank's error. NoSpace. AlreadyExists: this rank has already saved the
    step, possibly when another rank failed; continue with the next step. Aborted: the plan differs from the
    one used for staging; the next save makes a new one. A failed save is aborted on the ranks where it
    failed, and on the others at the latest when this thread saves again.

    One writer saves one step at a time. Threads must not share it.
    """

    _synchronize_after_execute = True  # async_save calls synchronize_staging() just before it returns

    def __init__(
        self,
        client: Client,
        step: CheckpointId | None = None,
        *,
        single_file_per_rank: bool = True,
        thread_count: int = 1,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        metadata: Mapping[str, JsonValue] | None = None,
        persist: bool = False,
    ) -> None:
        super().__init__()
        if thread_count < 1:
            raise InvalidArgument(f"thread_count {thread_count}: at least 1 is needed")
        if metadata is not None:
            encode_metadata(metadata)  # raises TypeError now
        self._options = Options(single_file_per_rank, thread_count, serialization_format)
        self._step = None if step is None else as_step(step)
        self._metadata, self._persist = metadata, persist
        self._client: Client | None = client  # None: this is the checkpoint process
        self._rope_rank = client.rank
        self._memory = memory_of(client)
        self._save_id = str(uuid.uuid4())
        self._used = False  # a save of this step has begun
        self._sink: Sink | None = None
        self._staged = _Staged()
        self._handover: Handover | None = None
        self._rank, self._is_coordinator, self._use_collectives = 0, True, True
        self._items = 0  # of all ranks, counted by the coordinator

    # ---- of the storage

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """DCP announces a save, between stage() and the rest."""
        self._save_id = str(uuid.uuid4())
        step = self._step if checkpoint_id is None else as_step(checkpoint_id)
        if step == self._step:
            return
        if self._staged.plan is not None:
            self._give_up()
            self._staged.error = InvalidArgument(
                f"the state was staged for step {self._step}, and checkpoint_id is {step}: give the step to "
                "StorageWriter alone"
            )
        self._step, self._used = step, False

    def storage_meta(self) -> StorageMeta:
        # The first call of a save in its thread.
        if self._sink is None or self._sink.over:
            self._sink = self._new_sink(None)
        until_thread_ends(self._sink)
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    @property
    def checkpoint_id(self) -> str:
        return str(self._step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether it is the number of a step."""
        try:
            return as_step(checkpoint_id) >= 0
        except (InvalidArgument, TypeError):
            return False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._is_coordinator = is_coordinator
        self._rank = kwargs.get("rank") or 0
        self._use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        error, self._staged.error = self._staged.error, None
        if error is not None:
            raise error
        if self._step is None:
            raise InvalidArgument(
                "StorageWriter has no step: StorageWriter(rope, step), or checkpoint_id=step"
            )
        if self._use_collectives:
            return plan
        return dataclasses.replace(plan, storage_data=_Prefix(f"__{self._rank}_", self._rope_rank))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._items = sum(len(plan.items) for plan in plans)
        return [
            dataclasses.replace(plan, storage_data=_Prefix(f"__{rank}_", self._rope_rank))
            if plan.storage_data is None
            else plan
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        sink = self._sink
        assert sink is not None and self._step is not None
        try:
            if self._staged.plan is not None:
                written = self._as_staged(plan, planner)
            else:
                written = self._write(sink, plan, planner)
            coordinator = getattr(plan.storage_data, "coordinator", 0)
            results = _Results(self._report(written, coordinator))
            if self._is_coordinator or not self._use_collectives:
                results.guard = Guard(sink)  # until finish(), which is not called if another rank has failed
            else:
                if self._rank != self._rope_rank or coordinator != 0:
                    sink.put(NOTE, _note(coordinator))
                sink.commit(persist=False)
        except BaseException:
            self._give_up()
            raise
        self._staged = _Staged()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        sink = self._sink
        assert sink is not None and self._step is not None
        try:
            full = [self._full(rank, reported) for rank, reported in enumerate(results)]
            metadata.version = filesystem.CURRENT_DCP_VERSION
            metadata.storage_data = {result.index: result.storage_data for each in full for result in each}
            metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)
            name = METADATA if self._use_collectives else f"__{self._rank}{METADATA}"
            sink.put_parts(name, [pickle.dumps(metadata)])
            ranks = [
                next((each.rank for each in one if isinstance(each, _Rank)), at)
                for at, one in enumerate(results)
            ]
            if self._use_collectives and (self._rope_rank != 0 or ranks != list(range(len(ranks)))):
                sink.put(NOTE, _note(self._rope_rank, ranks))
            if self._metadata is not None:
                sink.put_metadata(self._metadata)
            sink.commit(self._persist)
        except BaseException:
            self._give_up()
            raise
        if self._use_collectives:
            self._memory.results[self._step] = full
            for step in list(self._memory.results)[:-_RESULTS_KEPT]:
                del self._memory.results[step]

    # ---- of the stager

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Stages the state, so that training may change it. An error here fails the save later, on all ranks:
        if it were raised at once, the other ranks would wait for this one."""
        save_is_over_in_this_thread()
        if self._sink is not None and not self._sink.over:
            raise InvalidArgument(
                f"this StorageWriter still saves step {self._step}: wait for its future, or make one "
                "for each save"
            )
        self._staged = _Staged()
        try:
            state = State.of(state_dict)
            known = self._memory.known
            structure = known.structure if known and state.has(known.structure) else state.structure()
            self._sink = sink = self._new_sink(structure)
            fresh = self._step is not None and not self._used
            if known and fresh and structure is known.structure and self._options == known.options:
                self._handover = Handover(self._stage_in_arena(sink, known, state))
            else:
                staged = stage_in_memory(state)
                self._staged.state, self._staged.on_host = State.of(staged), state.on_host()
                self._handover = Handover(staged)
            return self._handover
        except Exception as error:
            self._give_up()
            self._staged.error = error
            return state_dict

    def synchronize_staging(self) -> None:
        """Nothing to wait for: the state is staged when stage() returns."""
        if self._handover is not None:
            self._handover.give()
            self._handover = None

    def close(self) -> None:
        """Discards a staged state that was not saved. A writer need not be closed otherwise."""
        self._give_up()

    def _stage_in_arena(self, sink: LocalSink, known: Known, state: State) -> dict[str, Any]:
        filled = known.prepared.fill(state) if known.prepared else None
        if filled is not None:
            results = known.prepared.results
            self._begin(sink, filled, results)
            for file in filled:
                sink.put_fields(file.name, file.fields, file.length)
        else:
            layout = lay_out(known.plan, state.resolve, self._options)
            results = layout.results
            self._put(sink, layout)
            known.prepared = prepare(layout, state)
        self._staged = _Staged(plan=known.plan, planner=known.planner, results=results)
        if known.hollow is None:
            known.hollow = state.without_data()
        return known.hollow

    # ---- inside

    def _new_sink(self, structure: Structure | None) -> LocalSink:
        assert self._client is not None
        memory = self._memory

        def learn(*plan: Any) -> None:
            memory.known = Known(structure, *plan) if plan and structure is not None else None

        return LocalSink(self._client, learn)

    def _give_up(self) -> None:
        self._staged = _Staged()
        if self._sink is not None:
            self._sink.close()

    def _begin(self, sink: Sink, files: Sequence[Any], results: list[WriteResult]) -> None:
        assert self._step is not None
        self._used = True
        length = _METADATA_BYTES + _METADATA_ITEM_BYTES * max(len(results), self._items)
        sink.begin(self._step, length + sum(file.length for file in files), len(files) + _OWN_OBJECTS)

    def _put(self, sink: Sink, layout: Layout) -> None:
        self._begin(sink, layout.files, layout.results)
        for file in layout.files:
            sink.put_parts(file.name, file.parts)

    def _write(self, sink: Sink, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        given: dict[Any, Any] = {}
        state = self._staged.state

        def resolve(item: WriteItem) -> Any:
            value = planner.resolve_data(item)
            if state is not None:
                given[item.index] = value
            return value

        # FileSystemWriter's order where it copies from a GPU ahead of writing.
        by_size = state is None and self._options.thread_count == 1 and torch.cuda.is_available()
        layout = lay_out(plan, resolve, self._options, by_size)
        self._put(sink, layout)
        if state is not None and is_default(plan, state, given):
            made: tuple[Any, ...] = ()
            if isinstance(sink, LocalSink) and self._staged.on_host:
                # Here in the background, so that the next save does not block training for it. The copy has
                # the structure of the original, and only that counts.
                made = (state.without_data(), prepare(layout, state))
            sink.learn(plan, type(planner), self._options, *made)
        return layout.results

    def _as_staged(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        staged = self._staged
        assert staged.plan is not None
        mine, theirs = plan_key(staged.plan), plan_key(plan)
        if mine == theirs and type(planner) is staged.planner:
            indices = {item.index: item.index for item in plan.items}  # of the plan that .metadata is made of
            return [dataclasses.replace(result, index=indices[result.index]) for result in staged.results]
        assert self._sink is not None
        self._sink.forget()
        if mine == theirs:
            difference = f"a {type(planner).__name__} made it"
        else:
            at = next((other for own, other in zip(mine, theirs) if own != other), "its end")
            difference = f"it has {len(plan.items)} items, not {len(staged.plan.items)}, and differs at {at}"
        raise Aborted(
            f"step {self._step}: rank {self._rope_rank} staged its state by the plan of its last save, and "
            f"the ranks' plan is another one now: {difference}. This save is given up; the next one is "
            "staged without a plan."
        )

    def _report(self, results: list[WriteResult], coordinator: int) -> list[Any]:
        """The results that DCP gathers at the coordinator. If the coordinator already has them (from a
        committed step), the number of that step is enough."""
        assert self._step is not None
        mark = [] if self._rank == self._rope_rank else [_Rank(self._rope_rank)]
        last = self._memory.reported
        self._memory.reported = (self._step, results, coordinator)
        if last is not None and self._use_collectives and last[1:] == (results, coordinator):
            if self._is_committed(last[0]):
                return [*mark, _As(last[0])]
        return [*mark, *results]

    def _is_committed(self, step: int) -> bool:
        try:
            if self._client is not None:
                self._client.wait(step, Level.COMMITTED, timeout=0)
                return True
        except RopeteamError:
            pass  # not yet, or not kept any more: all is reported
        return False

    def _full(self, rank: int, reported: list[Any]) -> list[WriteResult]:
        for each in reported:
            if isinstance(each, _As):
                known = self._memory.results.get(each.step, [])
                if rank >= len(known):
                    raise Aborted(f"rank {rank} reports as of step {each.step}, which is not known here")
                return known[rank]
        return [each for each in reported if isinstance(each, WriteResult)]

    def __getstate__(self) -> dict[str, Any]:
        """For the checkpoint process: a writer whose sink is in this process. The thread that waits for that
        process pickles it."""
        if self._client is None:
            raise TypeError("a StorageWriter of the checkpoint process goes nowhere else")
        if self._sink is None or self._sink.over:
            self._sink = self._new_sink(None)
        until_thread_ends(self._sink)
        return {
            **self.__dict__,
            "_sink": RemoteSink(serve(self._sink)),
            **{"_client": None, "_handover": None, "_memory": Memory()},
        }


def _note(coordinator: int, ranks: list[int] | None = None) -> bytes:
    note: dict[str, Any] = {"version": NOTE_VERSION, "coordinator": coordinator}
    return json.dumps(note if ranks is None else {**note, "ranks": ranks}, separators=(",", ":")).encode()

# SPDX-License-Identifier: Apache-2.0
"""Client and View: two of the C API's three handles as context managers; _save.py has the third."""

from __future__ import annotations

import ctypes
import enum
import logging
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _native
from ._errors import InvalidArgument, NotFound
from ._native import Handle, decode_name, encode_name, library, timeout_ms, unsigned
from ._ranges import Range, RangeArray
from ._save import Contents, Save, is_own
from ._values import (
    INDEX_NAME,
    METADATA_NAME,
    Index,
    JsonValue,
    ObjectInfo,
    Source,
    Value,
    decode_index,
    decode_metadata,
    encode_index,
    encode_metadata,
    is_tensor,
    new_tensor,
    object_info,
    target_memory,
)

#: The timeout in seconds of calls without one.
DEFAULT_TIMEOUT = 30.0


class Level(enum.IntEnum):
    """The levels of a shard. Each level includes those before it."""

    LOCAL = 1  # in this node's arena, checksummed; survives the death of any process
    REPLICATED = 2  # verified copies on as many other nodes as configured
    COMMITTED = 3  # every rank of this incarnation reached REPLICATED at this step
    PERSISTED = 4  # the whole step is on storage


@dataclass(frozen=True)
class Info:
    """This rank, and the node that it saves on."""

    rank: int
    world_size: int
    incarnation: int  # counted from 1
    chunk_bytes: int
    arena_bytes: int  # the node's whole budget


@dataclass(frozen=True)
class StepInfo:
    """A step that can be loaded."""

    step: int
    incarnation: int  # the one that saved it
    world_size: int  # the number of ranks that saved it: their views can be opened
    # A newer step that could be produced but is quarantined: the job kept failing after it had restored that
    # step, or an operator quarantined it. None: there is none. It can be opened by its number.
    passed_over: int | None = None


@dataclass(frozen=True)
class StoredStep:
    """A step on storage."""

    step: int
    incarnation: int  # the one that saved it
    folder: str  # below the job's: "step-0000000100-i…"; `ropeteam export` and `verify` accept it
    problem: str  # why it cannot be restored; empty: its manifest is good, and its files exist
    metadata: dict[str, Any]  # as given to save(); empty if there is none or it is unknown
    time: int  # when it was written: seconds since 1970, by the writer's clock; 0 if unknown
    bytes: int  # total of its ranks' shards; 0 if unknown
    world_size: int  # the number of ranks that saved it; 0 if unknown


class Shard(dict[str, Any]):
    """The objects that one rank saved at one step, by name: tensors as tensors, JSON as values, all others as
    bytes."""

    def __init__(self, step: int, rank: int) -> None:
        super().__init__()
        self.step = step
        self.rank = rank


def library_version() -> str:
    """The version of the libropeteam.so in use, e.g. "0.1.0"."""
    return str(library().version().decode())


def open(
    socket: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    incarnation_token: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Client:
    """Connects this process, as a rank, to its node's daemon. The same as ``Client(...)``; see there."""
    return Client(
        socket, rank=rank, world_size=world_size, incarnation_token=incarnation_token, timeout=timeout
    )


#: The numbers of processes that launchers set which do not set RANK. Slurm's SLURM_NTASKS is also set in a shell of an
#: allocation, where one process runs.
_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def _is_alone() -> bool:
    """Whether no launcher has started this process as one of several, nor a program that has formed a group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        if distributed.get_world_size() > 1:
            return False
    return not any(os.environ.get(name) for name in ("RANK", "WORLD_SIZE")) and all(
        os.environ.get(name, "1") in ("", "1") for name in _COUNTS
    )


#: A save of fewer objects is described again each time: that takes less than the import of what remembers it.
_KNOWN_FROM = 64

_open_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def opened_here() -> list[Client]:
    """This process's open clients, without those that a parent opened before fork()."""
    return [client for client in list(_open_clients) if client._handle is not None and client._handle.own]


class Client:
    """A rank's connection to its node's ropeteamd. A context manager: leaving it closes it.

    Threads may share a Client. Closing it aborts saves that were not committed and closes its views.
    A process made by fork() opens its own.
    """

    def __init__(
        self,
        socket: str | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        incarnation_token: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        """Waits until a leader has admitted this rank.

        socket: the daemon's unix socket; default: ROPETEAM_SOCKET, which ``ropeteam run`` sets.
        rank, world_size: default: RANK and WORLD_SIZE, which launchers set. If no launcher has set anything:
            the only rank.
        incarnation_token: a string that all ranks of the incarnation share and no other incarnation has.
            Without it ROPETEAM_INCARNATION_TOKEN, or SLURM's job, step and restart numbers;
            ``ropeteam.torch.open_distributed()`` makes one. When a rank has left, the next one that opens with
            the same token begins the next incarnation. Without any token, an incarnation ends when one of its
            ranks dies or opens again.

        Unavailable: there is no daemon at the socket. Stale: this incarnation has been superseded.
        InvalidArgument: the rank is not below world_size, or the incarnation of this token has another world
        size. AlreadyExists: this rank of this incarnation is already open. DeadlineExceeded: not admitted
        within `timeout` seconds, for example because an incarnation of another world size is still open:
        close its handles first.
        """
        if rank is None and world_size is None and _is_alone():
            rank, world_size = 0, 1
        options = _native.OpenOptions(size=ctypes.sizeof(_native.OpenOptions))
        options.socket = None if socket is None else socket.encode("utf-8", "surrogateescape")
        options.rank = _native.RANK_FROM_ENV if rank is None else unsigned(rank, 32, "rank")
        if rank == _native.RANK_FROM_ENV:
            raise InvalidArgument(f"rank {rank}: outside any world")
        if world_size is not None and world_size < 1:
            raise InvalidArgument(f"world_size {world_size}: at least 1 is needed")
        options.world_size = 0 if world_size is None else unsigned(world_size, 32, "world_size")
        options.incarnation_token = None if incarnation_token is None else encode_name(incarnation_token)
        options.timeout_ms = max(1, timeout_ms(timeout))  # 0 would be the library's own default
        pointer = ctypes.c_void_p()
        lib = library()
        lib.check(lib.open(ctypes.byref(options), ctypes.byref(pointer)))
        assert pointer.value is not None
        self._handle: Handle | None = Handle(pointer.value, lib.close)
        #: The daemon's.
        self.socket = os.environ.get("ROPETEAM_SOCKET", "") if socket is None else socket
        self._children: weakref.WeakSet[Save | View] = weakref.WeakSet()
        self._children_lock = threading.Lock()
        _open_clients.add(self)
        info = self.info()
        self._rank, self._world_size = info.rank, info.world_size
        self._known: Any = None  # the structure of the last save(), a torch._known.Known
        #: The global ranks of the process group that forms this world, in its order; None: opened without a
        #: group.
        self._group_ranks: Sequence[int] | None = None

    @property
    def closed(self) -> bool:
        return self._handle is None

    @property
    def rank(self) -> int:
        return self._rank

    def info(self) -> Info:
        lib = library()
        info = _native.InfoStruct(size=ctypes.sizeof(_native.InfoStruct))
        handle = self._use()
        lib.check(lib.info(handle.pointer, ctypes.byref(info)))
        return Info(info.rank, info.world_size, info.incarnation, info.chunk_bytes, info.arena_bytes)

    def save(
        self,
        step: int,
        objects: Mapping[str, Value] | Contents,
        *,
        metadata: Mapping[str, JsonValue] | None = None,
        agreement: int = 0,
        persist: bool = False,
        wait: Level | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> int:
        """Saves this rank's shard of `step` and returns the number of bytes saved. On return the shard is
        LOCAL, and the caller may reuse the sources.

        Values are tensors (CPU or CUDA, any dtype and shape; for a DTensor, this rank's part), buffers
        (bytes, bytearray, memoryview, numpy arrays: only their bytes), or JSON values (dict with str keys,
        list, str, int, float, bool, None). Tensor bytes are read in place; only a tensor that is not
        contiguous is first copied into a contiguous one. Nothing is pickled: any other value raises TypeError
        before anything is saved. CUDA tensors are copied after the work that torch's current stream has at
        the time of the call.

        metadata: information about the step, for example {"loss": 0.25, "tokens": 3200}: a mapping of names
        to JSON values, at most 4096 bytes of JSON. NaN and infinities become None; tensors without dimensions
        and scalars of numpy become numbers. One rank is enough; of several, the lowest rank's counts. It is
        written to the manifest on storage, for the daemons' --keep-best. View.metadata returns it.

        agreement: see begin().
        persist: write the step to storage once it is committed, even if it is not due; see persist().
        wait: afterwards wait, up to `timeout` seconds, until the shard has reached this level. After a
        DeadlineExceeded the shard is saved and still on its way to that level.

        InvalidArgument: this rank has saved a newer step in this incarnation (use one counter across epochs),
        or the shard is larger than the arena; the text has the --memory that is needed. AlreadyExists: this
        rank has already saved this step in this incarnation. NoSpace: the text has the bytes needed, free and
        the limit; nothing has changed, and older committed steps stay. Unsupported: a tensor has no plain
        bytes here (meta, fake, nested, sparse, quantized). Stale: the job has restarted without this
        process.
        """
        contents = objects if isinstance(objects, Contents) else self._contents(objects)
        encoded = None if metadata is None else encode_metadata(metadata)
        lengths = [*contents.lengths, *(len(each) for each in (contents.index, encoded) if each is not None)]
        with self.begin(step, bytes=sum(lengths), objects=len(lengths), agreement=agreement) as save:
            contents.put(save)
            save._index = contents.index
            if encoded is not None:
                save._put(METADATA_NAME, encoded)
        if persist:
            self.persist(step, timeout)
        if wait is not None and wait > Level.LOCAL:
            self.wait(step, wait, timeout)
        return sum(lengths)

    def _contents(self, objects: Mapping[str, Value]) -> Contents:
        if not hasattr(objects, "items"):
            raise TypeError(
                f"objects is a {type(objects).__name__}: a mapping of names to tensors, buffers or JSON "
                "values is needed"
            )
        known = self._known
        contents = None if known is None else known.contents(objects)
        if contents is not None:
            return contents
        sources = {name: Source(value, name) for name, value in objects.items()}
        infos = {name: source.info for name, source in sources.items()}
        self._known = None
        if len(infos) >= _KNOWN_FROM and any(map(is_tensor, objects.values())):
            from .torch._known import Known  # imports torch

            self._known = Known(objects, infos, {}, self._world_size)
        lengths = [info.length for info in infos.values() if info.at is None]
        return Contents(lambda save: save._put_many(sources), encode_index(infos, self._world_size), lengths)

    def begin(self, step: int, *, bytes: int = 0, objects: int = 0, agreement: int = 0) -> Save:
        """Begins a save that is filled piece by piece; see Save. `bytes` and `objects`, the sum of the
        objects' lengths and their number, are reserved at once. Give them as exactly as known: a larger save
        may be refused later.

        agreement: a 64-bit value that all ranks of this step must share, for example a digest of what they
        must have in common; 0: none. The leader compares the values, without a collective. If two ranks gave
        different values, or only one of them gave a value, the step is never committed and its memory is
        released: wait() raises Aborted with both values and their ranks. Unsupported: a node has an older
        daemon."""
        lib = library()
        handle = self._use()
        options = _native.SaveOptions(
            size=ctypes.sizeof(_native.SaveOptions),
            bytes=unsigned(bytes, 64, "bytes"),
            objects=unsigned(objects, 64, "objects"),
            agreement=unsigned(agreement, 64, "agreement"),
        )
        pointer = ctypes.c_void_p()
        number = unsigned(step, 64, "step")
        lib.check(lib.save_begin(handle.pointer, number, ctypes.byref(options), ctypes.byref(pointer)))
        assert pointer.value is not None
        save = Save(step, self._world_size, Handle(pointer.value, lib.save_close, handle))
        self._adopt(save)
        return save

    def wait(self, step: int, level: Level = Level.COMMITTED, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Waits until this rank's shard of `step` has reached `level`. Other threads run meanwhile.

        DeadlineExceeded: it has not reached the level within `timeout` seconds; 0: do not wait. Aborted: it
        never will (the job has restarted, or a newer step has replaced it). NotFound: this rank did not save
        it. Unsupported: Level.PERSISTED, and a daemon has no storage.
        """
        lib = library()
        handle = self._use()
        lib.check(
            lib.wait(handle.pointer, unsigned(step, 64, "step"), int(Level(level)), timeout_ms(timeout))
        )

    def drop(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Releases `step` from the memory of all nodes now, earlier than retention would. Storage is not
        changed.

        When it returns, no node of the job has a copy. One rank's call is enough. A step that was not
        committed will never be: wait() for it raises Aborted. Open views stay readable, except partial ones.
        If the step is being written to storage, the call waits until that has ended.

        InvalidArgument: a restart needs the step, for example because it is the newest committed one; the
        text has the reason. NotFound: no node has a copy of such a step. DeadlineExceeded: it may or may not
        be released later.
        """
        lib = library()
        handle = self._use()
        lib.check(lib.drop(handle.pointer, unsigned(step, 64, "step"), timeout_ms(timeout)))

    def persist(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Requests that `step` of this incarnation is written to storage once it is committed, even if it is
        not due.

        One rank's call is enough. When it returns, every node has recorded the request and nothing has been
        written yet: use wait(step, Level.PERSISTED). Aborted: the step is too old. Unsupported: the job has
        no storage.
        """
        lib = library()
        handle = self._use()
        lib.check(lib.persist(handle.pointer, unsigned(step, 64, "step"), timeout_ms(timeout)))

    def set_policy(
        self,
        persist_every: int | None = None,
        keep_on_storage: int | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        """Sets the job's --persist-every and --keep-on-storage, if the daemons' flags leave them open.

        One rank's call is enough; all may make it with the same values. It applies to this incarnation. When
        it returns, every node has recorded it.

        persist_every: a committed step is written to storage when a multiple of this number has been passed.
        keep_on_storage: this many of the newest steps are kept there; others are deleted after the next one.

        InvalidArgument: another rank has set another value, or a daemon was started with another one; the
        text has both. Unsupported: the job has no storage, or has an older daemon. DeadlineExceeded: it may
        or may not have been set; repeat the call.
        """
        lib = library()
        handle = self._use()
        given = (persist_every, keep_on_storage)
        if given == (None, None) or 0 in given:
            raise InvalidArgument(
                f"persist_every {persist_every}, keep_on_storage {keep_on_storage}: one is needed, from 1 on"
            )
        policy = _native.PolicyStruct(
            size=ctypes.sizeof(_native.PolicyStruct),
            persist_every=unsigned(persist_every or 0, 64, "persist_every"),
            keep_on_storage=unsigned(keep_on_storage or 0, 32, "keep_on_storage"),
        )
        lib.check(lib.set_policy(handle.pointer, ctypes.byref(policy), timeout_ms(timeout)))

    def latest(self, timeout: float = DEFAULT_TIMEOUT, *, level: Level = Level.COMMITTED) -> StepInfo | None:
        """The newest step of which every rank's shard can be produced now; None if there is none.

        All ranks of one incarnation get the same answer until that incarnation has completed a step of its
        own. A quarantined step is passed over, with a warning in the log "ropeteam" (StepInfo.passed_over).

        level: with Level.PERSISTED the newest good step on storage, even if memory has a newer one.
        Unsupported: the job has no storage. InvalidArgument: another level than this one or
        Level.COMMITTED."""
        lib = library()
        handle = self._use()
        step = _native.StepStruct(size=ctypes.sizeof(_native.StepStruct))
        try:
            lib.check(
                lib.latest_at(handle.pointer, int(Level(level)), ctypes.byref(step), timeout_ms(timeout))
            )
        except NotFound:
            return None
        if not step.passed_over:
            return StepInfo(step.step, step.incarnation, step.world_size)
        logging.getLogger("ropeteam").warning(
            "step %d is quarantined, step %d is offered instead: the job kept failing after it had restored "
            "that step, or an operator said so (ropeteam quarantine --undo %d offers it again; to debug with "
            "that step, start the daemons with --quarantine-after 0)",
            step.passed_over_step,
            step.step,
            step.passed_over_step,
        )
        return StepInfo(step.step, step.incarnation, step.world_size, step.passed_over_step)

    def storage_steps(self, limit: int = 100, timeout: float = DEFAULT_TIMEOUT) -> list[StoredStep]:
        """The newest steps on the job's storage, newest first: at most `limit` of them, from 1 to 200. This
        node's daemon reads manifests and the sizes of files. Unsupported: the job has no storage."""
        lib = library()
        handle = self._use()
        if limit == 0:
            raise InvalidArgument("limit 0: at least 1 is needed")  # it would be the library's default
        pointer = ctypes.c_void_p()
        number = unsigned(limit, 32, "limit")
        lib.check(lib.storage_list(handle.pointer, number, timeout_ms(timeout), ctypes.byref(pointer)))
        assert pointer.value is not None
        steps = Handle(pointer.value, lib.storage_list_close)
        entry = _native.StorageStepStruct(size=ctypes.sizeof(_native.StorageStepStruct))
        result = []
        for index in range(lib.storage_list_count(steps.pointer)):
            lib.check(lib.storage_list_step(steps.pointer, index, ctypes.byref(entry)))
            result.append(
                StoredStep(
                    step=entry.step,
                    incarnation=entry.incarnation,
                    folder=entry.folder.decode(),
                    problem=entry.problem.decode("utf-8", "replace"),
                    metadata=decode_metadata(entry.metadata or b"{}"),
                    time=entry.time_s,
                    bytes=entry.bytes,
                    world_size=entry.world_size,
                )
            )
        return result

    def view(
        self,
        step: int,
        rank: int | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        partial: bool = False,
    ) -> View:
        """Opens the shard that `rank` (default: this rank) saved at `step`. If this node has no copy, it
        fetches one from the holders. The shard stays readable until the close. NotFound: there is no holder,
        or no such step or rank.

        partial: a shard that this node lacks is not fetched. Reads transfer only the requested bytes, from
            the memory of the nodes that have them; read_ranges() takes many ranges at once. The shard is not
            kept for this view: once retention has released it, reads raise NotFound. map() fetches the whole
            shard first. So does any read where ranges are not available: in a job that encrypts its replicas,
            from storage, and beside older daemons."""
        lib = library()
        handle = self._use()
        whose = self._rank if rank is None else unsigned(rank, 32, "rank")
        pointer = ctypes.c_void_p()
        number = unsigned(step, 64, "step")
        milliseconds = timeout_ms(timeout)
        options = _native.ViewOptions(size=ctypes.sizeof(_native.ViewOptions), partial=partial)
        status = lib.view_open_with(
            handle.pointer, number, whose, ctypes.byref(options), milliseconds, ctypes.byref(pointer)
        )
        lib.check(status)
        assert pointer.value is not None
        view = View(step, whose, timeout, Handle(pointer.value, lib.view_close, handle))
        self._adopt(view)
        return view

    def load(
        self,
        step: int | None = None,
        rank: int | None = None,
        *,
        into: Mapping[str, Any] | None = None,
        names: Iterable[str] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> Shard:
        """Reads the shard that `rank` (default: this rank) saved at `step` (default: the latest).

        into: tensors (contiguous; for a DTensor, this rank's part) or writable buffers that are filled in
        place; they are the result's values. Names, dtypes, shapes and lengths are checked before any byte is
        read.
        names: the objects to read; by default all. Objects that are not in `into` are returned as new
            tensors, JSON values or bytes.

        NotFound: no such step, rank or name. InvalidArgument: a target does not fit. Corrupt: no source has
        good bytes; the targets are then unspecified. `timeout` limits each read, not their sum.
        """
        if step is None:
            found = self.latest(timeout)
            if found is None:
                raise NotFound("no step has been saved that can be loaded")
            step = found.step
        with self.view(step, rank, timeout) as view:
            return view.load(into=into, names=names)

    def close(self) -> None:
        """Aborts uncommitted saves and closes views. Never waits for the network. Closing twice is
        allowed."""
        with self._children_lock:
            children = list(self._children)
            self._handle = None
        for child in children:
            child.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _use(self) -> Handle:
        handle = self._handle
        if handle is None:
            raise InvalidArgument("this Client is closed")
        return handle

    def _adopt(self, child: Save | View) -> None:
        with self._children_lock:
            self._children.add(child)
            closed = self._handle is None
        if closed:  # meanwhile by another thread
            child.close()


#: ropeteam_origin_t.
_ORIGINS = {1: "memory", 2: "peers", 3: "storage"}


class View:
    """The shard that one rank saved at one step, open for reading. A context manager and iterable of names.

    Every read checks the bytes' checksums; a copy that does not match is repaired from another holder inside
    the call.
    """

    def __init__(self, step: int, rank: int, timeout: float, handle: Handle) -> None:
        self.step = step
        self.rank = rank
        self._timeout = timeout
        self._handle: Handle | None = handle
        self._objects = self._list(handle)
        self._index: Index | None = None
        #: Where the shard was at the opening: in this node's "memory", in that of "peers", or on "storage"
        #: alone; "": an older daemon does not say.
        self.origin = _ORIGINS.get(library().view_origin(handle.pointer), "")

    def names(self) -> list[str]:
        """The names of the objects, in the order they were saved, without the package's own."""
        return [name for name in self._objects if not is_own(name)]

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata that this rank gave to save(); empty if it gave none. Read at each access."""
        return decode_metadata(self.read(METADATA_NAME)) if METADATA_NAME in self._objects else {}

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def __contains__(self, name: object) -> bool:
        return name in self._objects

    def length(self, name: str) -> int:
        """Bytes of an object. NotFound: there is no object of this name."""
        try:
            return self._objects[name]
        except KeyError:
            raise NotFound(f"rank {self.rank} saved no object {name!r} at step {self.step}") from None

    def info(self, name: str) -> ObjectInfo:
        """Kind, and a tensor's dtype and shape, of an object."""
        return object_info(name, self.length(name), self.index().objects)

    def index(self) -> Index:
        """The package's index of this shard, as it was saved."""
        if self._index is None:
            self._index = decode_index(self.read(INDEX_NAME)) if INDEX_NAME in self._objects else Index({})
        return self._index

    def read(
        self, name: str, offset: int = 0, length: int | None = None, timeout: float | None = None
    ) -> bytes:
        """The object's bytes, or `length` of them from `offset` on."""
        count = self.length(name) - offset if length is None else length
        if count < 0:
            raise InvalidArgument(f"offset {offset} of object {name!r}, which has {self.length(name)} bytes")
        target = bytearray(count)
        self.read_into(name, target, offset, timeout)
        return bytes(target)

    def read_into(self, name: str, target: Any, offset: int = 0, timeout: float | None = None) -> None:
        """Fills `target` (a contiguous tensor or writable buffer) with the object's bytes from `offset` on.
        The range must be inside the object. dtype and shape are not compared (load() does that)."""
        memory, _ = target_memory(target, name)
        lib = library()
        milliseconds = timeout_ms(self._timeout if timeout is None else timeout)
        begin = unsigned(offset, 64, "offset")
        handle = self._use()
        arguments = [handle.pointer, encode_name(name), begin, memory.address, memory.length]
        if memory.stream is not None:
            lib.check(lib.view_read_cuda(*arguments, memory.stream.cuda_stream, milliseconds))
        else:
            lib.check(lib.view_read(*arguments, milliseconds))

    def read_ranges(self, ranges: Sequence[Range], timeout: float | None = None) -> None:
        """Fills the ranges' targets, of one object or of many, in one call. Each chunk is checked once,
        however many runs touch it.

        Nothing is read if any range is invalid: NotFound for an object, InvalidArgument for a range outside
        its object or target. After any other error the targets are unspecified."""
        array = RangeArray(ranges)
        lib = library()
        milliseconds = timeout_ms(self._timeout if timeout is None else timeout)
        array.synchronize()
        lib.check(lib.view_read_ranges(self._use().pointer, array.structs, len(array), milliseconds))

    def map(self, name: str, timeout: float | None = None) -> memoryview:
        """The object's bytes in place in the arena, read-only. This call checks them once.

        The arena keeps them as long as the memoryview or anything made from it exists, even after the view's
        close. Drop it soon: it keeps memory that retention would free."""
        lib = library()
        handle = self._use()
        pointer, length = ctypes.c_void_p(), ctypes.c_uint64()
        milliseconds = timeout_ms(self._timeout if timeout is None else timeout)
        status = lib.view_map(
            handle.pointer, encode_name(name), ctypes.byref(pointer), ctypes.byref(length), milliseconds
        )
        lib.check(status)
        if length.value == 0 or pointer.value is None:
            return memoryview(b"")
        array = (ctypes.c_ubyte * length.value).from_address(pointer.value)
        array._ropeteam_handle = handle  # type: ignore[attr-defined]
        return memoryview(array).cast("B").toreadonly()

    def value(self, name: str) -> Any:
        """The object as it was saved: a new tensor, a JSON value, or bytes."""
        info = self.info(name)
        if info.kind == "tensor":
            tensor = new_tensor(info, name)
            self.read_into(name, tensor)
            return tensor
        encoded = self.read(name)
        if info.kind == "json":
            import json

            return json.loads(encoded)
        return encoded

    def load(self, *, into: Mapping[str, Any] | None = None, names: Iterable[str] | None = None) -> Shard:
        """All objects, or those of `names`, with targets to fill in place; see Client.load()."""
        targets = dict(into or {})
        wanted = dict.fromkeys(self.names() if names is None else names)
        wanted.update(dict.fromkeys(targets))
        for name in wanted:
            self.length(name)  # NotFound before anything is read
        for name, target in targets.items():
            _check_fits(name, self.info(name), target_memory(target, name)[1])
        shard = Shard(self.step, self.rank)
        for name in wanted:
            if name in targets:
                self.read_into(name, targets[name])
                shard[name] = targets[name]
            else:
                shard[name] = self.value(name)
        return shard

    def close(self) -> None:
        """Closing twice is allowed. A memoryview from map() stays valid while it is referenced."""
        self._handle = None

    @property
    def closed(self) -> bool:
        return self._handle is None

    def __enter__(self) -> View:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _use(self) -> Handle:
        handle = self._handle
        if handle is None:
            raise InvalidArgument(f"the view of step {self.step}, rank {self.rank} is closed")
        return handle

    @staticmethod
    def _list(handle: Handle) -> dict[str, int]:
        lib = library()
        entry = _native.ObjectStruct(size=ctypes.sizeof(_native.ObjectStruct))
        objects: dict[str, int] = {}
        for index in range(lib.view_count(handle.pointer)):
            lib.check(lib.view_object(handle.pointer, index, ctypes.byref(entry)))
            objects[decode_name(entry.name)] = entry.length
        return objects


def _check_fits(name: str, saved: ObjectInfo, target: ObjectInfo) -> None:
    if saved.kind == "json":
        raise InvalidArgument(f"{name}: saved as a JSON value, which cannot be read into a target")
    if saved.kind == "tensor" and target.kind == "tensor":
        if (saved.dtype, saved.shape) != (target.dtype, target.shape):
            raise InvalidArgument(
                f"{name}: saved as {saved.dtype} of shape {saved.shape}, "
                f"the target is {target.dtype} of shape {target.shape}"
            )
    if saved.length != target.length:
        raise InvalidArgument(f"{name}: saved with {saved.length} bytes, the target has {target.length}")

# SPDX-License-Identifier: Apache-2.0
"""The receiver of a save's bytes: the open Save of this process or, over a connection, that of the process
with the Client.

A rank opens only once, so DCP's checkpoint process, which it starts for AsyncCheckpointerType.PROCESS, has no
Client of its own. It plans and communicates with the other ranks. On request over a pipe, the training
process copies from the shared memory, in which PyTorch passed the tensors, into the arena. It uses a thread
that waits in C.
"""

from __future__ import annotations

import array
import logging
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Callable, Protocol

from .._client import Client
from .._errors import InternalError, InvalidArgument
from .._save import Save
from .._values import JsonValue, ObjectInfo
from ._container import Piece

_log = logging.getLogger("ropeteam")

#: The calls that a RemoteSink may request.
_CALLS = ("begin", "put_parts", "put", "put_metadata", "commit", "close", "learn", "forget")


class Sink(Protocol):
    """One rank's save of one step. It is not begun yet, open, or ended; close() ends it in any state."""

    def begin(self, step: int, length: int, objects: int) -> None: ...
    def put_parts(self, name: str, parts: Sequence[Piece]) -> None: ...
    def put(self, name: str, value: bytes) -> None: ...
    def put_metadata(self, metadata: Mapping[str, JsonValue]) -> None: ...
    def commit(self, persist: bool) -> None: ...
    def learn(self, *plan: Any) -> None: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...
    @property
    def over(self) -> bool: ...


class LocalSink:
    def __init__(self, client: Client, learn: Callable[..., None]) -> None:
        self._client = client
        self._save: Save | None = None
        self._learn = learn
        self.over = False

    def begin(self, step: int, length: int, objects: int) -> None:
        self._save = self._client.begin(step, bytes=length, objects=objects)

    def put_parts(self, name: str, parts: Sequence[Piece]) -> None:
        self._open().put_parts(name, parts)

    def put_fields(self, name: str, fields: array.array[int], length: int) -> None:
        """Parts in the library's format; see Prepared."""
        self._open()._put_fields(name, fields, ObjectInfo("bytes", length))

    def put(self, name: str, value: bytes) -> None:
        self._open()._put(name, value)  # also the package's own names

    def put_metadata(self, metadata: Mapping[str, JsonValue]) -> None:
        self._open().put_metadata(metadata)

    def commit(self, persist: bool) -> None:
        save = self._open()
        self.over = True
        save.commit()
        if persist:
            self._client.persist(save.step)

    def learn(self, *plan: Any) -> None:
        self._learn(*plan)

    def forget(self) -> None:
        self._learn()

    def close(self) -> None:
        self.over = True
        if self._save is not None:
            self._save.close()

    def _open(self) -> Save:
        if self._save is None:
            raise InvalidArgument("this save was not begun")
        return self._save


class RemoteSink:
    """In the checkpoint process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.over = False

    def _call(self, name: str, *arguments: Any) -> None:
        self._connection.send((name, arguments))
        error = self._connection.recv()
        if error is not None:
            raise error

    def begin(self, step: int, length: int, objects: int) -> None:
        self._call("begin", step, length, objects)

    def put_parts(self, name: str, parts: Sequence[Piece]) -> None:
        self._call("put_parts", name, parts)

    def put(self, name: str, value: bytes) -> None:
        self._call("put", name, value)

    def put_metadata(self, metadata: Mapping[str, JsonValue]) -> None:
        self._call("put_metadata", metadata)

    def commit(self, persist: bool) -> None:
        self.over = True
        self._call("commit", persist)

    def learn(self, *plan: Any) -> None:
        self._call("learn", *plan)

    def forget(self) -> None:
        self._call("forget")

    def close(self) -> None:
        if self.over:
            return
        self.over = True
        try:
            self._call("close")
        except (OSError, EOFError):
            pass  # the training process has closed it, or is gone


def serve(sink: Sink) -> Connection:
    """The other process's end of a pipe, through which it uses the sink. When that end is closed, the sink is
    closed."""
    import torch.multiprocessing as multiprocessing

    theirs: Connection
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    threading.Thread(target=_serve, args=(ours, sink), name="ropeteam-dcp", daemon=True).start()
    return theirs


def _serve(connection: Connection, sink: Sink) -> None:
    try:
        while True:
            name, arguments = connection.recv()
            error: Exception | None = None
            try:
                if name not in _CALLS:
                    raise InternalError(f"no call {name!r} of a save")
                getattr(sink, name)(*arguments)
            except Exception as caught:
                error = caught
            del arguments  # tensors in shared memory
            connection.send(error)
    except (EOFError, OSError):
        pass  # the checkpoint process has closed it, or is gone
    except Exception:  # the message could not be decoded
        _log.exception("a save by the checkpoint process is given up")
    finally:
        sink.close()
        connection.close()


class Guard:
    """Closes a sink when the last reference to the guard is dropped. A save that failed elsewhere is not
    reported here: DCP simply does not continue it."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def __del__(self) -> None:
        self._sink.close()


_thread = threading.local()


def until_thread_ends(sink: Sink) -> None:
    """Closes the sink at the end of this thread, or when this thread begins another save. async_save has its
    own thread for each."""
    _thread.guard = Guard(sink)


def save_is_over_in_this_thread() -> None:
    """Closes the rest of a failed dcp.save."""
    _thread.guard = None

# SPDX-License-Identifier: Apache-2.0
"""``ropeteam://`` for fsspec: the shards of the job's ranks, as files.

    ropeteam://                          steps that can be read
    ropeteam://100/                      the files of step 100: each rank's objects, as raw bytes
    ropeteam://100/model.pt              this rank's, or else that of the lowest rank with one
    ropeteam://100/rank-00003/model.pt   rank 3's
    ropeteam://latest/model.pt           of the newest committed step

A file that is written becomes part of this rank's shard of the step. fsspec finds installed packages by
itself; in a source tree call ``ropeteam.register_fsspec()``.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import mmap
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.transaction import Transaction

from ._client import DEFAULT_TIMEOUT, Client, View, opened_here
from ._client import open as open_client
from ._errors import Aborted, AlreadyExists, InternalError, InvalidArgument, NotFound, Unsupported
from ._export import find_program
from ._ranges import Range
from ._values import is_tensor

# The least that a read requests, and the size to which small writes are collected: many times the cost of a
# call.
_BLOCK_BYTES = 1 << 20
# Steps for which the owners of files are remembered.
_STEPS_REMEMBERED = 8
_RANK_FOLDER = re.compile(r"rank-(\d{5,})(?:/|$)")


class RopeteamFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """fsspec's file system of a job's checkpoints.

    Outside a transaction a file is a whole shard: opening it for writing begins this rank's save of its step,
    and closing it commits. Within ``with fs.transaction:`` all files of a step are one shard, which is
    committed at the end. An exception aborts the save: of the whole transaction, or of a file that is closed
    during an exception. A step that this rank has saved cannot change: opening it raises AlreadyExists. Bytes
    are only appended.

    A file is LOCAL when it is committed; ``fs.client.wait(step)`` waits for more. ``latest`` and the listing
    of steps show it once it is COMMITTED. From a shard that this node lacks, only the requested bytes are
    transferred. An open file does not keep such a shard: reads raise NotFound once retention has released it.

    A missing file raises FileNotFoundError; other errors are RopeteamError. Threads may share the object; one
    thread begins and ends a transaction.
    """

    protocol = "ropeteam"

    def __init__(
        self, client: Client | None = None, timeout: float = DEFAULT_TIMEOUT, **options: Any
    ) -> None:
        """client: default: the one that this process has open or, if there is none, the result of
        ropeteam.open(), from the environment. timeout: seconds for each call that may wait."""
        super().__init__(**options)
        self._given = client
        self._own: Client | None = None
        self._timeout = timeout
        self._owners: dict[int, dict[str, int]] = {}
        self._lock = threading.Lock()
        self._shards: dict[int, _Shard] = {}  # of the transaction

    @property
    def client(self) -> Client:
        if self._given is not None:
            return self._given
        if self._own is None or self._own.closed:
            here = opened_here()
            if len(here) > 1:
                raise InvalidArgument(
                    f"{len(here)} clients are open in this process: give one, storage_options={{'client': …}}"
                )
            self._own = here[0] if here else open_client(timeout=self._timeout)
        return self._own

    # ---- reading ----

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        step, rest = self._split(path)
        if step is None:
            return _folder("")
        if rest:
            pending = self._pending(step, rest)
            if pending is not None:
                return _file(path, pending.tell(), step, self.client.rank)
            with contextlib.suppress(FileNotFoundError):
                view, name = self._find(path)
                with view:
                    return _file(path, view.length(name), step, view.rank)
        self.ls(path)  # FileNotFoundError if nothing is below it
        return {**_folder(path), "step": step}

    def exists(self, path: str, **kwargs: Any) -> bool:
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        step, rest = self._split(path)
        if step is None:
            entries = {str(number): {**_folder(str(number)), "step": number} for number in self._steps()}
        else:
            entries = self._children(path, step, rest)
        if not entries and path:
            raise FileNotFoundError(_url(path))
        return [entries[name] for name in sorted(entries)] if detail else sorted(entries)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        view, name = self._find(path)
        with view:
            begin, stop = _bounds(start, end, view.length(name))
            return view.read(name, begin, stop - begin)

    def cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        """As in fsspec: bytes, or with on_error="return" the exception. The ranges of one shard are read
        together."""
        starts = starts if isinstance(starts, list) else [starts] * len(paths)
        ends = ends if isinstance(ends, list) else [ends] * len(paths)
        if not len(paths) == len(starts) == len(ends):
            raise ValueError(f"{len(paths)} paths, {len(starts)} starts, {len(ends)} ends")
        results: list[Any] = [b""] * len(paths)
        with contextlib.ExitStack() as views:
            wanted: dict[tuple[int, int], tuple[View, list[tuple[int, Range]]]] = {}
            for index, (path, start, end) in enumerate(zip(paths, starts, ends)):
                try:
                    view, name = self._find(path)
                    views.enter_context(view)
                    begin, stop = _bounds(start, end, view.length(name))
                except Exception as error:
                    if on_error != "return":
                        raise
                    results[index] = error
                    continue
                entry = Range(name, bytearray(stop - begin), begin, stop - begin)
                wanted.setdefault((view.step, view.rank), (view, []))[1].append((index, entry))
            for view, entries in wanted.values():
                try:
                    view.read_ranges([entry for _, entry in entries])
                except Exception as error:
                    if on_error != "return":
                        raise
                    results = [error if i in dict(entries) else result for i, result in enumerate(results)]
                    continue
                for index, entry in entries:
                    results[index] = bytes(entry.target)
        return results

    @contextlib.contextmanager
    def local_path(self, path: str) -> Iterator[str]:
        """A path on this machine with the file's bytes, for code that accepts no open file: ``torch.load(…,
        mmap=True)``, ``safetensors.safe_open``.

        The bytes are copied once, from the arena into anonymous memory. It is freed when the block has ended
        and nothing maps it. Only this process can use the path."""
        fd = os.memfd_create("ropeteam", os.MFD_CLOEXEC)
        try:
            view, name = self._find(path)
            with view:
                length = view.length(name)
                os.ftruncate(fd, length)
                if length > 0:
                    view.read_into(name, mmap.mmap(fd, length))
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)

    # ---- writing ----

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        with self.open(path, "wb") as file:
            file.write(value)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Renames a file of the transaction whose bytes are not in the arena yet; those of a NAME.tmp never
        are. NotImplementedError: any other file."""
        source = self._writable(path1)
        step, name = self._writable(path2)
        file = self._pending(*source)
        if file is None or file.streamed or step != source[0]:
            raise NotImplementedError(
                f"{_url(path1)}: only a file of a transaction that is small or a .tmp gets another name"
            )
        del file.shard.files[source[1]]
        file.shard.files[name] = file

    def rm_file(self, path: str) -> None:
        """As mv(), for a file whose bytes are not in the arena yet. If it is the only file of a step, the
        step is dropped, as by rm(). NotImplementedError: any other file; steps are released as a whole."""
        path = self._strip_protocol(path)
        step, rest = self._split(path)
        file = None if step is None else self._pending(step, rest)
        if file is not None and not file.streamed:
            file.discard()
        elif file is None and step is not None and self.info(path)["type"] == "file":
            self._rm_files(path, step, 1)
        elif file is None:
            raise ValueError(f"{_url(path)} is a folder: only a step's is removed, with recursive=True")
        else:
            raise NotImplementedError(f"{_url(path)}: what is in a shard stays there")

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Of a step's folder, with recursive=True: Client.drop(). Storage is not changed, and the step is
        then read from there. InvalidArgument: a restart needs the step. Of files of a step: all of them or,
        as rm_file(), none."""
        for each in reversed(self.expand_path(path)):
            step, rest = self._split(each)
            if step is None or not recursive:
                self.rm_file(each)
                continue
            if rest or maxdepth is not None or step in self._shards:
                files = self.find(each, maxdepth=maxdepth)
                pending = [file for file in files if self._pending(step, self._split(file)[1]) is not None]
                for file in pending:
                    self.rm_file(file)
                if len(pending) < len(files):
                    self._rm_files(each, step, len(files) - len(pending))
            else:
                self.info(each)  # FileNotFoundError
                self._drop(step)

    def _rm_files(self, path: str, step: int, count: int) -> None:
        """Of so many committed files of a step."""
        if len(self.find(str(step))) > count:
            raise NotImplementedError(
                f"{_url(path)}: what is in a shard stays there; rm('ropeteam://{step}', recursive=True) "
                "releases the whole step"
            )
        self._drop(step)

    def _drop(self, step: int) -> None:
        self._owners.pop(step, None)
        with contextlib.suppress(NotFound):  # retention has released it before
            self.client.drop(step, self._timeout)

    def _open(self, path: str, mode: str = "rb", autocommit: bool = True, **kwargs: Any) -> Any:
        if mode == "rb":
            return io.BufferedReader(_Reader(*self._find(path)), _BLOCK_BYTES)
        if mode not in ("wb", "xb"):
            raise Unsupported(f"mode {mode!r} of {_url(path)}: only 'rb', 'wb' and 'xb' are possible")
        step, name = self._writable(path)
        with self._lock:  # several threads may write files of one transaction
            shard = None if autocommit else self._shards.get(step)
            if shard is None:
                shard = _Shard(self.client, step, autocommit)
            if not autocommit:
                self._shards[step] = shard
        self._owners.pop(step, None)
        file = _Writer(shard, name)
        if not autocommit:
            shard.files[name] = file
        return file

    def _end(self, commit: bool) -> None:
        """Ends the transaction."""
        shards, self._shards = self._shards, {}
        with contextlib.ExitStack() as rest:
            for shard in shards.values():
                rest.callback(shard.save.close)  # aborts, where an earlier one fails
            if commit:
                for shard in shards.values():
                    shard.commit()

    # ---- paths ----

    def _split(self, path: str) -> tuple[int | None, str]:
        """The step and the path below it; None: the root."""
        first, _, rest = self._strip_protocol(path).strip("/").partition("/")
        if not first:
            return None, ""
        if first == "latest":
            found = self.client.latest(self._timeout)
            if found is None:
                raise FileNotFoundError(f"{_url(path)}: no step is committed")
            return found.step, rest
        if not re.fullmatch("[0-9]{1,20}", first):
            raise FileNotFoundError(f"{_url(path)}: {first!r} is neither a step's number nor 'latest'")
        return int(first), rest

    def _writable(self, path: str) -> tuple[int, str]:
        """The step and the object's name, for a path of this rank."""
        first, _, name = self._strip_protocol(path).strip("/").partition("/")
        folder = _RANK_FOLDER.match(name)
        if folder is not None and int(folder[1]) == self.client.rank:
            name = name[folder.end() :]
        elif folder is not None:
            raise InvalidArgument(f"{_url(path)}: rank {self.client.rank} writes its own files alone")
        if not re.fullmatch("[0-9]{1,20}", first) or not name:
            raise InvalidArgument(f"{_url(path)}: ropeteam://STEP/NAME with a step's number is needed")
        return int(first), name

    def _pending(self, step: int, rest: str) -> _Writer | None:
        shard = self._shards.get(step)
        return None if shard is None else shard.files.get(rest)

    def _view(self, step: int, rank: int) -> View:
        return self.client.view(step, rank, self._timeout, partial=True)

    def _find(self, path: str) -> tuple[View, str]:
        """The view that has the file, open, and the object's name."""
        step, rest = self._split(path)
        folder = _RANK_FOLDER.match(rest)
        try:
            if step is not None and folder is not None:
                view, rest = self._view(step, int(folder[1])), rest[folder.end() :]
                if rest in view:
                    return view, rest
                view.close()
            elif step is not None and rest:
                for view in self._views(step, rest):
                    if rest in view:
                        return view, rest
                    view.close()
        except NotFound as error:
            raise FileNotFoundError(f"{_url(path)}: {error}") from error
        raise FileNotFoundError(f"{_url(path)}: no such file of the step")

    def _views(self, step: int, name: str = "") -> Iterator[View]:
        """The shards in which a file is searched, in order: its last owner's, this rank's, all. The caller
        closes them."""
        known = self._owners.setdefault(step, {})
        while len(self._owners) > _STEPS_REMEMBERED:
            del self._owners[next(iter(self._owners))]
        own = self.client.rank
        with contextlib.suppress(NotFound):
            if name in known:
                yield self._view(step, known[name])
        with contextlib.suppress(NotFound):
            view = self._view(step, own)
            known.update(dict.fromkeys(view, own))
            yield view
        with contextlib.suppress(NotFound):  # after the last rank that saved it
            for rank in itertools.count():
                if rank != own:
                    view = self._view(step, rank)
                    for each in view:
                        known.setdefault(each, rank)
                    yield view

    def _children(self, path: str, step: int, rest: str) -> dict[str, dict[str, Any]]:
        """The contents of a folder of a step, or the file at this path, by path. If several ranks have a file
        of one name, the others' are listed in their ranks' folders."""
        files: dict[str, dict[str, Any]] = {}
        top = path.partition("/")[0]
        for view in self._views(step):
            for name in view:
                where = f"rank-{view.rank:05}/{name}" if name in files else name
                files[where] = _file(f"{top}/{where}", view.length(name), step, view.rank)
            view.close()
        if step in self._shards:
            for name, file in self._shards[step].files.items():
                files[name] = _file(f"{top}/{name}", file.tell(), step, self.client.rank)
        below = rest.rstrip("/") + "/" if rest else ""
        entries = {f"{top}/{rest}": files[rest]} if rest in files else {}
        for name, info in files.items():
            if name.startswith(below):
                child, slash, _ = name[len(below) :].partition("/")
                where = f"{top}/{below}{child}"
                entries.setdefault(where, {**_folder(where), "step": step} if slash else info)
        return entries

    def _steps(self) -> set[int]:
        """The steps for which every rank's shard can be produced."""
        program = find_program()
        command = [program, "ls", "--json", "--socket", self.client.socket]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=self._timeout)
        if done.returncode != 0:
            raise InternalError(f"{program} ls: {done.stderr.decode(errors='replace')[-500:]}")
        steps = {int(each["step"]) for each in json.loads(done.stdout)["steps"] if each["producible"]}
        found = self.client.latest(self._timeout)
        return steps if found is None else steps | {found.step}


class _Transaction(Transaction):  # type: ignore[misc]
    fs: Any

    def complete(self, commit: bool = True) -> None:
        fs, self.fs = self.fs, None
        self.files.clear()
        fs._intrans, fs._transaction = False, None
        fs._end(commit)


RopeteamFileSystem.transaction_type = _Transaction


class _Shard:
    """This rank's part of one step: its save, and the files by name.

    Only one file at a time streams: its bytes go into the arena during the writing, and its name is fixed
    from then on. Others wait in memory for the commit and may be renamed: small files, those written at the
    same time as a streaming one, and NAME.tmp, which is to be renamed."""

    def __init__(self, client: Client, step: int, autocommit: bool) -> None:
        try:
            self.save = client.begin(step)
        except AlreadyExists as error:
            raise AlreadyExists(
                f"{error}; several files of one step are written within one `with fs.transaction:`"
            ) from error
        self.autocommit = autocommit
        self.files: dict[str, _Writer] = {}
        self.streaming: _Writer | None = None
        self.lock = threading.Lock()

    def commit(self) -> None:
        with self.save as save:
            if save.closed:
                raise Aborted(f"step {save.step}: a file that was being saved was given up: nothing is saved")
            for name, file in self.files.items():
                if not file.closed:
                    raise InvalidArgument(f"{name} is still open at the transaction's end: nothing is saved")
                if not file.streamed:
                    save.put_parts(name, file.pieces)


class _Writer(io.RawIOBase):
    """A file of a shard during its writing."""

    def __init__(self, shard: _Shard, name: str) -> None:
        self.shard = shard
        self.streamed = False  # it has an object in the shard
        self.pieces: list[bytearray] = []
        self._name = name
        self._length = 0
        self._opened_under = sys.exc_info()[1]

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._length

    def write(self, data: Any) -> int:
        if self.closed:
            raise ValueError("write to a closed file")
        some = memoryview(data).cast("B")  # not released here: an exception's traceback may hold it
        count = len(some)
        if count >= _BLOCK_BYTES and self._may_stream():
            self._stream(some)
        elif self.pieces and len(self.pieces[-1]) + count <= _BLOCK_BYTES:
            self.pieces[-1] += some
        else:
            if self.pieces and self._may_stream():
                self._stream()
            self.pieces.append(bytearray(some))
        self._length += count
        return count

    def put_parts(self, parts: Sequence[Any]) -> None:
        """Writes buffers and uint8 tensors one after the other, each with one copy, CUDA tensors too. If
        nothing else was written before, this is one call of the library, however many there are."""
        if self.closed:
            raise ValueError("write to a closed file")
        length = sum(part.nbytes if is_tensor(part) else memoryview(part).nbytes for part in parts)
        if length >= _BLOCK_BYTES and self._may_stream():
            self._stream(*parts)
            self._length += length
        else:
            for part in parts:
                self.write(part.cpu().numpy() if is_tensor(part) else part)

    def _may_stream(self) -> bool:
        with self.shard.lock:
            if self.shard.streaming is None and not self._name.endswith(".tmp"):
                self.shard.streaming = self
            return self.shard.streaming is self

    def _stream(self, *last: Any) -> None:
        """Passes the collected bytes, and `last`, to the shard."""
        pieces, self.pieces = [*self.pieces, *last], []
        try:
            if not self.streamed:
                self.shard.save.put_parts(self._name, pieces)
                self.streamed = True
                return
            for piece in pieces:
                self.shard.save.append(piece)
        except BaseException:
            self.shard.save.close()  # a piece is missing
            raise

    def close(self) -> None:
        if self.closed:
            return
        # A with statement around this file (of fsspec's OpenFile, or a TextIOWrapper) only calls close(),
        # even if an exception ended the block. Half a file must not become a shard.
        error = sys.exc_info()[1]
        if error is not None and error is not self._opened_under:
            self.discard()
            return
        super().close()
        if self.streamed:
            self._stream()
        self._rest()
        if self.shard.autocommit:
            self.shard.files[self._name] = self
            self.shard.commit()

    def discard(self) -> None:
        """Discards the file. Also discards its shard if that has only this file, or has bytes of it."""
        super().close()
        self.pieces.clear()
        self._rest()
        self.shard.files = {name: file for name, file in self.shard.files.items() if file is not self}
        if self.shard.autocommit or self.streamed:
            self.shard.save.close()

    def _rest(self) -> None:
        with self.shard.lock:
            if self.shard.streaming is self:
                self.shard.streaming = None

    def __del__(self) -> None:
        if not self.closed:  # nobody closed it
            self.discard()


class _Reader(io.RawIOBase):
    """An object open for reading; the view belongs to it."""

    def __init__(self, view: View, name: str) -> None:
        self._view = view
        self._name = name
        self._position = 0
        self.size = view.length(name)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        if position < 0:
            raise ValueError(f"seek to byte {position}")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        count = max(min(len(target), self.size - self._position), 0)
        if count > 0:
            self._view.read_into(self._name, target[:count], self._position)
        self._position += count
        return count

    def close(self) -> None:
        super().close()
        self._view.close()


def _url(path: str) -> str:
    return f"ropeteam://{RopeteamFileSystem._strip_protocol(path)}"


def _folder(path: str) -> dict[str, Any]:
    return {"name": path, "size": 0, "type": "directory"}


def _file(path: str, length: int, step: int, rank: int) -> dict[str, Any]:
    return {"name": path, "size": length, "type": "file", "step": step, "rank": rank}


def _bounds(start: int | None, end: int | None, length: int) -> tuple[int, int]:
    """A range with the rules of a slice: negative values count from the end, and the range is cut at the
    file's ends."""
    begin, stop, _ = slice(start, end).indices(length)
    return begin, max(begin, stop)

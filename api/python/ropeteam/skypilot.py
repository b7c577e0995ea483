# SPDX-License-Identifier: Apache-2.0
"""SkyPilot's checkpoint decorators over Ropeteam: a program that uses them only changes its import.

    from ropeteam.skypilot import load_checkpoint, save_checkpoint

    @save_checkpoint(save_dir="/tmp/ckpt", max_checkpoints=2)
    def save(step, model):
        torch.save(model.state_dict(), f"/tmp/ckpt/model_{step}.pt")

    @load_checkpoint(save_dir="/tmp/ckpt")
    def load(step, model):
        model.load_state_dict(torch.load(f"/tmp/ckpt/model_{step}.pt"))
        return step + 1

    start = load(0, model) or 0          # None: nothing has been saved

The interface is that of the decorators in SkyPilot's guide to model training, section "Robust checkpointing
with error handling". The directory is this node's own; it need not be a bucket or outlive the machine.
"""

from __future__ import annotations

import functools
import logging
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from ._errors import Corrupt, InvalidArgument, NotFound
from ._values import JsonValue
from .torch import Checkpointer

_log = logging.getLogger("ropeteam")
_Function = TypeVar("_Function", bound=Callable[..., Any])
#: Identifies a version of a file: when it was written, and its bytes.
_Stamps = dict[str, tuple[int, int]]


def save_checkpoint(
    save_dir: str,
    max_checkpoints: int = 5,
    checkpoint_prefix: str = "checkpoint",
    metadata: Mapping[str, JsonValue] | None = None,
) -> Callable[[_Function], _Function]:
    """For a function of (step, …) that writes files below `save_dir`: the files that a call writes become the
    checkpoint of `step`, in the memory of this node and others.

    Call it on every rank; a rank may write nothing. It is called once per step. max_checkpoints: how many
    steps' files stay in `save_dir`; the daemons' flags say how many steps the store keeps. checkpoint_prefix:
    load_checkpoint() finds only checkpoints with its own prefix. metadata: stored with each step in addition
    to the prefix and the time, as by Client.save().

    Exceptions of the function are raised; errors of the store are warnings, as in Checkpointer.step(). The
    first call opens the store: see Checkpointer for its errors.
    """
    folder = pathlib.Path(save_dir)
    kept: list[tuple[int, list[str]]] = []  # the files of each step, oldest first

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            step = kwargs.get("step", args[0] if args else None)
            if not isinstance(step, int):
                raise InvalidArgument(f"step {step!r}: the number of the step is needed, first or by name")
            folder.mkdir(parents=True, exist_ok=True)
            before = _stamps(folder)
            result = function(*args, **kwargs)
            files = [name for name, stamp in _stamps(folder).items() if before.get(name) != stamp]
            store = _store()
            _files.state = {"step": step, "prefix": checkpoint_prefix, "files": _mapped(folder, files)}
            known = {"prefix": checkpoint_prefix, "time": int(time.time()), **(metadata or {})}
            try:
                store.save(step, metadata=known)
            finally:
                _files.state = {}
            kept.append((step, files))
            while len(kept) > max_checkpoints:
                _remove(folder, kept.pop(0)[1], kept)
            return result

        return wrapper  # type: ignore[return-value]

    return decorate


def load_checkpoint(
    save_dir: str, checkpoint_prefix: str = "checkpoint"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For a function of (step, …) that reads the files of the saving function. The files of the newest step
    are written to `save_dir`, and then it is called with that step's number.

    If on any rank the files cannot be read or the function raises, the next older step is tried, with a
    warning; see Checkpointer.load_latest(). If nothing has been saved, the function is not called and the
    result is None.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            results: list[Any] = []

            def restore(state: Mapping[str, Any]) -> None:
                if state.get("prefix") != checkpoint_prefix:
                    raise NotFound(f"it is of the prefix {state.get('prefix')!r}, not {checkpoint_prefix!r}")
                _write(pathlib.Path(save_dir), state["files"])
                step, rest = state["step"], args[1:]
                by_name = "step" in kwargs or not args
                try:
                    result = (
                        function(**{**kwargs, "step": step}) if by_name else function(step, *rest, **kwargs)
                    )
                except Exception as error:  # the program's own code may raise anything
                    raise Corrupt(f"{function.__name__}() failed: {type(error).__name__}: {error}") from error
                results[:] = [result]

            store = _store()
            _files.restore = restore
            store.load_latest()
            if not results:
                _log.warning("no checkpoint of the prefix %r has been saved yet", checkpoint_prefix)
            return results[0] if results else None

        return wrapper

    return decorate


class _Files:
    """The files of one step, as the state that Checkpointer saves and loads."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.restore: Callable[[Mapping[str, Any]], None] = lambda _: None

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.restore(state)


_files = _Files()


@functools.lru_cache(maxsize=1)
def _store() -> Checkpointer:
    return Checkpointer(model={}, extra=_files, rng=False)


def _stamps(folder: pathlib.Path) -> _Stamps:
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            status = path.stat()
            found[path.relative_to(folder).as_posix()] = (status.st_mtime_ns, status.st_size)
    return found


def _mapped(folder: pathlib.Path, files: list[str]) -> dict[str, torch.Tensor]:
    """The files' bytes in the page cache: they are copied once, into the arena."""
    return {
        name: torch.from_file(
            str(folder / name), shared=False, size=(folder / name).stat().st_size, dtype=torch.uint8
        )
        if (folder / name).stat().st_size
        else torch.empty(0, dtype=torch.uint8)
        for name in files
    }


def _write(folder: pathlib.Path, files: Mapping[str, torch.Tensor]) -> None:
    for name, data in files.items():
        path = folder / name
        if ".." in path.parts or pathlib.PurePosixPath(name).is_absolute():
            raise Corrupt(f"the checkpoint has a file {name!r}, which is not below {folder}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.write(memoryview(data.numpy()) if data.numel() else b"")


def _remove(folder: pathlib.Path, files: list[str], kept: list[tuple[int, list[str]]]) -> None:
    still_needed = {name for _, names in kept for name in names}
    for name in files:
        if name not in still_needed:
            (folder / name).unlink(missing_ok=True)

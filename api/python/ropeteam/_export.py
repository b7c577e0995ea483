# SPDX-License-Identifier: Apache-2.0
"""export() runs the installed program `ropeteam export`. The library itself copies no steps to other
places."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

from ._errors import (
    Code,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    RopeteamError,
    Unsupported,
    error_for,
)
from ._native import library


def export(
    step: int | str,
    destination: str | os.PathLike[str],
    *,
    storage: str | os.PathLike[str] | None = None,
    socket: str | os.PathLike[str] | None = None,
    job: str | None = None,
    format: str | None = None,
    best: bool = False,
    model: str | None = None,
    config: str | os.PathLike[str] | None = None,
    max_shard_size: int | str | None = None,
    timeout: float | None = None,
) -> None:
    """Copies a step to a directory, which is made if need be, or to a URL: `ropeteam export` without its
    progress.

    step: StoredStep.folder, or a number; a number means its latest incarnation.
    destination: the step is written below it in the layout of storage, JOB/step-….
    storage: the URL that has the step. Default: the step is read from the running job's memory.
    socket: of that job's daemon; default: ROPETEAM_SOCKET, which `ropeteam run` sets.
    job: the job of the step; needed if storage has several jobs. Without storage the job may have ended: then
    the arena that it has left on this node is read.
    format: "hf" makes `destination` a directory for Hugging Face's from_pretrained: the model's whole
    tensors, joined from all ranks' parts, the configuration and the tokenizer. The directory must be empty;
    it is created if it does not exist.
    best: with "hf", the weights of the best step, which a Trainer with load_best_model_at_end has saved with
    this one.
    model: with "hf", the name of one model, if the step has several.
    config: with "hf", config.json, or a directory with it and other small files. They replace the step's.
    max_shard_size: with "hf", the largest file of tensors, in bytes or as "5GB", the default.
    timeout: seconds; default: none.

    Every byte is compared with its checksum, and the manifest is written last. NotFound: no such step or job.
    AlreadyExists: another step exists under this name, or with "hf" any file. Corrupt: the files on storage
    are damaged.
    DeadlineExceeded: the copy was stopped; repeat the call to continue it. Unsupported: the program
    `ropeteam` is not found next to the library or this Python, or on PATH, or cannot be run.
    """
    program = find_program()
    arguments = [program, "export", str(step), _place(destination)]
    if storage is not None:
        arguments += ["--storage", _place(storage)]
    if socket is not None:
        arguments += ["--socket", _place(socket)]
    if job is not None:
        arguments += ["--job", job]
    if format is not None:
        arguments += ["--format", format]
    if best:
        arguments += ["--best"]
    if model is not None:
        arguments += ["--model", model]
    if config is not None:
        arguments += ["--config", os.path.abspath(config)]
    if max_shard_size is not None:
        arguments += ["--max-shard-size", str(max_shard_size)]
    try:
        done = subprocess.run(
            arguments,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(f"step {step} was not exported to {destination} within {timeout} s") from error
    except OSError as error:
        raise Unsupported(f"cannot run {program}: {error}") from error
    if done.returncode != 0:
        raise _error(program, done)


def find_program() -> str:
    """The command-line program that belongs to the library in use."""
    # Of DIR/lib and DIR/bin, or of client and cli in a build.
    root = pathlib.Path(library().path).parent.parent
    own = pathlib.Path(sys.executable).with_name("ropeteam")
    for path in (root / "cli" / "ropeteam", root / "bin" / "ropeteam", own):
        if path.is_absolute() and os.access(path, os.X_OK):
            return str(path)
    found = shutil.which("ropeteam")
    if found is None:
        raise Unsupported("the program ropeteam is not found beside the library or this Python, or on PATH")
    return found


def _place(place: str | os.PathLike[str]) -> str:
    """Paths made absolute, so that none can look like an option."""
    text = os.fspath(place)
    return text if "://" in text else os.path.abspath(text)


def _error(program: str, done: subprocess.CompletedProcess[str]) -> RopeteamError:
    begin = "ropeteam export: "
    said = [line[len(begin) :] for line in done.stderr.splitlines() if line.startswith(begin)]
    if not said:
        return InternalError(f"{program} ended with {done.returncode}: {done.stderr[-500:]}")
    for code in Code:
        name = library().status_name(int(code)).decode() + ": "
        if said[-1].startswith(name):
            return error_for(code, said[-1][len(name) :])
    return InvalidArgument(said[-1])  # of the arguments

# SPDX-License-Identifier: Apache-2.0
"""Checkpointer: a training loop's checkpoints in three lines. Their errors do not reach the loop."""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from .._client import DEFAULT_TIMEOUT, Client, Level
from .._errors import (
    Aborted,
    Code,
    Corrupt,
    DeadlineExceeded,
    InvalidArgument,
    NoSpace,
    NotFound,
    RopeteamError,
    Stale,
    Unavailable,
    Unsupported,
    error_for,
)
from .._values import JsonValue
from . import _restored
from ._frameworks import set_policy
from ._plain import flatten
from ._state import Loaded, load_state, open_distributed, save_state

_log = logging.getLogger("ropeteam")

#: "skip" waits this long nevertheless: it frees the memory of a step that another rank has skipped.
_SKIP_WAIT_S = 0.1
#: The longest wait for a full arena while no save of this rank is running.
_IDLE_WAIT_S = 1.0
#: "skip": after this many commits in a row, twice as many steps are saved again.
_COMMITS_BEFORE_FASTER = 4
_STRIDE_MAX = 64
#: The leader answers within milliseconds, or is being replaced; the loop does not wait for a new one.
_PERSIST_TIMEOUT_S = 5.0
#: How many steps below the newest are tried if it cannot be loaded, in addition to those on storage.
_OLDER_TRIED = 8
#: The same call would also fail with an older step.
_CALLERS_MISTAKE = (InvalidArgument, Unsupported, TypeError)


@dataclass
class CheckpointStats:
    """The counters of a Checkpointer, on this rank."""

    saved: int = 0  # saves that are at least in this node's memory
    skipped: int = 0  # "skip", "raise": there was no memory; or there is no daemon
    failed: int = 0  # saves with errors, and saved steps that will never be committed
    blocked_s: float = 0.0  # seconds that the loop spent in step() and save()
    bytes: int = 0  # of this rank's shards
    committed: int | None = None  # the newest step known to be committed
    last_error: str = ""


class Checkpointer:
    """Saves and restores the state that a training loop needs to continue as if it had not been interrupted.

        ckpt = ropeteam.torch.Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler)
        for step in range(ckpt.load_latest(), steps):
            ...
            ckpt.step(step)
        ckpt.finish()

    A save that fails does not raise, unless it is a mistake of the program; see step(). It is logged as a
    warning (log "ropeteam") and counted in `stats`, and the older committed steps stay. The constructor and
    load_latest() raise errors. Under torch.distributed they are collectives of the group; saving is not. A
    context manager: leaving it finishes; leaving it by an exception closes without waiting. InvalidArgument:
    two threads save or load at once.
    """

    def __init__(
        self,
        *,
        model: Any,
        optimizer: Any = None,
        scheduler: Any = None,
        dataloader: Any = None,
        extra: Any = None,
        files: Mapping[str, bytes] | None = None,
        memory_every: int = 1,
        storage_every: int | None = None,
        keep: int | None = None,
        log_file: str | os.PathLike[str] | None = None,
        when_full: str = "wait",
        rng: bool = True,
        replicas: Any = "auto",
        verify: str = "first",
        required: bool = True,
        client: Client | None = None,
        group: Any = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        """Opens the store as this process's rank of torch.distributed. If that is not initialised: as the
        rank given by RANK and WORLD_SIZE, or as the only one.

        model, optimizer, scheduler, dataloader: one, or several by name, {"generator": g, "critic": c}.
        Models are modules; all others have state_dict() and load_state_dict().
        extra: an object with these methods, or a dict of such objects, or plain values. The dict's values at
        the time of a save are saved, and a load sets them in the same dict. {"epoch": 0, "ema":
        averaged_model}
        files: small files that rank 0 saves with each step: see save_state().
        memory_every: step(n) saves if n is a multiple of it.
        storage_every: in a job with storage, the daemons write a committed step there when a multiple of this
        number has been passed, if they were started without --persist-every. Default: 500, unless their flag
        or another rank says otherwise; 0: only the daemons' flag decides.
        keep: how many of the newest steps are kept on storage, if the daemons were started without --keep-*.
        Default: the daemons' flags decide, or all steps are kept. If storage_every or keep is given and there
        is no storage: one warning, and training continues.
        log_file: gets a line of JSON for each save; "{rank}" in it is the rank.
        when_full: what a save does if memory is full, because saves come faster than commits. "wait": waits
        up to `timeout` seconds. "skip": the step is not saved. From then on only every second step (fourth,
        …) is saved, the same ones on every rank, until these are committed in time again. "raise": NoSpace.
        Apart from this, step() raises only mistakes of the program; see there.
        rng: also torch's, Python's and numpy's random generators. replicas, verify: see save_state().
        required: if a rank has no daemon: True: Unavailable. False: one warning, and every rank trains
        without checkpoints.
        client: an open one to use, which stays open. group: the process group of these ranks; default: the
        default group. timeout: seconds for opening, a wait for memory, and each read of a load.

        Unavailable: no daemon. InvalidArgument: a value is invalid, or storage_every or keep differs from the
        daemons' flags or from another rank's value; the text has both. TypeError: a part of the state cannot
        be saved. Others: see Client.
        """
        if memory_every < 1:
            raise InvalidArgument(f"memory_every {memory_every}: at least 1 is needed")
        if storage_every is not None and storage_every < 0:
            raise InvalidArgument(f"storage_every {storage_every}: at least 0 is needed")
        if keep is not None and keep < 1:
            raise InvalidArgument(f"keep {keep}: at least 1 is needed")
        if when_full not in ("wait", "skip", "raise"):
            raise InvalidArgument(f'when_full {when_full!r}: "wait", "skip" or "raise" is needed')
        self.stats = CheckpointStats()
        self.loaded: Loaded | None = None  # what load_latest() has found
        self._model = _checked_models(model)
        self._optimizer, others = _split_optimizers(optimizer)
        self._others = {"optimizer": others, "scheduler": scheduler, "dataloader": dataloader, "extra": extra}
        self._memory_every, self._when_full, self._rng = memory_every, when_full, rng
        self._options = {"rng": rng, "replicas": replicas, "verify": verify}
        self._files = dict(files or {})
        self._group, self._timeout = group, timeout
        self._pending: list[int] = []  # saved and not yet known to be committed, oldest first
        self._untrained: int | None = None  # the step that was restored, until step() is called
        self._newest: int | None = None  # the newest step that was saved in this incarnation
        self._stride, self._commits_in_a_row = 1, 0
        self._failures_in_a_row, self._gave_up_waiting = 0, False
        self._stale = self._finished = False
        self._busy = threading.RLock()  # held by the thread that saves or loads; its signal handlers may save
        flatten(self._plain_state())  # raises TypeError now, not at every save
        self._own, self._used = client is None, False
        self._client = client
        self._policy = (storage_every, keep)
        self._begin(required)
        self._log_path = None if log_file is None else os.fspath(log_file).replace("{rank}", str(self._rank))

    def _begin(self, required: bool) -> None:
        if self._own:
            self._client = self._open(required)
        self._rank = 0 if self._client is None else self._client.rank
        self._incarnation = 0 if self._client is None else self._client.info().incarnation
        if self._client is None:
            return
        try:
            set_policy(self._client, *self._policy, self._timeout)
        except InvalidArgument:
            self.close()
            raise

    # ---- loading

    def load_latest(self) -> int:
        """Restores the newest step that can be loaded, and returns the first step to run: the one after it,
        or 0 if nothing has been saved.

        If a rank cannot load the newest step (its bytes are lost or damaged), all ranks load the next older
        one that all can load, with a warning. With more than one rank that needs torch.distributed. The
        result is in `loaded`; its data are `extra`.

        After a save or an earlier load_latest() the program goes back, on all ranks. So a `client` of the
        constructor's caller must be a new one, and one that was opened here is opened again: the steps before
        and after are of two incarnations, and no step has shards of both.

        If no step can be loaded, it raises the error of Client.latest() or load_state() for the newest step.
        The model's state is then undefined. A caller's mistake (another model) is raised at once.
        """
        if self._client is None:
            return 0
        with self._one_thread():
            return self._load_latest()

    def _load_latest(self) -> int:
        assert self._client is not None
        if self._used and self._own:
            self._client.close()
            self._pending.clear()
            self._stale, self._newest = False, None
            self._begin(required=True)
            assert self._client is not None
        self._used = True
        candidates: list[int] = self._from_first(self._candidates)
        errors: dict[int, RopeteamError] = {}
        for step in candidates:
            error = self._try_load(step)
            if error is None:
                if errors:
                    _log.warning("step %d was loaded in place of step %d", step, candidates[0])
                self._untrained = step
                return step + 1
            if isinstance(error, _CALLERS_MISTAKE) or (self._world() > 1 and not self._grouped()):
                raise error
            if not errors or not isinstance(
                error, NotFound
            ):  # most older numbers were never saved, or are gone
                errors[step] = error
                _log.warning("step %d cannot be loaded, an older one is tried: %s", step, error)
        if not errors:
            return 0
        text = "; ".join(f"step {step}: {error}" for step, error in errors.items())
        raise error_for(int(errors[candidates[0]].code), f"no step can be loaded: {text}")

    def _candidates(self) -> list[int]:
        """The steps to try, newest first. Empty: nothing was saved."""
        assert self._client is not None
        found = self._client.latest(self._timeout)
        if found is None:
            return []
        older = {found.step - self._memory_every * (index + 1) for index in range(_OLDER_TRIED)}
        try:
            older.update(each.step for each in self._client.storage_steps() if not each.problem)
        except RopeteamError:
            pass  # usually the job has no storage; memory is tried anyway
        return [found.step, *sorted((step for step in older if 0 <= step < found.step), reverse=True)]

    def _try_load(self, step: int) -> RopeteamError | None:
        """Loads `step` on every rank of the group. Returns the first rank's error if one cannot."""
        assert self._client is not None
        # The error, and the incarnation that saved the shard; where it was, and its bytes.
        outcome: tuple[int, int, str, str, int]
        begun = time.perf_counter()
        try:
            options: dict[str, Any] = {"step": step, "rng": self._rng, "timeout": self._timeout}
            loaded = load_state(self._client, self._model, self._optimizer, **options)
            assert loaded is not None
            saved = loaded.data
            if not isinstance(saved, dict) or "incarnation" not in saved:
                raise InvalidArgument(f"step {step} was not saved by a Checkpointer: use load_state()")
            self._restore(saved)
            outcome = (0, saved["incarnation"], "", _restored.farthest(loaded.origins), loaded.bytes)
            self.loaded = replace(loaded, data=saved.get("extra"))
        except RopeteamError as error:
            outcome = (int(error.code), 0, str(error), "", 0)
        except Exception as error:  # the program's own load_state_dict() may raise anything
            outcome = (int(Code.INVALID_ARGUMENT), 0, f"{type(error).__name__}: {error}", "", 0)
        outcomes = self._gather(outcome)
        for rank, (code, _, text, *_) in enumerate(outcomes):
            if code != 0:
                return error_for(code, f"rank {rank}: {text}" if len(outcomes) > 1 else text)
        if len({incarnation for _, incarnation, *_ in outcomes}) > 1:
            return Corrupt(f"the ranks' shards of step {step} are of different incarnations")
        if self._rank == 0:
            places, size = [each[3] for each in outcomes], sum(each[4] for each in outcomes)
            _restored.say(_restored.text(step, places, size, time.perf_counter() - begun))
        return None

    def _restore(self, saved: Mapping[str, Any]) -> None:
        for kind, target in self._others.items():
            if target is None:
                continue
            if kind not in saved:
                raise InvalidArgument(f"the step was saved without a {kind}")
            if kind == "extra" and not _is_stateful(target):
                _restore_extra(target, saved[kind])
                continue
            for name, each in _by_name(target).items():
                state = saved[kind] if not isinstance(target, Mapping) else saved[kind].get(name)
                if state is None:
                    raise InvalidArgument(f"the step was saved without the {kind} {name!r}")
                each.load_state_dict(state)

    # ---- saving

    def step(
        self, step: int, *, metadata: Mapping[str, JsonValue] | None = None, persist: bool = False
    ) -> bool:
        """Call it after training step `step`: saves the step if it is due. Numbers must grow: use one counter
        across epochs.

        metadata, persist: see Client.save(); a step with persist is due. Returns True if it is saved and on
        its way to the other nodes. After the return the loop may change the tensors.

        InvalidArgument: a newer step was saved since the last load_latest(). The first save also raises
        TypeError or InvalidArgument for what can never be saved: metadata that are not plain, a tensor
        without bytes, a shard that is larger than the arena. After the first save these are warnings.
        """
        step = _number(step)
        self._untrained = None
        due = step % self._memory_every == 0
        return (due or persist) and self._checked_save(step, metadata, persist, due=False)

    def save(
        self, step: int, *, metadata: Mapping[str, JsonValue] | None = None, persist: bool = False
    ) -> bool:
        """Saves `step` even if it is not due. All ranks must call it with the same step."""
        return self._checked_save(_number(step), metadata, persist, due=True)

    def _checked_save(
        self, step: int, metadata: Mapping[str, JsonValue] | None, persist: bool, due: bool
    ) -> bool:
        if self._finished:
            raise InvalidArgument("this Checkpointer is finished")
        self._untrained = None
        with self._one_thread():
            return self._timed_save(step, metadata, persist, due)

    @contextlib.contextmanager
    def _one_thread(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise InvalidArgument("two threads use this Checkpointer at once: save and load in one of them")
        try:
            yield
        finally:
            self._busy.release()

    def _timed_save(
        self, step: int, metadata: Mapping[str, JsonValue] | None, persist: bool, due: bool
    ) -> bool:
        begun = time.perf_counter()
        bytes_before = self.stats.bytes
        refused: Exception | None = None
        try:
            result = self._save(step, metadata, persist, due or persist)
        except NoSpace as error:  # when_full="raise"
            result, refused = "skipped", error
        except (InvalidArgument, TypeError) as error:
            result, refused = "failed", error
        self.stats.skipped += result == "skipped"
        seconds = time.perf_counter() - begun
        self.stats.blocked_s += seconds
        self._write_log(step, result, seconds, self.stats.bytes - bytes_before)
        if refused is not None:
            raise refused
        return result == "saved"

    def _save(self, step: int, metadata: Mapping[str, JsonValue] | None, persist: bool, due: bool) -> str:
        """Returns the outcome: "saved", "skipped" or "failed". due: "skip" does not skip it."""
        if self._client is None:
            return "skipped"
        self._used = True
        try:
            if self._stale:
                raise Stale("the world has restarted without this process")
            self._look()
            if not due and step % (self._memory_every * self._stride) != 0:
                return "skipped"
            self.stats.bytes += self._when_there_is_room(lambda: self._put(step, metadata))
            self.stats.saved += 1
            self._pending.append(step)
            if persist:
                self._persist(step)
        except NoSpace as error:
            if self._when_full == "wait":
                return self._failed(step, error)
            self.stats.last_error = str(error)
            if self._when_full == "raise":
                raise
            self._slower()
            return "skipped"
        except (InvalidArgument, TypeError) as error:
            # What cannot succeed now or later is told where training can still be stopped without a loss.
            older = self._newest is not None and step < self._newest
            if self.stats.saved == 0 or older:
                self.stats.failed += 1
                self.stats.last_error = str(error)
                raise
            return self._failed(step, error)
        except Exception as error:  # also the program's own state_dict(), which may raise anything
            return self._failed(step, error)
        self._newest = step
        self._failures_in_a_row, self._gave_up_waiting = 0, False
        return "saved"

    def _persist(self, step: int) -> None:
        assert self._client is not None
        try:
            self._client.persist(step, min(self._timeout, _PERSIST_TIMEOUT_S))
        except Unsupported as error:
            _log.warning("step %d stays in memory alone: %s", step, error)
        except RopeteamError as error:
            self.stats.last_error = str(error)
            _log.warning("step %d is saved, and not written to storage: %s", step, error)

    def _put(self, step: int, metadata: Mapping[str, JsonValue] | None) -> int:
        assert self._client is not None
        options = {"data": self._plain_state(), "metadata": metadata, **self._options}
        if self._rank == 0:
            options["files"] = self._files
        return save_state(self._client, step, self._model, self._optimizer, **options)

    def _plain_state(self) -> dict[str, Any]:
        """The state without the models, the optimizers that torch knows, and the random generators."""
        state: dict[str, Any] = {"incarnation": getattr(self, "_incarnation", 0)}
        for kind, each in self._others.items():
            if each is None:
                continue
            if _is_stateful(each):
                state[kind] = each.state_dict()
            elif isinstance(each, Mapping):
                state[kind] = {name: _state_of(value, kind, name) for name, value in each.items()}
            else:
                what = f"a {type(each).__name__}"
                raise TypeError(
                    f"{kind} is {what}: it has no state_dict() and load_state_dict(), and is no dict"
                )
        return state

    def _when_there_is_room(self, put: Callable[[], int]) -> int:
        """Calls put() repeatedly while the arena is full, as long as `when_full` allows."""
        begun = time.monotonic()
        limit = {"wait": self._timeout, "skip": _SKIP_WAIT_S, "raise": 0.0}[self._when_full]
        if self._gave_up_waiting:
            limit = 0.0  # an earlier save has waited in vain: later ones do not stop training, too
        while True:
            try:
                return put()
            except NoSpace:
                waited = time.monotonic() - begun
                left = (limit if self._pending else min(limit, _IDLE_WAIT_S)) - waited
                if left <= 0:
                    self._gave_up_waiting = self._when_full == "wait"
                    raise
                # A commit of an older save frees memory. Actions of other ranks and nodes may as well.
                self._look(min(left, 0.05))
                if not self._pending:
                    time.sleep(min(left, 0.01))

    def _look(self, timeout: float = 0.0) -> None:
        """Records which saves are committed by now; waits up to `timeout` seconds."""
        assert self._client is not None
        deadline = time.monotonic() + timeout
        while self._pending:
            step = self._pending[0]
            try:
                self._client.wait(step, Level.COMMITTED, max(0.0, deadline - time.monotonic()))
            except DeadlineExceeded:
                return
            except (Aborted, NotFound) as error:  # a newer step has replaced it, or a rank lacks it
                self._pending.pop(0)
                self._never_committed(step, error)
                continue
            except Unavailable:  # the daemon is or was gone; the next save tries to connect again
                return
            self._pending.pop(0)
            self.stats.committed = step
            self._faster()

    def _never_committed(self, step: int, error: RopeteamError) -> None:
        if self._when_full == "skip":
            self._slower()
        if not self._pending:  # otherwise a newer one may still commit, and this one is not missed
            self._failed(step, error)

    def _slower(self) -> None:
        self._stride, self._commits_in_a_row = min(2 * self._stride, _STRIDE_MAX), 0

    def _faster(self) -> None:
        self._commits_in_a_row += 1
        if self._commits_in_a_row >= _COMMITS_BEFORE_FASTER and self._stride > 1:
            self._stride, self._commits_in_a_row = self._stride // 2, 0

    def _failed(self, step: int, error: Exception) -> str:
        self.stats.failed += 1
        self.stats.last_error = str(error)
        self._stale = self._stale or isinstance(error, Stale)
        self._failures_in_a_row += 1
        count = self._failures_in_a_row
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, … in a row: not one line per step
            in_a_row = f" ({count} in a row)" if count > 1 else ""
            _log.warning("step %d is not safe, training goes on%s: %s", step, in_a_row, error)
        return "failed"

    def _write_log(self, step: int, result: str, seconds: float, size: int) -> None:
        if self._log_path is None:
            return
        line: dict[str, Any] = {"time": time.time(), "rank": self._rank, "step": step, "result": result}
        line.update(blocked_s=round(seconds, 6), bytes=size, committed=self.stats.committed)
        if result != "saved" and self.stats.last_error:
            line["error"] = self.stats.last_error
        try:
            with open(self._log_path, "a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            self._log_path = None
            _log.warning("the log file of checkpoints is not written any more: %s", error)

    # ---- the end

    def maybe_finalize(self, blocking: bool = False, timeout: float | None = None) -> bool:
        """Checks the running saves. Returns True if all have been committed, or never will be.

        blocking: waits for that, up to `timeout` seconds (default: the constructor's). If the newest save has
        failed, at most a second.
        """
        if self._client is None or self._client.closed:
            return True
        limit = self._timeout if timeout is None else timeout
        if self._failures_in_a_row:
            limit = min(limit, _IDLE_WAIT_S)
        try:
            self._look(limit if blocking else 0.0)
        except RopeteamError as error:
            self._failed(self._pending[-1], error)
            self._pending.clear()
        return not self._pending

    def finish(self, timeout: float | None = None, persist: bool = False) -> int | None:
        """Waits until the last save is committed, and closes. Returns the newest committed step; None: there
        is none.

        A save that is not committed in time is a warning. Finishing twice is allowed.
        persist: that step is also written to storage, due or not. The call waits again, at most as long, until
            it is there. Without it the end of a job does not wait for storage. A step that is not there in time
            is a warning.
        """
        if not self._finished and not self.maybe_finalize(blocking=True, timeout=timeout):
            self._failed(
                self._pending[-1], DeadlineExceeded("it is saved, and was not committed before the end")
            )
        if self._untrained is not None and not self._finished and self._rank == 0:
            _log.warning(
                "step %d was restored, and this run has trained no step after it: if it is another run than the "
                "one that saved it, give it another name (ropeteam run --job), or free that memory first "
                "(ropeteam clean --job %s)",
                self._untrained,
                os.environ.get("ROPETEAM_JOB", "JOB"),
            )
        if persist and not self._finished and self.stats.committed is not None:
            self._finish_on_storage(self.stats.committed, self._timeout if timeout is None else timeout)
        self.close()
        return self.stats.committed

    def _finish_on_storage(self, step: int, timeout: float) -> None:
        assert self._client is not None
        try:
            self._client.persist(step, min(timeout, _PERSIST_TIMEOUT_S))
            self._client.wait(step, Level.PERSISTED, timeout)
        except RopeteamError as error:
            self.stats.last_error = str(error)
            _log.warning("step %d is in memory, and not on storage: %s", step, error)

    def close(self) -> None:
        """Closes without waiting. A client that was passed in stays open."""
        self._finished = True
        if self._own and self._client is not None:
            self._client.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()

    def __repr__(self) -> str:
        return f"Checkpointer(rank={self._rank}, {asdict(self.stats)})"

    # ---- the group

    def _grouped(self) -> bool:
        return bool(dist.is_available() and dist.is_initialized())

    def _world(self) -> int:
        return 1 if self._client is None else self._client.info().world_size

    def _gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank. A collective."""
        if not self._grouped():
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _from_first(self, make: Callable[[], Any]) -> Any:
        """The result or the exception of make() on rank 0, on every rank. A collective."""
        made: tuple[Any, int, str] = (None, 0, "")
        if not self._grouped() or dist.get_rank(self._group) == 0:
            try:
                made = (make(), 0, "")
            except RopeteamError as error:
                made = (None, int(error.code), str(error))
        value, code, text = self._gather(made)[0]
        if code != 0:
            raise error_for(code, text)
        return value

    def _open(self, required: bool) -> Client | None:
        """The client on every rank, or on none."""
        client: Client | None = None
        failed: tuple[int, str] | None = None
        try:
            client = self._open_here()
        except RopeteamError as error:
            missing = "ROPETEAM_SOCKET" not in os.environ
            failed = (int(Code.UNAVAILABLE if missing else error.code), str(error))
        outcomes = self._gather(failed)
        for rank, each in enumerate(outcomes):
            if each is None:
                continue
            if client is not None:
                client.close()
            code, text = each
            where = f"rank {rank}: " if len(outcomes) > 1 else ""
            if not required:
                _log.warning("training goes on without checkpoints: %s%s", where, text)
                return None
            if code == Code.UNAVAILABLE:
                text += "; start the program with `ropeteam run -- …`, or give required=False"
            raise error_for(code, f"{where}{text}")
        return client

    def _open_here(self) -> Client:
        if self._grouped():
            return open_distributed(group=self._group, timeout=self._timeout)
        return Client(timeout=self._timeout)


def _number(step: Any) -> int:
    try:
        return operator.index(step)
    except TypeError:
        raise InvalidArgument(f"step {step!r}: an integer is needed") from None


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _by_name(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {"": value}


def _checked_models(model: Any) -> Any:
    for name, each in _by_name(model).items():
        if not isinstance(each, torch.nn.Module):
            raise TypeError(
                f"model {name!r} is a {type(each).__name__}, not a torch.nn.Module: give it as extra"
            )
    return model


def _split_optimizers(optimizer: Any) -> tuple[Any, Any]:
    """Optimizers whose state is saved by the names of the model's parameters, and those of other
    libraries."""
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return optimizer, None
    if not isinstance(optimizer, Mapping):
        return None, optimizer
    known = {name: each for name, each in optimizer.items() if isinstance(each, torch.optim.Optimizer)}
    others = {name: each for name, each in optimizer.items() if name not in known}
    return known or None, others or None


def _state_of(value: Any, kind: str, name: str) -> Any:
    if _is_stateful(value):
        return value.state_dict()
    if kind == "extra":
        return value
    what = f"a {type(value).__name__}"
    raise TypeError(f"{kind} {name!r} is {what}: it has no state_dict() and load_state_dict()")


def _restore_extra(target: Any, saved: Mapping[str, Any]) -> None:
    for name, value in saved.items():
        if name in target and _is_stateful(target[name]):
            target[name].load_state_dict(value)
        else:
            target[name] = value

# SPDX-License-Identifier: Apache-2.0
"""Reads what the demo's ranks wrote, and makes the report and the timeline, as text and as a picture."""

from __future__ import annotations

import json
import pathlib
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


def read_events(directory: pathlib.Path, rank: int) -> list[dict[str, Any]]:
    """A rank's events in order. The last line is left out if the kill of the process cut it off."""
    path = directory / f"events.{rank}.jsonl"
    events = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events


def read_losses(directory: pathlib.Path, rank: int) -> list[tuple[int, str]]:
    """Pairs (step, loss as hexadecimal float) in the order written. A repeated step is there twice."""
    path = directory / f"loss.{rank}.txt"
    pairs = []
    for line in path.read_text().splitlines() if path.exists() else []:
        fields = line.split()
        if len(fields) == 2:
            pairs.append((int(fields[0]), fields[1]))
    return pairs


def last_step(directory: pathlib.Path, rank: int, before: float = float("inf")) -> int:
    """The newest step that the rank finished, before a time; 0 for none."""
    steps = (event["step"] for event in read_events(directory, rank) if event["event"] == "step")
    if before == float("inf"):
        return max(steps, default=0)
    events = read_events(directory, rank)
    return max((e["step"] for e in events if e["event"] == "step" and e["t"] < before), default=0)


def compare_losses(reference: pathlib.Path, run: pathlib.Path, world: int, steps: int) -> list[str]:
    """Where the run's losses differ from the reference's in any bit, on any rank; also in repeated steps."""
    differences = []
    for rank in range(world):
        expected = dict(read_losses(reference, rank))
        seen = read_losses(run, rank)
        for wanted in range(1, steps + 1):
            if wanted not in expected:
                differences.append(f"rank {rank}: the reference has no step {wanted}")
            if wanted not in dict(seen):
                differences.append(f"rank {rank}: the run has no step {wanted}")
        for step, loss in seen:
            if expected.get(step) != loss:
                differences.append(f"rank {rank} step {step}: {loss}, in the reference {expected.get(step)}")
    return differences


@dataclass(frozen=True)
class StoredStep:
    """A complete step on storage."""

    step: int
    incarnation: int  # the whole number, as in the folder's name
    size: int  # bytes of its files, its manifest included


@dataclass(frozen=True)
class Persist:
    """A step on its way to storage."""

    step: int
    incarnation: int  # as logs show it: the lower bits of the number in the folder's name
    begun_at: float
    ended_at: float | None  # None: it was cut off


@dataclass
class Storage:
    every: int  # every how many steps one is persisted
    newest: StoredStep  # at the time of the loss
    persists: list[Persist] = field(default_factory=list)  # of the whole run
    restored_bytes: int | None = None  # that the new nodes read from storage; None: unknown

    def interval(self) -> str:
        return "every step" if self.every == 1 else f"every {self.every} steps"

    def announced(self, before: float) -> int:
        """The newest step that a daemon had logged as persisted before a time; 0 for none."""
        ended = (p.step for p in self.persists if p.ended_at is not None and p.ended_at < before)
        return max(ended, default=0)


@dataclass
class Kill:
    node: int | None  # None: every node
    at: float
    step: int  # the newest step that a killed node's rank had finished
    views: Mapping[int, float]  # survivor: time of its daemon's first view without the node
    replaced_at: float
    storage: Storage | None = None  # only when every node was killed

    def killed(self, rank: int) -> bool:
        return self.node is None or rank == self.node


def median_ms(directory: pathlib.Path, world: int, event: str) -> float | None:
    values = [e["ms"] for rank in range(world) for e in read_events(directory, rank) if e["event"] == event]
    return round(statistics.median(values), 2) if values else None


def first(events: Iterable[dict[str, Any]], name: str, after: float) -> dict[str, Any] | None:
    return next((event for event in events if event["event"] == name and event["t"] > after), None)


def make_report(
    run: pathlib.Path, reference: pathlib.Path, world: int, steps: int, kill: Kill
) -> dict[str, Any]:
    restarts = [first(read_events(run, rank), "loaded", kill.at) for rank in range(world)]
    resumed = {None if loaded is None else loaded["step"] for loaded in restarts}
    resumed_from = resumed.pop() if len(resumed) == 1 else None
    restored = [loaded["ms"] for rank, loaded in enumerate(restarts) if loaded and kill.killed(rank)]
    # A survivor may still finish a step right after the kill. Its first step after the load counts.
    again = [first(read_events(run, rank), "step", e["t"]) for rank, e in enumerate(restarts) if e]
    after = [event["t"] for event in again if event]
    differences = compare_losses(reference, run, world, steps)
    detected = max(kill.views.values(), default=None)  # None: no survivors
    report = {
        "nodes": world,
        "world_size": world,
        "steps": steps,
        "killed_node": kill.node,
        "killed_at_step": kill.step,
        "resumed_from_step": resumed_from,
        "steps_lost": None if resumed_from is None else kill.step - resumed_from,
        "save_stall_ms_median": median_ms(run, world, "saved"),
        "replicated_ms_median": median_ms(run, world, "replicated"),
        "committed_ms_median": median_ms(run, world, "committed"),
        "step_ms_median": median_ms(run, world, "step"),
        "detect_ms": None if detected is None else round((detected - kill.at) * 1e3, 1),
        "restore_ms": round(max(restored), 1) if restored else None,
        "first_step_after_ms": round((max(after) - kill.at) * 1e3, 1) if len(after) == world else None,
        "losses_identical": not differences,
        "loss_differences": differences[:5],
    }
    if kill.storage is not None:
        report.update(_storage_report(kill, kill.storage, [loaded for loaded in restarts if loaded], world))
    return report


def _storage_report(
    kill: Kill, storage: Storage, restarts: list[dict[str, Any]], world: int
) -> dict[str, Any]:
    took = [p.ended_at - p.begun_at for p in storage.persists if p.ended_at is not None]
    restored = None
    if len(restarts) == world:  # from the first rank's request until the last rank has its shard
        restored = max(e["t"] for e in restarts) - min(e["t"] - e["ms"] / 1e3 for e in restarts)
    return {
        "persist_every": storage.every,
        "persisted_step": storage.newest.step,
        "persisted_bytes": storage.newest.size,
        "announced_persisted_step": storage.announced(kill.at),
        "persist_ms_median": round(statistics.median(took) * 1e3, 1) if took else None,
        "restore_from_storage_ms": None if restored is None else round(restored * 1e3, 1),
        "restored_from_storage_bytes": storage.restored_bytes,
    }


def _storage_failures(report: Mapping[str, Any]) -> list[str]:
    found = []
    if report["resumed_from_step"] != report["persisted_step"]:
        found.append(
            f"training went on from step {report['resumed_from_step']}, "
            f"the newest persisted one was step {report['persisted_step']}"
        )
    if report["announced_persisted_step"] > report["persisted_step"]:
        found.append(
            f"step {report['announced_persisted_step']} had been called persisted, "
            f"the newest on storage was step {report['persisted_step']}"
        )
    return found


def failures(report: Mapping[str, Any], detect_ms_max: float) -> list[str]:
    """The promises that do not hold."""
    found = []
    from_storage = "persisted_step" in report
    if report["resumed_from_step"] is None:
        found.append("the ranks did not all go on from one step")
    elif from_storage:
        found += _storage_failures(report)
    elif not 0 <= report["steps_lost"] <= 1:
        found.append(f"{report['steps_lost']} steps were lost, at most 1 may be")
    if not report["losses_identical"]:
        found.append(
            "the losses differ from the uninterrupted run's: " + "; ".join(report["loss_differences"])
        )
    if not from_storage and report["detect_ms"] > detect_ms_max:
        found.append(
            f"the death was seen after {report['detect_ms']} ms, at most {detect_ms_max:.0f} are promised"
        )
    measured = ["save_stall_ms_median", "replicated_ms_median", "restore_ms", "first_step_after_ms"]
    if from_storage:
        measured += ["persist_ms_median", "restore_from_storage_ms"]
    for key in measured:
        if report[key] is None:
            found.append(f"nothing was measured for {key}")
    return found


def milestones(run: pathlib.Path, world: int, kill: Kill) -> list[tuple[float, str]]:
    """(seconds since the kill, what happened), in order."""
    who = "every node" if kill.node is None else f"node {kill.node}"
    marks = [(0.0, f"{who} killed: ranks, launcher, daemon, memory (step {kill.step} was done)")]
    if kill.views:
        marks.append((min(kill.views.values()) - kill.at, "the first survivor's view is without it"))
        marks.append((max(kill.views.values()) - kill.at, "every survivor's view is without it"))
    what = f"{world} new nodes are" if kill.node is None else f"a replacement for node {kill.node} is"
    marks.append((kill.replaced_at - kill.at, f"{what} started"))
    for rank in range(world):
        who = "the replacement's rank" if rank == kill.node else f"rank {rank}"
        events = [event for event in read_events(run, rank) if event["t"] > kill.at]
        opened, loaded = first(events, "opened", kill.at), first(events, "loaded", kill.at)
        if opened:
            marks.append(
                (opened["t"] - kill.at, f"{who} has its daemon (incarnation {opened['incarnation']})")
            )
        if loaded:
            took = f"{loaded['ms']:.0f} ms"
            marks.append((loaded["t"] - kill.at, f"{who} has step {loaded['step']} back, read in {took}"))
            again = first(events, "step", loaded["t"])
            if again:
                marks.append((again["t"] - kill.at, f"{who} finished step {again['step']}"))
    return sorted(marks)


def storage_text(kill: Kill, storage: Storage) -> list[str]:
    """When each step was written to storage, one line per step."""
    lines = ["", f"  storage, {storage.interval()}, seconds since the kill"]
    for persist in storage.persists:
        begun = persist.begun_at - kill.at
        if persist.ended_at is None:
            ended = "cut off by the kill" if begun < 0 else "cut off by the end of training"
        else:
            ended = f"persisted within {(persist.ended_at - persist.begun_at) * 1e3:.0f} ms"
        back = ""
        if begun < 0 and persist.step == storage.newest.step:
            back = f"; the newest, {storage.newest.size / 1e6:.1f} MB: training goes on from it"
        lines.append(f"    {begun:8.3f} s   step {persist.step} {ended}{back}")
    return lines


def timeline_text(
    report: Mapping[str, Any], marks: list[tuple[float, str]], storage_lines: Iterable[str] = ()
) -> str:
    def ms(key: str) -> str:
        return "     -" if report[key] is None else f"{report[key]:8.1f} ms"

    lines = ["", "  each step"]
    lines.append(f"    {ms('step_ms_median')}  computing (median)")
    lines.append(f"    {ms('save_stall_ms_median')}  save: training stands still (median)")
    lines.append(f"    {ms('replicated_ms_median')}  until REPLICATED: verified on another node (median)")
    lines.append(f"    {ms('committed_ms_median')}  until COMMITTED: of every rank (median)")
    lines += storage_lines
    lines += ["", "  the failure, seconds since the kill"]
    lines += [f"    {at:8.3f} s   {what}" for at, what in marks]
    return "\n".join(lines) + "\n"


def plot(path: pathlib.Path, run: pathlib.Path, reference: pathlib.Path, world: int, kill: Kill) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, lanes) = pyplot.subplots(2, 1, figsize=(10, 7), constrained_layout=True)
    mean = _mean_losses(reference, world)
    losses.plot(list(mean), list(mean.values()), color="0.75", linewidth=5, label="uninterrupted run")
    mean = _mean_losses(run, world)
    lost, killed = ("everything", "every node") if kill.node is None else ("a node", f"node {kill.node}")
    losses.plot(
        list(mean), list(mean.values()), color="tab:blue", linewidth=1.2, label=f"run that lost {lost}"
    )
    losses.axvline(kill.step, color="tab:red", linestyle="--", label=f"{killed} killed")
    if kill.storage is not None:
        newest = kill.storage.newest.step
        losses.axvline(newest, color="tab:green", linestyle="--", label=f"step {newest}, newest on storage")
    losses.set_xlabel("step")
    losses.set_ylabel("loss, mean of the ranks")
    losses.legend()

    for rank in range(world):
        events = read_events(run, rank)
        steps = [event["t"] - kill.at for event in events if event["event"] == "step"]
        lanes.plot(steps, [rank] * len(steps), "|", color="tab:blue", markersize=12)
        for event in events:
            if event["event"] == "loaded":
                lanes.plot(event["t"] - kill.at, rank, "^", color="tab:green", markersize=9)
    dead = [rank for rank in range(world) if kill.killed(rank)]
    lanes.plot([0] * len(dead), dead, "x", color="tab:red", markersize=14, markeredgewidth=3)
    vertical = [(0.0, "tab:red", "killed")]
    if kill.views:
        vertical.append((max(kill.views.values()) - kill.at, "tab:orange", "declared dead"))
    started = "replacement started" if kill.views else "new nodes started"
    vertical.append((kill.replaced_at - kill.at, "tab:purple", started))
    for mark, color, label in vertical:
        lanes.axvline(mark, color=color, linestyle="--", label=label)
    lanes.plot([], [], "|", color="tab:blue", markersize=12, label="a step done")
    lanes.plot([], [], "^", color="tab:green", markersize=9, label="checkpoint read")
    names = [f"rank {rank}" for rank in range(world)]
    if kill.storage is not None:
        _plot_storage(lanes, world, kill, kill.storage)
        names.append("storage")
    lanes.set_yticks(range(len(names)), names)
    lanes.set_ylim(-0.6, len(names) - 0.4)
    lanes.set_xlabel("seconds since the kill")
    lanes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=5)
    figure.savefig(path, dpi=110)


def _plot_storage(lanes: Any, lane: int, kill: Kill, storage: Storage) -> None:
    """Draws a bar with its number for each step that was persisted; red: the kill cut it off."""
    for persist in storage.persists:
        begun = persist.begun_at - kill.at
        if persist.ended_at is None and begun > 0:
            continue  # training ended meanwhile
        ended = 0.0 if persist.ended_at is None else persist.ended_at - kill.at
        color = "tab:red" if persist.ended_at is None else "tab:cyan"
        lanes.barh(lane, ended - begun, left=begun, height=0.4, color=color, edgecolor="0.3", linewidth=0.5)
        lanes.text(begun, lane + 0.24, str(persist.step), fontsize=7, va="bottom")
    lanes.plot([], [], "s", color="tab:cyan", label="being persisted")
    if any(persist.ended_at is None and persist.begun_at < kill.at for persist in storage.persists):
        lanes.plot([], [], "s", color="tab:red", label="cut off")


def _mean_losses(directory: pathlib.Path, world: int) -> dict[int, float]:
    ranks = [dict(read_losses(directory, rank)) for rank in range(world)]
    common = sorted(set.intersection(*(set(rank) for rank in ranks)))
    return {step: statistics.mean(float.fromhex(rank[step]) for rank in ranks) for step in common}

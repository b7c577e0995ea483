# SPDX-License-Identifier: Apache-2.0
"""scripts/chaos after its set-up: a seeded schedule of faults against six real daemons, and what became of the steps."""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from chaos_nodes import Cluster, Node, Rank, Stuck, wait_until
from chaos_rank import content
from demo_nodes import Paths

ROOT = pathlib.Path(__file__).resolve().parents[2]
NODES = 6
ROUND_S = 90.0  # a round that has not recovered by then is stuck
CALL_S = 20.0  # of one call of a rank
FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
PAUSES_S = (0.3, 1.0, 3.0, 10.0, 30.0)
CUTS_S = (0.5, 2.0, 5.0)


@dataclass
class Tally:
    rounds: int = 0
    stuck: int = 0
    lost: int = 0
    wrong: int = 0
    detection_s: list[float] = field(default_factory=list)
    latest_s: list[float] = field(default_factory=list)
    redundancy_s: list[float] = field(default_factory=list)


class Chaos:
    def __init__(self, cluster: Cluster, paths: Paths, seed: int) -> None:
        self.cluster, self.paths, self.seed = cluster, paths, seed
        self.random = random.Random(seed)
        self.ranks: list[Rank] = []
        self.life = ""
        self.lives = 0
        self.next = 1  # the step that is saved next
        self.safe = 0  # the newest step that a rank was told is committed, …
        self.safe_life = ""  # … and the life that saved it
        self.latest = 0  # what this life restores: as new as that, or newer
        self.committed = 0  # how many
        self.attempts: dict[int, set[str]] = collections.defaultdict(set)  # lives that saved a step
        self.tallies: dict[str, Tally] = collections.defaultdict(Tally)
        self.tally = Tally()
        self.struck = 0.0  # wall clock, as the logs have it
        self.notes: list[str] = []

    def start(self) -> None:
        for node in self.cluster.nodes:
            node.start(wait=False)
        self.ranks = [Rank(self.paths, self.seed, number, NODES) for number in range(NODES)]
        wait_until(lambda: len(self.cluster.running()) == NODES and self.redundant(), "all nodes are members", 60)

    def redundant(self) -> bool:
        return self.cluster.redundant()

    # ---- what ranks do

    def ask(self, do: str, ranks: list[Rank] | None = None, each: Callable[[Rank], dict] | None = None) -> list[dict]:
        """The answers of all; they work at the same time."""
        asked = self.ranks if ranks is None else ranks
        for rank in asked:
            rank.order(do, **(each(rank) if each else {}))
        return [rank.answer() for rank in asked]

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"    {text}", flush=True)

    def open_world(self) -> None:
        """All ranks in a new life, those of nodes that do not run on others; checks what is the newest step then."""
        deadline = time.monotonic() + ROUND_S
        errors: list[str] = []
        while time.monotonic() < deadline:
            self.lives += 1
            self.life = f"life-{self.lives}"
            homes = self.cluster.running()
            home = {rank.number: homes[rank.number % len(homes)] for rank in self.ranks}
            for node in homes:
                home[node.ordinal] = node
            arguments = {"life": self.life, "timeout": CALL_S}
            answers = self.ask("open", each=lambda rank: {"socket": home[rank.number].socket, **arguments})
            if not any("error" in answer for answer in answers):
                answers = self.ask("latest", each=lambda rank: {"timeout": CALL_S})
            errors = [answer["error"] for answer in answers if "error" in answer]
            if not errors:
                break
        else:
            raise Stuck(f"no world opens: {errors[:2]}")
        steps = {answer["value"] for answer in answers}
        if len(steps) != 1:
            raise Stuck(f"the ranks of one life have different newest steps: {steps}")
        self.latest = steps.pop() or 0
        if self.latest < self.safe:
            self.tally.lost += 1
            self.note(f"LOST: step {self.safe} was committed, the newest is {self.latest}")
        self.next = self.latest + 1

    def begin_save(self) -> None:
        self.attempts[self.next].add(self.life)
        for rank in self.ranks:
            rank.order("save", step=self.next, life=self.life)

    def end_save(self, timeout_s: float) -> bool:
        """Whether the step is committed; some rank was told so."""
        saved = [rank.answer() for rank in self.ranks]
        waiting = [rank for rank, answer in zip(self.ranks, saved) if "error" not in answer]
        step = self.next
        told = self.ask("wait", waiting, lambda rank: {"step": step, "timeout": timeout_s})
        if any("error" not in answer for answer in told):
            self.safe, self.safe_life = step, self.life
            self.committed += 1
        self.next += 1
        return len(waiting) == NODES and all("error" not in answer for answer in told)

    def save(self) -> None:
        self.begin_save()
        if not self.end_save(CALL_S):
            raise Stuck(f"step {self.next - 1} is not committed in a cluster without a fault")

    def compare(self) -> None:
        """Every committed step that the cluster keeps, and the one to restore: every rank's shard, read by every rank."""
        steps = self.cluster.committed()
        if self.safe and self.safe not in steps:
            self.tally.lost += 1
            self.note(f"LOST: step {self.safe} is not among the committed ones: {steps}")
        for step in sorted({*steps, self.latest} - {0}):
            answers = self.ask("read", each=lambda rank: {"step": step, "timeout": CALL_S})
            lives = {life for answer in answers for life in answer.get("value", [])}
            for rank, answer in zip(self.ranks, answers):
                if "error" in answer:
                    wrong = "WRONG" in answer["error"]
                    self.tally.wrong += wrong
                    self.tally.lost += not wrong
                    self.note(f"rank {rank.number} reads step {step}: {answer['error']}")
            if len(lives) > 1 or not lives <= self.attempts[step]:
                self.tally.wrong += 1
                self.note(f"WRONG: step {step} is of {sorted(lives)}, saved by {sorted(self.attempts[step])}")

    # ---- a round

    def strike(self) -> None:
        self.struck = time.time()

    def saves_meet(self, act: Callable[[], None], waits_s: float = 0.5) -> None:
        """A fault in the middle of a save."""
        self.begin_save()
        time.sleep(self.random.uniform(0, 0.06))  # where in the save it strikes
        self.strike()
        act()
        self.end_save(waits_s)

    def round(self, name: str, fault: Callable[[Chaos], None]) -> None:
        self.tally = self.tallies[name]
        self.tally.rounds += 1
        for _ in range(self.random.randint(1, 2)):
            self.save()
        fault(self)
        repaired = time.monotonic()
        wait_until(self.redundant, "all copies are there again", ROUND_S)
        self.tally.redundancy_s.append(time.monotonic() - repaired)
        self.open_world()
        self.compare()

    def failed_over(self, lost: list[Node]) -> None:
        """After a kill: ranks go on elsewhere at once; notes how long the view and the newest step took."""
        self.open_world()
        self.tally.latest_s.append(time.time() - self.struck)
        survivors = self.cluster.running()
        wanted = len(survivors)

        def noticed() -> list[float]:
            first = [
                min((at for at, members in node.views_since(self.struck) if members <= wanted), default=0.0)
                for node in survivors
            ]
            return first if all(first) else []

        # The coordinator's own return is another matter: its nodes wait for it.
        if self.cluster.nodes[0] not in lost:
            self.tally.detection_s.append(max(wait_until(noticed, "the view without it", ROUND_S)) - self.struck)

    def pick(self, count: int = 1) -> list[Node]:
        return self.random.sample(self.cluster.nodes, count)


# ---- faults. Each leaves every daemon running and the network whole.


def kill_ranks(chaos: Chaos, numbers: list[int], act: Callable[[], None] = lambda: None) -> None:
    def kill() -> None:
        for number in numbers:
            chaos.ranks[number].kill()
        act()

    chaos.saves_meet(kill)
    for number in numbers:
        chaos.ranks[number] = Rank(chaos.paths, chaos.seed, number, NODES)


def kill_rank(chaos: Chaos) -> None:
    kill_ranks(chaos, [chaos.random.randrange(NODES)])


def kill_nodes(chaos: Chaos, nodes: list[Node], drop_memory: bool) -> None:
    """With drop_memory as when hosts are lost: their ranks and arenas go with them."""
    kill_ranks(
        chaos,
        [node.ordinal for node in nodes] if drop_memory else [],
        lambda: [node.kill(drop_memory) for node in nodes],
    )
    if chaos.cluster.nodes[0] in nodes:  # with the coordinator, which nobody else stands in for
        for node in nodes:
            node.start(wait=False)
        chaos.open_world()
        chaos.tally.latest_s.append(time.time() - chaos.struck)
        return
    chaos.failed_over(nodes)
    for node in nodes:
        node.start()


def kill_daemon(chaos: Chaos) -> None:
    kill_nodes(chaos, chaos.pick(), drop_memory=False)


def lose_node(chaos: Chaos) -> None:
    kill_nodes(chaos, chaos.pick(), drop_memory=True)


def lose_two_nodes(chaos: Chaos) -> None:
    kill_nodes(chaos, chaos.pick(2), drop_memory=True)


def kill_leader(chaos: Chaos) -> None:
    leader = chaos.cluster.running()[0].status()["leader"]
    kill_nodes(chaos, [node for node in chaos.cluster.nodes if node.name == leader], drop_memory=False)


def kill_all_daemons(chaos: Chaos) -> None:
    kill_nodes(chaos, list(chaos.cluster.nodes), drop_memory=False)


def pause(chaos: Chaos) -> None:
    (node,) = chaos.pick()
    seconds = chaos.random.choice(PAUSES_S)
    chaos.saves_meet(node.pause)
    time.sleep(seconds)  # its length is what is tried
    node.go_on()


def cut(chaos: Chaos, one_way: bool) -> None:
    some = chaos.pick(chaos.random.randint(1, NODES // 2))
    others = [node for node in chaos.cluster.nodes if node not in some]

    def drop() -> None:
        for node in some:
            node.drop_from(others)
        for node in [] if one_way else others:
            node.drop_from(some)

    chaos.saves_meet(drop)
    time.sleep(chaos.random.choice(CUTS_S))
    for node in chaos.cluster.nodes:
        node.heal()


def partition(chaos: Chaos) -> None:
    cut(chaos, one_way=False)


def one_way_partition(chaos: Chaos) -> None:
    cut(chaos, one_way=True)


def throttle(chaos: Chaos) -> None:
    slow = chaos.pick(2)
    for node in slow:
        node.throttle(chaos.random.choice((10, 50, 200)))
    chaos.saves_meet(lambda: None, CALL_S)
    for node in slow:
        node.heal()


def full_memory(chaos: Chaos) -> None:
    """The host has no memory for the arena of a node that comes back: it says so, and comes when there is."""
    (node,) = chaos.pick()
    kill_ranks(chaos, [node.ordinal], lambda: node.kill(drop_memory=True))
    ballast = chaos.cluster.arenas / "ballast"
    room = os.statvfs(chaos.cluster.arenas)
    with open(ballast, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, (room.f_bavail - 256) * room.f_frsize)
    node.start(wait=False)
    try:
        status = node.process.wait(CALL_S)
    except Exception as error:
        raise Stuck(f"{node.name} neither starts nor ends where memory is full") from error
    node.process = None
    if status == 0 or "space" not in node.last_words():
        raise Stuck(f"{node.name} ended with {status} where memory is full: {node.last_words()}")
    ballast.unlink()
    node.start()


def flip_bit(chaos: Chaos) -> None:
    """Of one copy of a committed shard. It is found when it is read, or by the scrub."""
    step = chaos.safe
    owner = chaos.random.randrange(NODES)
    value = content(chaos.seed, step, owner, chaos.safe_life)["model"]
    at = chaos.random.randrange(max(1, len(value) - 64))
    holder = next((node for node in chaos.pick(NODES) if len(value) > 64 and node.flip_bit_of(value, at)), None)
    if holder is not None:
        chaos.note(f"flipped a bit of rank {owner}'s step {step} on {holder.name}")


def step_clock(chaos: Chaos) -> None:
    """A daemon whose wall clock jumps while it works; its clock is right again from its next start on."""
    (node,) = chaos.pick()
    clock = chaos.cluster.directory / "clock"
    clock.write_text("+0")
    preload = {"LD_PRELOAD": FAKETIME, "FAKETIME_TIMESTAMP_FILE": str(clock), "DONT_FAKE_MONOTONIC": "1"}
    preload["FAKETIME_CACHE_DURATION"] = "1"
    node.kill()
    node.start(preload=preload)
    chaos.open_world()
    chaos.saves_meet(lambda: clock.write_text(chaos.random.choice(("+2h", "-2h", "+400d"))), CALL_S)
    chaos.saves_meet(lambda: None, CALL_S)
    node.kill()
    node.start()


FAULTS: dict[str, Callable[[Chaos], None]] = {
    "kill-rank": kill_rank,
    "kill-daemon": kill_daemon,
    "kill-leader": kill_leader,
    "kill-all-daemons": kill_all_daemons,
    "lose-node": lose_node,
    "lose-two-nodes": lose_two_nodes,
    "pause": pause,
    "partition": partition,
    "one-way-partition": one_way_partition,
    "throttle": throttle,
    "full-memory": full_memory,
    "flip-bit": flip_bit,
    "step-clock": step_clock,
}


def worst(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} / {max(values):.2f}" if values else "-"


def table(chaos: Chaos) -> str:
    head = ["FAULT", "ROUNDS", "LOST", "WRONG", "STUCK", "DETECTED_S", "LATEST_S", "REDUNDANT_S"]
    rows = [head]
    total = Tally()
    for name, each in [*chaos.tallies.items(), ("all", total)]:
        if each is not total:
            for key, value in vars(each).items():
                setattr(total, key, getattr(total, key) + value)
        times = [worst(each.detection_s), worst(each.latest_s), worst(each.redundancy_s)]
        rows.append([name, *map(str, (each.rounds, each.lost, each.wrong, each.stuck)), *times])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, f"steps committed {chaos.committed}; times: median / worst, in seconds"])


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/chaos", add_help=False)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", default=",".join(FAULTS))
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--in-turn", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "chaos")
    options = parser.parse_args(words)
    options.only = options.only.split(",")
    unknown = [name for name in options.only if name not in FAULTS]
    if unknown:
        parser.error(f"--only {', '.join(unknown)}: the faults are {', '.join(FAULTS)}")
    if options.in_turn:
        options.rounds = len(options.only)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1_000_000)
    return options


def main() -> int:
    options = parse(sys.argv[1:])
    if os.geteuid() != 0:
        print("scripts/chaos: network namespaces take root", file=sys.stderr)
        return 1
    if "step-clock" in options.only and not pathlib.Path(FAKETIME).exists():
        print(f"step-clock is left out: there is no {FAKETIME} (Debian: libfaketime)")
        options.only.remove("step-clock")
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.log"):
        old.unlink()
    paths = Paths(ROOT, out)
    cluster = Cluster(paths, out, NODES)
    chaos = Chaos(cluster, paths, options.seed)
    schedule = random.Random(options.seed)
    print(f"seed {options.seed}, {options.rounds} rounds, logs in {out}", flush=True)
    begin = time.monotonic()
    try:
        cluster.open()
        chaos.start()
        chaos.open_world()
        for number in range(options.rounds):
            name = options.only[number] if options.in_turn else schedule.choice(options.only)
            print(f"[{time.monotonic() - begin:6.1f} s] round {number + 1}: {name}", flush=True)
            chaos.random = random.Random(f"{options.seed}/{number}")
            try:
                chaos.round(name, FAULTS[name])
            except Stuck as stuck:
                chaos.tally.stuck += 1
                chaos.note(f"STUCK: {stuck}")
                break  # what comes after a stuck round says nothing
    finally:
        for rank in chaos.ranks:
            rank.kill()
        cluster.close(options.keep)
    print(table(chaos))
    report: dict[str, Any] = {"seed": options.seed, "rounds": options.rounds, "committed": chaos.committed}
    report["faults"] = {name: vars(each) for name, each in chaos.tallies.items()}
    report["notes"] = chaos.notes
    (out / "report.json").write_text(json.dumps(report, indent=1))
    bad = sum(each.lost + each.wrong + each.stuck for each in chaos.tallies.values())
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

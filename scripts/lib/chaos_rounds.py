# SPDX-License-Identifier: Apache-2.0
"""A round of scripts/chaos: what the ranks save, what is compared after a fault, and what is counted."""

from __future__ import annotations

import collections
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from chaos_host import Stuck, wait_until
from chaos_nodes import Cluster, Node, Rank
from demo_nodes import Paths

NODES = 6
ROUND_S = 90.0  # a round that has not recovered by then is stuck
CALL_S = 20.0  # timeout of one call of a rank
WAITING = ("Unavailable", "DeadlineExceeded")  # the errors of a rank that is told to wait, until its deadline
WAITS_S = 3.0  # how long ranks must be told to wait where nothing can be restored


@dataclass
class Tally:
    rounds: int = 0
    stuck: int = 0
    lost: int = 0
    wrong: int = 0
    disturbed: int = 0
    detection_s: list[float] = field(default_factory=list)
    latest_s: list[float] = field(default_factory=list)
    redundancy_s: list[float] = field(default_factory=list)


class Chaos:
    def __init__(self, cluster: Cluster, paths: Paths, seed: int) -> None:
        self.cluster, self.paths, self.seed = cluster, paths, seed
        self.random = random.Random(seed)
        self.ranks: list[Rank] = []
        self.token = ""
        self.incarnations = 0
        self.next = 1  # the step that is saved next
        self.safe = 0  # the newest step that a rank was told is committed, …
        self.safe_token = ""  # … and the token of the incarnation that saved it
        self.persisted = 0  # the newest step that a rank was told is persisted, …
        self.persisted_token = ""
        self.latest = 0  # the step that this incarnation restores; must not be older than `safe`
        self.committed = 0  # number of committed steps
        self.attempts: dict[int, set[str]] = collections.defaultdict(set)  # tokens that saved a step
        self.tallies: dict[str, Tally] = collections.defaultdict(Tally)
        self.tally = Tally()
        self.struck = 0.0  # time of the fault; wall clock, as in the logs
        self.notes: list[str] = []

    def start(self) -> None:
        for node in self.cluster.nodes:
            node.start(wait=False)
        self.ranks = [Rank(self.paths, self.seed, number, NODES) for number in range(NODES)]
        wait_until(lambda: len(self.cluster.running()) == NODES and self.redundant(), "all nodes are members", 60)

    def redundant(self, absent: int = 0) -> bool:
        return self.cluster.redundant(absent)

    # ---- what ranks do

    def ask(self, do: str, ranks: list[Rank] | None = None, each: Callable[[Rank], dict] | None = None) -> list[dict]:
        """Gives all ranks the order, so that they work at the same time. Returns their answers."""
        asked = self.ranks if ranks is None else ranks
        for rank in asked:
            rank.order(do, **(each(rank) if each else {}))
        return [rank.answer() for rank in asked]

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"    {text}", flush=True)

    def open_ranks(self) -> list[str]:
        """Opens all ranks in a new incarnation, and returns the errors. A rank whose node is absent opens on a spare, or
        on another node."""
        self.incarnations += 1
        self.token = f"run-{self.incarnations}"
        running = self.cluster.running()
        others = [node for node in running if node in self.cluster.spares] or running
        home = {rank.number: others[rank.number % len(others)] for rank in self.ranks}
        for node in running:
            home[node.ordinal] = node
        arguments = {"token": self.token, "timeout": CALL_S}
        answers = self.ask("open", each=lambda rank: {"socket": home[rank.number].socket, **arguments})
        return [answer["error"] for answer in answers if "error" in answer]

    def open_world(self) -> None:
        """Opens all ranks in a new incarnation. Checks `latest`."""
        deadline = time.monotonic() + ROUND_S
        errors: list[str] = []
        while time.monotonic() < deadline:
            errors = self.open_ranks()
            if errors:
                continue
            answers = self.ask("latest", each=lambda rank: {"timeout": CALL_S})
            errors = [answer["error"] for answer in answers if "error" in answer]
            if not errors:
                break
        else:
            raise Stuck(f"no world opens: {errors[:2]}")
        steps = {answer["value"] for answer in answers}
        if len(steps) != 1:
            raise Stuck(f"the ranks of one incarnation have different newest steps: {steps}")
        self.latest = steps.pop() or 0
        if self.latest < self.safe:
            self.tally.lost += 1
            self.note(f"LOST: step {self.safe} was committed, the newest is {self.latest}")
        self.next = self.latest + 1

    def waits(self) -> None:
        """Ranks that open now must be told to wait: never that nothing is saved, nor an older step."""
        wait_until(lambda: not self.open_ranks(), "ranks open where they have to wait", ROUND_S)
        answers = self.ask("latest", each=lambda rank: {"timeout": WAITS_S})
        told = {answer["value"] or 0 for answer in answers if "value" in answer}
        if any(step < self.safe for step in told):
            self.tally.lost += 1
            self.note(f"LOST: step {self.safe} exists but cannot be read now, ranks were told {sorted(told)}")
        errors = [answer["error"] for answer in answers if "error" in answer]
        if not all(error.startswith(WAITING) for error in errors):
            raise Stuck(f"ranks are not told to wait: {errors[:2]}")

    def begin_save(self, persist: bool = False) -> None:
        self.attempts[self.next].add(self.token)
        for rank in self.ranks:
            rank.order("save", step=self.next, token=self.token, persist=persist)

    def end_save(self, timeout_s: float) -> bool:
        """Whether all ranks were told that the step is committed. If one was told, it counts as committed."""
        saved = [rank.answer() for rank in self.ranks]
        waiting = [rank for rank, answer in zip(self.ranks, saved) if "error" not in answer]
        step = self.next
        told = self.ask("wait", waiting, lambda rank: {"step": step, "level": "COMMITTED", "timeout": timeout_s})
        if any("error" not in answer for answer in told):
            self.told_committed(step)
        self.next += 1
        return len(waiting) == NODES and all("error" not in answer for answer in told)

    def told_committed(self, step: int) -> None:
        if (step, self.token) != (self.safe, self.safe_token):
            self.safe, self.safe_token = step, self.token
            self.committed += 1

    def save(self, persist: bool = False) -> None:
        self.begin_save(persist)
        if not self.end_save(CALL_S):
            raise Stuck(f"step {self.next - 1} is not committed in a cluster without a fault")

    def told_persisted(self, timeout_s: float) -> bool:
        """Whether all ranks were told that the step saved last is persisted. If one was told, it must be on storage."""
        step = self.next - 1
        told = self.ask("wait", each=lambda rank: {"step": step, "level": "PERSISTED", "timeout": timeout_s})
        if any("error" not in answer for answer in told):
            self.told_committed(step)
            self.persisted, self.persisted_token = step, self.token
            self.compare_stored()
        return all("error" not in answer for answer in told)

    def persist(self) -> None:
        """Saves steps until one is persisted. A step may be abandoned while storage recovers."""
        begin = time.monotonic()
        while True:
            self.save(persist=True)
            if self.told_persisted(CALL_S):
                return
            if time.monotonic() > begin + ROUND_S:
                raise Stuck(f"no step was persisted within {ROUND_S:.0f} s, the last one was {self.next - 1}")

    def compare_stored(self) -> None:
        """The newest step that ranks were told is persisted is on storage, whole."""
        if not self.persisted:
            return
        trouble = self.cluster.store.trouble_with(self.seed, self.persisted, self.persisted_token, NODES)
        if trouble:
            wrong = trouble.startswith("WRONG")
            self.tally.wrong += wrong
            self.tally.lost += not wrong
            self.note(trouble)

    def lost_all_memory(self) -> None:
        """From now on only what is on storage can come back."""
        self.safe, self.safe_token = self.persisted, self.persisted_token

    def compare(self, since: float) -> None:
        """`since`: when the cluster was whole again. Every rank reads and checks every shard of all committed steps and of the step to restore."""
        self.compare_stored()
        steps = self.cluster.committed()
        if self.safe and self.safe not in (*steps, self.latest):
            self.tally.lost += 1
            self.note(f"LOST: step {self.safe} is not among the committed ones: {steps}")
        for step in sorted({*steps, self.latest} - {0}):
            answers = self.ask("read", each=lambda rank: {"step": step, "timeout": CALL_S})
            unavailable = any("Unavailable" in answer.get("error", "") for answer in answers)
            if unavailable and self.declared_dead(since):
                # On a busy machine a daemon missed its heartbeats and started again. Nothing is lost.
                self.tally.disturbed += 1
                self.note("DISTURBED: a node was declared dead in a cluster without a fault")
                wait_until(self.redundant, "all copies are there again", ROUND_S)
                self.open_world()
                answers = self.ask("read", each=lambda rank: {"step": step, "timeout": CALL_S})
            self.judge(step, answers)

    def declared_dead(self, since: float) -> bool:
        """Whether a node was declared dead after `since`. Others may see that later than the node's ranks."""
        try:
            wait_until(lambda: any(self.smaller_views(self.cluster.nodes, NODES - 1, since)), "a smaller view", CALL_S)
        except Stuck:
            return False
        return True

    def judge(self, step: int, answers: list[dict]) -> None:
        tokens = {token for answer in answers for token in answer.get("value", [])}
        for rank, answer in zip(self.ranks, answers):
            if "error" in answer:
                wrong = "WRONG" in answer["error"]
                self.tally.wrong += wrong
                self.tally.lost += not wrong
                self.note(f"rank {rank.number} reads step {step}: {answer['error']}")
        if len(tokens) > 1 or not tokens <= self.attempts[step]:
            self.tally.wrong += 1
            self.note(f"WRONG: step {step} is of {sorted(tokens)}, saved by {sorted(self.attempts[step])}")

    # ---- a round

    def strike(self) -> None:
        self.struck = time.time()

    def saves_meet(self, act: Callable[[], None], waits_s: float = 0.5, persist: bool = False) -> None:
        """Injects a fault in the middle of a save."""
        self.begin_save(persist)
        time.sleep(self.random.uniform(0, 0.06))  # the fault may hit any part of the save
        self.strike()
        act()
        self.end_save(waits_s)

    def round(self, name: str, fault: Callable[[Chaos], None]) -> None:
        self.tally = self.tallies[name]
        self.tally.rounds += 1
        counts = [len(each) for each in (self.tally.detection_s, self.tally.latest_s, self.tally.redundancy_s)]
        for _ in range(self.random.randint(1, 2)):
            self.save()
        fault(self)
        repaired = time.monotonic()
        if self.cluster.etcd:
            self.cluster.etcd.wait()
        wait_until(self.redundant, "all copies are there again", ROUND_S)
        self.tally.redundancy_s.append(time.monotonic() - repaired)
        whole = time.time()
        self.open_world()
        self.compare(whole)
        print(f"    {self.times(counts)}", flush=True)

    def times(self, counts: list[int]) -> str:
        """What the round added to each list of times."""
        names = ("detected", "latest", "redundant")
        new = zip(names, counts, (self.tally.detection_s, self.tally.latest_s, self.tally.redundancy_s))
        return ", ".join(f"{name} {values[-1]:.2f} s" for name, count, values in new if len(values) > count)

    def failed_over(self) -> None:
        """After a kill: opens the ranks on other nodes. Records the times until `latest` and the view."""
        self.open_world()
        self.tally.latest_s.append(time.time() - self.struck)
        survivors = self.cluster.running()

        def noticed() -> list[float]:
            first = self.smaller_views(survivors, len(survivors))
            return first if all(first) else []

        self.tally.detection_s.append(max(wait_until(noticed, "the view without it", ROUND_S)) - self.struck)

    def smaller_views(self, nodes: list[Node], members_max: int, since: float | None = None) -> list[float]:
        """When each node first had a view of at most `members_max` members after `since`, by default after the fault;
        0: not yet."""
        begin = self.struck if since is None else since
        return [
            min((at for at, members in node.views_since(begin) if members <= members_max), default=0.0)
            for node in nodes
        ]

    def noticed_silence(self, others: list[Node]) -> None:
        """Records how long these nodes took to a view without the silent node, if there was such a view."""
        seen = [at for at in self.smaller_views(others, NODES - 1) if at]
        if seen:
            self.tally.detection_s.append(max(seen) - self.struck)

    def undisturbed(self) -> None:
        """Counts the round if a node was declared dead: no fault of etcd alone, or of one link, is a reason."""
        if any(self.smaller_views(self.cluster.nodes, NODES - 1)):
            self.tally.disturbed += 1
            self.note("DISTURBED: a node was declared dead, but no fault had silenced it")

    def pick(self, count: int = 1) -> list[Node]:
        return self.random.sample(self.cluster.nodes, count)

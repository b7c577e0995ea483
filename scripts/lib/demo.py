# SPDX-License-Identifier: Apache-2.0
"""The demo behind scripts/demo, which describes it: a reference run, then the same run in which one node, or
every node, is killed and replaced."""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from types import FrameType
from typing import Any

import demo_report
from demo_nodes import MARK, DemoError, Job, Node, Paths, kill_whole, marked, signal_all, wait_until
from demo_storage import Bucket, read_persists

NODES = 4
# Long enough for a busy machine. Each wait ends as soon as its condition holds.
READY_TIMEOUT_S = 240.0  # until the first training step: four processes import torch, on two cores or more
RUN_TIMEOUT_S = 600.0  # of each of the two runs
DETECT_TIMEOUT_S = 15.0
PERSIST_TIMEOUT_S = 120.0  # until storage has a first step
QUIET_TIMEOUT_S = 30.0  # until the S3 server has finished the requests of killed daemons
PERSISTS = 12  # roughly, in a run: several come before the kill, which is in the middle third
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DETECT_MS_MAX = 1500.0  # the promise: a node is declared dead after 1 s of silence; 0.5 s to announce it


class Screen:
    def __init__(self) -> None:
        self._begun = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begun:6.1f} s] {text}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="training steps [60]")
    parser.add_argument("--seed", type=int, default=None, help="which node dies when; printed [random]")
    parser.add_argument("--lose-everything", action="store_true", help="all nodes die; storage has it all")
    parser.add_argument("--transport", help="passed to every daemon")
    parser.add_argument("--provider", help="passed to every daemon")
    parser.add_argument("--keep", action="store_true", help="keep sockets and arenas for a look afterwards")
    arguments = parser.parse_args()
    if arguments.steps < 12:
        parser.error("--steps must be at least 12: the kill is in the middle third")
    return arguments


def reference_run(paths: Paths, out: pathlib.Path, training: list[str], screen: Screen) -> None:
    """Runs the same training without a store and without failures, under one launcher."""
    mark = f"reference-{time.time_ns()}"
    command = [
        str(paths.torchrun),
        "--standalone",
        "--nproc-per-node",
        str(NODES),
        str(paths.train),
        *training,
    ]
    log_path = paths.out / "reference.log"
    begun = time.monotonic()
    with open(log_path, "w") as log:
        process = subprocess.Popen(
            command,
            env={**paths.environment(), MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise DemoError(
                f"the reference run did not end within {RUN_TIMEOUT_S:.0f} s: {log_path}"
            ) from error
        finally:
            while pids := marked(mark):
                signal_all(pids, signal.SIGKILL)
                process.poll()
    if status != 0:
        raise DemoError(f"the reference run failed with status {status}: {log_path}")
    screen.say(f"reference: {demo_report.last_step(out, 0)} steps in {time.monotonic() - begun:.1f} s")


class Run:
    """The run that loses one node, or every node. In the latter case it has a bucket."""

    def __init__(
        self,
        paths: Paths,
        arguments: argparse.Namespace,
        training: list[str],
        screen: Screen,
        bucket: Bucket | None,
    ) -> None:
        self.out = paths.out / "run"
        self.steps, self.screen = arguments.steps, screen
        options = []
        for name in ("transport", "provider"):
            if getattr(arguments, name):
                options += [f"--{name}", getattr(arguments, name)]
        self.paths = paths
        self.bucket = bucket
        self.persist_every = max(1, arguments.steps // PERSISTS)
        if bucket is not None:
            options += ["--storage", bucket.url, "--persist-every", str(self.persist_every)]
        self.job = Job(paths, NODES, training, options, environment=bucket.environment() if bucket else {})
        self.nodes = [Node(self.job, ordinal, 0) for ordinal in range(NODES)]
        self.all_nodes = list(self.nodes)

    def check_alive(self) -> None:
        for node in self.nodes:
            status = node.returncode()
            if status not in (None, 0):
                raise DemoError(
                    f"{node.name} ended with status {status}; its log {node.log} ends:\n{node.tail()}"
                )

    def wait_for_step(self, step: int, timeout_s: float, ranks: list[int]) -> None:
        def reached() -> bool:
            return all(demo_report.last_step(self.out, rank) >= step for rank in ranks)

        wait_until(reached, timeout_s, f"step {step}", self.check_alive)

    def status(self, when: str) -> dict[str, Any] | None:
        """Stores the output of `ropeteam status` for the user. The demo works without it. None: no answer."""
        command = [str(self.paths.ropeteam), "status", "--socket", str(self.nodes[0].socket)]
        for suffix, more in (("txt", []), ("json", ["--json"])):
            try:
                done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=10)
            except subprocess.TimeoutExpired:
                continue
            (self.paths.out / f"status-{when}.{suffix}").write_text(done.stdout + done.stderr)
            if suffix == "json" and done.returncode == 0:
                return dict(json.loads(done.stdout))
        return None

    def lose_node(self, seed: int) -> demo_report.Kill:
        draw = random.Random(seed)
        victim = draw.randint(1, NODES - 1)
        kill_step = draw.randint(self.steps // 3, 2 * self.steps // 3)
        fraction = draw.random()
        self.screen.say(
            f"starting {NODES} nodes; node {victim} dies within step {kill_step + 1} (--seed {seed})"
        )
        self._train_until(kill_step, victim)
        time.sleep(fraction * self._step_seconds(victim))
        killed = self.nodes[victim]
        pids = killed.processes()
        at = kill_whole([killed])
        step = demo_report.last_step(self.out, victim, before=at)
        self.screen.say(f"killed node {victim}: {len(pids)} processes and its memory; step {step} was done")
        views = self.wait_for_death(at, victim)
        self.screen.say(f"every survivor knows after {(max(views.values()) - at) * 1e3:.0f} ms")
        replacement = Node(self.job, victim, 1)
        self.nodes[victim] = replacement
        self.all_nodes.append(replacement)
        replacement.start()
        self.screen.say(f"a replacement for node {victim} is started")
        return demo_report.Kill(victim, at, step, views, replacement.started_at)

    def _train_until(self, step: int, rank: int) -> None:
        """Starts all nodes and waits until the rank has finished the step."""
        for node in self.nodes:
            node.start()
        self.wait_for_step(1, READY_TIMEOUT_S, list(range(NODES)))
        self.screen.say("all ranks train; every step is saved")
        self.wait_for_step(step // 2, RUN_TIMEOUT_S, [0])
        self.status("before")
        self.wait_for_step(step, RUN_TIMEOUT_S, [rank])

    def lose_everything(self, seed: int) -> demo_report.Kill:
        assert self.bucket is not None
        bucket, draw = self.bucket, random.Random(seed)
        kill_step = draw.randint(self.steps // 3, 2 * self.steps // 3)
        fraction = draw.random()
        self.screen.say(
            f"starting {NODES} nodes with a bucket at {bucket.endpoint}, --persist-every {self.persist_every}; "
            f"all die within step {kill_step + 1} (--seed {seed})"
        )
        self._train_until(kill_step, 0)
        wait_until(
            lambda: bool(bucket.steps()), PERSIST_TIMEOUT_S, "a first persisted step", self.check_alive
        )
        time.sleep(fraction * self._step_seconds(0))
        count = sum(len(node.processes()) for node in self.nodes)
        at = kill_whole(self.nodes)
        self.job.remove_files()
        step = max(demo_report.last_step(self.out, rank, before=at) for rank in range(NODES))
        self.screen.say(
            f"killed all {NODES} nodes: {count} processes and all their memory; step {step} was done"
        )
        wait_until(
            lambda: bucket.connections() == 0, QUIET_TIMEOUT_S, "the end of requests to storage", lambda: None
        )
        stored = bucket.steps()
        newest = stored[-1]
        self.screen.say(
            f"storage has {len(stored)} steps; the newest is step {newest.step}, {newest.size / 1e6:.1f} MB"
        )
        # Like a new allocation of nodes: only the job's name is the same.
        old = self.job
        self.job = Job(
            self.paths, NODES, old.training, old.options, environment=old.environment, first=NODES, token=old.token
        )
        self.nodes = [Node(self.job, ordinal, 1) for ordinal in range(NODES)]
        self.all_nodes += self.nodes
        for node in self.nodes:
            node.start()
        started_at = self.nodes[0].started_at
        self.screen.say(f"{NODES} new nodes are started, on other addresses")
        return demo_report.Kill(
            None, at, step, {}, started_at, demo_report.Storage(self.persist_every, newest)
        )

    def _step_seconds(self, rank: int) -> float:
        events = demo_report.read_events(self.out, rank)
        times = [event["ms"] for event in events if event["event"] == "step"]
        return statistics.median(times) / 1e3

    def wait_for_death(self, at: float, victim: int) -> dict[int, float]:
        survivors = [node for node in self.nodes if node.ordinal != victim]

        def seen(node: Node) -> float | None:
            return next(
                (view.at for view in node.views() if view.at > at and view.members == NODES - 1), None
            )

        def check() -> None:
            for node in survivors:
                if node.returncode() is not None:
                    raise DemoError(
                        f"{node.name} ended when node {victim} died; its log ends:\n{node.tail()}"
                    )

        all_seen = "the survivors' view without the killed node"
        wait_until(lambda: all(seen(node) for node in survivors), DETECT_TIMEOUT_S, all_seen, check)
        return {node.ordinal: seen(node) or at for node in survivors}

    def finish(self, kill: demo_report.Kill) -> None:
        """Waits for the end of training on every node."""
        self.wait_for_step(kill.step + 1, READY_TIMEOUT_S, list(range(NODES)))
        self.screen.say("all ranks train again")
        status = self.status("after")
        if kill.storage is not None and status is not None:
            counters = [node["counters"] for node in status["nodes"]]
            kill.storage.restored_bytes = sum(each.get("loaded_bytes", 0) for each in counters)

        def ended() -> bool:
            return all(node.returncode() is not None for node in self.nodes)

        wait_until(ended, RUN_TIMEOUT_S, "the end of training", self.check_alive)
        self.check_alive()
        self.screen.say("training has ended on every node")
        if kill.storage is not None:
            kill.storage.persists = read_persists(node.daemon_log for node in self.all_nodes)

    def end(self, keep: bool) -> None:
        for node in self.all_nodes:
            node.end()
        if not keep:
            self.job.remove_files()


def play(arguments: argparse.Namespace, paths: Paths, screen: Screen) -> dict[str, Any]:
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1_000_000)
    reference, run_dir = paths.out / "reference", paths.out / "run"
    training = ["--steps", str(arguments.steps), "--out"]
    reference_run(paths, reference, [*training, str(reference)], screen)
    bucket = Bucket(paths, pathlib.Path(sys.executable)) if arguments.lose_everything else None
    try:
        run = Run(paths, arguments, [*training, str(run_dir)], screen, bucket)
        try:
            kill = run.lose_everything(seed) if arguments.lose_everything else run.lose_node(seed)
            run.finish(kill)
        finally:
            run.end(arguments.keep)
    finally:
        if bucket is not None:
            bucket.end()
    report = demo_report.make_report(run_dir, reference, NODES, arguments.steps, kill)
    report["seed"] = seed
    storage_lines = [] if kill.storage is None else demo_report.storage_text(kill, kill.storage)
    marks = demo_report.milestones(run_dir, NODES, kill)
    print(demo_report.timeline_text(report, marks, storage_lines), flush=True)
    demo_report.plot(paths.out / "timeline.png", run_dir, reference, NODES, kill)
    return report


def interrupted(number: int, _frame: FrameType | None) -> None:
    """Ends the demo with its cleanup. Further signals are ignored, so that the cleanup is completed."""
    for each in ENDING_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(f"signal {number}")


def main() -> int:
    arguments = parse()
    root = pathlib.Path(__file__).resolve().parents[2]
    paths = Paths(root, root / "build" / "demo")
    for number in ENDING_SIGNALS:
        signal.signal(number, interrupted)
    shutil.rmtree(paths.out, ignore_errors=True)
    paths.out.mkdir(parents=True)
    screen = Screen()
    try:
        report = play(arguments, paths, screen)
    except DemoError as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo interrupted; everything it started is ended", file=sys.stderr)
        return 130
    (paths.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    found = demo_report.failures(report, DETECT_MS_MAX)
    for failure in found:
        print(f"demo failed: {failure}", file=sys.stderr)
    if not found:
        source = f"restored step {report['persisted_step']} from storage, " if arguments.lose_everything else ""
        screen.say(
            f"done: {source}steps lost {report['steps_lost']}, losses identical to the bit; build/demo/ has it all"
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

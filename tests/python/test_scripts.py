# SPDX-License-Identifier: Apache-2.0
"""The parts of scripts/ that decide which tests count as passed, and whether the demo passed."""

from __future__ import annotations

import json
import pathlib
import socket
import subprocess
import sys
import urllib.request

import pytest

LIB = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "lib"
sys.path.insert(0, str(LIB))

import demo_nodes  # noqa: E402
import demo_report  # noqa: E402
import demo_storage  # noqa: E402
import sum_results  # noqa: E402

CTEST = """<?xml version="1.0"?>
<testsuite name="all" tests="4" failures="1" disabled="0" skipped="1">
  <testcase name="A.Good" classname="A.Good" time="0.1" status="run"><system-out>ok</system-out></testcase>
  <testcase name="A.Bad" classname="A.Bad" time="0.1" status="fail"><failure message="Failed"/></testcase>
  <testcase name="A.Skip" classname="A.Skip" time="0" status="notrun"><skipped
  message="SKIP_REGULAR_EXPRESSION"/>
    <system-out>/src/a_test.cc:12: Skipped
no second node here

[  SKIPPED ] A.Skip (0 ms)</system-out></testcase>
  <testcase name="A.Unbuilt" classname="A.Unbuilt" time="0" status="notrun">
    <skipped message="Unable to find executable"/></testcase>
  <testcase name="A.Off" classname="A.Off" time="0" status="disabled"/>
</testsuite>"""
PYTEST = """<testsuites><testsuite name="pytest">
  <testcase classname="t.x" name="test_a" time="1"/>
  <testcase classname="t.x" name="test_b" time="1"><skipped message="torch is not installed"/></testcase>
  <testcase classname="t.x" name="test_c" time="1"><error message="fixture"/></testcase>
</testsuite></testsuites>"""


def sum_up(tmp_path, *documents):
    paths = []
    for index, document in enumerate(documents):
        path = tmp_path / f"{index}.xml"
        path.write_text(document)
        paths.append(str(path))
    done = subprocess.run(
        [sys.executable, str(LIB / "sum_results.py"), *paths], capture_output=True, text=True
    )
    return done.returncode, done.stdout.splitlines()


def test_both_suites_are_added_up_with_reasons(tmp_path):
    status, lines = sum_up(tmp_path, CTEST, PYTEST)
    assert status == 1
    assert lines[-1] == "2 passed, 3 failed, 3 skipped"
    assert lines[:-1] == [
        "  failed: A.Bad",
        "  failed: A.Unbuilt",
        "  failed: t.x.test_c",
        "  skipped: A.Skip: no second node here",
        "  skipped: A.Off: disabled",
        "  skipped: t.x.test_b: torch is not installed",
    ]


def test_a_suite_that_left_no_result_is_a_failure(tmp_path):
    good = '<testsuite><testcase name="a"/></testsuite>'
    assert sum_up(tmp_path, good) == (0, ["1 passed, 0 failed, 0 skipped"])
    assert sum_up(tmp_path, good, "<testsuite><testcase")[0] == 1
    none = sum_results.Sum()
    none.add(str(tmp_path / "none.xml"))
    assert none.outcomes == {"failed": 1}
    (tmp_path / "results").mkdir()
    run = f'set -eu; results="{tmp_path}/results"; . "{LIB}/suites.sh"; suite good true; suite "no build" false'
    subprocess.run(["bash", "-c", run], check=True)
    [left] = (tmp_path / "results").iterdir()
    assert sum_up(tmp_path, left.read_text()) == (
        1,
        ["  failed: suite.no build", "0 passed, 1 failed, 0 skipped"],
    )


def test_nothing_run_is_not_a_success(tmp_path):
    assert sum_up(tmp_path, "<testsuite></testsuite>") == (1, ["0 passed, 0 failed, 0 skipped"])


def test_the_conformance_suite_is_counted_by_transport_and_place(tmp_path):
    host = tmp_path / "ctest.xml"
    host.write_text(
        """<testsuite>
          <testcase name="Every/TransportTest.Puts/ofi_tcp  # GetParam() = &quot;ofi_tcp&quot;"/><testcase name="Every/PeerTest.Dies/ofi_tcp"/>
          <testcase name="Every/PeerTest.Dies/inproc"><failure message="Failed"/></testcase>
          <testcase name="Every/OtherTest.Puts/ofi_tcp"/>
        </testsuite>"""
    )
    guest = tmp_path / "guest-one-verbs.xml"
    guest.write_text(
        """<testsuites><testsuite name="Every/TransportTest">
          <testcase name="Puts/verbs" classname="Every/TransportTest" status="run"/>
          <testcase name="Gets/verbs" classname="Every/TransportTest" status="run"><skipped message="a.cc:7&#x0A;why"/></testcase>
        </testsuite></testsuites>"""
    )
    done = subprocess.run(
        [sys.executable, str(LIB / "sum_results.py"), str(host), str(guest)], capture_output=True, text=True
    )
    assert "  skipped: Every/TransportTest.Gets/verbs: why" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-5:] == [
        "conformance suite by transport:",
        f"  {'inproc':<24} host   0 passed, 1 failed, 0 skipped",
        f"  {'ofi_tcp':<24} host   2 passed, 0 failed, 0 skipped",
        f"  {'verbs':<24} guest  1 passed, 0 failed, 1 skipped",
        "4 passed, 1 failed, 1 skipped",
    ]


def test_what_was_skipped_here_and_ran_there_is_counted_where_it_ran(tmp_path):
    here = (
        '<testsuite><testcase name="V.Cut" status="notrun"><skipped message="no device"/></testcase>'
        '<testcase name="V.Gone" status="notrun"><skipped message="no device"/></testcase></testsuite>'
    )
    there = '<testsuite><testcase classname="V" name="Cut"/></testsuite>'
    assert sum_up(tmp_path, here, there) == (
        0,
        ["  skipped: V.Gone: no device", "1 passed, 0 failed, 1 skipped"],
    )


# ---- whether the demo passed

LOSSES = {1: 4.5, 2: 4.25, 3: 4.0, 4: 3.5}


def write_run(directory, kill_at, resumed_from=2, losses=LOSSES, first_run=3):
    """Writes the files of two ranks: steps 1 to `first_run`, a kill, and the steps after `resumed_from`."""
    directory.mkdir()
    for rank in range(2):
        events, lines = [], []

        def step(number, at, lines=lines, events=events):
            lines.append(f"{number} {float(losses[number]).hex()}\n")
            events.append({"t": at, "event": "step", "step": number, "ms": 10.0})
            events.append({"t": at, "event": "saved", "step": number, "ms": 1.0})
            events.append({"t": at, "event": "replicated", "step": number, "ms": 2.0})

        for number in range(1, first_run + 1):
            step(number, kill_at - 1 + number / 10)
        if kill_at < 1e9:
            events.append({"t": kill_at + 2, "event": "loaded", "step": resumed_from, "ms": 33.0})
            for number in range(resumed_from + 1, 5):
                step(number, kill_at + 2 + number)
        (directory / f"loss.{rank}.txt").write_text("".join(lines))
        (directory / f"events.{rank}.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events) + '{"t')


@pytest.fixture
def judged(tmp_path):
    def judge(**run):
        write_run(tmp_path / "reference", 2e9, first_run=4)
        write_run(tmp_path / "run", 100.0, **run)
        kill = demo_report.Kill(1, 100.0, 3, {0: 100.9}, 101.0)
        report = demo_report.make_report(tmp_path / "run", tmp_path / "reference", 2, 4, kill)
        return report, demo_report.failures(report, 1500.0)

    return judge


def test_a_run_that_kept_its_promises_passes(judged):
    report, found = judged()
    assert found == []
    assert report["killed_at_step"] == 3 and report["resumed_from_step"] == 2 and report["steps_lost"] == 1
    assert report["losses_identical"] is True
    assert (report["detect_ms"], report["restore_ms"]) == (900.0, 33.0)
    assert (report["save_stall_ms_median"], report["replicated_ms_median"]) == (1.0, 2.0)


def test_more_than_one_lost_step_fails(judged):
    report, found = judged(resumed_from=1)
    assert report["steps_lost"] == 2 and any("2 steps were lost" in line for line in found)


def test_one_bit_of_difference_in_a_loss_fails(judged):
    report, found = judged(losses={**LOSSES, 4: 3.5000000000000004})
    assert report["losses_identical"] is False and any("losses differ" in line for line in found)
    assert "rank 0 step 4" in report["loss_differences"][0]


def test_a_death_seen_late_fails(judged):
    report, _ = judged()
    report["detect_ms"] = 1500.1
    assert demo_report.failures(report, 1500.0) == [
        "the death was seen after 1500.1 ms, at most 1500 are promised"
    ]


def test_steps_that_are_missing_are_differences(tmp_path):
    write_run(tmp_path / "reference", 2e9, first_run=4)
    write_run(tmp_path / "run", 2e9, first_run=3)
    found = demo_report.compare_losses(tmp_path / "reference", tmp_path / "run", 2, 4)
    assert found == ["rank 0: the run has no step 4", "rank 1: the run has no step 4"]


# ---- the same after all memory was lost


@pytest.fixture
def judged_from_storage(tmp_path):
    """judge() judges a run of steps 1 to 3 where every node was killed at 100.0; `newest` is on storage."""

    def judge(newest=2, **run):
        write_run(tmp_path / "reference", 2e9, first_run=4)
        write_run(tmp_path / "run", 100.0, **run)
        persists = [
            demo_report.Persist(1, 1, 99.1, 99.2),
            demo_report.Persist(2, 1, 99.3, 99.6),
            demo_report.Persist(3, 1, 99.9, None),
            demo_report.Persist(3, 2, 105.5, 105.6),
        ]
        storage = demo_report.Storage(1, demo_report.StoredStep(newest, 1 << 32, 5_000_000), persists)
        kill = demo_report.Kill(None, 100.0, 3, {}, 100.5, storage)
        report = demo_report.make_report(tmp_path / "run", tmp_path / "reference", 2, 4, kill)
        return report, demo_report.failures(report, 1500.0), kill

    return judge


def test_a_run_that_came_back_from_storage_passes(judged_from_storage):
    report, found, kill = judged_from_storage()
    assert found == []
    assert (report["persisted_step"], report["resumed_from_step"], report["steps_lost"]) == (2, 2, 1)
    assert report["announced_persisted_step"] == 2, "step 3 was persisted only after the kill"
    assert (report["restore_ms"], report["restore_from_storage_ms"]) == (33.0, 33.0)
    assert report["persist_ms_median"] == 100.0
    assert report["losses_identical"] is True and report["detect_ms"] is None
    lines = demo_report.storage_text(kill, kill.storage)
    assert [("cut off by the kill" in line, "goes on from it" in line) for line in lines[2:]] == [
        (False, False), (False, True), (True, False), (False, False)]  # fmt: skip


def test_a_run_that_lost_everything_may_lose_as_many_steps_as_storage_lacked(judged_from_storage):
    report, found, _ = judged_from_storage(newest=1, resumed_from=1)
    assert report["steps_lost"] == 2
    assert found == ["step 2 had been called persisted, the newest on storage was step 1"]


def test_an_older_step_than_the_newest_on_storage_fails(judged_from_storage):
    _, found, _ = judged_from_storage(resumed_from=1)
    assert found == ["training went on from step 1, the newest persisted one was step 2"]


def test_one_bit_of_difference_after_a_restore_from_storage_fails(judged_from_storage):
    _, found, _ = judged_from_storage(losses={**LOSSES, 4: 3.5000000000000004})
    assert len(found) == 1 and "losses differ" in found[0]


def test_the_plot_has_what_was_persisted(judged_from_storage, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    _, _, kill = judged_from_storage()
    demo_report.plot(tmp_path / "t.png", tmp_path / "run", tmp_path / "reference", 2, kill)
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"


def test_only_steps_with_a_manifest_count():
    sizes = {
        "runs/demo-1/step-0000000005-i00000001/ropeteam-manifest.json": 10,
        "runs/demo-1/step-0000000005-i00000001/rank-00000.safetensors": 1000,
        "runs/demo-1/step-0000000004-i00000002/ropeteam-manifest.json": 1,
        "runs/demo-1/step-0000000009-i00000001/rank-00000.safetensors": 1000,
    }
    assert demo_storage.stored_steps(sizes) == [
        demo_report.StoredStep(5, 1, 1010),
        demo_report.StoredStep(4, 2, 1),
    ], "the newest is the last incarnation's"


def test_persists_are_read_from_daemons_logs(tmp_path):
    (tmp_path / "a.log").write_text(
        "2026-11-21T02:08:38.250+00:00 info step 5 incarnation 1 is being persisted\n"
        "2026-11-21T02:08:38.300+00:00 info step 6 incarnation 1 is not persisted: it is overtaken\n"
        "2026-11-21T02:08:38.500+00:00 info step 5 incarnation 1 is persisted\n"
    )
    (tmp_path / "b.log").write_text(
        "2026-11-21T02:08:39.000+00:00 info step 10 incarnation 1 is being persisted\n"
    )
    seen = demo_storage.read_persists([tmp_path / "a.log", tmp_path / "b.log", tmp_path / "none.log"])
    assert [(persist.step, persist.begun_at % 60, persist.ended_at and persist.ended_at % 60) for persist in seen] == [
        (5, 38.25, 38.5),
        (10, 39.0, None),
    ]


@pytest.fixture
def bucket(tmp_path):
    made = demo_storage.Bucket(demo_nodes.Paths(LIB.parents[1], tmp_path), pathlib.Path(sys.executable))
    yield made
    made.end()


def test_the_bucket_says_what_is_there_and_when_it_is_quiet(bucket):
    folder = "runs/demo-1/step-0000000005-i00000001"
    for name in ("rank-00000.safetensors", "ropeteam-manifest.json"):
        document = {"bucket": "demo", "key": f"{folder}/{name}", "text": "12345"}
        request = urllib.request.Request(
            f"{bucket.endpoint}/_control/put", json.dumps(document).encode(), method="POST"
        )
        urllib.request.urlopen(request, timeout=30).close()
    assert bucket.steps() == [demo_report.StoredStep(5, 1, 10)]
    with socket.create_connection(("127.0.0.1", bucket.port)):
        assert bucket.connections() >= 1
    demo_nodes.wait_until(lambda: bucket.connections() == 0, 30, "the end of the connection", lambda: None)


def test_a_bucket_that_does_not_start_is_an_error(tmp_path):
    with pytest.raises(demo_nodes.DemoError, match="bucket.log"):
        demo_storage.Bucket(demo_nodes.Paths(tmp_path, tmp_path), pathlib.Path(sys.executable))


def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    write_run(tmp_path / "reference", 2e9, first_run=4)
    write_run(tmp_path / "run", 100.0)
    kill = demo_report.Kill(1, 100.0, 3, {0: 100.9}, 101.0)
    demo_report.plot(tmp_path / "t.png", tmp_path / "run", tmp_path / "reference", 2, kill)
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"


def test_views_are_read_from_a_daemon_s_log():
    line = "2026-11-21T02:08:38.250+00:00 info view epoch 7 members 3 leader node-0 lost node-2\n"
    at, epoch, members = demo_nodes.VIEW_LINE.search("x\n" + line).groups()
    assert (epoch, members) == ("7", "3")
    assert demo_nodes.datetime.strptime(at, demo_nodes.LOG_TIME).timestamp() % 60 == 38.25


# ---- the demo's arguments


@pytest.fixture
def bare_machine(tmp_path):
    """An environment, and the file in which programs that install, build or run Python write their names."""
    programs = tmp_path / "programs"
    programs.mkdir()
    touched = tmp_path / "touched"
    for name in ("apt-get", "dpkg-query", "sudo", "cmake", "ninja", "g++", "python3"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} >>"{touched}"\nexit 1\n')
        (programs / name).chmod(0o755)
    return {"PATH": f"{programs}:/usr/bin:/bin"}, touched


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--help"], 0, "scripts/demo [--steps N]"),
        (["-h"], 0, "--transport X"),
        (["--help"], 0, "which node dies when; printed [random]\n  --lose-everything\n"),
        (["--lose-everything=yes"], 2, "--lose-everything=yes"),
        (["--bogus"], 2, "--bogus"),
        (["--steps", "3"], 2, '"3" is not a whole number of at least 12'),
        (["--steps=many"], 2, '"many" is not a whole number'),
        (["--steps", "60", "--transport", "foo"], 2, '"foo" is not auto, tcp, verbs, ucx or ofi'),
        (["--keep", "--seed"], 2, "--seed needs a value"),
        (["--seed", "-1"], 2, '"-1" is not a whole number'),
    ],
)
def test_the_demo_looks_at_its_arguments_before_it_installs_or_builds(bare_machine, arguments, status, says):
    environment, touched = bare_machine
    done = subprocess.run(
        ["bash", str(LIB.parent / "demo"), *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == status, done.stderr
    assert says in (done.stdout if status == 0 else done.stderr)
    assert not touched.exists(), touched.read_text()


def test_what_the_demo_s_script_takes_its_program_takes(monkeypatch):
    import demo

    words = ["--steps=12", "--seed=3", "--transport=ucx", "--provider=x", "--keep", "--lose-everything"]
    monkeypatch.setattr(sys, "argv", ["demo", *words])
    taken = demo.parse()
    assert (taken.steps, taken.seed, taken.transport, taken.provider, taken.keep) == (12, 3, "ucx", "x", True)
    assert taken.lose_everything is True


# ---- the set-up


def setup_sh(root: pathlib.Path, command: str) -> subprocess.CompletedProcess[str]:
    """Runs a line of bash after sourcing scripts/lib/setup.sh, in a tree of the test's own."""
    script = f'set -euo pipefail; ROOT="$1"; source "{LIB / "setup.sh"}"; {command}'
    return subprocess.run(["bash", "-c", script, "bash", str(root)], capture_output=True, text=True)


def test_the_virtual_environment_knows_package_and_programs(tmp_path):
    (tmp_path / "api" / "python" / "ropeteam").mkdir(parents=True)
    (tmp_path / "api" / "python" / "ropeteam" / "__init__.py").write_text("here = True\n")
    program = tmp_path / "build" / "release" / "api" / "cli" / "ropeteam"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nexit 7\n")
    program.chmod(0o755)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / ".venv")], check=True)
    for _ in range(2):  # a second call changes nothing
        done = setup_sh(tmp_path, "link_venv")
        assert done.returncode == 0, done.stderr
    seen = subprocess.run(
        ["bash", "-c", '. "$1/.venv/bin/activate"; python -c "import ropeteam; assert ropeteam.here" && ropeteam',
         "bash", str(tmp_path)],
        env={"PATH": "/usr/bin:/bin"}, cwd="/", capture_output=True, text=True,
    )  # fmt: skip
    assert seen.returncode == 7, seen.stderr
    assert not (tmp_path / ".venv" / "bin" / "ropeteamd").is_symlink(), "what is not built is not linked"


@pytest.mark.parametrize(
    ("release", "refused"),
    [
        ('ID=debian\nVERSION_ID="12"\n', ""),
        ('ID=debian\nVERSION_ID="13"\n', ""),
        ('ID=debian\nPRETTY_NAME="Debian GNU/Linux forky/sid"\n', ""),
        ('ID=ubuntu\nVERSION_ID="24.04"\n', ""),
        ('ID=ubuntu\nVERSION_ID="22.04"\nPRETTY_NAME="Ubuntu 22.04.5 LTS"\n', "Ubuntu 22.04.5 LTS is too old"),
        ('ID=debian\nVERSION_ID="11"\nPRETTY_NAME="Debian 11"\n', "Debian 11 is too old"),
        ('ID=fedora\nVERSION_ID="3"\n', ""),
    ],
)
def test_a_machine_that_is_too_old_is_told_so_in_one_line(tmp_path, release, refused):
    (tmp_path / "os-release").write_text(release)
    done = setup_sh(tmp_path, f'check_release "{tmp_path / "os-release"}"')
    assert done.returncode == (1 if refused else 0), done.stderr
    assert len(done.stderr.splitlines()) == (1 if refused else 0)
    assert refused in done.stderr

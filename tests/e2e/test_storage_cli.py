# SPDX-License-Identifier: Apache-2.0
"""The commands that work on storage: ls --storage, verify URL, prune, export. test_storage_memory.py tests those that
need a running job.

This file writes most of its steps itself, in the format of docs/format-on-storage.md: files of any content, and a
manifest.
"""

from __future__ import annotations

import json
import os
import pathlib
import pty
import re
import subprocess
import sys
import termios
import time

import pytest
from harness import ROOT, ROPETEAM, WAIT_S, ask, environment, payload
from test_storage import bucket  # noqa: F401  (a fixture)

from ropeteam import Level

sys.path.insert(0, str(ROOT / "tests" / "storage" / "s3" / "server"))

from checksums import crc32c  # noqa: E402

MANIFEST = "ropeteam-manifest.json"
HEADER_BYTES = 4096
DAY_S = 86400
LARGE = 20_000_001  # three ranges, the last one short

pytestmark = pytest.mark.skipif(not ROPETEAM.exists(), reason=f"{ROPETEAM} is not built")


def folder_of(job: str, step: int, incarnation: int = 1) -> str:
    return f"{job}/step-{step:010d}-i{incarnation:08d}"


def manifest_text(job: str, step: int, incarnation: int, files: list[dict[str, bytes]], **fields) -> bytes:
    """A step's manifest. `files`: for each rank, its files by path."""
    age_s = fields.pop("age_s", 0)
    head = {
        "format": "ropeteam-step",
        "version": 1,
        "job": job,
        "step": step,
        "incarnation": incarnation,
        "world_size": len(files),
        "chunk_bytes": 4 << 20,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - age_s)),
        "user": {},
        **fields,
    }
    ranks = []
    for rank, of_rank in enumerate(files):
        entries = []
        for path, data in of_rank.items():
            entry = {"path": path, "bytes": len(data), "crc32c": f"{crc32c(data):08x}"}
            if path == f"rank-{rank:05d}.safetensors":
                entry |= {"header_bytes": HEADER_BYTES, "header_crc32c": f"{crc32c(data[:HEADER_BYTES]):08x}"}
            entries.append(entry)
        size = sum(len(data) for data in of_rank.values())
        ranks.append({"rank": rank, "stream_bytes": size + 100, "digest": "0" * 16, "files": entries})
    text = json.dumps({**head, "ranks": ranks}, indent=0)[:-2] + ",\n"
    return (text + f'"manifest_crc32c": "{crc32c(text.encode()):08x}"\n}}\n').encode()


def write_step(root: pathlib.Path, job: str, step: int, incarnation: int = 1, size: int = 1000, **fields):
    """Writes a step of two ranks; both have config.json, and some files are in a folder. Returns the step's folder."""
    shared = payload(step, 10)
    files = [
        {"rank-00000.safetensors": payload(step + 1, HEADER_BYTES + size), "config.json": shared},
        {"model/part.pt": payload(step + 2, 500), "config.json": shared, "empty.pt": b""},
    ]
    place = root / folder_of(job, step, incarnation)
    for of_rank in files:
        for path, data in of_rank.items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_bytes(data)
    (place / MANIFEST).write_bytes(manifest_text(job, step, incarnation, files, **fields))
    return place


def flip(path: pathlib.Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def snapshot(root: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def steps_in(root: pathlib.Path, job: str = "train") -> list[int]:
    return sorted(int(path.parent.name[5:15]) for path in (root / job).glob(f"step-*/{MANIFEST}"))


def refused(*command: str, code: int = 1) -> str:
    """Checks that a command fails and prints only one line, which begins with its name; returns the line."""
    done = ask(*command)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert done.stdout == ""
    assert done.stderr.startswith(f"ropeteam {command[0]}: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def well(*command: str) -> str:
    done = ask(*command)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


# ls


def test_ls_lists_every_job_by_name_with_its_steps_newest_first(tmp_path):
    write_step(tmp_path, "train", 90, user={"loss": 0.5})
    write_step(tmp_path, "train", 40, incarnation=2)
    write_step(tmp_path, "team/eval", 7)
    (tmp_path / "notes").mkdir()
    listed = json.loads(well("ls", "--storage", str(tmp_path), "--json"))
    assert listed["storage"] == str(tmp_path)
    assert [job["job"] for job in listed["jobs"]] == ["team/eval", "train"]
    steps = listed["jobs"][1]["steps"]
    assert [(step["step"], step["incarnation"]) for step in steps] == [(40, 2), (90, 1)]
    assert steps[1]["folder"] == folder_of("train", 90)
    assert steps[1]["state"] == "complete"
    assert steps[1]["problem"] == ""
    assert steps[1]["world_size"] == 2
    assert steps[1]["files"] == 4, "a file that two ranks share is one file"
    assert steps[1]["bytes"] == HEADER_BYTES + 1000 + 10 + 500
    assert steps[1]["user"] == {"loss": 0.5}
    assert steps[1]["time"].endswith("Z")
    text = well("ls", "--storage", str(tmp_path))
    assert "job team/eval" in text and "job train" in text
    assert "STEP  INCARNATION" in text
    assert re.search(r'complete +\{"loss":0.5\}$', text, re.MULTILINE)
    only = json.loads(well("ls", f"--storage={tmp_path}", "--job", "team/eval", "--json"))
    assert [job["job"] for job in only["jobs"]] == ["team/eval"]


def test_ls_says_what_is_wrong_with_a_step(tmp_path):
    (write_step(tmp_path, "train", 1) / "config.json").unlink()
    flip(write_step(tmp_path, "train", 2) / MANIFEST, 100)
    write_step(tmp_path, "train", 3, version=2)
    (write_step(tmp_path, "train", 4) / MANIFEST).unlink()
    write_step(tmp_path, "other", 5)
    (tmp_path / folder_of("other", 5)).rename(tmp_path / folder_of("train", 5))
    (write_step(tmp_path, "train", 6) / MANIFEST).write_bytes(b"")
    steps = json.loads(well("ls", "--storage", str(tmp_path), "--json"))["jobs"][0]["steps"]
    states = {step["step"]: (step["state"], step["problem"]) for step in steps}
    assert states[1][0] == "incomplete" and "lacks config.json" in states[1][1]
    assert states[2][0] == "unreadable"
    assert states[3][0] == "unreadable" and "version 2, this build reads up to 1" in states[3][1]
    assert states[4] == ("unfinished", "")
    assert states[5][0] == "unreadable" and "is of job other" in states[5][1]
    assert states[6][0] == "unreadable" and "0 bytes" in states[6][1]
    assert "lacks config.json" in well("ls", "--storage", str(tmp_path))


def test_ls_of_nothing(tmp_path):
    assert well("ls", "--storage", str(tmp_path)) == f"no steps below {tmp_path}\n"
    assert json.loads(well("ls", "--storage", str(tmp_path), "--json"))["jobs"] == []
    assert "has no step of job train" in refused("ls", "--storage", str(tmp_path), "--job", "train")


def test_a_relative_path_is_a_directory_below_the_current_one(tmp_path):
    write_step(tmp_path / "store", "train", 1)
    done = subprocess.run(
        [str(ROPETEAM), "verify", "store"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=WAIT_S
    )
    assert (done.returncode, done.stdout.count("all good")) == (0, 1), done.stderr


# verify


def test_verify_reads_every_byte_of_the_newest_step(tmp_path):
    write_step(tmp_path, "train", 90)
    write_step(tmp_path, "train", 40, incarnation=2, size=LARGE)
    text = well("verify", str(tmp_path))
    assert text.startswith("step 40 incarnation 2 of job train: 4 files, 19.1 MiB, all good")
    assert "step 90 incarnation 1" in well("verify", str(tmp_path), "90")
    assert json.loads(well("verify", str(tmp_path), "90", "--json"))["problems"] == []


@pytest.mark.parametrize(
    ("path", "offset", "words"),
    [
        ("rank-00000.safetensors", HEADER_BYTES - 1, "its header has the checksum"),
        ("rank-00000.safetensors", HEADER_BYTES, "has the checksum"),
        ("rank-00000.safetensors", 12_000_000, "has the checksum"),
        ("rank-00000.safetensors", -1, "has the checksum"),
        ("model/part.pt", 0, "has the checksum"),
    ],
)
def test_verify_finds_a_single_bit_anywhere(tmp_path, path, offset, words):
    place = write_step(tmp_path, "train", 5, size=LARGE)
    flip(place / path, offset)
    done = ask("verify", str(tmp_path), "5", "--json")
    assert done.returncode == 1
    [problem] = json.loads(done.stdout)["problems"]
    assert problem["file"] == path
    assert words in problem["problem"] and "its manifest says" in problem["problem"]


def test_verify_tells_every_problem(tmp_path):
    place = write_step(tmp_path, "train", 5)
    flip(place / "model/part.pt", 3)
    (place / "config.json").unlink()
    (place / "empty.pt").write_bytes(b"x")
    done = ask("verify", str(tmp_path))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.startswith("bad: ")]) == 3
    assert "lacks config.json" in done.stdout
    assert "empty.pt has 1 bytes, its manifest says 0" in done.stdout
    assert lines[-1].endswith("3 bad")


def test_the_latest_incarnation_of_a_number_is_meant_or_the_one_that_is_named(tmp_path):
    write_step(tmp_path, "train", 5, incarnation=1)
    write_step(tmp_path, "train", 5, incarnation=2)
    assert "step 5 incarnation 2" in well("verify", str(tmp_path), "5")
    assert "step 5 incarnation 1" in well("verify", str(tmp_path), "step-0000000005-i00000001")
    (tmp_path / folder_of("train", 5, 2) / MANIFEST).unlink()
    assert "step 5 incarnation 1" in well("verify", str(tmp_path), "5")
    assert "no manifest" in refused("verify", str(tmp_path), "step-0000000005-i00000002")


# prune


def test_prune_removes_what_no_rule_keeps_and_a_dry_run_nothing(tmp_path):
    for step in range(10, 110, 10):
        write_step(tmp_path, "train", step, user={"loss": 1.0 if step == 30 else 2.0})
    write_step(tmp_path, "other", 1)
    before = snapshot(tmp_path)
    rules = ["--job", "train", "--keep-on-storage", "2", "--keep-every", "50", "--keep-best", "loss:min"]
    text = well("prune", str(tmp_path), "--dry-run", *rules)
    assert snapshot(tmp_path) == before
    assert text.count("would go") == 6 and text.count("stays") == 4
    assert f"{folder_of('train', 30)}  best" in text
    assert f"{folder_of('train', 100)}  last good, newest, every" in text
    assert "job train: 6 steps would be removed, 24 files, 32.8 KiB; 4 stay" in text
    text = well("prune", str(tmp_path), "--yes", *rules)
    assert "job train: 6 steps removed" in text
    assert steps_in(tmp_path) == [30, 50, 90, 100]
    assert steps_in(tmp_path, "other") == [1]
    assert not (tmp_path / folder_of("train", 10)).exists()
    kept = snapshot(tmp_path)
    assert kept == {name: data for name, data in before.items() if name in kept}, "what stays is as it was"
    assert "0 steps removed" in well("prune", str(tmp_path), "--yes", *rules)


def test_prune_keeps_what_is_younger(tmp_path):
    for step, age_s in ((1, 8 * DAY_S), (2, 6 * DAY_S), (3, -DAY_S), (4, 30 * DAY_S)):
        write_step(tmp_path, "train", step, age_s=age_s)
    well("prune", str(tmp_path), "--yes", "--keep-within", "7d")
    assert steps_in(tmp_path) == [2, 3, 4], "1 is too old, 4 is the last good one"


def test_prune_never_removes_the_last_good_step(tmp_path):
    for step in (1, 2, 3, 4):
        write_step(tmp_path, "train", step)
    (tmp_path / folder_of("train", 4) / "config.json").unlink()
    (tmp_path / folder_of("train", 3) / "config.json").write_bytes(b"short")
    (tmp_path / folder_of("train", 1) / "config.json").unlink()
    well("prune", str(tmp_path), "--yes", "--keep-on-storage", "1")
    assert steps_in(tmp_path) == [2, 3, 4]


def test_a_step_that_is_marked_as_damaged_is_not_good_and_may_be_pruned(tmp_path):
    for step in (1, 2, 3, 4):
        place = write_step(tmp_path, "train", step)
        if step in (1, 3):
            (place / "ropeteam-damaged.txt").write_bytes(b"rank-00000.safetensors has the checksum 1\x1b, not 2\n")
    [job] = json.loads(well("ls", "--storage", str(tmp_path), "--json"))["jobs"]
    states = {step["step"]: (step["state"], step["problem"]) for step in job["steps"]}
    reason = "marked as damaged: rank-00000.safetensors has the checksum 1 , not 2"
    assert states == {1: ("damaged", reason), 2: ("complete", ""), 3: ("damaged", reason), 4: ("complete", "")}
    done = ask("verify", str(tmp_path), "3")
    assert done.returncode == 1
    assert f"bad: {folder_of('train', 3)} is {reason}" in done.stdout and "4 files" in done.stdout and "1 bad" in done.stdout
    document = json.loads(ask("verify", str(tmp_path), "3", "--json").stdout)
    assert [problem["file"] for problem in document["problems"]] == ["ropeteam-damaged.txt"]
    well("prune", str(tmp_path), "--yes", "--keep-on-storage", "2")
    assert steps_in(tmp_path) == [2, 4], "those that are damaged do not count"
    assert not (tmp_path / folder_of("train", 3)).exists()


def test_prune_writes_an_audit_log(tmp_path):
    for step in (1, 2):
        write_step(tmp_path / "store", "train", step)
    prune = ["prune", str(tmp_path / "store"), "--yes", "--keep-on-storage", "1", "--audit-log"]
    assert "/no/such/place: No such file" in refused(*prune, "/no/such/place")
    well(*prune, str(tmp_path / "audit.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert lines[0]["name"] == f"{folder_of('train', 1)}/{MANIFEST}"
    assert {line["name"].rsplit("/", 1)[1] for line in lines[1:]} == {
        "rank-00000.safetensors", "config.json", "part.pt", "empty.pt"
    }  # fmt: skip
    assert {(line["event"], line["cause"], line["job"], line["node"]) for line in lines} == {
        ("delete", "retention", "train", "prune")
    }


def test_prune_touches_nothing_that_is_not_a_step_of_this_job(tmp_path):
    write_step(tmp_path, "train", 9)
    flip(write_step(tmp_path, "train", 1) / MANIFEST, 100)
    write_step(tmp_path, "train", 2, version=2)
    write_step(tmp_path, "other", 3)
    (tmp_path / folder_of("other", 3)).rename(tmp_path / folder_of("train", 3))
    (write_step(tmp_path, "train", 4) / MANIFEST).unlink()
    (tmp_path / "train" / "step-5").mkdir()
    (tmp_path / "train" / "step-5" / "model.pt").write_bytes(b"somebody's own")
    (tmp_path / "train" / "log.txt").write_bytes(b"a log")
    before = snapshot(tmp_path)
    text = well("prune", str(tmp_path), "--yes", "--job", "train", "--keep-on-storage", "1", "--unfinished")
    assert snapshot(tmp_path) == before
    assert "unfinished, it may be being written" in text
    assert "this build reads up to 1" in text


def test_prune_leaves_files_that_are_not_the_steps(tmp_path):
    place = write_step(tmp_path, "train", 1)
    write_step(tmp_path, "train", 2)
    (place / "notes.txt").write_bytes(b"keep")
    (place / "extra.pt").write_bytes(b"keep too")
    (place / "rank-00007.safetensors").write_bytes(b"of an attempt that was cut off")
    (place / ".rank-00000.safetensors.ropeteam-0123456789abcdef.part").write_bytes(b"an unfinished upload")
    text = well("prune", str(tmp_path), "--yes", "--keep-on-storage", "1")
    assert "2 files in it are not the step's and stay" in text
    assert sorted(path.name for path in place.rglob("*") if path.is_file()) == ["extra.pt", "notes.txt"]


def test_unfinished_folders_go_when_a_later_step_is_a_day_old_and_only_when_asked(tmp_path):
    for step, age_s in ((1, 0), (2, 2 * DAY_S), (3, 0), (4, 0)):
        write_step(tmp_path, "train", step, age_s=age_s)
    for step in (1, 3):
        (tmp_path / folder_of("train", step) / MANIFEST).unlink()
    before = snapshot(tmp_path)
    text = well("prune", str(tmp_path), "--yes", "--keep-on-storage", "9")
    assert "unfinished for more than a day, --unfinished removes it" in text
    assert "unfinished, it may be being written" in text
    assert snapshot(tmp_path) == before
    assert "would go" in well("prune", str(tmp_path), "--dry-run", "--unfinished")
    assert snapshot(tmp_path) == before
    well("prune", str(tmp_path), "--yes", "--unfinished")
    assert not (tmp_path / folder_of("train", 1)).exists()
    assert (tmp_path / folder_of("train", 3)).exists()
    assert steps_in(tmp_path) == [2, 4]


def test_a_metadata_key_that_no_step_has_removes_nothing(tmp_path):
    for step in (1, 2, 3):
        write_step(tmp_path, "train", step, user={"loss" if step != 2 else "los": 1})
    (tmp_path / folder_of("train", 2) / "config.json").unlink()
    before = snapshot(tmp_path)
    assert 'no complete step of job train has a number "los"' in refused(
        "prune", str(tmp_path), "--yes", "--keep-best", "los:min"
    )
    assert snapshot(tmp_path) == before


def test_a_prune_that_is_cut_off_leaves_no_half_step(tmp_path, bucket):  # noqa: F811
    for step in (1, 2):
        write_step(tmp_path, "train", step)
        well("export", str(step), bucket.url, "--storage", str(tmp_path))
    bucket.fault(kind="status", match={"method": "DELETE"}, status=403, nth=2, count=100)
    done = ask("prune", bucket.url, "--yes", "--keep-on-storage", "1")
    assert done.returncode == 1
    assert "0 steps removed" in done.stdout
    assert "403" in done.stderr
    left = [name for name in bucket.files() if name.startswith(folder_of("train", 1))]
    assert left != [] and f"{folder_of('train', 1)}/{MANIFEST}" not in left, "the manifest goes first"
    steps = json.loads(well("ls", "--storage", bucket.url, "--json"))["jobs"][0]["steps"]
    assert [(step["step"], step["state"]) for step in steps] == [(2, "complete"), (1, "unfinished")]
    assert "no manifest" in refused("verify", bucket.url, "1")


def test_a_store_that_refuses_the_first_deletion_keeps_all(tmp_path, bucket):  # noqa: F811
    for step in (1, 2):
        write_step(tmp_path, "train", step)
        well("export", str(step), bucket.url, "--storage", str(tmp_path))
    before = bucket.files()
    bucket.fault(kind="status", match={"method": "DELETE"}, status=403, count=100)
    assert ask("prune", bucket.url, "--yes", "--keep-on-storage", "1").returncode == 1
    assert bucket.files() == before


# export


def test_a_step_goes_to_a_bucket_and_back_unchanged(tmp_path, bucket):  # noqa: F811
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    write_step(tmp_path / "from", "train", 3)
    write_step(tmp_path / "from", "train", 5, size=LARGE)
    text = well("export", "5", bucket.url, "--storage", str(tmp_path / "from"))
    assert text.startswith("step 5 incarnation 1 of job train: 4 files, 19.1 MiB, are in s3://")
    assert "all good" in well("verify", bucket.url)
    well("export", "step-0000000005-i00000001", str(tmp_path / "to"), "--storage", bucket.url)
    step = folder_of("train", 5)
    assert snapshot(tmp_path / "to" / step) == snapshot(tmp_path / "from" / step)
    assert steps_in(tmp_path / "to") == [5]
    assert "is in" in well("export", "5", str(tmp_path / "to"), "--storage", bucket.url)
    pruned = well("prune", bucket.url, "--dry-run", "--keep-on-storage", "1")
    assert "0 steps would be removed" in pruned


def test_a_damaged_step_is_not_exported(tmp_path):
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    place = write_step(tmp_path / "from", "train", 5, size=LARGE)
    flip(place / "rank-00000.safetensors", 12_000_000)
    text = ask("export", "5", str(tmp_path / "to"), "--storage", str(tmp_path / "from"))
    assert text.returncode == 1 and text.stdout == ""
    assert "rank-00000.safetensors" in text.stderr and "its manifest says" in text.stderr
    assert steps_in(tmp_path / "to") == []
    assert not (tmp_path / "to" / folder_of("train", 5) / "rank-00000.safetensors").exists()
    flip(place / "rank-00000.safetensors", 12_000_000)
    well("export", "5", str(tmp_path / "to"), "--storage", str(tmp_path / "from"))
    assert "all good" in well("verify", str(tmp_path / "to"))


def test_a_step_that_lacks_a_file_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    (write_step(tmp_path / "from", "train", 5) / "config.json").unlink()
    assert "lacks config.json" in refused("export", "5", str(tmp_path / "to"), "--storage", str(tmp_path / "from"))
    assert list((tmp_path / "to").iterdir()) == []


def test_an_export_never_replaces_another_step(tmp_path):
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    write_step(tmp_path / "from", "train", 5)
    write_step(tmp_path / "to", "train", 5, user={"other": "run"})
    before = snapshot(tmp_path / "to")
    text = refused("export", "5", str(tmp_path / "to"), "--storage", str(tmp_path / "from"))
    assert "already, with another manifest" in text
    assert snapshot(tmp_path / "to") == before


def test_an_export_into_a_bucket_that_may_not_be_written(tmp_path, bucket):  # noqa: F811
    write_step(tmp_path, "train", 5)
    bucket.fault(kind="status", match={"method": "PUT"}, status=403, count=100)
    assert "403" in ask("export", "5", bucket.url, "--storage", str(tmp_path)).stderr
    assert bucket.files() == {}


def test_what_a_job_persisted_is_listed_verified_exported_and_restored_from_the_export(cluster, tmp_path):
    store, other = tmp_path / "store", tmp_path / "other"
    store.mkdir()
    other.mkdir()
    nodes = cluster(2, options=["--storage", str(store)])
    ranks = [nodes[rank].open(rank, 2, "first") for rank in range(2)]
    for rank, rope in enumerate(ranks):
        rope.save(7, {"data": payload(rank, 3_000_000), "note": {"rank": rank}}, persist=True)
    for rope in ranks:
        rope.wait(7, Level.PERSISTED)
        rope.close()
    [job] = json.loads(well("ls", "--storage", str(store), "--json"))["jobs"]
    [step] = job["steps"]
    assert (step["step"], step["state"], step["world_size"]) == (7, "complete", 2)
    assert "all good" in well("verify", str(store), "7")
    well("export", "7", str(other), "--storage", str(store))
    again = cluster(2, options=["--storage", str(other)])
    for rank in range(2):
        rope = again[rank].open(rank, 2, "second")
        assert rope.latest().step == 7
        assert rope.load(7)["data"] == payload(rank, 3_000_000)
        rope.close()


# Progress


def test_a_bar_on_a_terminal_and_plain_lines_elsewhere(tmp_path):
    write_step(tmp_path, "train", 5, size=LARGE)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    done = subprocess.run(
        [str(ROPETEAM), "verify", str(tmp_path)], env=environment(), stdout=subprocess.PIPE, stderr=theirs, timeout=WAIT_S
    )
    os.close(theirs)
    drawn = os.read(ours, 65536).decode()
    os.close(ours)
    assert done.returncode == 0
    last = drawn.split("\r")[-2]  # the terminal changes "\n" to "\r\n"
    assert last.startswith("verify step 5 [####")
    assert "19.1 MiB of 19.1 MiB" in last and re.search(r", [0-9.]+ [KMG]iB/s, ", last)
    plain = ask("verify", str(tmp_path)).stderr
    assert "\r" not in plain and "[" not in plain
    assert plain.splitlines()[-1].startswith("verify step 5: 19.1 MiB of 19.1 MiB, ")


# Bad input


def every_command(url: str, tmp_path: pathlib.Path) -> list[list[str]]:
    return [
        ["ls", "--storage", url],
        ["verify", url],
        ["prune", url, "--yes", "--keep-on-storage", "1"],
        ["export", "1", str(tmp_path), "--storage", url],
    ]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://somewhere/x", "unknown scheme"),
        ("s3://", "bucket"),
        ("/proc/self/exe", "directory"),
        ("/no/such/directory", "/no/such/directory"),
    ],
)
def test_a_url_that_cannot_be(tmp_path, url, words):
    for command in every_command(url, tmp_path):
        assert words in refused(*command)
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_that_is_not_there(tmp_path, bucket):  # noqa: F811
    url = bucket.url.replace("s3://bucket/", "s3://no-such-bucket/")
    for command in every_command(url, tmp_path):
        assert "no-such-bucket" in refused(*command)


def test_no_rights(tmp_path, bucket, monkeypatch):  # noqa: F811
    write_step(tmp_path, "train", 1)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    for command in every_command(bucket.url, tmp_path):
        assert "SignatureDoesNotMatch" in refused(*command) or "403" in refused(*command)


def test_an_export_to_a_place_that_cannot_be(tmp_path):
    write_step(tmp_path, "train", 1)
    file = tmp_path / "file"
    file.write_bytes(b"")
    for url in (str(file), str(file / "below"), "ftp://x/y"):
        assert url in refused("export", "1", url, "--storage", str(tmp_path))
    refused("export", "2", str(tmp_path / "new"), "--storage", str(tmp_path))
    assert not (tmp_path / "new").exists(), "there is no such step"
    well("export", "1", str(tmp_path / "new"), "--storage", str(tmp_path))
    assert "all good" in well("verify", str(tmp_path / "new"))


def test_a_step_that_is_not_there(tmp_path):
    write_step(tmp_path, "train", 1)
    assert "job train has no step 2" in refused("verify", str(tmp_path), "2")
    assert "job train has no step 2" in refused("export", "2", str(tmp_path), "--storage", str(tmp_path))
    assert "neither a whole number" in refused("verify", str(tmp_path), "../train")
    assert "no step of job other" in refused("verify", str(tmp_path), "--job", "other")


def test_which_of_several_jobs_must_be_said(tmp_path):
    write_step(tmp_path, "train", 1)
    write_step(tmp_path, "team/eval", 1)
    for command in every_command(str(tmp_path), tmp_path)[1:]:
        assert "steps of 2 jobs, say which with --job: team/eval, train" in refused(*command)
    assert steps_in(tmp_path) == [1]


def test_the_folder_of_a_job_is_not_its_storage(tmp_path):
    write_step(tmp_path, "train", 1)
    for command in every_command(str(tmp_path / "train"), tmp_path):
        assert "give the one above it" in refused(*command)


@pytest.mark.parametrize("job", ["../other", "/etc", "a/../b", "", "a\nb"])
def test_a_job_that_would_leave_the_prefix(tmp_path, job):
    store = tmp_path / "store"
    write_step(store, "train", 1)
    write_step(tmp_path, "other", 1)
    before = snapshot(tmp_path)
    for command in every_command(str(store), tmp_path):
        assert "--job" in refused(*command, "--job", job, code=2)
    assert snapshot(tmp_path) == before


def test_a_manifest_that_names_files_outside_is_never_followed(tmp_path):
    (tmp_path / "victim.pt").write_bytes(b"precious")
    for step in (1, 2):
        write_step(tmp_path / "store", "train", step)
    text = manifest_text("train", 1, 1, [{"../../../victim.pt": b"precious"}])
    (tmp_path / "store" / folder_of("train", 1) / MANIFEST).write_bytes(text)
    assert "victim.pt" in refused("verify", str(tmp_path / "store"), "1")
    well("prune", str(tmp_path / "store"), "--yes", "--keep-on-storage", "1")
    assert (tmp_path / "victim.pt").read_bytes() == b"precious"
    assert steps_in(tmp_path / "store") == [1, 2]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["prune", "URL"], "exactly one of --dry-run"),
        (["prune", "URL", "--dry-run", "--yes", "--keep-every", "5"], "exactly one of --dry-run"),
        (["prune", "URL", "--yes"], "no rule says what stays"),
        (["prune", "--yes", "--keep-every", "5"], "one URL"),
        (["prune", "URL", "--yes", "--keep-on-storage", "0"], '--keep-on-storage "0"'),
        (["prune", "URL", "--yes", "--keep-every", "x"], '--keep-every "x"'),
        (["prune", "URL", "--yes", "--keep-best", "loss"], '--keep-best "loss"'),
        (["prune", "URL", "--yes", "--keep-within", "7y"], '--keep-within "7y"'),
        (["prune", "URL", "--yes", "--keep-within"], "--keep-within has no value"),
        (["prune", "URL", "--yes", "--keep-nothing"], "--keep-nothing was not expected"),
        (["ls", "--storage", "URL", "7"], "7 was not expected"),
        (["ls", "--storage"], "--storage has no value"),
        (["verify", "URL", "1", "2"], "2 was not expected"),
        (["verify", "URL", "--timeout", "0"], '--timeout "0"'),
        (["export", "1", "--storage", "URL"], "STEP, and DIR or URL"),
        (["export", "1", "/tmp", "--best"], "--best, --model, --config and --max-shard-size go with --format hf"),
        (["export", "1", "/tmp", "--storage", "URL", "--socket", "/x"], "--socket is for a step in memory"),
        (["import"], "DIR or URL"),
        (["import", "URL", "--ranks", "0-1"], "--ranks needs --incarnation-token"),
        (["import", "URL", "--ranks", "3-1", "--incarnation-token", "x"], '--ranks "3-1"'),
        (["import", "URL", "--incarnation-token", ""], "--incarnation-token of 0 bytes"),
    ],
)
def test_wrong_arguments_are_refused_before_storage_is_looked_at(tmp_path, command, words):
    write_step(tmp_path, "train", 1)
    before = snapshot(tmp_path)
    told = refused(*[str(tmp_path) if word == "URL" else word for word in command], code=2)
    assert words in told and "--help" in told
    assert snapshot(tmp_path) == before


def test_help():
    for command in ("prune", "export", "import"):
        assert "--job JOB" in well(command, "--help")
    for command in ("ls", "verify"):
        assert "URL" in well(command, "--help")

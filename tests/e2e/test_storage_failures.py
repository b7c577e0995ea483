# SPDX-License-Identifier: Apache-2.0
"""Storage failures with real daemons: disks, buckets, daemons that are killed, a second allocation.

In every test an incomplete step is never offered, saves and commits continue, a log line gives the cause, and the next
attempt resumes if it can. tests/storage has fault tests of the sinks alone.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable

import pytest
from harness import WAIT_S, Cluster, ask, payload, wait_until
from test_storage import Bucket, Directory, bucket, lose, manifests, save, start_again, world  # noqa: F401

import ropeteam
from ropeteam import Level

TWO_PARTS = 20_000_000  # a part has 16 MiB
STORE_BYTES = 8 << 20  # size of a small disk: a step of SMALL bytes fits, a step of LARGE bytes does not
SMALL, LARGE = 1_000_000, 12_000_000
RUN_KILLS_AFTER_S = 10  # from SIGTERM until `ropeteam run` kills its daemon

# Makes writes of files below SHIM_DIR fail as the file SHIM_CONTROL says: "write ERRNO", "fsync ERRNO", "short",
# "hang".
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>
static int told(int fd, const char* what, int* number) {
  char link[64], path[4096], text[64] = "", word[32] = "";
  const char* dir = getenv("SHIM_DIR");
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n <= 0) return 0;
  path[n] = 0;
  if (strncmp(path, dir, strlen(dir)) != 0) return 0;
  int control = open(getenv("SHIM_CONTROL"), O_RDONLY | O_CLOEXEC);
  if (control < 0) return 0;
  n = read(control, text, sizeof text - 1);
  close(control);
  sscanf(text, "%31s %d", word, number);
  return strcmp(word, what) == 0;
}
ssize_t pwritev(int fd, const struct iovec* pieces, int count, off_t at) {
  static ssize_t (*real)(int, const struct iovec*, int, off_t);
  if (!real) *(void**)&real = dlsym(RTLD_NEXT, "pwritev");
  int number = 0;
  while (told(fd, "hang", &number)) {
    close(open(getenv("SHIM_HANGS"), O_CREAT | O_WRONLY | O_CLOEXEC, 0644));
    usleep(1000);
  }
  if (told(fd, "write", &number)) return errno = number, -1;
  if (told(fd, "short", &number) && pieces[0].iov_len > 8192) {
    struct iovec half = {pieces[0].iov_base, pieces[0].iov_len / 2 / 4096 * 4096};
    return real(fd, &half, 1, at);
  }
  return real(fd, pieces, count, at);
}
int fsync(int fd) {
  static int (*real)(int);
  if (!real) *(void**)&real = dlsym(RTLD_NEXT, "fsync");
  int number = 0;
  if (told(fd, "fsync", &number)) return errno = number, -1;
  return real(fd);
}
"""


def control(server: Bucket, name: str, **document: object) -> None:
    request = urllib.request.Request(f"{server.control}/{name}", json.dumps(document).encode(), method="POST")
    urllib.request.urlopen(request, timeout=WAIT_S).close()


def state(bucket: Bucket) -> dict:
    with urllib.request.urlopen(f"{bucket.control}/state?log=1000", timeout=WAIT_S) as answer:
        return json.load(answer)


def logs(nodes: Cluster) -> str:
    return "".join(node.log_text() for node in nodes.nodes)


def step_of(manifest: str) -> int:
    return int(manifest.split("step-")[1][:10])


def steps_in(store: Directory | Bucket) -> list[int]:
    return sorted(map(step_of, manifests(store)))


class Story:
    """One node and its rank, which saves steps during faults."""

    def __init__(self, nodes: Cluster, store: Directory | Bucket, size: int) -> None:
        self.nodes, self.store, self.size = nodes, store, size
        self.step = 0
        self.rope = nodes[0].open(0, 1, "first")
        self.persist()

    def save(self, **options) -> None:
        """Saves the next step and waits until it is committed; this must not depend on storage."""
        self.step += 1
        self.rope.save(self.step, {"data": payload(self.step, self.size)}, **options)
        self.rope.wait(self.step, Level.COMMITTED)

    def persist(self) -> None:
        self.save(persist=True)
        self.rope.wait(self.step, Level.PERSISTED)

    def fails_until(self, heal: Callable[[], None], words: str, what: str) -> None:
        """With the fault active, a step is not persisted and a log line says why. After heal() it is persisted, without
        another save."""
        seen = len(logs(self.nodes))
        self.save(persist=True)
        wait_until(lambda: words in logs(self.nodes)[seen:], f"{what}: a line with {words!r}")
        wait_until(lambda: words in self.nodes[0].status()["policy"]["trouble"], f"{what}: status says {words!r}")
        self.save()
        assert self.step - 1 not in steps_in(self.store), what
        with pytest.raises(ropeteam.DeadlineExceeded):
            self.rope.wait(self.step - 1, Level.PERSISTED, timeout=0)
        heal()
        self.rope.wait(self.step - 1, Level.PERSISTED)
        assert self.step - 1 in steps_in(self.store), what
        assert self.nodes[0].status()["policy"]["trouble"] == "", what

    def all_good(self) -> None:
        for step in steps_in(self.store):
            verified = ask("verify", self.store.url, str(step))
            assert verified.returncode == 0 and "all good" in verified.stdout, verified.stdout + verified.stderr


@pytest.fixture
def shim(tmp_path, monkeypatch) -> Callable[[str], None]:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the library that spoils writes")
    (tmp_path / "shim.c").write_text(SHIM)
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(tmp_path / "shim.so"), str(tmp_path / "shim.c"), "-ldl"]
    subprocess.run(command, check=True, timeout=WAIT_S)
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "shim.so"))
    monkeypatch.setenv("SHIM_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("SHIM_CONTROL", str(tmp_path / "control"))
    monkeypatch.setenv("SHIM_HANGS", str(tmp_path / "hangs"))
    monkeypatch.setenv("ASAN_OPTIONS", os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0")

    def say(text: str) -> None:
        (tmp_path / "control.new").write_text(text)
        (tmp_path / "control.new").rename(tmp_path / "control")

    return say


# Disks


def test_a_disk_that_fails_writes_half_or_hangs(cluster, tmp_path, shim):
    store = Directory(tmp_path / "store")
    story = Story(cluster(1, memory="256M", options=["--storage", store.url]), store, SMALL)
    for fault, words in (
        ("write 5", "Input/output error"),
        ("fsync 5", "Input/output error"),
        ("write 28", "no space"),
        ("write 30", "Read-only file system"),
    ):
        shim(fault)
        story.fails_until(lambda: shim(""), words, fault)
    shim("short")
    story.persist()
    shim("hang")
    story.save(persist=True)
    hung = story.step
    for _ in range(3):
        story.save()
    assert story.nodes[0].local_status()["counters"], "the daemon answers"
    assert hung not in steps_in(store)
    shim("")
    story.rope.wait(hung, Level.PERSISTED)
    story.rope.close()
    story.all_good()
    assert not [name for name in store.files() if ".ropeteam" in name], "nothing unfinished is left"


def test_a_disk_that_hangs_does_not_hold_up_the_end_of_a_daemon(cluster, tmp_path, shim):
    store = Directory(tmp_path / "store")
    nodes = cluster(1, memory="256M", options=["--storage", store.url])
    story = Story(nodes, store, SMALL)
    shim("hang")
    story.save(persist=True)
    wait_until((tmp_path / "hangs").exists, "a write that hangs")
    begun = time.monotonic()
    assert nodes[0].stop() == 0
    assert time.monotonic() - begun < RUN_KILLS_AFTER_S
    assert "storage hangs: a call has not returned from" in nodes[0].log_text()
    assert not pathlib.Path(nodes[0].socket).exists()
    assert steps_in(store) == [1]
    shim("")
    nodes[0].start()
    nodes.wait_members()
    assert story.rope.load(2)["data"] == payload(2, SMALL)
    story.rope.persist(2)
    story.rope.wait(2, Level.PERSISTED)
    story.rope.close()
    story.all_good()


def test_a_disk_that_is_really_full_or_read_only(cluster, tmp_path):
    store = Directory(tmp_path / "store")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={STORE_BYTES}", "tmpfs", store.url]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a file system cannot be mounted here")

    def remount(options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", store.url], check=True, timeout=WAIT_S)

    try:
        story = Story(cluster(1, memory="256M", options=["--storage", store.url]), store, SMALL)
        story.size = LARGE
        story.fails_until(lambda: remount(f"size={8 * STORE_BYTES}"), "no space", "a full disk")
        story.size = SMALL
        wait_until(lambda: subprocess.run(["mount", "-o", "remount,ro", store.url], capture_output=True).returncode == 0,
                   "no file open for writing")  # fmt: skip
        story.fails_until(lambda: remount("rw"), "Read-only file system", "a read-only disk")
        story.rope.close()
        story.all_good()
        story.nodes[0].stop()
    finally:
        subprocess.run(["umount", "-l", store.url], check=True, timeout=WAIT_S)


# Buckets


def test_a_bucket_that_fails_in_every_way(cluster, bucket):  # noqa: F811
    """At the end the server ends before the daemons, which must end nevertheless."""
    nodes = cluster(1, memory="512M", options=["--storage", bucket.url])
    story = Story(nodes, bucket, TWO_PARTS)
    part = {"operation": "UploadPart"}
    # The sink retries transient failures without a log line.
    for fault in (
        {"kind": "status", "match": part, "status": 500, "count": 2},
        {"kind": "status", "match": part, "status": 503, "code": "SlowDown", "count": 2},
        {"kind": "reset", "match": part, "after_bytes": 1 << 20},
        {"kind": "wrong_checksum", "match": part},
        {"kind": "lost_ack", "match": {"operation": "CompleteMultipartUpload"}},
        {"kind": "error_in_200", "match": {"operation": "CompleteMultipartUpload"}, "code": "InternalError"},
        {"kind": "abort_upload", "match": {**part, "part": 2}},
    ):
        bucket.fault(**fault)
        story.persist()
        [known] = state(bucket)["faults"]
        assert known["fired"] == fault.get("count", 1), fault
        bucket.fault(clear=True)

    control(bucket, "settings", skew_s=3600)  # as if this machine's clock was an hour late
    story.persist()
    assert "RequestTimeTooSkewed" in logs(nodes) or "clock" in logs(nodes)
    control(bucket, "settings", skew_s=0)
    story.persist()

    control(bucket, "settings", read_only={"bucket": True})
    story.fails_until(lambda: control(bucket, "settings", read_only={"bucket": False}), "AccessDenied", "read-only")
    control(bucket, "credentials", expire=True)
    story.fails_until(
        lambda: control(bucket, "credentials", access_key="key", secret_key="secret"), "ExpiredToken", "expired"
    )
    story.rope.close()
    assert state(bucket)["uploads"]["bucket"] == [], "nothing unfinished is left"

    lose(nodes)
    bucket.fault(kind="truncate", match={"operation": "GetObject", "key": ".safetensors"}, after_bytes=1 << 20)
    bucket.fault(kind="reset", match={"operation": "GetObject", "key": ".safetensors"}, nth=2, where="reply")
    start_again(nodes)
    rope = nodes[0].open(0, 1, "second")
    newest = steps_in(bucket)[-1]
    assert rope.latest().step == newest
    assert rope.load(newest)["data"] == payload(newest, TWO_PARTS)
    rope.close()


def test_a_bucket_that_can_only_be_read_restores_and_persists_nothing(bucket, cluster):  # noqa: F811
    nodes = cluster(1, options=["--storage", bucket.url])
    Story(nodes, bucket, SMALL).rope.close()
    lose(nodes)
    control(bucket, "settings", read_only={"bucket": True})
    before = bucket.files()
    start_again(nodes)
    rope = nodes[0].open(0, 1, "second")
    assert rope.load(rope.latest().step)["data"] == payload(1, SMALL)
    rope.save(2, {"data": b"x"}, persist=True)
    rope.wait(2, Level.COMMITTED)
    wait_until(lambda: "AccessDenied" in logs(nodes), "a line that says why")
    rope.close()
    assert bucket.files() == before


# Daemons that are killed


@pytest.mark.parametrize(
    ("operation", "nth"),
    [("CreateMultipartUpload", 1), ("UploadPart", 1), ("CompleteMultipartUpload", 1), ("PutObject", 1)],
    ids=["upload-created", "first-part-there", "before-complete", "before-manifest"],
)
def test_a_daemon_killed_at_a_stage_of_an_upload(bucket, cluster, operation, nth):  # noqa: F811
    """The server stops answering at the stage, so that the daemon is certainly in it when it is killed."""
    nodes = cluster(1, memory="256M", options=["--storage", bucket.url])
    story = Story(nodes, bucket, TWO_PARTS)
    when = "before_body" if operation in ("CompleteMultipartUpload", "PutObject") else "after_effect"
    match = {"operation": operation} | ({"key": "ropeteam-manifest.json"} if operation == "PutObject" else {})
    bucket.fault(kind="stall", match=match, seconds=600, when=when, nth=nth)
    story.save(persist=True)
    wait_until(lambda: state(bucket)["faults"][0]["fired"] == 1, operation)
    if operation == "CompleteMultipartUpload":
        wait_until(lambda: len(parts_there(bucket)) == 2, "both parts")
    there = parts_there(bucket)
    nodes[0].kill()  # its memory stays
    assert steps_in(bucket) == [1], "half a step does not count"
    bucket.fault(clear=True)
    sent = state(bucket)["requests"].get("UploadPart", 0)
    nodes[0].start()
    nodes.wait_members()
    story.rope.persist(2)  # only the killed daemon knew of the request
    story.rope.wait(2, Level.PERSISTED)
    assert steps_in(bucket) == [1, 2], "finished from memory"
    again = state(bucket)["requests"].get("UploadPart", 0) - sent
    expected = {"CreateMultipartUpload": (0, 2), "UploadPart": (0, 1), "CompleteMultipartUpload": (0, 0), "PutObject": (0, 0)}
    low, high = expected[operation]
    assert low <= again <= high, f"{again} parts were sent again, {len(there)} were there"
    story.rope.close()
    lose(nodes)
    start_again(nodes)
    rope = nodes[0].open(0, 1, "third")
    assert rope.latest().step == 2
    assert rope.load(2)["data"] == payload(2, TWO_PARTS)
    rope.close()


def parts_there(bucket: Bucket) -> list[str]:  # noqa: F811
    return [part for upload in state(bucket)["uploads"]["bucket"] for part in upload["parts"]]


def test_all_memory_lost_before_the_manifest_offers_the_older_step(bucket, cluster):  # noqa: F811
    nodes = cluster(1, options=["--storage", bucket.url])
    story = Story(nodes, bucket, SMALL)
    bucket.fault(kind="stall", match={"key": "ropeteam-manifest.json", "operation": "PutObject"}, seconds=600)
    story.save(persist=True)
    wait_until(lambda: state(bucket)["faults"][0]["fired"] == 1, "the manifest")
    lose(nodes)
    bucket.fault(clear=True)
    start_again(nodes)
    rope = nodes[0].open(0, 1, "second")
    assert rope.latest().step == 1
    assert rope.load(1)["data"] == payload(1, SMALL)
    rope.save(2, {"data": payload(20, SMALL)}, persist=True)
    rope.wait(2, Level.PERSISTED)
    rope.close()
    assert steps_in(bucket) == [1, 2]


def test_an_owner_that_is_lost_while_it_writes_is_replaced_by_a_holder(bucket, cluster):  # noqa: F811
    nodes = cluster(3, memory="256M", options=["--storage", bucket.url])
    ranks = world(nodes, "first")
    save(ranks, 1, persist=True)
    ranks[0].wait(1, Level.PERSISTED)
    bucket.fault(kind="stall", match={"operation": "UploadPart", "key": "/rank-00002"}, seconds=600)
    save(ranks, 2, persist=True)
    wait_until(lambda: state(bucket)["faults"][0]["fired"] == 1, "rank 2's file")
    nodes[2].kill(drop_memory=True)
    bucket.fault(clear=True)
    ranks[0].wait(2, Level.PERSISTED)
    for rope in ranks[:2]:
        rope.close()
    verified = ask("verify", bucket.url, "2")
    assert "all good" in verified.stdout, verified.stdout + verified.stderr


# Two allocations of one job


def test_a_second_allocation_is_refused_and_may_take_over(cluster, tmp_path):
    store = Directory(tmp_path / "store")
    options = ["--storage", store.url, "--keep-on-storage", "1"]
    first = cluster(1, options=options)
    one = Story(first, store, SMALL)
    second = cluster(1, options=options)
    rope = second[0].open(0, 1, "theirs")
    rope.save(7, {"data": payload(7, SMALL)}, persist=True)
    rope.wait(7, Level.COMMITTED)
    with pytest.raises(ropeteam.Aborted, match="is held by node node-0 of host .* which is alive.*--take-over-storage"):
        rope.wait(7, Level.PERSISTED)
    rope.close()
    assert steps_in(store) == [1], "nothing of the first is deleted, nothing of the second written"
    one.persist()
    assert "--take-over-storage" not in logs(first)

    third = cluster(1, options=[*options, "--take-over-storage"])
    rope = third[0].open(0, 1, "third")
    rope.save(9, {"data": payload(9, SMALL)}, persist=True)
    rope.wait(9, Level.PERSISTED)
    wait_until(lambda: steps_in(store) == [9], "the others' steps to be pruned by the new holder")
    one.save()
    wait_until(lambda: "was taken over by node node-0" in logs(first), "the first to say that it has lost the lock")
    assert "writes and deletes nothing there any more" in logs(first)
    with pytest.raises(ropeteam.Aborted, match="was taken over by node node-0"):
        one.rope.persist(one.step)
    rope.close()
    one.rope.close()
    assert steps_in(store) == [9]
    assert third[0].stop() == 0
    assert not [name for name in store.files() if "ropeteam-lock" in name], "given back, so that the next need not wait"


def test_daemons_that_were_killed_hold_nothing_up_on_their_machine(cluster, tmp_path):
    store = Directory(tmp_path / "store")
    nodes = cluster(1, options=["--storage", store.url])
    Story(nodes, store, SMALL).rope.close()
    lose(nodes)
    assert [name for name in store.files() if "ropeteam-lock" in name] == ["test/ropeteam-lock/0000000001.json"]
    start_again(nodes)
    rope = nodes[0].open(0, 1, "second")
    rope.save(2, {"data": payload(2, SMALL)}, persist=True)
    rope.wait(2, Level.PERSISTED, timeout=10)  # for a holder on another machine the timeout is 15 s
    assert "whose process is gone" in logs(nodes)
    rope.close()


# Damage, leftovers, the audit log


def test_a_step_that_is_marked_as_damaged_is_passed_over(cluster, tmp_path):
    store = Directory(tmp_path / "store")
    nodes = cluster(1, options=["--storage", store.url])
    story = Story(nodes, store, SMALL)
    story.persist()
    story.rope.close()
    lose(nodes)
    newest = pathlib.Path(max(manifests(store))).parent
    (store.path / newest / "ropeteam-damaged.txt").write_text("a reader found rot in it\n")
    start_again(nodes)
    rope = nodes[0].open(0, 1, "second")
    assert rope.latest().step == 1
    rope.close()
    assert "is marked as damaged: a reader found rot in it" in logs(nodes)


def test_uploads_that_are_older_than_a_day_are_aborted_once_storage_is_held(bucket, cluster):  # noqa: F811
    for age_s, step in ((90000, 1), (60, 2)):
        key = f"runs/test/step-000000000{step}-i00000001/rank-00000.safetensors"
        control(bucket, "upload", bucket="bucket", key=key, age_s=age_s)
    control(bucket, "upload", bucket="bucket", key="runs/other/step-0000000001-i00000001/x.pt", age_s=90000)
    nodes = cluster(1, options=["--storage", bucket.url])
    Story(nodes, bucket, SMALL).rope.close()
    line = "aborted 1 unfinished uploads that were begun more than a day ago"
    wait_until(lambda: line in logs(nodes), "a line that says how many")
    left = sorted(upload["key"] for upload in state(bucket)["uploads"]["bucket"])
    assert left == [
        "runs/other/step-0000000001-i00000001/x.pt",
        "runs/test/step-0000000002-i00000001/rank-00000.safetensors",
    ]


def test_the_audit_log_has_every_file_that_was_written_and_deleted(cluster, tmp_path):
    store, audit = Directory(tmp_path / "store"), tmp_path / "audit.jsonl"
    nodes = cluster(1, options=["--storage", store.url, "--keep-on-storage", "1", "--audit-log", str(audit)])
    story = Story(nodes, store, SMALL)
    story.persist()
    wait_until(lambda: steps_in(store) == [2], "the older step to be deleted")
    story.rope.close()
    assert nodes[0].stop() == 0
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    kept = pathlib.Path(*manifests(store)).parent.name
    folders = [f"test/{kept.replace('step-0000000002', f'step-000000000{step}')}" for step in (1, 2)]
    files = ["rank-00000.safetensors", "ropeteam-manifest.json"]
    assert [(line["event"], line["cause"], line["name"]) for line in lines] == [
        ("write", "persist", f"{folders[0]}/{files[0]}"),
        ("write", "manifest", f"{folders[0]}/{files[1]}"),
        ("write", "persist", f"{folders[1]}/{files[0]}"),
        ("write", "manifest", f"{folders[1]}/{files[1]}"),
        ("delete", "retention", f"{folders[0]}/{files[1]}"),
        ("delete", "retention", f"{folders[0]}/{files[0]}"),
    ]
    assert {(line["job"], line["node"]) for line in lines} == {("test", "node-0")}
    manifest = json.loads((store.path / folders[1] / files[1]).read_text())
    [entry] = manifest["ranks"][0]["files"]
    assert (lines[2]["bytes"], lines[2]["crc32c"]) == (entry["bytes"], entry["crc32c"])


def test_an_audit_log_that_cannot_be_written_is_an_error_at_the_start(tmp_path):
    from harness import ROPETEAMD, environment

    command = [str(ROPETEAMD), "--job", "test", "--memory", "64M", "--arena-path", str(tmp_path)]
    command += ["--storage", str(tmp_path), "--audit-log", "/no/such/place/audit.jsonl"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 1
    assert "--audit-log /no/such/place/audit.jsonl: No such file or directory" in done.stderr

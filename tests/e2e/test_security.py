# SPDX-License-Identifier: Apache-2.0
"""An intruder that knows a job's name, nodes and addresses, but not its key, cannot join it."""

from __future__ import annotations

import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest
from harness import ROPETEAM, ROPETEAMD, VIEW, WAIT_S, Cluster, environment, free_port, wait_until

KEY = "5a" * 32
OTHER_KEY = "a5" * 32
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
TLS_ALERT = 0x15


@pytest.fixture
def place() -> Iterator[pathlib.Path]:
    """A directory for the socket and arena of an intruder, which may run as another user."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="ropeteam-", dir="/dev/shm"))
    directory.chmod(0o777)
    yield directory
    shutil.rmtree(directory)


def daemon(place: pathlib.Path, *options: str, job: str = "test") -> list[str]:
    return [str(ROPETEAMD), "--job", job, "--memory", "16M", "--arena-path", str(place)] + [
        *("--socket", str(place / "i.sock")),
        *options,
    ]


def intrude(
    nodes: Cluster, place: pathlib.Path, *options: str, before: tuple[str, ...] = (), job: str = "test", **env: str
) -> str:
    """A daemon claims to be node 1, which is running. It must be refused with exit code 3; returns its output."""
    own = daemon(place, "--node", "node-1", "--ordinal", "1", "--nodes", "2", "--no-embed-coordinator", job=job)
    own += ["--coordinator", nodes.coordinator, "--listen", "127.0.0.9", "--log-level", "debug", *options]
    done = subprocess.run(
        [*before, *own], env=environment(**env), capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 3, done.stderr
    return done.stderr


def views(nodes: Cluster) -> list[list[tuple[str, ...]]]:
    return [VIEW.findall(node.log_text()) for node in nodes.nodes]


def check_undisturbed(nodes: Cluster, before: list, said: str) -> None:
    assert views(nodes) == before, "no view came or went"
    for node in nodes.nodes:
        status = node.status()
        assert status["daemon"]["control"] not in said
        assert status["daemon"]["data"] not in said


def test_an_intruder_is_refused_in_words_and_disturbs_nobody(cluster, place):
    nodes = cluster(2)
    before = views(nodes)
    told = "a connection of 127.0.0.1 ended before it had authenticated, "
    assert not any("before it had authenticated" in node.log_text() for node in nodes.nodes)
    said = intrude(nodes, place, ROPETEAM_JOB_KEY=OTHER_KEY)
    assert f"the coordinator at {nodes.coordinator} is of another job or has another job key" in said
    assert OTHER_KEY not in said
    check_undisturbed(nodes, before, said)
    wait_until(lambda: told in nodes[0].log_text(), "the coordinator's log")
    # The same key, but the name of another job: the message has the name.
    said = intrude(nodes, place, job="tset")
    assert f"the coordinator at {nodes.coordinator} is of another job or has another job key" in said
    assert "check --job and --job-key-file (here: job tset, job key " in said
    check_undisturbed(nodes, before, said)
    said = intrude(nodes, place, "--insecure")
    assert "it may want the job's key (--job-key-file)" in said
    check_undisturbed(nodes, before, said)


def test_without_a_key_anybody_joins(cluster, place):
    nodes = cluster(1, options=["--insecure"])
    own = daemon(place, "--node", "node-9", "--ordinal", "9", "--nodes", "1", "--no-embed-coordinator")
    own += ["--coordinator", nodes.coordinator, "--listen", "127.0.0.9", "--insecure"]
    with subprocess.Popen(own, env=environment(), stderr=subprocess.DEVNULL) as stranger:
        try:
            nodes.wait_members(2)
        finally:
            stranger.terminate()


def test_another_user_of_the_host_is_an_intruder_without_any_option(cluster, place):
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("becoming another user takes root and setpriv (Debian: util-linux)")
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    if subprocess.run([*nobody, "test", "-x", ROPETEAMD], check=False).returncode != 0:
        pytest.skip(f"another user may not run {ROPETEAMD}")
    nodes = cluster(2)
    before = views(nodes)
    own = place / "runtime"
    own.mkdir()
    os.chown(own, 65534, 65534)
    said = intrude(nodes, place, before=nobody, XDG_RUNTIME_DIR=str(own))
    assert "is of another job or has another job key" in said
    check_undisturbed(nodes, before, said)


def test_names_that_another_user_has_taken_are_refused_with_owner_mode_and_remedy(place):
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("becoming another user takes root and setpriv (Debian: util-linux)")
    uid = 65000 + os.getpid() % 500
    before = ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups")
    if subprocess.run([*before, "test", "-x", ROPETEAMD], check=False).returncode != 0:
        pytest.skip(f"another user may not run {ROPETEAMD}")

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        words = ["run", "--job", "j", "--memory", "16M", "--arena-path", str(place), "--", "true"]
        env = {name: value for name, value in environment().items() if name != "XDG_RUNTIME_DIR"} | variables
        return subprocess.run(
            [*before, ROPETEAM, *words], env=env, cwd=place, capture_output=True, text=True, timeout=WAIT_S, check=False
        )

    name = pathlib.Path(f"/tmp/ropeteam-{uid}")
    name.mkdir(mode=0o755)
    try:
        done = run()
        assert done.returncode != 0
        assert f"{name} is a directory of uid 0 (mode 0755), not a directory of uid {uid} alone" in done.stderr
        assert "have its owner or root remove it, or set XDG_RUNTIME_DIR to a directory of your own" in done.stderr
        own = place / "runtime"
        own.mkdir(mode=0o700)
        os.chown(own, uid, uid)
        done = run(XDG_RUNTIME_DIR=str(own))
        assert done.returncode == 0, done.stderr
        assert f"log-file {own}/ropeteam/j-node-0.log (default)" in done.stderr
        [arena] = place.glob("*.arena")
        os.chown(arena, 0, 0)
        done = run(XDG_RUNTIME_DIR=str(own))
        assert done.returncode != 0
        assert f"{arena} cannot be opened: it is a file of uid 0 (mode 0600), this daemon is uid {uid}" in done.stderr
        assert "have its owner or root remove it, or give another --arena-path" in done.stderr
    finally:
        name.rmdir()


def test_no_port_speaks_to_who_comes_in_clear(cluster):
    nodes = cluster(2)
    for node in nodes.nodes:
        assert len(node.listening()) >= 2
        for address in node.listening():
            with socket.create_connection(address, timeout=WAIT_S) as stranger:
                stranger.sendall(PREFACE)
                # An HTTP/2 server sends its settings at once. The data port waits for more bytes of its own protocol.
                stranger.settimeout(0.5)
                try:
                    said = stranger.recv(100)
                except (TimeoutError, ConnectionResetError):
                    said = b""
            assert not said or said[0] == TLS_ALERT, (address, said)


# Reads the environment with which each process of the job was started, as any process of this user can: `ropeteam run`,
# the daemon, etcd and its keeper, and this COMMAND. The last one is the command of --notice, which wrote its own.
READER = """
import os, pathlib, sys, time
notice = pathlib.Path(sys.argv[1])
def family(pid):
    yield pid
    for children in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from family(int(child))
def names():
    return {pathlib.Path(f"/proc/{pid}/comm").read_text().strip() for pid in family(os.getppid())}
until = time.monotonic() + 20
while time.monotonic() < until and not (notice.exists() and {"etcd", "ropeteamd"} <= names()):
    time.sleep(0.02)
assert {"ropeteam", "ropeteamd", "etcd"} <= names(), names()
secrets = b"5a" * 3, b"hun" + b"ter2"
for pid in family(os.getppid()):
    for file in ("cmdline", "environ"):
        text = pathlib.Path(f"/proc/{pid}/{file}").read_bytes()
        assert not any(secret in text for secret in secrets), (pid, file, pathlib.Path(f"/proc/{pid}/comm").read_text())
assert b"PATH=" in notice.read_bytes() and not any(secret in notice.read_bytes() for secret in secrets)
assert not any("JOB_KEY" in name or "PASSWORD" in name for name in os.environ)
print("nobody")
"""


def test_the_key_and_etcds_password_are_shown_to_nobody(run_ropeteam, tmp_path):
    if shutil.which("etcd") is None or shutil.which("etcdctl") is None:
        pytest.skip("no etcd and etcdctl (Debian: etcd-server, etcd-client)")
    notice = tmp_path / "notice"
    options = ["--job", tmp_path.name, "--start-etcd", f"127.0.0.1:{free_port('127.0.0.1')}"]
    options += ["--notice", f"cmd:env > {notice}.new; mv {notice}.new {notice}; false"]
    done = run_ropeteam(
        *(sys.executable, "-c", READER, str(notice)),
        options=options,
        ROPETEAM_JOB_KEY=KEY,
        ROPETEAM_ETCD_PASSWORD="hunter2",
    )
    assert (done.returncode, done.stdout) == (0, "nobody\n"), done.stderr
    assert "5a5a5a" not in done.stderr and "hunter2" not in done.stderr


def test_a_daemon_that_is_started_again_has_the_key(run_ropeteam, tmp_path):
    kills = """
import os, pathlib, signal, sys, time
log = pathlib.Path(sys.argv[1])
for child in pathlib.Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split():
    if int(child) != os.getpid():
        os.kill(int(child), signal.SIGKILL)
until = time.monotonic() + 20
while time.monotonic() < until and log.read_text().count("(ROPETEAM_JOB_KEY)") < 2:
    time.sleep(0.02)
"""
    log = tmp_path / "log"
    options = ["--job", tmp_path.name, "--log-file", str(log)]
    done = run_ropeteam(sys.executable, "-c", kills, str(log), options=options, ROPETEAM_JOB_KEY=KEY)
    assert done.returncode == 0, done.stderr
    assert log.read_text().count("(ROPETEAM_JOB_KEY)") == 2, log.read_text()


def test_a_rank_that_truncates_the_arena_ends_neither_the_daemon_for_good_nor_the_job(run_ropeteam, tmp_path):
    saves = """
import sys, time
import ropeteam
until = time.monotonic() + 30
while True:
    try:
        client = ropeteam.open(rank=0, world_size=1)
        client.save(int(sys.argv[1]), {"x": b"x" * (20 << 20)})
        client.wait(int(sys.argv[1]))
        break
    except ropeteam.RopeteamError:  # the daemon is being started again
        if time.monotonic() > until:
            raise
        time.sleep(0.05)
print(client.latest().step)
"""
    script = f"""
import glob, os, subprocess, sys
save = lambda step: subprocess.run([sys.executable, "-c", {saves!r}, step], check=True)
save("1")
[arena] = glob.glob(sys.argv[1])
size = os.stat(arena).st_size
os.truncate(arena, 8 << 20)  # as ftruncate() of the descriptor that a rank gets
verified = subprocess.run([sys.argv[2], "verify"], capture_output=True)
save("2")
print(os.stat(arena).st_size == size)
"""
    log = tmp_path / "log"
    options = ["--job", tmp_path.name, "--log-file", str(log)]
    arena = f"/dev/shm/ropeteam-*/ropeteam-{tmp_path.name}-*.arena"
    done = run_ropeteam(sys.executable, "-c", script, arena, str(ROPETEAM), options=options)
    assert (done.returncode, done.stdout) == (0, "1\n2\nTrue\n"), done.stderr
    assert "another process has truncated the arena /dev/shm/" in done.stderr
    assert "ropeteamd ended with exit code 7, starting it again" in done.stderr
    assert "another process has truncated or extended it" in log.read_text()


def test_an_address_that_others_reach_takes_a_key(place):
    said = subprocess.run(
        daemon(place, "--listen", "10.1.2.3"), env=environment(), capture_output=True, text=True, timeout=WAIT_S
    )
    assert said.returncode == 2
    assert "can be reached from other hosts, and this daemon has no job key and no certificate: give --job-key-file FILE" in said.stderr
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "key", "shown"),
    [
        (["--insecure"], "", "security control OPEN (--insecure)"),
        ([], KEY, "security control mutual TLS, job key "),
        (["--insecure"], KEY, "security control mutual TLS, job key "),
    ],
)
def test_with_a_key_or_told_to_be_open_it_starts_there(place, options, key, shown):
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("a network of its own takes root, unshare (Debian: util-linux) and ip (iproute2)")
    if subprocess.run(["unshare", "-n", "ip", "link", "set", "lo", "up"], check=False).returncode != 0:
        pytest.skip("no network namespace can be made here")
    setup = 'ip link set lo up && ip address add 10.9.9.1/24 dev lo && exec "$@"'
    command = ["unshare", "-n", "sh", "-c", setup, "sh", *daemon(place, "--listen", "10.9.9.1", "--coordinator", "10.9.9.1:7000", *options)]
    more = {"ROPETEAM_JOB_KEY": key} if key else {}
    with open(place / "log", "w+") as log:
        process = subprocess.Popen(command, env=environment(**more), stdout=log, stderr=log)
        try:
            text = wait_until(lambda: "members 1" in (place / "log").read_text() and (place / "log").read_text(), "it")
            told = subprocess.run(
                [str(ROPETEAM), "status", "--socket", str(place / "i.sock")],
                env=environment(),
                capture_output=True,
                text=True,
                timeout=WAIT_S,
            )
        finally:
            process.terminate()
            process.wait(WAIT_S)
    assert shown in told.stdout, told.stderr
    assert KEY not in text + told.stdout
    assert ("insecure: anyone who reaches 10.9.9.1" in text) == (not key)


def test_certificates_in_place_of_a_key(cluster, place, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("making certificates takes the program openssl")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=tmp_path, check=True, capture_output=True, timeout=WAIT_S)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=our ca", "-days", "30")
    openssl("req", *key, "-keyout", "n.key", "-out", "n.csr", "-subj", "/CN=train")
    openssl("x509", "-req", "-in", "n.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-out", "n.crt", "-days", "30")
    files = ["--tls-cert", f"{tmp_path}/n.crt", "--tls-key", f"{tmp_path}/n.key", "--tls-ca", f"{tmp_path}/ca.crt"]
    nodes = cluster(2, options=[*files, "--tls-name", "train"])
    shown = nodes[1].status()["daemon"]["security"]["control"]
    assert shown.startswith("mutual TLS, certificate of train expires 20")
    before = views(nodes)
    said = intrude(nodes, place)  # it has the default key of this machine and user
    assert f"the coordinator at {nodes.coordinator} is of another job or has another job key" in said
    check_undisturbed(nodes, before, said)

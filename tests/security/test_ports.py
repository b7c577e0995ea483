# SPDX-License-Identifier: Apache-2.0
"""Attacks on every port of running daemons, and on their local sockets. PACKETS in the environment sets how
many packets are sent in all.

At the data port a member needs the secret of a view. TcpTest.AMembersGarbageEndsItsConnectionOnly has it
(FRAMES sets the number of its packets), and so has the fuzz target tcp_target."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import os
import pathlib
import random
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))

from harness import (  # noqa: E402
    VIEW,
    WAIT_S,
    Cluster,
    Daemon,
    ScriptedRank,
    e2e_fixture,
    free_port,
    undisturbed,
    wait_until,
)

module_cluster = e2e_fixture("module_cluster")

PACKETS = int(os.environ.get("PACKETS", "100000"))
KEY = "5a" * 32
NOBODY = 65534
SENDER = pathlib.Path(__file__).with_name("packets.py")
# A loaded machine may delay a daemon for seconds. Nobody must be declared dead here, whatever else runs.
OPTIONS = ["--dead-after-ms", "20000"]

# A rank that commits steps until it is killed, and says how many at each line that it is sent.
SAVES = """
    import sys, threading
    import ropeteam

    def say():
        for line in sys.stdin:
            print(step, flush=True)

    rope = ropeteam.open({socket!r}, rank=0, world_size=1, incarnation_token="run")
    step = 0
    threading.Thread(target=say, daemon=True).start()
    while True:
        rope.save(step + 1, {{"data": bytes(100_000)}}, wait=ropeteam.Level.COMMITTED)
        step += 1
"""


class Attacked:
    """Two daemons, and a rank that saves meanwhile."""

    def __init__(self, nodes: Cluster, rank: ScriptedRank, ports: list[list[int]]) -> None:
        self.nodes, self.rank = nodes, rank
        self.data = [f"{node.address}:{data}" for node, (data, _) in zip(nodes.nodes, ports, strict=True)]
        self.metrics = [
            f"{node.address}:{metrics}" for node, (_, metrics) in zip(nodes.nodes, ports, strict=True)
        ]
        self.all = [f"{host}:{port}" for node in nodes.nodes for host, port in node.listening()]

    def committed(self) -> int:
        self.rank.go_on()
        said = self.rank.says()
        assert said, "the rank could not save any more"
        return int(said)

    @contextlib.contextmanager
    def survive(self) -> Iterator[None]:
        """Steps are committed during the block and after it. No daemon restarts, and no view comes."""
        processes = [node.process for node in self.nodes.nodes]
        views = [VIEW.findall(node.log_text()) for node in self.nodes.nodes]
        before = self.committed()
        yield
        after = self.committed()
        print(f"{after - before} steps were committed during the attack")
        # One of two more has been begun after the block.
        wait_until(lambda: self.committed() >= after + 2, "steps that are committed after the attack")
        undisturbed(self.nodes.nodes, processes)
        assert [VIEW.findall(node.log_text()) for node in self.nodes.nodes] == views

    def send(
        self, attack: str, packets: int, targets: list[str], before: tuple[str, ...] = ()
    ) -> tuple[int, int]:
        """The connections that were opened, and answered."""
        command = [*before, sys.executable, str(SENDER), attack, str(packets), "7", *targets]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        opened, answered = map(int, done.stdout.split())
        return opened, answered


@pytest.fixture(scope="module")
def attacked(module_cluster, tmp_path_factory) -> Iterator[Attacked]:
    key = tmp_path_factory.mktemp("key") / "job.key"
    key.write_text(KEY)
    key.chmod(0o600)
    addresses = ["127.0.0.1", "127.0.0.2"]
    ports = [[free_port(address), free_port(address)] for address in addresses]
    own = [
        ["--data-port", str(data), "--metrics", f"{address}:{metrics}"]
        for address, (data, metrics) in zip(addresses, ports, strict=True)
    ]
    nodes = module_cluster(2, options=["--job-key-file", str(key), *OPTIONS], node_options=own)
    with ScriptedRank(SAVES.format(socket=nodes[0].socket)) as rank:
        made = Attacked(nodes, rank, ports)
        wait_until(lambda: made.committed() > 0, "the first step")
        # Coordinator, control, data and metrics; the coordinator is on the first node.
        assert len(made.all) == 7 and set(made.data + made.metrics) < set(made.all)
        assert {host for node in nodes.nodes for host, _ in node.listening()} == set(addresses)
        yield made


def nobody() -> tuple[str, ...]:
    """What comes before a command of another user."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("becoming another user takes root and setpriv (Debian: util-linux)")
    before = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    if subprocess.run([*before, sys.executable, "-c", f"open({str(SENDER)!r})"], check=False).returncode != 0:
        pytest.skip(f"another user may not run {sys.executable} or read {SENDER}")
    return before


def members_identity(path: pathlib.Path) -> pathlib.Path:
    """A key and a certificate of the authority that membership/credentials/job_key.h describes."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    extracted = hmac.digest(b"ropeteam job key 1", bytes.fromhex(KEY), "sha256")
    authority = Ed25519PrivateKey.from_private_bytes(hmac.digest(extracted, b"tls ca\0test\x01", "sha256"))
    raw = authority.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    own = Ed25519PrivateKey.generate()

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    names = x509.SubjectAlternativeName([x509.DNSName("node.ropeteam.internal")])
    made = x509.CertificateBuilder(
        issuer_name=named("ropeteam job ca " + hashlib.sha256(raw).hexdigest()[:16]),
        subject_name=named("node-7"),
        public_key=own.public_key(),
        serial_number=7,
        not_valid_before=datetime.datetime(2025, 1, 1),
        not_valid_after=datetime.datetime(9999, 12, 31),
    )
    made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    made = made.add_extension(names, critical=False).add_extension(
        x509.ExtendedKeyUsage(usages), critical=False
    )
    pem = serialization.Encoding.PEM
    key = own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(key + made.sign(authority, None).public_bytes(pem))
    return path


def test_packets_of_libfabric_end_no_daemon(attacked):
    with attacked.survive():
        opened, answered = attacked.send("rxm", 256, attacked.data)
    assert (opened, answered) == (256, 0), "no byte is said to a stranger"


def test_random_packets_of_a_stranger_disturb_nobody(attacked):
    with attacked.survive():
        opened, _ = attacked.send("random", PACKETS // 2, attacked.all)
        _, answered = attacked.send("random", 1000, attacked.data)
    assert opened >= PACKETS // 2 // 100 and answered == 0


def test_random_packets_of_another_user_of_the_host_disturb_nobody(attacked):
    with attacked.survive():
        opened, _ = attacked.send("random", PACKETS // 4, attacked.all, nobody())
    assert opened >= PACKETS // 4 // 100


def test_garbage_of_a_member_ends_its_own_connections_only(attacked, tmp_path):
    identity = members_identity(tmp_path / "member.pem")
    control = [target for target in attacked.all if target not in attacked.data + attacked.metrics]
    with attacked.survive():
        opened, answered = attacked.send(str(identity), PACKETS // 4, control)
    assert answered == opened, "every server has accepted the certificate"


REPLY = 18
HELLO = struct.pack("<IIHHIQ", 0x45504F52, 0, 1, 0, 0, 1)  # a frame's header, of type kHello


def told(node: Daemon, said: bytes) -> bytes:
    """What the daemon answers on its local socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(WAIT_S)
        client.connect(node.socket)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(said)
            client.shutdown(socket.SHUT_WR)
            return client.recv(100)
    return b""


def test_the_local_socket_is_for_its_own_user(attacked):
    before = nobody()
    path = pathlib.Path(attacked.nodes[0].socket)
    script = """if True:
        import socket, sys
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(60)
        try:
            client.connect(sys.argv[1])
        except PermissionError:
            sys.exit("no permission")
        try:
            client.sendall(bytes.fromhex(sys.argv[2]))
            print(len(client.recv(100)))
        except OSError:
            print(0)
    """
    command = [*before, sys.executable, "-c", script, str(path), HELLO.hex()]
    with attacked.survive():
        assert (
            "no permission" in subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S).stderr
        )
        # Whoever has made the file accessible is still asked who he is.
        path.parent.chmod(0o755)
        path.chmod(0o666)
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
        path.chmod(0o600)
        path.parent.chmod(0o700)
        assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    assert f"session of uid {NOBODY}" in attacked.nodes[0].log_text()


def test_garbage_on_the_local_socket_ends_its_own_connection_only(attacked):
    rng = random.Random(7)
    with attacked.survive():
        for _ in range(max(200, PACKETS // 100)):
            body = rng.randbytes(rng.randrange(300))
            kind = rng.choice((1, 1, rng.randrange(70)))
            framed = struct.pack("<IIHHIQ", 0x45504F52, len(body), kind, 0, 0, rng.getrandbits(64)) + body
            answer = told(attacked.nodes[rng.randrange(2)], rng.choice((body, framed)))
            assert not answer or answer[8] == REPLY, "at most the reason of a refusal"

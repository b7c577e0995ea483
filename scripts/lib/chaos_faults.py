# SPDX-License-Identifier: Apache-2.0
"""The faults of scripts/chaos. Each leaves every process running and the network whole."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence

from chaos_etcd import Member
from chaos_host import Host, Stuck, wait_until
from chaos_nodes import Node, Rank
from chaos_rank import content
from chaos_rounds import CALL_S, NODES, Chaos

FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
PAUSES_S = (0.3, 1.0, 3.0, 10.0, 30.0)
CUTS_S = (0.5, 2.0, 5.0)


def kill_at_once(chaos: Chaos, numbers: list[int], hosts: Sequence[Host] = ()) -> None:
    """kill -9 of these ranks and of what runs on the hosts. All have their signal before the first is waited for: on a busy
    machine a process takes a second to end, and what is killed after that would live on in the time that is measured."""
    dying = [*hosts, *(chaos.ranks[number] for number in numbers)]

    def kill() -> None:
        for each in dying:
            each.process.kill()
        for each in dying:
            each.kill()

    chaos.saves_meet(kill)
    for number in numbers:
        chaos.ranks[number] = Rank(chaos.paths, chaos.seed, number, NODES)


def kill_rank(chaos: Chaos) -> None:
    kill_at_once(chaos, [chaos.random.randrange(NODES)])


def lose(chaos: Chaos, nodes: list[Node]) -> None:
    """As when hosts are lost: their ranks and arenas go with them."""
    kill_at_once(chaos, [node.ordinal for node in nodes], nodes)
    for node in nodes:
        shutil.rmtree(node.arena)


def kill_nodes(chaos: Chaos, nodes: list[Node], drop_memory: bool) -> None:
    if drop_memory:
        lose(chaos, nodes)
    else:
        kill_at_once(chaos, [], nodes)
    # Standalone nobody stands in for the coordinator; and with all lost there is nobody to go on.
    if (chaos.cluster.nodes[0] in nodes and not chaos.cluster.etcd) or len(nodes) == NODES:
        for node in nodes:
            node.start(wait=False)
        chaos.open_world()
        chaos.tally.latest_s.append(time.time() - chaos.struck)
        return
    chaos.failed_over()
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
    chaos.noticed_silence([each for each in chaos.cluster.nodes if each is not node])
    node.go_on()


def cut(chaos: Chaos, one_way: bool) -> None:
    """Up to half of the nodes from the others; each member of etcd is on one of the sides, or within reach of both."""
    some: list[Host] = list(chaos.pick(chaos.random.randint(1, NODES // 2)))
    others: list[Host] = [node for node in chaos.cluster.nodes if node not in some]
    for member in chaos.cluster.etcd.members if chaos.cluster.etcd else []:
        chaos.random.choice((some, others, [])).append(member)

    def drop() -> None:
        for host in some:
            host.drop_from(others)
        for host in [] if one_way else others:
            host.drop_from(some)

    chaos.saves_meet(drop)
    time.sleep(chaos.random.choice(CUTS_S))
    for host in chaos.cluster.hosts():
        host.heal()


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
    lose(chaos, [node])
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
    value = content(chaos.seed, step, owner, chaos.safe_token)["model"]
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


# ---- faults of etcd, and of the node that has the coordinator role


def kill_coordinator(chaos: Chaos) -> None:
    kill_nodes(chaos, [chaos.cluster.coordinator()], drop_memory=False)


def lose_coordinator(chaos: Chaos) -> None:
    kill_nodes(chaos, [chaos.cluster.coordinator()], drop_memory=True)


def kill_coordinator_and_etcd_leader(chaos: Chaos) -> None:
    """No node can take the coordinator role before etcd has elected a leader."""
    coordinator, leader = chaos.cluster.coordinator(), chaos.cluster.etcd.leader()
    kill_at_once(chaos, [], [leader, coordinator])
    chaos.failed_over()
    leader.start()
    coordinator.start()


def kill_member(chaos: Chaos, member: Member) -> None:
    """A save commits while one of three is missing."""
    chaos.saves_meet(member.kill, CALL_S)
    chaos.save()
    member.start()
    chaos.undisturbed()


def etcd_kill_follower(chaos: Chaos) -> None:
    kill_member(chaos, chaos.random.choice(chaos.cluster.etcd.followers()))


def etcd_kill_leader(chaos: Chaos) -> None:
    kill_member(chaos, chaos.cluster.etcd.leader())


def etcd_pause(chaos: Chaos) -> None:
    member = chaos.random.choice(chaos.cluster.etcd.members)
    seconds = chaos.random.choice(PAUSES_S[:4])
    chaos.saves_meet(member.pause, CALL_S)
    time.sleep(seconds)
    member.go_on()
    chaos.undisturbed()


def cut_member(chaos: Chaos, member: Member) -> None:
    """From the other members and all daemons; in one direction at times."""
    rest = [host for host in chaos.cluster.hosts() if host is not member]
    one_way = chaos.random.random() < 0.3

    def drop() -> None:
        member.drop_from(rest)
        for host in [] if one_way else rest:
            host.drop_from([member])

    chaos.saves_meet(drop, CALL_S)
    time.sleep(chaos.random.choice(CUTS_S))
    for host in chaos.cluster.hosts():
        host.heal()
    chaos.undisturbed()


def etcd_cut_follower(chaos: Chaos) -> None:
    cut_member(chaos, chaos.random.choice(chaos.cluster.etcd.followers()))


def etcd_cut_leader(chaos: Chaos) -> None:
    cut_member(chaos, chaos.cluster.etcd.leader())


def cut_from_etcd(chaos: Chaos, node: Node) -> None:
    """One daemon from etcd alone; all others reach both."""
    members = chaos.cluster.etcd.members

    def drop() -> None:
        node.drop_from(members)
        for member in members:
            member.drop_from([node])

    chaos.saves_meet(drop, CALL_S)
    time.sleep(chaos.random.choice(CUTS_S))
    for host in (node, *members):
        host.heal()


def etcd_cut_node(chaos: Chaos) -> None:
    coordinator = chaos.cluster.coordinator()
    cut_from_etcd(chaos, next(node for node in chaos.pick(2) if node is not coordinator))
    chaos.undisturbed()


def etcd_cut_coordinator(chaos: Chaos) -> None:
    cut_from_etcd(chaos, chaos.cluster.coordinator())


def etcd_away(chaos: Chaos) -> None:
    """All of etcd for some seconds: killed, or stopped, in which case its leases end when it goes on."""
    etcd = chaos.cluster.etcd
    kill = chaos.random.random() < 0.5
    chaos.saves_meet(etcd.kill if kill else lambda: etcd.signal(stop=True))
    time.sleep(chaos.random.choice(CUTS_S))
    if kill:
        etcd.start()
    else:
        etcd.signal(stop=False)
        etcd.wait()
    chaos.undisturbed()


def etcd_wipe(chaos: Chaos) -> None:
    etcd = chaos.cluster.etcd

    def wipe() -> None:
        etcd.kill()
        etcd.wipe()
        etcd.start()

    chaos.saves_meet(wipe)
    for node in chaos.cluster.nodes:
        wait_until(lambda: node.found_coordinator_since(chaos.struck), f"{node.name} has found the empty etcd", CALL_S)
    chaos.undisturbed()


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
# Over etcd, as well as those above.
ETCD_FAULTS: dict[str, Callable[[Chaos], None]] = {
    "kill-coordinator": kill_coordinator,
    "lose-coordinator": lose_coordinator,
    "kill-both-leaders": kill_coordinator_and_etcd_leader,
    "etcd-kill-follower": etcd_kill_follower,
    "etcd-kill-leader": etcd_kill_leader,
    "etcd-pause": etcd_pause,
    "etcd-cut-follower": etcd_cut_follower,
    "etcd-cut-leader": etcd_cut_leader,
    "etcd-cut-node": etcd_cut_node,
    "etcd-cut-coordinator": etcd_cut_coordinator,
    "etcd-away": etcd_away,
    "etcd-wipe": etcd_wipe,
}
# A process that is killed is noticed by its connections, and the times are limited. Silence takes longer, and while etcd
# elects nobody decides: those are told apart.
KILLS = {
    "kill-daemon", "kill-leader", "kill-coordinator", "lose-node", "lose-two-nodes", "lose-coordinator", "kill-all-daemons"
}  # fmt: skip

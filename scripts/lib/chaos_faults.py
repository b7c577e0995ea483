# SPDX-License-Identifier: Apache-2.0
"""The faults of scripts/chaos. After each of them every process runs again and the network is healed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence

from chaos_etcd import Member
from chaos_host import Host, Stuck, wait_until
from chaos_nodes import READY_S, REPLICAS, Node, Rank
from chaos_rank import content
from chaos_rounds import CALL_S, NODES, ROUND_S, Chaos
from chaos_storage import View

FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
PAUSES_S = (0.3, 1.0, 3.0, 10.0, 30.0)
CUTS_S = (0.5, 2.0, 5.0)
TROUBLED_S = 5.0  # how long ranks wait for a step to be persisted while storage is in trouble


def kill_at_once(chaos: Chaos, numbers: list[int], hosts: Sequence[Host] = ()) -> None:
    """Kills these ranks and the hosts' processes with SIGKILL. All get the signal before the first wait: on a
    busy machine a process takes a second to end, and the others would live on during the measured time."""
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
    """Loses the hosts: their daemons, ranks and arenas."""
    kill_at_once(chaos, [node.ordinal for node in nodes if node.ordinal < NODES], nodes)
    for node in nodes:
        shutil.rmtree(node.arena)
    if len(nodes) == NODES:
        chaos.lost_all_memory()


def kill_nodes(chaos: Chaos, nodes: list[Node], drop_memory: bool) -> None:
    if drop_memory:
        lose(chaos, nodes)
    else:
        kill_at_once(chaos, [], nodes)
    # No node can replace a standalone coordinator, and no node survives if all are killed.
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
    kill_nodes(chaos, [chaos.cluster.leader()], drop_memory=False)


def kill_all_daemons(chaos: Chaos) -> None:
    kill_nodes(chaos, list(chaos.cluster.nodes), drop_memory=False)


def pause(chaos: Chaos) -> None:
    (node,) = chaos.pick()
    seconds = chaos.random.choice(PAUSES_S)
    chaos.saves_meet(node.pause)
    time.sleep(seconds)  # the length of the pause is the test
    chaos.noticed_silence([each for each in chaos.cluster.nodes if each is not node])
    node.go_on()


def cut(chaos: Chaos, one_way: bool) -> None:
    """Cuts up to half of the nodes off. Each etcd member is on one side, or reaches both."""
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
    """A node restarts on a host without memory for its arena. It must end with an error, and start later."""
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
    """Flips a bit in one copy of a committed shard. A read or the scrub finds it."""
    step = chaos.safe
    owner = chaos.random.randrange(NODES)
    value = content(chaos.seed, step, owner, chaos.safe_token)["model"]
    at = chaos.random.randrange(max(1, len(value) - 64))
    holder = next((node for node in chaos.pick(NODES) if len(value) > 64 and node.flip_bit_of(value, at)), None)
    if holder is not None:
        chaos.note(f"flipped a bit of rank {owner}'s step {step} on {holder.name}")


def step_clock(chaos: Chaos) -> None:
    """A daemon's wall clock jumps while it works. Its next start corrects the clock."""
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


def cut_leader_link(chaos: Chaos) -> None:
    """Cuts the link between the leader and another node. Both still reach the coordinator, and no node is dead."""
    leader = chaos.cluster.leader()
    other = next(node for node in chaos.pick(2) if node is not leader)
    port = int(chaos.cluster.coordinator_at().rpartition(":")[2])

    def drop() -> None:
        leader.drop_from([other], but_port=port)
        other.drop_from([leader], but_port=port)

    chaos.saves_meet(drop, CALL_S)
    chaos.save()  # no node leads any more that does not reach all others
    if chaos.random.random() < 0.5:
        chaos.open_world()
        chaos.compare(chaos.struck)
        chaos.save()
    for node in (leader, other):
        node.heal()
    chaos.undisturbed()


# ---- faults of spares and of the keys


def replaceable(chaos: Chaos, count: int) -> list[Node]:
    """Nodes whose daemons may stay away: without etcd the coordinator is on node 0."""
    return chaos.random.sample(chaos.cluster.nodes[0 if chaos.cluster.etcd else 1 :], count)


def spares(chaos: Chaos) -> None:
    """Spares replace nodes. These come back when the job has newer steps, with their old memory or without it."""
    cluster = chaos.cluster
    away = replaceable(chaos, chaos.random.randint(1, len(cluster.spares)))
    drop_memory = chaos.random.random() < 0.5
    joins_first = chaos.random.random() < 0.5
    if joins_first:
        start_spares(chaos)
        wait_until(chaos.redundant, "the spares are members", ROUND_S)
    if drop_memory:
        lose(chaos, away)
    else:
        kill_at_once(chaos, [node.ordinal for node in away], away)
    if not joins_first:
        start_spares(chaos)
    chaos.open_world()
    chaos.save()
    if chaos.random.random() < 0.5:
        others = cluster.running()
        kill_at_once(chaos, [], others)
        for node in others:
            node.start(wait=False)
        chaos.open_world()
        chaos.save()
    wait_until(lambda: chaos.redundant(len(away)), "all copies are on the others", ROUND_S)
    for node in away:
        node.start()
    chaos.open_world()
    end_spares(chaos)


def away(chaos: Chaos) -> None:
    """All daemons are killed. More of them stay away than the copies allow for, and spares fill their places."""
    cluster = chaos.cluster
    missing = replaceable(chaos, REPLICAS + 1)
    kill_at_once(chaos, [node.ordinal for node in missing], list(cluster.nodes))
    for node in cluster.nodes:
        if node not in missing:
            node.start(wait=False)
    start_spares(chaos)
    chaos.waits()
    for node in missing:
        node.start()
    chaos.open_world()
    end_spares(chaos)


def start_spares(chaos: Chaos) -> None:
    for spare in chaos.cluster.spares:
        spare.start()


def end_spares(chaos: Chaos) -> None:
    """The spares are lost, as two nodes at once may be."""
    wait_until(chaos.redundant, "all copies are there, with the spares", ROUND_S)
    lose(chaos, chaos.cluster.spares)
    chaos.open_world()


def replace_key(chaos: Chaos) -> None:
    """The procedure of docs/security.md, with nodes that are killed or lost between its steps."""
    cluster = chaos.cluster
    old, new = *cluster.nodes[0].keys, f"{chaos.random.getrandbits(256):064x}"
    for keys in ((old, new), (new, old), (new,)):
        if keys == (new,) and cluster.encrypt:
            wait_until(cluster.removable, "the old key may be removed", ROUND_S)
        for node in cluster.nodes:
            node.keys = keys
            node.stop()
            node.start()
            wait_until(chaos.redundant, "all copies are there with the key's new place", ROUND_S)
            if chaos.random.random() < 0.2:
                chaos.open_world()
                kill_nodes(chaos, chaos.pick(chaos.random.randint(1, REPLICAS)), chaos.random.random() < 0.7)
                chaos.save()
                wait_until(chaos.redundant, "all copies are there after a kill", ROUND_S)
    for spare in cluster.spares:
        spare.keys = (new,)
    if cluster.encrypt:
        wait_until(cluster.one_key, "only the new key is in use, and every copy counts", ROUND_S)


# ---- faults of storage


def storage_trouble(chaos: Chaos, views: dict[Node, View]) -> None:
    """These nodes see something else in the place of the store: from the middle of a save, or from the moment when all
    daemons are killed. In most rounds all memory is lost meanwhile."""
    cluster = chaos.cluster
    chaos.persist()
    begins_early = chaos.random.random() < 0.6
    restarts = not begins_early or chaos.random.random() < 0.6
    drop_memory = chaos.random.random() < 0.7
    blind = len(views) == NODES and not any(view.readable for view in views.values())
    waits = False

    def begin() -> None:
        for node, view in views.items():
            node.see(view)

    if begins_early:
        chaos.saves_meet(begin, CALL_S, persist=True)
        chaos.told_persisted(TROUBLED_S)
        chaos.save(persist=True)
        chaos.told_persisted(TROUBLED_S)
    if restarts:
        if drop_memory:
            lose(chaos, cluster.nodes)
        else:
            kill_at_once(chaos, [], cluster.nodes)
        begin()
        start_where_storage_allows(chaos)
        begun = bool(cluster.running()) if cluster.etcd else cluster.nodes[0].process is not None
        waits = not begun or (blind and drop_memory)
        if not waits:
            chaos.open_world()
            chaos.save(persist=True)
            chaos.told_persisted(TROUBLED_S)
        elif begun:
            chaos.waits()
    for node in views:
        node.see(None)
    for node in cluster.nodes:
        if node.process is None:
            node.start()
    if waits:
        chaos.open_world()
    chaos.persist()


def start_where_storage_allows(chaos: Chaos) -> None:
    """A daemon may end at its start where its storage is refused. It is started again later, as a supervisor would."""
    nodes = chaos.cluster.nodes
    for node in nodes:
        node.start(wait=False)

    def settled(node: Node) -> bool:
        return node.process.poll() is not None or node.status("--local") is not None

    wait_until(lambda: all(map(settled, nodes)), "every daemon answers or has ended", READY_S)
    for node in nodes:
        if node.process.poll() is None:
            continue
        refused = node.view is not None and node.view.source == chaos.cluster.store.denied
        said = str(chaos.cluster.store.path) in node.last_words()
        if not (refused and said and node.process.returncode > 0):  # below 0: a signal, as of a crash
            raise Stuck(f"{node.name} ended with {node.process.returncode}: {node.last_words()}")
        node.process = None


def storage_unmounted(chaos: Chaos) -> None:
    """Some nodes, often the leader alone, see an empty directory that they can write to."""
    nodes = chaos.pick(chaos.random.randint(1, NODES - 1))
    if chaos.random.random() < 0.5:
        nodes = [chaos.cluster.leader()]
    storage_trouble(chaos, {node: chaos.cluster.store.empty(node.name) for node in nodes})


def storage_refused(chaos: Chaos) -> None:
    """One node or all may not use the store, or may not write there."""
    nodes = chaos.random.choice((chaos.pick(), [chaos.cluster.leader()], chaos.cluster.nodes))
    view = chaos.random.choice(chaos.cluster.store.refusals())
    storage_trouble(chaos, dict.fromkeys(nodes, view))


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
    """A save must commit while one of the three members is missing."""
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
    """Cuts a member off from the others and from all daemons, sometimes in one direction only."""
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
    """Cuts one daemon off from etcd, but not from the other daemons."""
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
    """Kills or stops all of etcd for some seconds. If it was stopped, leases expire when it continues."""
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
    "cut-leader-link": cut_leader_link,
    "spares": spares,
    "away": away,
    "replace-key": replace_key,
    "storage-unmounted": storage_unmounted,
    "storage-refused": storage_refused,
}
# Additional faults for membership over etcd.
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
# The table sums these up. A killed process is detected by its closed connections, within limited time.
# Silence is detected later, and nothing is decided while etcd elects a leader.
KILLS = {
    "kill-daemon", "kill-leader", "kill-coordinator", "lose-node", "lose-two-nodes", "lose-coordinator", "kill-all-daemons"
}  # fmt: skip

"""The faults that a whole run must survive, as objects: what is done, and what must hold afterwards.

    for fault in FAULTS:
        recovered = fault.strike(run, chance)      # returns at once
        run.wait_until(recovered, fault.passes)

The pass condition of all of them together is the audit's: each ordinal counts exactly once in the history of the
weights, no lag is above the bound, no version number comes twice. `tests.reliability` draws them at random; the seed
of `chance` decides everything that is random in one.
"""

import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass

import redis

from offbeat.streams.keys import Role
from tests.harness.faulted_run import MIN_IDLE_SECONDS, FaultedRun
from tests.harness.proxy import Proxy

Recovered = Callable[[], bool]
Strike = Callable[[FaultedRun, random.Random], Recovered]


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    kind: str
    target: str
    """What it hits; two faults with one target are not under way at once."""
    does: str
    passes: str
    strike: Strike
    """Does it, and returns what tells whether the run has got over it."""


def _next_step(run: FaultedRun, count: int = 1) -> Recovered:
    """So many further steps were trained."""
    enough = len(run.steps) + count
    return lambda: len(run.steps) >= enough


def _all(*conditions: Recovered) -> Recovered:
    return lambda: all(holds() for holds in conditions)


# --- processes


def _victims(run: FaultedRun, role: Role) -> list[int]:
    """Processes that may be hit; waits until there is one."""
    return list(run.wait_for(lambda: [p for p in run.pids(role) if p not in run.spared], role))


def _held(run: FaultedRun, role: Role, pid: int) -> set[tuple[str, bytes]]:
    """What a worker holds, as far as Redis can be asked."""
    try:
        return run.held_by(role, pid)
    except redis.RedisError:
        return set()


def _kill_worker(role: Role) -> Strike:
    def strike(run: FaultedRun, chance: random.Random) -> Recovered:
        pid = chance.choice(_victims(run, role))
        # Frozen first, so that what it holds is known when it dies.
        os.kill(pid, signal.SIGSTOP)
        held = _held(run, role, pid)
        os.kill(pid, signal.SIGKILL)
        return lambda: not (held & run.held_by(role, pid)) and run.all_work(role)

    return strike


def _freeze_worker(role: Role) -> Strike:
    def strike(run: FaultedRun, chance: random.Random) -> Recovered:
        pid = chance.choice(_victims(run, role))
        os.kill(pid, signal.SIGSTOP)
        held, awake = _held(run, role, pid), []

        def wake() -> None:
            os.kill(pid, signal.SIGCONT)
            awake.append(_next_step(run))

        run.after(2.5 * MIN_IDLE_SECONDS, wake)
        return lambda: bool(awake) and awake[0]() and not (held & run.held_by(role, pid))

    return strike


def _kill_learner(run: FaultedRun, chance: random.Random) -> Recovered:
    term = run.term
    run.kill("learner")
    return lambda: run.term > term


def _kill_checkpoint(run: FaultedRun, chance: random.Random) -> Recovered:
    run.kill("checkpoint")
    return _next_step(run, 2)


# --- failpoints


def _learner_at(failpoint: str) -> Strike:
    def strike(run: FaultedRun, chance: random.Random) -> Recovered:
        term, hit = run.term, run.arm(failpoint)
        return lambda: hit() and run.term > term

    return strike


def _checkpoint_at(failpoint: str) -> Strike:
    def strike(run: FaultedRun, chance: random.Random) -> Recovered:
        hit, then = run.arm(failpoint), []

        def recovered() -> bool:
            if hit() and not then:
                then.append(_next_step(run, 2))
            return bool(then) and then[0]()

        return recovered

    return strike


# --- Redis


def _kill_redis(run: FaultedRun, chance: random.Random) -> Recovered:
    run.server.kill()
    started: list[Recovered] = []

    def start() -> None:
        run.server.start()
        started.append(_next_step(run))

    run.after(chance.uniform(0.0, 2.0), start)
    return lambda: bool(started) and started[0]()


def _empty_redis(run: FaultedRun, chance: random.Random) -> Recovered:
    run.empty_redis()
    return _next_step(run, 2)


def _fill_redis(run: FaultedRun, chance: random.Random) -> Recovered:
    limit = run.client.config_get("maxmemory")["maxmemory"]
    run.client.config_set("maxmemory", 1)
    freed: list[Recovered] = []

    def free() -> None:
        run.client.config_set("maxmemory", limit)
        freed.append(_next_step(run))

    run.after(chance.uniform(1.0, 3.0), free)
    return lambda: bool(freed) and freed[0]()


# --- the network


def _for_a_while(
    link: str, begin: Callable[[Proxy], None], end: Callable[[Proxy], None], seconds: float
) -> Strike:
    def strike(run: FaultedRun, chance: random.Random) -> Recovered:
        proxy = getattr(run, link)
        proxy.do(begin)
        lifted: list[Recovered] = []

        def lift() -> None:
            proxy.do(end)
            lifted.append(_next_step(run))

        run.after(seconds, lift)
        return lambda: bool(lifted) and lifted[0]()

    return strike


def _at_once(link: str, do: Callable[[Proxy, random.Random], None]) -> Strike:
    def strike(run: FaultedRun, chance: random.Random) -> Recovered:
        getattr(run, link).do(lambda proxy: do(proxy, chance))
        return _next_step(run, 2)

    return strike


def _delay(seconds: float) -> Callable[[Proxy], None]:
    def begin(proxy: Proxy) -> None:
        proxy.delay_seconds = seconds

    return begin


def _refuse(proxy: Proxy) -> None:
    proxy.refuse = True
    proxy.cut()


def _accept(proxy: Proxy) -> None:
    proxy.refuse = False


def _cut_and_go_on(proxy: Proxy) -> None:
    """The end of a half-open time: what was sent into it is lost."""
    proxy.cut()
    proxy.resume()


def _network(link: str, name: str, target: str) -> tuple[Fault, ...]:
    same = "work goes on once the link is back; nothing was done twice"
    return (
        Fault(
            f"{name}: slow",
            target,
            "each piece of bytes takes 0.3 s, for 3 s",
            "nobody is robbed, " + same,
            _for_a_while(link, _delay(0.3), _delay(0.0), 3.0),
        ),
        Fault(
            f"{name}: cut",
            target,
            "all connections are reset",
            same,
            _at_once(link, lambda proxy, chance: proxy.cut()),
        ),
        Fault(
            f"{name}: cut in an answer",
            target,
            "the connection is reset after some bytes of an answer",
            same,
            _at_once(link, lambda proxy, chance: proxy.cut_after(chance.randrange(1, 20_000))),
        ),
        Fault(
            f"{name}: lost reply",
            target,
            "a command is done, its reply is lost and the connection reset",
            same,
            _at_once(link, lambda proxy, chance: proxy.cut_after(0)),
        ),
        Fault(
            f"{name}: half-open",
            target,
            "connections stay open for 4 s, no byte gets through, then they are reset",
            same,
            _for_a_while(link, Proxy.stall, _cut_and_go_on, 4.0),
        ),
        Fault(
            f"{name}: down",
            target,
            "connections are reset and new ones refused, for 3 s",
            same,
            _for_a_while(link, _refuse, _accept, 3.0),
        ),
    )


AGAIN = "the next learner goes on from the last checkpoint: no step is lost or counted twice"
PUBLISH = "readers see the old or the new version, never a mix; the learner's publish is made again"

GENERATOR_KILL = Fault(
    "generator killed",
    "generator",
    "kill -9 of a generator",
    "what it held is handed on by others, and its successor takes part",
    _kill_worker("generator"),
)
REWARD_KILL = Fault(
    "reward worker killed",
    "reward",
    "kill -9 of a reward worker",
    "what it held is handed on by others, and its successor takes part",
    _kill_worker("reward"),
)
LEARNER_KILL = Fault("learner killed", "learner", "kill -9 of the learner", AGAIN, _kill_learner)
LEARNER_POINTS = tuple(
    Fault(f"learner killed: {words}", "learner", f"it dies {words}", AGAIN, _learner_at(point))
    for point, words in (
        ("publish.sending", "inside a publish"),
        ("learner.published", "between publish and checkpoint"),
        ("checkpoint.before_rename", "inside a checkpoint"),
        ("checkpoint.before_committed", "before a checkpoint counts"),
        ("checkpoint.after_committed", "after a checkpoint counts"),
    )
)
CHECKPOINT_KILL = Fault(
    "checkpoint service killed",
    "checkpoint",
    "kill -9 of the checkpoint service",
    "generators go on with what they hold; transfers are taken up again",
    _kill_checkpoint,
)
CHECKPOINT_POINTS = tuple(
    Fault(
        f"checkpoint service killed: {words}",
        "checkpoint",
        f"it dies {words}",
        PUBLISH,
        _checkpoint_at(point),
    )
    for point, words in (
        ("publish.received", "when all bytes are there"),
        ("publish.counted", "when the number is given"),
        ("publish.moved", "before the manifest"),
        ("publish.manifest_renamed", "after the manifest"),
    )
)
REDIS_KILL = Fault(
    "Redis killed",
    "redis",
    "kill -9 of Redis, which starts again with its append-only file within 2 s",
    "all reconnect, nothing acknowledged is lost, nobody is robbed before it could beat",
    _kill_redis,
)
REDIS_EMPTIED = Fault(
    "Redis emptied",
    "redis",
    "kill -9 of Redis, which starts again with nothing",
    "what is expected and absent is issued again; terms and versions go on rising",
    _empty_redis,
)
REDIS_FULL = Fault(
    "Redis full",
    "redis",
    "maxmemory below what is used, for 1 to 3 s",
    "issuing waits, everything else goes on",
    _fill_redis,
)
FROZEN = tuple(
    Fault(
        f"{name} frozen",
        role,
        "SIGSTOP for 2.5 idle times, then SIGCONT",
        "its entries are done by others; what it does when it wakes changes nothing",
        _freeze_worker(role),
    )
    for role, name in (("generator", "generator"), ("reward", "reward worker"))
)
DISK_FULL = Fault(
    "disk full at a publish",
    "checkpoint",
    "ENOSPC at the checkpoint service, once",
    "the publish is refused and made again; readers see the version before",
    _checkpoint_at("publish.fsync"),
)
REDIS_NETWORK = _network("redis_proxy", "link to Redis", "redis")
WEIGHTS_NETWORK = _network("weights_proxy", "link to the checkpoint service", "checkpoint")

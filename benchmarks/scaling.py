"""``python -m benchmarks.scaling``: what the measured costs say about many GPUs; docs/scaling.md shows the tables.

A model, not a measurement. What was measured on two CPU cores stands in `Measured`, what a GPU does is assumed and
stands in `Workload`; everything else is arithmetic.
"""

import math
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Measured:
    """Medians of docs/results: benchmarks (e), (i), and weights."""

    group_kb: tuple[float, ...] = (4.0, 64.0, 1024.0)
    """Sizes of a group on the streams, KiB."""
    redis_ms: tuple[float, ...] = (0.153, 0.587, 7.38)
    """Redis's CPU for a group of that size, from issue to acknowledgement."""
    learner_ms: tuple[float, ...] = (0.175, 0.485, 2.61)
    """Rank 0's CPU for it: issue, and gathering."""
    reward_ms: tuple[float, ...] = (0.192, 0.351, 2.31)
    """A reward worker's, without its functions."""
    token_ns: float = 308.0
    """A generator's Python per token, beside the engine."""
    delta_share: float = 0.00263
    """Bytes of a delta by those of all weights, at a learning rate of 1e-6."""
    compare_gb_s: float = 2.4
    """Comparing two versions, two cores."""
    stream_gb_s: float = 1.0
    """One gRPC stream of weights, one core of the sender."""


@dataclass(frozen=True)
class Workload:
    """A policy, answers, and what GPUs do with them. Assumptions."""

    name: str
    weights_gb: float
    k: int
    tokens: int
    """Of one completion, on average, prompt included."""
    generator_gpus: int
    generator_tokens_s: float
    """Of one generator with so many GPUs."""
    learner_gpu_tokens_s: float
    """Of one GPU of the learner."""
    prompts: int
    """Of a step at 16 GPUs; larger clusters take larger steps, in proportion."""
    bytes_per_token: float = 8.0

    @property
    def group_kb(self) -> float:
        """A group on the streams."""
        return self.k * self.tokens * self.bytes_per_token / 1024


WORKLOADS = (
    Workload("8B, short answers", 16.0, 2, 512, 1, 5000.0, 6000.0, 128),
    Workload("8B, reasoning", 16.0, 8, 8192, 1, 4000.0, 6000.0, 32),
    Workload("70B, short answers", 140.0, 2, 512, 8, 5000.0, 700.0, 128),
)
GPUS = (16, 64, 256, 1000)
PER_NODE = 8


@dataclass(frozen=True)
class Plan:
    """A cluster of so many GPUs, in balance."""

    workload: Workload
    gpus: int
    measured: Measured = field(default_factory=Measured)

    @property
    def learner_gpus(self) -> int:
        """Whole nodes of the learner, so that both sides take the same time."""
        work = self.workload
        share = work.generator_tokens_s / work.generator_gpus
        part = share / (share + work.learner_gpu_tokens_s)
        return max(PER_NODE, PER_NODE * round(self.gpus * part / PER_NODE))

    @property
    def generators(self) -> int:
        """Generator processes on what is left."""
        return max(1, (self.gpus - self.learner_gpus) // self.workload.generator_gpus)

    @property
    def groups_s(self) -> float:
        """Groups a second, by the slower side."""
        work = self.workload
        tokens = min(
            self.generators * work.generator_tokens_s,
            self.learner_gpus * work.learner_gpu_tokens_s,
        )
        return tokens / (work.k * work.tokens)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.workload.prompts * self.gpus / GPUS[0] / self.groups_s

    def cores(self, cost: tuple[float, ...]) -> float:
        """Cores that a cost per group takes."""
        return self.groups_s * between(self.workload.group_kb, self.measured.group_kb, cost) / 1000

    @property
    def nodes(self) -> int:
        """Nodes with generators, each with a relay."""
        return math.ceil(self.generators * self.workload.generator_gpus / PER_NODE)

    @property
    def redis_gb(self) -> float:
        """What the streams hold at most with max_lag 1: two cohorts, at each of three streams' copies of a group."""
        groups = 2 * self.workload.prompts * self.gpus / GPUS[0]
        return groups * self.workload.group_kb * 1024 / 1e9

    def egress_s(self, receivers: int) -> float:
        """Seconds of one core of a sender for one step's deltas to so many receivers."""
        size = self.workload.weights_gb * self.measured.delta_share
        return receivers * size / self.measured.stream_gb_s

    @property
    def compare_s(self) -> float:
        """Seconds for which one rank compares two versions before a delta can leave, with two cores."""
        return self.workload.weights_gb / self.measured.compare_gb_s

    @property
    def compare_by_ranks_s(self) -> float:
        """The same where each rank of ZeRO-3 compares and publishes the tensors that it owns."""
        return self.compare_s / self.learner_gpus


def between(size: float, sizes: tuple[float, ...], costs: tuple[float, ...]) -> float:
    """Cost of a size by the two measured ones beside it, linear in the size."""
    place = min(max(1, sum(known <= size for known in sizes)), len(sizes) - 1)
    low, high = sizes[place - 1], sizes[place]
    slope = (costs[place] - costs[place - 1]) / (high - low)
    return max(0.0, costs[place - 1] + slope * (size - low))


def tables() -> MappingProxyType[str, str]:
    """Name -> Markdown table, as in docs/scaling.md."""
    plans = [Plan(work, gpus) for work in WORKLOADS for gpus in GPUS]
    balance = [
        "| policy, answers | GPUs | learner | generators | groups/s | step, s | KiB a group |"
    ]
    limits = [
        "| policy, answers | GPUs | Redis, cores | rank 0, cores | reward workers, cores | streams, GB |"
    ]
    weights = [
        "| policy, answers | GPUs | step, s | compare: one rank, s | each its own, s "
        "| egress: no relays, s | one per node, s | two tiers, s |"
    ]
    for plan in plans:
        head = f"| {plan.workload.name} | {plan.gpus:,} |"
        cost = plan.measured
        balance.append(
            f"{head} {plan.learner_gpus} | {plan.generators} | {plan.groups_s:,.1f} | {plan.step_s:.0f} "
            f"| {plan.workload.group_kb:.0f} |"
        )
        limits.append(
            f"{head} {plan.cores(cost.redis_ms):.3f} | {plan.cores(cost.learner_ms):.3f} "
            f"| {plan.cores(cost.reward_ms):.3f} | {plan.redis_gb:.3f} |"
        )
        weights.append(
            f"{head} {plan.step_s:.0f} | {plan.compare_s:.1f} | {plan.compare_by_ranks_s:.2f} "
            f"| {plan.egress_s(plan.generators):.2f} "
            f"| {plan.egress_s(plan.nodes):.2f} | {plan.egress_s(math.ceil(math.sqrt(plan.nodes))):.2f} |"
        )
    found = {"balance": balance, "limits": limits, "weights": weights}
    for rows in found.values():
        columns = rows[0].count("|") - 1
        rows.insert(1, "|---|" + "---:|" * (columns - 1))
    return MappingProxyType({name: "\n".join(rows) for name, rows in found.items()})


def main() -> None:
    """Prints the tables."""
    for name, table in tables().items():
        print(f"<!-- {name} -->\n{table}\n")


if __name__ == "__main__":
    main()

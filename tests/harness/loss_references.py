"""The losses a second time: slow loops over Python floats, written from the formulas alone.

Nothing of `services` is used. `held` is the policy where a formula detaches it. Each function returns
the whole loss of an update, so that a finite difference of it by `pi` is the gradient to expect.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any


@dataclass
class Completion:
    """Log-probs of the trained tokens alone; `length` counts all tokens."""

    reward: float
    length: int
    pi: list[float]
    held: list[float]
    old: list[float]
    mu: list[float]
    ref: list[float]
    advantage: list[float] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    target: list[float] = field(default_factory=list)


Groups = list[list[Completion]]


def flat(groups: Groups) -> list[Completion]:
    return [completion for group in groups for completion in group]


def tokens(groups: Groups) -> int:
    return sum(len(completion.pi) for completion in flat(groups))


def gap(a: list[float], b: list[float]) -> float:
    return math.fsum(x - y for x, y in zip(a, b, strict=True))


# ---- losses on pairs and groups


def best_worst(group: list[Completion]) -> tuple[Completion, Completion] | None:
    best, worst = group[0], group[0]
    for completion in group:
        if completion.reward > best.reward:
            best = completion
        if completion.reward < worst.reward:
            worst = completion
    return None if best.reward == worst.reward else (best, worst)


def online_dpo(groups: Groups, s: dict[str, Any]) -> float:
    total = 0.0
    for pair in map(best_worst, groups):
        if pair is not None:
            best, worst = pair
            margin = s["beta"] * (gap(best.pi, best.ref) - gap(worst.pi, worst.ref))
            total += math.log(1 + math.exp(-margin))
    return total / len(groups)


def ipo(groups: Groups, s: dict[str, Any]) -> float:
    total = 0.0
    for pair in map(best_worst, groups):
        if pair is not None:
            best, worst = pair
            difference = gap(best.pi, best.ref) - gap(worst.pi, worst.ref)
            total += (difference - 1 / (2 * s["beta"])) ** 2
    return total / len(groups)


def copg(groups: Groups, s: dict[str, Any]) -> float:
    total = 0.0
    for group in groups:
        values = [c.reward - s["beta"] * gap(c.held, c.ref) for c in group]
        pairs = [(i, j) for j in range(len(group)) for i in range(j)]
        for i, j in pairs:
            one = (values[i] - values[j]) * math.fsum(group[i].pi)
            other = (values[j] - values[i]) * math.fsum(group[j].pi)
            total -= (one + other) / len(pairs)
    return total / len(groups)


def best_of_n(groups: Groups, s: dict[str, Any]) -> float:
    total = 0.0
    for group in groups:
        top = max(completion.reward for completion in group)
        first = next(completion for completion in group if completion.reward == top)
        total -= math.fsum(first.pi)
    return total / len(groups)


def vargrad(groups: Groups, s: dict[str, Any]) -> float:
    total = 0.0
    for group in groups:
        log_z = fmean(c.reward / s["beta"] - gap(c.held, c.ref) for c in group)
        for c in group:
            total += (log_z + gap(c.pi, c.ref) - c.reward / s["beta"]) ** 2
    return total / len(flat(groups))


# ---- advantages of policy gradients


def scores(groups: Groups, s: dict[str, Any], longest: int) -> list[list[float]]:
    values = [[c.reward for c in group] for group in groups]
    buffer = s.get("overlong_buffer")
    if buffer is not None:
        for row, group in zip(values, groups, strict=True):
            for place, c in enumerate(group):
                if c.length > longest - buffer:
                    row[place] += s["overlong_penalty"] * (longest - buffer - c.length) / buffer
    if s["whiten_rewards"]:
        pooled = [value for row in values for value in row]
        values = [[(v - fmean(pooled)) / (stdev(pooled) + 1e-8) for v in row] for row in values]
    values = [[v * s["reward_scale"] for v in row] for row in values]
    if s["reward_clip"] is not None:
        c = s["reward_clip"]
        values = [[min(c, max(-c, v)) for v in row] for row in values]
    if s["kl_in"] == "reward":
        for row, group in zip(values, groups, strict=True):
            for place, completion in enumerate(group):
                row[place] -= s["kl_coef"] * gap(completion.old, completion.ref)
    return values


def leave_one_out(row: list[float], s: dict[str, Any], pooled: list[float]) -> list[float]:
    return [v - fmean(row[:place] + row[place + 1 :]) for place, v in enumerate(row)]


def centred(row: list[float], s: dict[str, Any], pooled: list[float]) -> list[float]:
    return [v - fmean(row) for v in row]


def scaled(row: list[float], s: dict[str, Any], pooled: list[float]) -> list[float]:
    deviation = {"group": lambda: stdev(row), "batch": lambda: stdev(pooled), "none": lambda: None}
    found = deviation[s["scale"]]()
    return [(v - fmean(row)) / (1.0 if found is None else found + 1e-4) for v in row]


def raw_or_centred(row: list[float], s: dict[str, Any], pooled: list[float]) -> list[float]:
    return row if s["baseline"] == "none" else centred(row, s, pooled)


def set_advantages(
    groups: Groups,
    s: dict[str, Any],
    longest: int,
    estimator: Callable[[list[float], dict[str, Any], list[float]], list[float]],
) -> None:
    values = scores(groups, s, longest)
    pooled = [value for row in values for value in row]
    for row, group in zip(values, groups, strict=True):
        for value, completion in zip(estimator(row, s, pooled), group, strict=True):
            completion.advantage = [value] * len(completion.pi)
    if s["whiten_advantages"]:
        everything = [a for c in flat(groups) for a in c.advantage]
        mean, deviation = fmean(everything), stdev(everything)
        for c in flat(groups):
            c.advantage = [(a - mean) / (deviation + 1e-8) for a in c.advantage]


def token_rewards(groups: Groups, s: dict[str, Any]) -> list[list[float]]:
    """PPO's rewards: the KL of each token, the score at the last one; whitening keeps the mean."""
    rewards = []
    for c in flat(groups):
        row = [0.0] * len(c.pi)
        if s["kl_in"] == "reward":
            row = [-s["kl_coef"] * (o - r) for o, r in zip(c.old, c.ref, strict=True)]
        score = c.reward * s["reward_scale"]
        if s["reward_clip"] is not None:
            score = min(s["reward_clip"], max(-s["reward_clip"], score))
        row[-1] += score
        rewards.append(row)
    if s["whiten_rewards"]:
        deviation = stdev([r for row in rewards for r in row])
        rewards = [[r / (deviation + 1e-8) for r in row] for row in rewards]
    return rewards


def set_gae(groups: Groups, s: dict[str, Any]) -> None:
    """The definition, term by term: A_t = sum over l of (gamma lambda)^l delta_{t+l}."""
    for c, rewards in zip(flat(groups), token_rewards(groups, s), strict=True):
        values = [*c.value, 0.0]
        deltas = [r + s["gamma"] * values[t + 1] - values[t] for t, r in enumerate(rewards)]
        decay = s["gamma"] * s["gae_lambda"]
        c.advantage = [
            math.fsum(decay**later * delta for later, delta in enumerate(deltas[t:]))
            for t in range(len(deltas))
        ]
        c.target = [a + v for a, v in zip(c.advantage, c.value, strict=True)]
    if s["whiten_advantages"]:
        everything = [a for c in flat(groups) for a in c.advantage]
        mean, deviation = fmean(everything), stdev(everything)
        for c in flat(groups):
            c.advantage = [(a - mean) / (deviation + 1e-8) for a in c.advantage]


def value_loss(groups: Groups, s: dict[str, Any], present: list[list[float]]) -> float:
    """The critic's loss; `present`: its values of the trained tokens of each completion."""
    total = 0.0
    for c, row in zip(flat(groups), present, strict=True):
        for now, before, target in zip(row, c.value, c.target, strict=True):
            losses = [(now - target) ** 2]
            if s["value_clip"] is not None:
                near = min(before + s["value_clip"], max(before - s["value_clip"], now))
                losses.append((near - target) ** 2)
            total += 0.5 * s["vf_coef"] * max(losses)
    return total / tokens(groups)


# ---- corrections


def set_weights(groups: Groups, corrections: list[dict[str, Any]]) -> None:
    for c in flat(groups):
        c.weight = [1.0] * len(c.pi)
        for s in corrections:
            ratios = [math.exp(o - m) for o, m in zip(c.old, c.mu, strict=True)]
            whole = math.exp(gap(c.old, c.mu))
            for t, ratio in enumerate(ratios):
                c.weight[t] *= factor(s, ratio, whole, gap(c.mu, c.old) / len(c.pi), c.advantage[t])


def factor(s: dict[str, Any], ratio: float, whole: float, distance: float, a: float) -> float:
    if s["name"] == "tis":
        return min(ratio, s["cap"])
    if s["name"] == "masked_is":
        return ratio if s["low"] <= ratio <= s["high"] else 0.0
    if s["name"] == "sequence_is" and s["mode"] == "truncate":
        return min(s["high"], max(s["low"], whole))
    if s["name"] == "sequence_is":
        return whole if s["low"] <= whole <= s["high"] else 0.0
    assert s["name"] == "sequence_mask"
    return 0.0 if a < 0 and distance > s["delta"] else 1.0


# ---- surrogates: per token or per completion


def pessimistic(ratio: float, a: float, low: float, high: float) -> float:
    return -min(ratio * a, min(1 + high, max(1 - low, ratio)) * a)


def clipped_token(c: Completion, t: int, s: dict[str, Any]) -> float:
    ratio = math.exp(c.pi[t] - c.old[t])
    return pessimistic(ratio, c.advantage[t], s["clip_low"], s["clip_high"])


def ppo_token(c: Completion, t: int, s: dict[str, Any]) -> float:
    return pessimistic(math.exp(c.pi[t] - c.old[t]), c.advantage[t], s["clip"], s["clip"])


def cispo_token(c: Completion, t: int, s: dict[str, Any]) -> float:
    weight = min(math.exp(c.held[t] - c.old[t]), s["ratio_max"])
    return -weight * c.advantage[t] * c.pi[t]


def decoupled_token(c: Completion, t: int, s: dict[str, Any]) -> float:
    weight = math.exp(c.old[t] - c.mu[t])
    if s["weight_cap"] is not None and weight > s["weight_cap"]:
        weight = 0.0
    return weight * clipped_token(c, t, s)


def m2po_token(c: Completion, t: int, s: dict[str, Any]) -> float:
    return -math.exp(c.pi[t] - c.mu[t]) * c.advantage[t]


def vespo_token(c: Completion, t: int, s: dict[str, Any]) -> float:
    w = math.exp(gap(c.held, c.mu))
    sign = "positive" if c.advantage[t] >= 0 else "negative"
    phi = w ** s[f"k_{sign}"] * math.exp(s[f"lambda_{sign}"] * (1 - w))
    return -phi * c.advantage[t] * c.pi[t]


def rloo_row(c: Completion, s: dict[str, Any]) -> float:
    return -c.advantage[0] * math.exp(gap(c.pi, c.old))


def proximal_row(c: Completion, s: dict[str, Any]) -> float:
    return pessimistic(math.exp(gap(c.pi, c.old)), c.advantage[0], s["clip"], s["clip"])


def gspo_row(c: Completion, s: dict[str, Any]) -> float:
    ratio = math.exp(gap(c.pi, c.old) / len(c.pi))
    return pessimistic(ratio, c.advantage[0], s["clip_low"], s["clip_high"])


def topr_row(c: Completion, s: dict[str, Any]) -> float:
    taper = 1.0 if c.advantage[0] >= 0 else min(1.0, math.exp(gap(c.held, c.mu)))
    return -taper * c.advantage[0] * math.fsum(c.pi)


def drop_outliers(groups: Groups, s: dict[str, Any]) -> None:
    """M2PO's mask: takes the largest square away until the mean of those left is small enough."""
    trained = [group for group in groups if s["all_run"] or len({c.reward for c in group}) > 1]
    left = [(c, t) for group in trained for c in group for t in range(len(c.pi))]

    def square(token: tuple[Completion, int]) -> float:
        return (token[0].old[token[1]] - token[0].mu[token[1]]) ** 2

    while left and fmean(map(square, left)) > s["m2_threshold"]:
        worst = max(left, key=square)
        left.remove(worst)
        worst[0].weight[worst[1]] = 0.0


def kl3(c: Completion, t: int) -> float:
    log_r = c.ref[t] - c.pi[t]
    return math.exp(log_r) - log_r - 1


@dataclass(frozen=True)
class Family:
    """How a policy gradient is put together."""

    estimator: Callable[..., list[float]]
    reduction: str
    token: Callable[[Completion, int, dict[str, Any]], float] | None = None
    row: Callable[[Completion, dict[str, Any]], float] | None = None
    before: Callable[[Groups, dict[str, Any]], None] | None = None


POLICY_GRADIENTS = {
    "rloo": Family(leave_one_out, "sum", row=rloo_row),
    "proximal_rloo": Family(leave_one_out, "sum", row=proximal_row),
    "ppo": Family(centred, "token", ppo_token),
    "grpo": Family(scaled, "mean", clipped_token),
    "dr_grpo": Family(centred, "constant", clipped_token),
    "dapo": Family(scaled, "token", clipped_token),
    "cispo": Family(scaled, "token", cispo_token),
    "gspo": Family(scaled, "mean", row=gspo_row),
    "decoupled_ppo": Family(scaled, "token", decoupled_token),
    "topr": Family(raw_or_centred, "sum", row=topr_row),
    "m2po": Family(scaled, "token", m2po_token, before=drop_outliers),
    "vespo": Family(scaled, "token", vespo_token),
}

OTHERS = {
    "online_dpo": online_dpo,
    "ipo": ipo,
    "copg": copg,
    "best_of_n": best_of_n,
    "vargrad": vargrad,
}

NAMES = {*POLICY_GRADIENTS, *OTHERS}


def reference_loss(
    name: str,
    settings: dict[str, Any],
    groups: Groups,
    *,
    corrections: list[dict[str, Any]],
    longest: int,
) -> float:
    """The loss of an update. `settings`: all settings of the loss, defaults included."""
    if name in OTHERS:
        return OTHERS[name](groups, settings)
    family = POLICY_GRADIENTS[name]
    if name == "ppo":
        set_gae(groups, settings)
    else:
        set_advantages(groups, settings, longest, family.estimator)
    set_weights(groups, corrections)
    if family.before is not None:
        family.before(groups, settings)
    total = math.fsum(row_loss(family, c, settings, longest) for c in flat(groups))
    return total / (tokens(groups) if family.reduction == "token" else len(flat(groups)))


def row_loss(family: Family, c: Completion, s: dict[str, Any], longest: int) -> float:
    kl = [0.0] * len(c.pi)
    if s["kl_in"] == "loss":
        kl = [s["kl_coef"] * kl3(c, t) for t in range(len(c.pi))]
    divisor = {
        "token": 1,
        "sum": 1,
        "mean": len(c.pi),
        "constant": s.get("length") or longest,
    }[family.reduction]
    if family.row is not None:
        return fmean(c.weight) * family.row(c, s) + math.fsum(kl) / divisor
    assert family.token is not None
    terms = [c.weight[t] * family.token(c, t, s) + kl[t] for t in range(len(c.pi))]
    return math.fsum(terms) / divisor

"""How much of their time the workers wait, from what they announce. Used by `loop`."""

from collections.abc import Iterable, Mapping

from offbeat.streams.base import Member


def waiting_times(members: Iterable[Member], role: str) -> dict[str, tuple[float, float]]:
    """Seconds without work and seconds since the start, by member, for the workers of a role that tell."""
    return {
        member.member_id: (
            float(member.info["waiting_seconds"]),
            float(member.info["uptime_seconds"]),
        )
        for member in members
        if member.role == role and "uptime_seconds" in member.info
    }


def waiting_fraction(
    members: Iterable[Member], role: str, earlier: Mapping[str, tuple[float, float]]
) -> float | None:
    """Mean share of the time since `earlier` that a role's workers waited; None when none of them tells."""
    shares = []
    for member_id, (waited, uptime) in waiting_times(members, role).items():
        waited_before, uptime_before = earlier.get(member_id, (0.0, 0.0))
        if uptime > uptime_before:
            shares.append((waited - waited_before) / (uptime - uptime_before))
    return sum(shares) / len(shares) if shares else None

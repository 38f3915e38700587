"""The official base images, or stand-ins under their names where no registry can be reached.

A stand-in is Debian with the same interpreter or server, made by mmdebstrap. It trusts what this machine trusts: its
local certificate authorities are copied in, and nothing of that is in the project's own images.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.docker.engine import run

DEBIAN = "offbeat-test/debian"
LOCAL_AUTHORITIES = Path("/usr/local/share/ca-certificates")

PYTHON = f"""
FROM {DEBIAN}
COPY authorities/ {LOCAL_AUTHORITIES}/
RUN update-ca-certificates && apt-get update \\
    && apt-get install --yes --no-install-recommends python3.11 python3.11-venv libpython3.11-dev \\
    && rm -rf /var/lib/apt/lists/* && ln -s /usr/bin/python3.11 /usr/local/bin/python
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt
"""

REDIS = f"""
FROM {DEBIAN}
COPY authorities/ {LOCAL_AUTHORITIES}/
RUN apt-get update && apt-get install --yes --no-install-recommends redis-server \\
    && rm -rf /var/lib/apt/lists/* && install -d -o redis -g redis /data
WORKDIR /data
CMD ["redis-server"]
"""

PROMETHEUS = f"""
FROM {DEBIAN}
COPY authorities/ {LOCAL_AUTHORITIES}/
RUN apt-get update && apt-get install --yes --no-install-recommends prometheus \\
    && rm -rf /var/lib/apt/lists/* && install -d -o nobody -g nogroup /prometheus
USER nobody
WORKDIR /prometheus
ENTRYPOINT ["/usr/bin/prometheus"]
"""

BASES = {
    "python:3.11-slim": PYTHON,
    "redis:7-alpine": REDIS,
    "prom/prometheus:v3.5.0": PROMETHEUS,
}


def ensure_bases(folder: Path, env: Mapping[str, str]) -> None:
    """Makes sure that the bases are there: pulled, or made as stand-ins."""
    missing = [tag for tag in BASES if not _there_or_pulled(tag, env)]
    if missing:
        assert shutil.which("mmdebstrap"), (
            f"{missing} can't be pulled, and stand-ins need mmdebstrap: install it, or load the images"
        )
        _make_debian(folder, env)
    for tag in missing:
        _make(tag, folder, env)


def _there_or_pulled(tag: str, env: Mapping[str, str]) -> bool:
    if run("docker", "image", "inspect", tag, env=env, check=False).returncode == 0:
        return True
    return run("docker", "pull", "--quiet", tag, env=env, check=False).returncode == 0


def _make_debian(folder: Path, env: Mapping[str, str]) -> None:
    archive = folder / "debian.tar"
    words = ["--quiet", "--variant=minbase", "--include=ca-certificates", "bookworm", str(archive)]
    run("mmdebstrap", *words, env=env)
    run("docker", "import", str(archive), DEBIAN, env=env)
    archive.unlink()


def _make(tag: str, folder: Path, env: Mapping[str, str]) -> None:
    context = folder / tag.partition(":")[0].replace("/", "-")
    (context / "authorities").mkdir(parents=True)
    for certificate in LOCAL_AUTHORITIES.glob("*.crt"):
        shutil.copy(certificate, context / "authorities")
    (context / "Dockerfile").write_text(BASES[tag])
    run("docker", "build", "--network=host", "--tag", tag, str(context), env=env)

"""Model folders from the Hugging Face hub: the policy, and what goes with it, such as its reward model.

Used by `offbeat prepare` through `services.learner.prepare`. The policy's folder comes last, so that where it is, the
others are too. Files come through the cache of `huggingface_hub` (`HF_HOME`): with `HF_HUB_OFFLINE=1` nothing else is
asked. Gated models need `HF_TOKEN`, which is read by that library alone.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from pathlib import Path

from pydantic import Field

from offbeat.config.base import Settings
from offbeat.errors import ModelError

log = logging.getLogger(__name__)

WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
PICKLED = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
COMPANIONS = ["*.json", "*.jinja", "*.txt", "*.model"]
"""Configuration and tokenizer."""


class HubModel(Settings):
    """A repository on the hub."""

    repo: str = Field(pattern=r"^[^/\s]+/[^/\s]+$", description="owner/name on the hub.")
    revision: str = Field("main", description="Branch, tag or commit.")


class OtherModel(HubModel):
    """A model beside the policy."""

    path: str = Field(description="The folder to make, relative to the recipe's folder.")


class HubSettings(HubModel):
    """The policy's repository, and others that the recipe's reward functions need."""

    others: list[OtherModel] = Field(default_factory=list)


def prepare_hub(settings: HubSettings, *, out: Path) -> None:
    """Makes the folders that are not there, each whole or not at all; `out`, the policy's, is the last one.

    Raises `ModelError` when a folder is there without a config.json, or the hub does not give what is asked for.
    """
    for model in settings.others:
        fetch(model, Path(model.path))
    fetch(settings, out)


def fetch(model: HubModel, out: Path) -> None:
    """One model folder, unless it is there. Raises `ModelError`."""
    if (out / "config.json").is_file():
        log.info("%s is already there", out)
        return
    if out.exists():
        raise ModelError(f"{out}: expected no such folder or a model, found neither; remove it")
    log.info("%s: fetching %s at %s", out, model.repo, model.revision)
    commit, source = _snapshot(model.repo, model.revision, [*WEIGHTS, *COMPANIONS])
    if not any(source.glob("*.safetensors")):
        commit, source = _snapshot(model.repo, model.revision, [*PICKLED, *COMPANIONS])
    if not (source / "config.json").is_file():
        raise ModelError(f"{model.repo} at {model.revision}: expected a config.json, found none")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as work:
        folder = Path(work) / "model"
        # The cache holds links; a folder of its own survives when the cache is cleaned.
        shutil.copytree(source, folder)
        described = {"repo": model.repo, "revision": model.revision, "commit": commit}
        (folder / "prepare.json").write_text(json.dumps(described, indent=2) + "\n")
        folder.rename(out)


def _snapshot(repo: str, revision: str, patterns: list[str]) -> tuple[str, Path]:
    """The commit of a revision and the folder in the cache that has its files. Raises `ModelError`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        found = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        text = str(error).strip().replace("\n", " ")
        raise ModelError(
            f"{repo} at {revision} can't be had from the hub: {text} Is the name right, is there a connection, and "
            "does HF_TOKEN have access to it? With HF_HUB_OFFLINE=1 the cache (HF_HOME) must hold it"
        ) from error
    return found.name, found

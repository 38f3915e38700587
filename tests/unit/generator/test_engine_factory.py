"""Which engine is made is what the recipe says, never a fallback, and nothing heavy is loaded for another one."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from offbeat.config.recipe import ModelSettings
from offbeat.config.workers import VllmEngine
from offbeat.errors import ConfigError
from services.generator.engines import create_engine

MODEL = ModelSettings(path="/nowhere")

LIGHT = """
import sys
from offbeat.config.recipe import ModelSettings
from offbeat.config.workers import DeterministicEngine
from services.generator.engines import create_engine
create_engine(DeterministicEngine(name="deterministic"), ModelSettings(path="/nowhere"))
sys.exit(", ".join(sorted({"torch", "transformers", "vllm"} & set(sys.modules))) or 0)
"""


def test_an_unknown_name_lists_the_allowed_ones() -> None:
    with pytest.raises(ConfigError, match="'sglang'; expected one of vllm, transformers, deter"):
        create_engine(SimpleNamespace(name="sglang"), MODEL)  # type: ignore[arg-type]


def test_the_deterministic_engine_needs_no_heavy_package() -> None:
    result = subprocess.run(
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_arguments_of_vllm_that_the_generator_sets_are_refused_in_extra() -> None:
    settings = VllmEngine(name="vllm", extra={"logprobs_mode": "raw_logprobs"})
    with pytest.raises(ConfigError, match="logprobs_mode"):
        create_engine(settings, MODEL)

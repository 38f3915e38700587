"""The engines that sample completions, behind one port (`base`), and the only place that chooses one.

Heavy modules are imported only when their engine is asked for.
"""

from offbeat.config.recipe import ModelSettings
from offbeat.config.workers import (
    DeterministicEngine,
    EngineSettings,
    TransformersEngine,
    VllmEngine,
)
from offbeat.errors import ConfigError
from services.generator.engines.base import (
    Engine,
    EngineFailed,
    GeneratedCompletion,
    GenerationRequest,
    LoadReport,
    PromptTooLong,
)

ENGINES = ("vllm", "transformers", "deterministic")

__all__ = [
    "ENGINES",
    "Engine",
    "EngineFailed",
    "GeneratedCompletion",
    "GenerationRequest",
    "LoadReport",
    "PromptTooLong",
    "create_engine",
]


def create_engine(
    settings: EngineSettings, model: ModelSettings, *, threads: int | None = None
) -> Engine:
    """Makes the engine that `settings.name` asks for, not started. Nothing ever falls back to another one.

    Raises `ConfigError` for a name that is none of `ENGINES`, and when the engine's package is not installed.
    """
    try:
        return _create(settings, model, threads)
    except ImportError as error:
        raise ConfigError(
            f"generator.engine.name is {settings.name!r}, but {error.name} can't be imported ({error}): "
            f"install this service's requirements, or choose another of {', '.join(ENGINES)}"
        ) from error


def _create(settings: EngineSettings, model: ModelSettings, threads: int | None) -> Engine:
    if isinstance(settings, VllmEngine):
        from services.generator.engines.vllm_engine import VllmAsyncEngine

        return VllmAsyncEngine(settings, model, threads=threads)
    if isinstance(settings, TransformersEngine):
        from services.generator.engines.transformers_engine import TransformersLoopEngine

        return TransformersLoopEngine(settings, model, threads=threads)
    if isinstance(settings, DeterministicEngine):
        from services.generator.engines.deterministic import DeterministicHashEngine

        return DeterministicHashEngine(settings, model)
    raise ConfigError(
        f"generator.engine.name is {getattr(settings, 'name', settings)!r}; expected one of {', '.join(ENGINES)}"
    )

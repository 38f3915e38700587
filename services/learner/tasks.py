"""Makes the prompt tasks of training cohorts. Used by `coordinator`."""

import hashlib

from offbeat.config import Recipe
from offbeat.v1 import samples_pb2 as samples
from services.learner.data.dataset import TrainingPrompts


def seeds_of(run_seed: int, ordinal: int, k: int, *, salt: str = "train") -> list[int]:
    """One 63-bit seed per completion: a function of run, ordinal and index, so every attempt samples alike."""
    digests = (
        hashlib.blake2b(f"{run_seed}:{salt}:{ordinal}:{index}".encode(), digest_size=8).digest()
        for index in range(k)
    )
    return [int.from_bytes(digest, "little") >> 1 for digest in digests]


class TaskMaker:
    """Training tasks by ordinal."""

    def __init__(self, recipe: Recipe, prompts: TrainingPrompts) -> None:
        self._recipe = recipe
        self._prompts = prompts
        sampling = recipe.sampling
        self._sampling = samples.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            stop=sampling.stop,
        )

    def make(
        self, ordinal: int, *, attempt: int, term: int, min_version: int
    ) -> samples.PromptTask:
        """The task of an ordinal. In exact lag mode the version is the only one that may generate it."""
        prompt = self._prompts.at(ordinal)
        exact = self._recipe.schedule.lag_mode == "exact"
        return samples.PromptTask(
            run_id=self._recipe.run_id,
            ordinal=ordinal,
            attempt=attempt,
            term=term,
            kind=samples.TASK_KIND_TRAIN,
            prompt_token_ids=prompt.token_ids,
            prompt_text=prompt.text,
            k=self._recipe.sampling.k,
            sampling=self._sampling,
            seeds=seeds_of(self._recipe.run.seed, ordinal, self._recipe.sampling.k),
            min_version=min_version,
            max_version=min_version if exact else 0,
            columns=prompt.columns,
        )

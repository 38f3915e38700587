"""A small recipe for unit tests."""

import pytest

from offbeat.config.load import parse_recipe


@pytest.fixture
def recipe(tmp_path):
    return parse_recipe(
        {
            "run": {"id": "test", "directory": str(tmp_path)},
            "model": {"path": str(tmp_path / "model"), "dtype": "float32", "max_context": 64},
            "data": {
                "train": {"kind": "reasoning_gym", "dataset": "chain_sum", "size": 50},
                "heldout": {
                    "kind": "reasoning_gym",
                    "dataset": "chain_sum",
                    "size": 50,
                    "seed": 10,
                },
                "prompt": "{question}",
            },
            "sampling": {"k": 4, "max_tokens": 8},
            "schedule": {"steps": 10, "prompts_per_step": 4},
            "evaluation": {},
            "learner": {"loss": {"name": "online_dpo"}},
            "reward": {"functions": [{"name": "exact_match"}]},
        },
        source="test",
    )

"""Model folders that can't be used: one clear error each, before anything is started."""

import json

import pytest

from offbeat.errors import ConfigError, ModelError
from services.learner.model import check_model, load_tokenizer
from tests.harness.tiny_models import make_tiny_model


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    make_tiny_model(folder, tied=False).save_pretrained(folder)
    return folder


def test_a_good_one(folder):
    assert check_model(folder, max_context=256).vocabulary == 128
    assert load_tokenizer(folder).eos_token_id == 2


def test_a_missing_folder(tmp_path):
    with pytest.raises(ModelError, match=r"expected a model folder at .*nowhere, found nothing"):
        check_model(tmp_path / "nowhere")


def test_missing_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="weights"):
        check_model(folder)


def test_a_tokenizer_without_eos(folder):
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("eos_token")
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"(?i)end-of-sequence|eos"):
        load_tokenizer(folder)


def test_a_context_longer_than_the_model(folder):
    with pytest.raises(ConfigError, match="256"):
        check_model(folder, max_context=257)

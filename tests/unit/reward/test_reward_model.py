"""Scores of `reward_model` are those of plain transformers, one text at a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.config.workers import RewardFunction
from offbeat.errors import ModelError
from offbeat.v1 import samples_pb2
from services.reward.calling import Scorer
from services.reward.counters import Counters
from services.reward.functions.registry import load_functions
from services.reward.functions.reward_model import RewardModel, batches_by_tokens
from services.reward.records import samples_of_rollout

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPTS = ["2 + 2 =", "a long question about many things, is it not?", "x", "2 + 2 ="]
COMPLETIONS = [" 4", " no", " yes, yes, yes, yes, yes, yes, yes", " 5"]
CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


def _tokenizer(**special):
    """One token per byte: unlike any policy's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0, "<pad>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _config(**changes):
    return transformers.LlamaConfig(
        **{
            "vocab_size": 258,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 96,
            "num_labels": 1,
            "pad_token_id": None,
        }
        | changes
    )


def _save(folder, model, **special):
    model.save_pretrained(folder)
    _tokenizer(**special).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(3)
    model = transformers.LlamaForSequenceClassification(_config()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    """No pad token at all, as many causal models have it."""
    return _save(tmp_path_factory.mktemp("plain"), model, eos_token="<eos>")


def _alone(model, ids):
    """Plain transformers: one text, no padding, the score at the last token."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits.item()


def _reference(model, texts, append=()):
    tokenizer = _tokenizer()
    return [_alone(model, [*tokenizer(text)["input_ids"], *append]) for text in texts]


def _joined():
    return [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]


def _close(expected):
    return pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("max_tokens", [1, 40, 4096])
@pytest.mark.parametrize("special", [{}, {"pad_token": "<pad>"}, {"pad_token": "<eos>"}])
def test_a_batch_scores_as_each_text_alone(tmp_path, model, special, max_tokens):
    path = _save(tmp_path, model, eos_token="<eos>", **special)
    expected = _reference(model, _joined())
    assert len({round(score, 3) for score in expected}) == 4
    scores = RewardModel(path=path, device="cpu", max_tokens=max_tokens)(PROMPTS, COMPLETIONS)
    assert scores == _close(expected)


@pytest.mark.parametrize("special", [{}, {"pad_token": "<pad>"}, {"pad_token": "<eos>"}])
def test_an_appended_eos_is_scored_also_where_it_is_the_pad_token(tmp_path, model, special):
    path = _save(tmp_path, model, eos_token="<eos>", **special)
    function = RewardModel(path=path, device="cpu", append_eos=True)
    expected = _reference(model, _joined(), append=[0])
    assert function(PROMPTS, COMPLETIONS) == _close(expected)
    assert expected != _close(_reference(model, _joined()))


def test_template_and_braces_in_texts(folder, model):
    function = RewardModel(path=folder, device="cpu", template="Q: {prompt}\nA: {completion}")
    assert function(["{x}"], ["{}"]) == _close(_reference(model, ["Q: {x}\nA: {}"]))


def test_the_models_own_chat_template(tmp_path, model):
    path = _save(tmp_path, model, eos_token="<eos>", chat_template=CHAT)
    function = RewardModel(path=path, device="cpu", template="chat")
    assert function(["hi"], ["ho"]) == _close(_reference(model, ["<|user|>hi<|assistant|>ho"]))


def test_too_long_texts_are_an_error_or_lose_their_beginning(folder, model):
    text = "0123456789" * 10
    with pytest.raises(ValueError, match=r"at most 96 tokens.*found 101 at index 1"):
        RewardModel(path=folder, device="cpu")(["a", "b"], ["", text])
    function = RewardModel(path=folder, device="cpu", max_length=20)
    assert function(["b"], [text]) == _close(_reference(model, [text[-20:]]))
    function = RewardModel(path=folder, device="cpu", max_length=20, append_eos=True)
    assert function(["b"], [text]) == _close(_reference(model, [text[-19:]], append=[0]))


def test_an_empty_text_is_an_error(folder):
    with pytest.raises(ValueError, match=r"at least one token.*index 1"):
        RewardModel(path=folder, device="cpu")(["a", ""], ["b", ""])


def test_bad_models_are_clear_errors(tmp_path, folder):
    two = transformers.LlamaForSequenceClassification(_config(num_labels=2))
    _save(tmp_path / "two", two, eos_token="<eos>")
    policy = transformers.LlamaForCausalLM(_config())
    _save(tmp_path / "policy", policy, eos_token="<eos>")
    no_eos = transformers.LlamaForSequenceClassification(_config())
    _save(tmp_path / "no_eos", no_eos)
    for params, words in [
        ({"path": str(tmp_path / "nowhere")}, "expected a Hugging Face folder"),
        ({"path": str(tmp_path / "two")}, "expected num_labels 1, found 2"),
        ({"path": str(tmp_path / "policy")}, "score.weight"),
        ({"path": str(tmp_path / "no_eos"), "append_eos": True}, "its tokenizer has none"),
        ({"path": folder, "template": "chat"}, "chat template, and its tokenizer has none"),
        ({"path": folder, "max_length": 1000}, "expected at most 96"),
        ({"path": folder, "device": "nonsense"}, "expected auto, cpu, or a GPU"),
        ({"path": folder, "device": "cuda:7"}, "found 'cuda:7'"),
    ]:
        with pytest.raises(ModelError, match=words):
            RewardModel(**{"device": "cpu"} | params)


@pytest.mark.parametrize("template", ["{prompt}", "{completion} {x}", "{", "{0}{completion}"])
def test_bad_templates_are_refused(folder, template):
    with pytest.raises(ValueError, match="template"):
        RewardModel(path=folder, device="cpu", template=template)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_batches_hold_everything_once_and_fit(lengths, max_tokens):
    batches = list(batches_by_tokens(lengths, max_tokens))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        widest = max(lengths[index] for index in batch)
        assert widest * len(batch) <= max_tokens or len(batch) == 1


async def test_a_rollout_of_a_policy_with_another_tokenizer_is_scored_by_its_text(tmp_path, model):
    """Through the worker's own steps: the policy's token ids mean something else to this model, and do not matter."""
    path = _save(tmp_path, model, eos_token="<eos>")
    item = RewardFunction(name="reward_model", params={"path": path, "device": "cpu"})
    scorer = Scorer(load_functions([item]), 60.0, Counters())
    texts = [" four words, by characters", " 4", " vier"]
    words = sorted({word for text in texts for word in text.split(" ")})  # the policy's vocabulary
    completions = [
        samples_pb2.Completion(
            token_ids=ids,
            logprobs=[0.0] * len(ids),
            version_spans=[samples_pb2.VersionSpan(version=1, count=len(ids))],
            finish_reason=samples_pb2.FINISH_REASON_STOP,
            text=text,
        )
        for text in texts
        for ids in [[words.index(word) for word in text.split(" ")]]
    ]
    task = samples_pb2.PromptTask(
        kind=samples_pb2.TASK_KIND_TRAIN,
        prompt_text="2 + 2 =",
        prompt_token_ids=[7, 7],
        k=3,
        seeds=[1, 2, 3],
        sampling=samples_pb2.SamplingParams(max_tokens=8),
    )
    rollout = samples_pb2.Rollout(task=task, completions=completions)
    scores = await scorer.score(samples_of_rollout(rollout))
    scorer.close()
    expected = _reference(model, ["2 + 2 =" + text for text in texts])
    assert [score.total for score in scores] == _close(expected)
    assert len({round(score, 3) for score in expected}) == 3

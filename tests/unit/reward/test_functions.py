"""The built-in reward functions, and how a recipe's functions are found."""

import json

import pytest
import reasoning_gym

from offbeat.config.workers import RewardFunction
from offbeat.errors import ConfigError
from services.reward.functions import BUILT_IN, load_functions
from services.reward.functions.math_answer import MathAnswer
from services.reward.scoring import Role


def _load(name: str, weight: float = 1.0, path: str | None = None, **params):
    return load_functions([RewardFunction(name=name, path=path, weight=weight, params=params)])[0]


def _beside(name: str, weight: float = 1.0, **params):
    item = RewardFunction(name=name, weight=weight, params=params)
    return load_functions([RewardFunction(name="exact_match"), item])[1]


# --- exact_match -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "completion", "answer", "score"),
    [
        ({}, " 42\n", "42", 1.0),
        ({}, "42.", "42", 0.0),
        ({}, "42", 42, 1.0),
        ({}, "", "42", 0.0),
        ({"strip": False}, " 42", "42", 0.0),
        ({"extract": r"#### (-?\d+)"}, "#### 1 then #### 42", "42", 1.0),
        ({"extract": r"#### (-?\d+)"}, "42", "42", 0.0),
        ({"extract": r"\d+"}, "1 and 42", "42", 1.0),
        ({"extract": r"(x)?42"}, "42", "42", 0.0),
        ({"extract": r"\d+"}, "none", "", 0.0),
        ({"ignore": ",$"}, "$1,042", "1042", 1.0),
        ({"ignore": ","}, "1.042", "1,042", 0.0),
        ({"column_extract": "#### (.+)"}, "42", "6 * 7 = 42\n#### 42", 1.0),
        ({"column_extract": "#### (.+)"}, "6", "6 * 7 = 42\n#### 42", 0.0),
    ],
)
def test_exact_match(params, completion, answer, score):
    function = _load("exact_match", **params).call
    assert function(completions=[completion], answer=[answer]) == [score]


def test_exact_match_reads_the_column_that_it_is_told_to():
    function = _load("exact_match", column="solution").call
    assert function(completions=["a", "b"], solution=["a", "a"], answer=["b", "b"]) == [1.0, 0.0]
    with pytest.raises(ValueError, match="column 'solution', found answer"):
        function(completions=["a"], answer=["a"])
    with pytest.raises(ValueError, match="found null at index 1"):
        function(completions=["a", "b"], solution=["a", None])


def test_a_column_in_which_its_pattern_does_not_match_is_an_error():
    function = _load("exact_match", column_extract="#### (.+)").call
    with pytest.raises(
        ValueError, match="column_extract in column 'answer', found '42' at index 1"
    ):
        function(completions=["a", "b"], answer=["#### 42", "42"])


# --- math --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def maths():
    function = MathAnswer(timeout_seconds=1.5)
    yield function
    function.close()


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        (r"The answer is \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (r"so $x = \frac{2}{4}$", r"\frac{1}{2}", 1.0),
        ("#### 72", 72, 1.0),
        (r"\boxed{1234}", "1,234", 1.0),
        ("$1+x^2$", "x^2+1", 1.0),
        ("71", "72", 0.0),
        ("I do not know", "72", 0.0),
        ("", "72", 0.0),
    ],
)
def test_math(maths, completion, answer, score):
    assert maths(completions=[completion], answer=[answer]) == [score]


def test_math_takes_the_answer_out_of_a_worked_solution():
    function = MathAnswer(column_extract="#### (.+)")
    solution = "He has 2 + 3 = 5 boxes of 200.\n#### 1,000"
    found = function(completions=["so 1000", "so 5"], answer=[solution, solution])
    function.close()
    assert found == [1.0, 0.0]


def test_math_survives_an_expression_that_never_ends(maths):
    tower = r"\boxed{9^{9^{9^{9}}}}"
    assert maths(completions=[tower, r"\boxed{7}"], answer=["7", "7"]) == [None, 1.0]


def test_math_that_died_otherwise_is_an_error(maths):
    maths._verifier._process.kill()
    with pytest.raises(Exception, match="ended with code -9"):
        maths(completions=["7"], answer=["7"])


# --- reasoning_gym -----------------------------------------------------------------------------------------------


def test_reasoning_gym_scores_as_the_package_does():
    data = reasoning_gym.create_dataset("chain_sum", size=3, seed=5)
    entries = [json.loads(json.dumps(data[i])) for i in range(3)]
    completions = [f" {entries[0]['answer']}\n", "-1", ""]
    partial = _load("reasoning_gym", dataset="chain_sum").call
    expected = [data.score_answer(c.strip(), e) for c, e in zip(completions, entries, strict=True)]
    assert partial(completions=completions, entry=entries) == expected
    assert expected[0] == 1.0
    assert expected[1] < 1.0
    binary = _load("reasoning_gym", dataset="chain_sum", binary=True, extract=r"= (.*)").call
    completions = [f"1 = {entries[0]['answer']}", "= -1", str(entries[2]["answer"])]
    assert binary(completions=completions, entry=entries) == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="found str"):
        binary(completions=["1"], entry=["1"])


# --- penalties ---------------------------------------------------------------------------------------------------


def test_missing_eos_goes_by_the_finish_reason_alone():
    reasons = ["stop", "length"]
    replace = _beside("missing_eos", mode="replace", value=-1.0)
    assert (replace.role, replace.call(finish_reasons=reasons)) == (Role.REPLACEMENT, [None, -1.0])
    subtract = _beside("missing_eos", mode="subtract", value=0.5)
    assert (subtract.role, subtract.call(finish_reasons=reasons)) == (Role.PENALTY, [None, -0.5])
    for function in (replace, subtract):
        assert not function.takes("prompts")
        assert not function.takes("completions")


def test_length_penalty():
    function = _load("length_penalty", target=2, coef=0.5).call
    ids = [[1], [1, 2], [1, 2, 3, 4]]
    assert function(completions=["a", "b", "c"], completion_token_ids=ids) == [0.0, 0.0, -1.0]
    with pytest.raises(ValueError, match="none at index 1"):
        function(completions=["", "b"], completion_token_ids=[[], []])


# --- the registry ------------------------------------------------------------------------------------------------

MINE = """
def plain(completions, scale=1.0, **columns):
    return [scale * len(c) for c in completions]

class Made:
    def __init__(self, scale):
        self.scale = scale
    def __call__(self, completions):
        return [self.scale] * len(completions)

class Fails:
    def __init__(self):
        raise OSError("no such server")

class Uncallable:
    pass

def positional(completions, /):
    return []

number = 3
"""


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return str(file)


def test_your_function_gets_params_in_each_call_and_no_column_replaces_them(mine):
    function = _load("x", path=f"{mine}:plain", scale=3.0)
    assert function.call(completions=["ab"]) == [6.0]
    assert function.takes("anything")
    assert not function.takes("scale")


def test_your_class_is_made_from_params(mine):
    assert _load("x", path=f"{mine}:Made", scale=3.0).call(completions=["ab"]) == [3.0]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"name": "exactmatch"}, [".name: expected a built-in", *BUILT_IN, "'exactmatch'"]),
        ({"name": "exact_match", "params": {"colunm": "x"}}, ["unknown colunm"]),
        ({"name": "exact_match", "params": {"extract": "("}}, ["extract", "regular expression"]),
        ({"name": "missing_eos", "params": {"mode": "replace"}}, ["value: Field required"]),
        ({"name": "missing_eos", "params": {"mode": "subtract", "value": -1}}, ["positive"]),
        ({"name": "reasoning_gym", "params": {"dataset": "chain_sums"}}, ["chain_sums"]),
        ({"name": "x", "path": "MINE:nothing"}, [".path", "no 'nothing'", "plain"]),
        ({"name": "x", "path": "MINE:number"}, [".path", "found int"]),
        ({"name": "x", "path": "MINE:positional"}, [".path", "positional-only"]),
        ({"name": "x", "path": "MINE:Uncallable"}, [".path", "without one"]),
        ({"name": "x", "path": "MINE:Fails"}, ["OSError: no such server"]),
        ({"name": "x", "path": "MINE:Made", "params": {"speed": 1}}, ["'speed'"]),
        ({"name": "x", "path": "MINE:Made"}, ["scale"]),
    ],
)
def test_mistakes_in_a_recipe_are_clear_errors(mine, item, words):
    if "path" in item:
        item = item | {"path": item["path"].replace("MINE", mine)}
    with pytest.raises(ConfigError) as raised:
        load_functions([RewardFunction(**item)])
    for word in ["reward.functions.0", *words]:
        assert word in str(raised.value)


def test_penalties_alone_are_no_reward():
    params = {"mode": "subtract", "value": 1.0}
    with pytest.raises(ConfigError, match=r"found none \(missing_eos\)"):
        load_functions([RewardFunction(name="missing_eos", params=params)])


def test_a_weight_that_would_not_be_used_is_refused():
    with pytest.raises(ConfigError, match="weight: not used by missing_eos"):
        _beside("missing_eos", weight=2.0, mode="replace", value=-1.0)

"""The judge against a real endpoint: what it asks, what it takes for a score, and what it does when things go wrong."""

import asyncio
import contextlib
import json
import logging

import pytest

from offbeat.config.load import parse_recipe
from offbeat.config.workers import RewardFunction
from offbeat.errors import ConfigError, RewardError
from services.reward.calling import Scorer
from services.reward.counters import Counters
from services.reward.functions import chat_client, load_functions
from services.reward.functions.chat_client import asked_to_wait, delay_before
from services.reward.functions.judge import Judge
from services.reward.functions.verdicts import ScoreReader
from services.reward.records import Sample
from services.reward.scoring import FunctionFailed
from tests.harness import judge_server as server_module
from tests.harness.judge_server import cut, cut_in_the_middle, drip, flood, hang, raw, says, status

KEY = "sk-secret-0123456789"
PARAMS = {
    "model": "judge-1",
    "template": "{completion}",
    "pattern": r"Score:\s*(-?[\d.]+)",
    "minimum": 0,
    "maximum": 100,
    "scale": False,
}


@pytest.fixture
async def server(monkeypatch):
    # A retry after a moment: what the delays are is tested by themselves.
    monkeypatch.setattr(chat_client, "FIRST_DELAY_SECONDS", 0.01)
    async with server_module.judge_server() as found:
        yield found


@pytest.fixture
async def judge(server):
    """Makes a judge; closed in the end."""
    async with contextlib.AsyncExitStack() as stack:

        def make(**params) -> Judge:
            made = Judge(**{"base_url": server.url, **PARAMS, **params})
            stack.push_async_callback(made.close)
            return made

        yield make


async def _ask(judge: Judge, *completions: str, **columns) -> list[float]:
    return await judge(["the prompt"] * len(completions), list(completions), **columns)


# --- what is asked, what is read -------------------------------------------------------------------------------------


async def test_a_request_says_what_the_recipe_says(server, judge):
    asking = judge(
        template="Q: {prompt} {columns[prompt]} {level} A: {completion}",
        system="be strict",
        extra={"response_format": {"type": "json_object"}},
        max_tokens=50,
    )
    assert await _ask(asking, "x", level=[3], prompt=["raw"]) == [len("Q: the prompt raw 3 A: x")]
    assert server.requests == [
        {
            "model": "judge-1",
            "messages": [
                {"role": "system", "content": "be strict"},
                {"role": "user", "content": "Q: the prompt raw 3 A: x"},
            ],
            "temperature": 0.0,
            "max_tokens": 50,
            "response_format": {"type": "json_object"},
        }
    ]
    assert "Authorization" not in server.headers[0]
    await _ask(judge(temperature=None, max_tokens=None), "x")
    assert set(server.requests[-1]) == {"model", "messages"}


async def test_scores_come_in_order_and_equal_completions_are_asked_for_once(server, judge):
    asking = judge(scale=True)
    assert await _ask(asking, "aaa", "a", "aaa", "aa") == [0.03, 0.01, 0.03, 0.02]
    assert len(server.requests) == 3
    assert await _ask(asking, "aa", "aaaa") == [0.02, 0.04]
    assert len(server.requests) == 4


def _reader(**params) -> ScoreReader:
    return ScoreReader(
        **{"pattern": None, "field": None, "minimum": 1, "maximum": 10, "scale": False} | params
    )


@pytest.mark.parametrize(
    ("params", "reply", "score"),
    [
        ({"pattern": r"Score: (\S+)"}, "Score: 3. No, Score: 7", 7.0),
        ({"pattern": r"\d+"}, "4", 4.0),
        ({"pattern": r"Score: (\S+)", "scale": True}, "Score: 10", 1.0),
        ({"pattern": r"Score: (\S+)", "scale": True}, "Score: 1e0", 0.0),
        ({"field": "score"}, '{"score": 5}', 5.0),
        ({"field": "score"}, '```json\n{"score": " 5.5 "}\n```\n', 5.5),
        ({"field": "result.score"}, '{"result": {"score": 2}}', 2.0),
    ],
)
def test_scores_that_can_be_read(params, reply, score):
    assert _reader(**params)(reply) == score


@pytest.mark.parametrize(
    ("params", "reply", "said"),
    [
        ({"pattern": r"\d+"}, "", "found an empty reply"),
        ({"pattern": r"\d+"}, " \n", "found an empty reply"),
        (
            {"pattern": r"Score: (\S+)"},
            "I can't say",
            "expected a match of params.pattern, found none",
        ),
        ({"pattern": r"Score: (\S+)"}, "Score: nan", "expected a number, found 'nan'"),
        ({"pattern": r"Score: (\S+)"}, "Score: inf", "expected a number, found 'inf'"),
        ({"pattern": r"Score: (\S+)"}, "Score: 1_0", "expected a number, found '1_0'"),
        ({"pattern": r"Score: (\S+)"}, "Score: 7/10", "expected a number, found '7/10'"),
        ({"pattern": r"Score: (\S+)"}, "Score: 11", "expected a score from 1 to 10, found 11"),
        ({"pattern": r"Score: (\S+)"}, "Score: 0.99", "expected a score from 1 to 10, found 0.99"),
        ({"pattern": r"(x)?Score"}, "Score", "expected a number, found ''"),
        ({"field": "score"}, "The score is 5", "expected JSON, found 'The score is 5'"),
        ({"field": "score"}, '{"score": true}', "expected a number, found 'True'"),
        ({"field": "score"}, '{"score": null}', "expected a number, found 'None'"),
        ({"field": "score"}, '{"score": NaN}', "expected a number, found 'nan'"),
        ({"field": "score"}, '{"score": 1e999}', "expected a number, found 'inf'"),
        ({"field": "score"}, f'{{"score": 1{"0" * 400}}}', "expected a number"),
        ({"field": "score"}, '{"grade": 5}', "expected the field 'score', found none"),
        ({"field": "a.b"}, '{"a": [5]}', "expected the field 'a.b', found none"),
        ({"field": "score"}, "[" * 100_000, "expected JSON"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_read_is_an_error(params, reply, said):
    with pytest.raises(ValueError, match=said):
        _reader(**params)(reply)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (says("no idea"), "the judge's reply can't be read: expected a match of params.pattern"),
        (says(""), "found an empty reply"),
        (says(None), "found an empty reply"),
        (says("Score: 5", "length"), "expected a whole reply, found one that ended by 'length'"),
        (says("Score: 5", "content_filter"), "ended by 'content_filter'"),
        (raw("<html>Score: 5</html>"), "expected a chat completion, found '<html>Score: 5"),
        (raw(""), "expected a chat completion, found ''"),
        (raw('{"choices": []}'), r"expected a chat completion, .*\(choices: "),
        (raw('{"error": "overloaded"}'), r"\(choices: Field required\)"),
        (flood, "expected a reply of at most 1048576 bytes"),
        (status(400, "bad model"), "refuses the request with HTTP 400 Bad Request: 'bad model'"),
        (status(401, f"wrong key {KEY}"), r"refuses .*HTTP 401 Unauthorized: 'wrong key \*\*\*'"),
        (status(404, ""), "HTTP 404"),
        (status(307, "", Location="http://127.0.0.1:1/"), "HTTP 307"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_bad_answer_fails_its_sample_and_is_not_asked_for_again(
    server, judge, monkeypatch, answer, said
):
    monkeypatch.setenv("JUDGE_KEY", KEY)

    async def for_bad(request, body):
        bad = body["messages"][0]["content"] == "bad"
        return await (answer if bad else server.length)(request, body)

    server.answer = for_bad
    asking = judge(api_key_env="JUDGE_KEY")
    with pytest.raises(RewardError, match=rf"1 of 3 completions .* at index 1: .*{said}") as caught:
        await _ask(asking, "a", "bad", "aa")
    assert KEY not in str(caught.value)
    assert len(server.requests) == 3
    # What was answered is not asked for again when the groups are scored by themselves.
    assert await _ask(asking, "a", "aa") == [1.0, 2.0]
    assert len(server.requests) == 3


# --- what may pass ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [status(429), status(500, "x"), status(503), status(529), cut, cut_in_the_middle],
    ids=["429", "500", "503", "529", "cut", "cut in the middle"],
)
async def test_what_may_pass_is_tried_again(server, judge, answer):
    server.script(answer, answer)
    assert await _ask(judge(), "aaa") == [3.0]
    assert len(server.requests) == 3


@pytest.mark.parametrize("answer", [hang, drip], ids=["hang", "drip"])
async def test_a_request_that_takes_too_long_is_ended_and_tried_again(server, judge, answer):
    server.script(answer)
    assert await _ask(judge(timeout_seconds=0.3), "aaa") == [3.0]
    assert len(server.requests) == 2
    while server.open_requests:
        await asyncio.sleep(0.01)
    assert server.connections <= 1


async def test_an_endpoint_that_stays_away_is_an_error_within_the_deadline(server, judge):
    server.answer = status(503, "still loading")
    with pytest.raises(
        RewardError,
        match=r"2 of 2 .*no reply in .* tries, .*; the last one: HTTP 503 .*still loading",
    ):
        await _ask(judge(deadline_seconds=1.5), "a", "b")
    assert len(server.requests) > 2
    await server.stop()
    with pytest.raises(RewardError, match="the last one: ConnectError"):
        await _ask(judge(deadline_seconds=0.5), "a")


async def test_a_wait_that_the_deadline_does_not_allow_is_not_begun(server, judge):
    server.answer = status(429, "slow down", Retry_After="3600")
    with pytest.raises(
        RewardError, match=r"and 1 tries, and no time left to try again in 3.6e\+03 s"
    ):
        await _ask(judge(), "a")
    server.script(status(429, "", Retry_After="0.05"))
    assert await _ask(judge(), "a") == [1.0]


def test_delays_grow_and_are_bounded():
    assert [delay_before(n, 1.0) for n in (1, 2, 3, 4)] == [0.5, 1.0, 2.0, 4.0]
    assert delay_before(3, 0.0) == 1.0
    assert delay_before(10**6, 1.0) == 30.0


def test_both_forms_of_a_wished_for_wait():
    assert asked_to_wait("2.5", 0) == 2.5
    assert asked_to_wait("Thu, 01 Jan 1970 00:01:00 GMT", 20) == 40
    assert asked_to_wait("Thu, 01 Jan 1970 00:00:10 GMT", 20) == 0
    assert [asked_to_wait(text, 0) for text in (None, "", "soon", "nan", "inf", "-3")] == [0] * 6


# --- connections -----------------------------------------------------------------------------------------------------


async def test_requests_and_connections_stay_within_the_bound_over_many_calls(server, judge):
    async def slow(request, body):
        await asyncio.sleep(0.005)
        return await server.length(request, body)

    server.answer = slow
    asking = judge(max_concurrency=4)
    calls = [_ask(asking, *(f"{call}-{index}" for index in range(20))) for call in range(4)]
    await asyncio.gather(*calls)
    assert len(server.requests) == 80
    assert server.most_requests == 4
    assert server.most_connections == 4
    await asking.close()
    while server.connections:
        await asyncio.sleep(0.01)


async def test_connections_stay_bounded_when_they_break_and_hang(server, judge):
    server.script(*[cut, hang, status(500), cut_in_the_middle] * 5)
    asking = judge(max_concurrency=3, timeout_seconds=0.2)
    scores = await _ask(asking, *("x" * n for n in range(1, 13)))
    assert scores == [float(n) for n in range(1, 13)]
    assert server.most_requests <= 3
    assert len(server.requests) == 32


async def test_a_call_that_is_given_up_leaves_no_request_behind(server):
    """The worker's own limit on time."""
    server.answer = hang
    function = RewardFunction(name="judge", params={"base_url": server.url, **PARAMS})
    scorer = Scorer(load_functions([function]), 0.5, Counters())
    with pytest.raises(FunctionFailed, match=r"expected values for 1 completions within 0\.5 s"):
        await scorer.score([Sample("p", "c")])
    while server.open_requests or server.connections:
        await asyncio.sleep(0.01)
    server.answer = server.length
    assert [score.total for score in await scorer.score([Sample("p", "c")])] == [1.0]
    await scorer.close()
    while server.connections:
        await asyncio.sleep(0.01)


# --- keys and settings -----------------------------------------------------------------------------------------------


async def test_the_key_is_sent_and_stands_in_no_log(server, judge, monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server.script(status(500, f"your key {KEY}"), cut)
    await _ask(judge(api_key_env="JUDGE_KEY"), "a", "b")
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    asking = judge(api_key_file=str(file))
    await _ask(asking, "a")
    file.write_text("renewed")
    await _ask(asking, "b")
    assert [headers["Authorization"] for headers in server.headers[-2:]] == [
        *(f"Bearer {KEY}", "Bearer renewed"),
    ]
    assert "trying again after: HTTP 500 Internal Server Error: 'your key ***'" in caplog.text
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"base_url": "judge:80/v1"}, "base_url: expected http(s)://HOST"),
        ({"base_url": "http://"}, "base_url: expected http"),
        ({"base_url": "http://h/v1?a=b"}, "base_url: expected http"),
        ({"base_url": f"http://user:{KEY}@h/v1"}, "has a user or password in it"),
        ({"template": "{prompt}"}, "template: expected {completion} in it"),
        ({"template": "{completion} {}"}, "template: expected a name in each pair of braces"),
        ({"template": "{completion"}, "template: "),
        ({"pattern": None}, "expected either pattern or field"),
        ({"field": "score"}, "expected either pattern or field"),
        ({"pattern": "("}, "pattern: expected a regular expression"),
        ({"minimum": 100}, "expected minimum below maximum"),
        ({"minimum": float("nan")}, "minimum: "),
        ({"extra": {"model": "x"}}, "extra: model is set by the judge itself"),
        ({"extra": {"stream": True}}, "extra: stream is set by the judge itself"),
        ({"api_key": KEY}, "unknown api_key; remove it"),
        ({"api_key_env": "A", "api_key_file": "b"}, "found both; remove one"),
        (
            {"api_key_env": "OFFBEAT_UNSET"},
            "in the environment variable OFFBEAT_UNSET, found nothing",
        ),
        ({"api_key_file": "/nowhere"}, "the file /nowhere can't be read"),
        ({"api_key_env": "BAD_KEY"}, "environment variable BAD_KEY, found something else"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_mistakes_in_the_params_show_at_the_start_and_never_the_key(monkeypatch, params, said):
    monkeypatch.setenv("BAD_KEY", f"{KEY}\nsecond line")
    function = {"base_url": "http://localhost/v1", **PARAMS, **params}
    with pytest.raises(ConfigError) as caught:
        load_functions([RewardFunction(name="judge", params=function)])
    assert said in str(caught.value)
    assert KEY not in str(caught.value)


async def test_a_template_that_does_not_fit_the_row(server, judge):
    with pytest.raises(ValueError, match="KeyError 'level'; there are: prompt, completion, answer"):
        await _ask(judge(template="{level}{completion}"), "x", answer=[1])
    with pytest.raises(
        ValueError, match="expected a value in column 'level', found null at index 1"
    ):
        await _ask(judge(template="{level}{completion}"), "x", "y", level=[1, None])
    assert server.requests == []


def test_the_key_file_is_relative_to_the_recipe(tmp_path):
    from offbeat.config import load_recipe

    file = tmp_path / "recipe.yaml"
    tree = {
        "model": {"path": "model"},
        "data": {"train": {"kind": "jsonl", "path": "a.jsonl"}},
        "sampling": {"k": 2, "max_tokens": 8},
        "schedule": {"steps": 1, "prompts_per_step": 1},
        "learner": {"loss": {"name": "online_dpo"}},
        "reward": {"functions": [{"name": "judge", "params": {"api_key_file": "secret"}}]},
    }
    file.write_text(json.dumps(tree))
    assert load_recipe(file).reward.functions[0].params == {"api_key_file": f"{tmp_path}/secret"}
    assert parse_recipe(tree, source="x").reward.functions[0].params == {"api_key_file": "secret"}

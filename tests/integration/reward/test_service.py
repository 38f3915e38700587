"""The gRPC face of a reward worker, over a socket."""

import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2

from offbeat import rpc
from offbeat.local.redis_server import free_port
from offbeat.v1 import reward_pb2, reward_pb2_grpc, samples_pb2
from tests.harness.service import health, is_serving

STOP, LENGTH = samples_pb2.FINISH_REASON_STOP, samples_pb2.FINISH_REASON_LENGTH


def _item(completion: str, answer: str = "4", **fields) -> reward_pb2.ScoreItem:
    item = reward_pb2.ScoreItem(
        prompt=fields.pop("prompt", "2+2="), completion=completion, **fields
    )
    item.columns["answer"].text = answer
    return item


async def test_score_status_health_and_metrics(run):
    port = free_port()
    worker = run.worker(
        {"name": "exact_match"},
        {"name": "missing_eos", "params": {"mode": "replace", "value": -1}},
        "raises",
        rpc={"metrics_port": port},
    )
    address = await worker.ready()
    for name in ("", "liveness", "readiness", "offbeat.v1.RewardService"):
        assert await is_serving(address, name)
    async with rpc.connect(address) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        items = [_item(" 4 "), _item("5"), _item("4", finish_reason=LENGTH)]
        reply = await stub.Score(reward_pb2.ScoreRequest(items=items), timeout=20)
        assert [score.total for score in reply.scores] == [4.0, 1.0, -1.0]
        assert [c.name for c in reply.scores[0].components] == [
            "exact_match",
            "missing_eos",
            "raises",
        ]
        assert [c.HasField("value") for c in reply.scores[0].components] == [True, False, True]

        for items, code, words in [
            ([], grpc.StatusCode.INVALID_ARGUMENT, "expected 1 to 1024, found 0"),
            ([_item("4")] * 1025, grpc.StatusCode.INVALID_ARGUMENT, "found 1025"),
            (
                [_item("4", finish_reason=8)],
                grpc.StatusCode.INVALID_ARGUMENT,
                "item 0: finish_reason",
            ),
            ([_item("4", prompt="bad")], grpc.StatusCode.INTERNAL, "'raises'"),
        ]:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Score(reward_pb2.ScoreRequest(items=items), timeout=20)
            assert raised.value.code() == code
            assert words in raised.value.details()

        await run.issue(["good", "prompt"])
        await run.collect(2)
        status = await stub.GetStatus(reward_pb2.RewardServiceGetStatusRequest(), timeout=20)
    assert list(status.functions) == ["exact_match", "missing_eos", "raises"]
    assert (status.groups_finished, status.completions_scored, status.groups_dead) == (2, 4, 0)
    assert 0 < status.waiting_seconds <= status.uptime_seconds
    assert not status.draining
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20).read().decode()
    assert "offbeat_reward_groups_finished_total 2.0" in page
    assert 'offbeat_reward_function_failures_total{function="raises"} 1.0' in page
    (member,) = await run.reward_members()
    assert member.address == address


async def test_not_ready_while_functions_load_or_redis_is_away(run):
    slow = run.folder / "slow_import.py"
    slow.write_text(
        "import pathlib, time\nwhile not pathlib.Path(__file__).with_name('go').exists():\n"
        "    time.sleep(0.01)\ndef f(completions): return [0.0] * len(completions)\n"
    )
    worker = run.worker({"name": "f", "path": f"{slow}:f"})
    address = await worker.listening()
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    assert await health(address) == not_serving
    assert await is_serving(address, "liveness")
    async with rpc.connect(address) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Score(reward_pb2.ScoreRequest(items=[_item("4")]), timeout=20)
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
    (run.folder / "go").touch()
    assert await worker.ready() == address
    assert worker.stop() == 0

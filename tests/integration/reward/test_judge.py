"""A reward worker whose function is a judge on the network: scores, failures that pass, and failures that stay."""

import psutil

from offbeat.streams.base import Stream
from tests.harness.judge_server import judge_server, reply, status

KEY = "sk-secret-0123456789"


async def test_a_worker_with_a_judge(run, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    async with judge_server() as server:

        async def answer(request, body):
            question = body["messages"][0]["content"]
            return reply("I refuse" if question.startswith("bad") else f"Score: {len(question)}")

        server.length = answer
        server.script(status(503, "loading"), status(429))
        params = {
            "base_url": server.url,
            "model": "m",
            "template": "{prompt} {completion}",
            "pattern": r"Score: (\d+)$",
            "minimum": 0,
            "maximum": 100,
            "api_key_env": "JUDGE_KEY",
        }
        worker = run.worker({"name": "judge", "params": params}, log_level="DEBUG")
        await run.issue(["bad" if i == 2 else f"prompt-{i}" for i in range(6)])
        results = await run.collect(6)
        scored = {
            r.record.rollout.task.ordinal: [score.total for score in r.record.scores]
            for r in results
            if r.stream is Stream.SCORED
        }
        assert scored == {i: [0.10, 0.11] for i in (0, 1, 3, 4, 5)}
        (dead,) = [r.record for r in results if r.stream is Stream.DEAD]
        assert dead.ordinal == 2
        assert "'judge': expected 2 values, but it raised RewardError: 2 of 2 comp" in dead.reason
        assert "expected a match of params.pattern, found none in 'I refuse'" in dead.reason
        # Two that had to be repeated, and two for each group: what was answered is not asked for again.
        good = [r for r in server.requests if not r["messages"][0]["content"].startswith("bad")]
        assert len(good) <= 12
        command = " ".join(psutil.Process(worker.process.pid).cmdline())
        assert worker.stop() == 0
        kept = [path.read_text() for path in run.folder.rglob("*") if path.is_file()]
        assert not any(KEY in text for text in (command, *kept, worker.log.read_text()))

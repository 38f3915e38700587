"""A LoRA run by the real command: adapters are sent, a kill loses nothing, and the exports load everywhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.v1 import checkpoint_pb2 as checkpoint
from tests.harness.tiny_models import reference_logprobs
from tests.harness.whole_run import VLLM, resume, start, write_recipe

SEQUENCES = [[1, 5, 9, 13, 17, 21], [7, 8, 30]]
LORA = {"lora": {"r": 4}, "optimizer": {"lr": 1e-2, "schedule": "constant"}}


def offbeat(*arguments: str) -> str:
    command = [str(Path(sys.executable).parent / "offbeat"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_an_adapter_is_trained_sent_and_exported(tmp_path, engine):
    import peft
    from transformers import AutoModelForCausalLM

    settings = VLLM if engine == "vllm" else {"name": "transformers", "max_num_seqs": 16}
    recipe = write_recipe(
        tmp_path, learner=LORA, generator={"engine": settings}, schedule={"steps": 8}
    )
    with start(recipe) as run:
        run.wait_for_step(4)
        run.kill("learner")
        run.wait_for_step(6)
        run.kill_all()
        folder = run.folder
    with resume(recipe, folder) as run:
        run.succeed()
        assert run.audit().trained == 8 * 8
        steps = [line for line in run.metrics() if "loss" in line]
        # The engine's log-probs are the learner's: what it held was the adapter of that version.
        assert max(line["logprob_diff/max"] for line in steps if line["lag/max"] == 0) < 1e-3
        folder = run.folder
    manifests = [
        checkpoint.Manifest.FromString(file.read_bytes())
        for file in sorted(folder.glob("**/manifest.pb"))
    ]
    assert manifests
    # A learner that resumes publishes weights again that there were before; its own all differ.
    for term in {manifest.term for manifest in manifests}:
        digests = [manifest.weights_digest for manifest in manifests if manifest.term == term]
        assert len(set(digests)) == len(digests)
    whole = sum(f.stat().st_size for f in (tmp_path / "model").glob("*.safetensors"))
    for manifest in manifests:
        assert manifest.kind == checkpoint.WEIGHTS_KIND_ADAPTER
        assert all(".lora_" in spec.name for spec in manifest.tensors)
        assert manifest.total_bytes < whole / 4
    offbeat("export", str(folder), "--out", str(tmp_path / "again"))
    offbeat("export", str(folder), "--adapter", "--out", str(tmp_path / "adapter"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    before = reference_logprobs(base, SEQUENCES)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    expected = reference_logprobs(adapted, SEQUENCES)
    assert abs(expected[0][0] - before[0][0]) > 1e-3
    for exported in (folder / "export", tmp_path / "again"):
        found = reference_logprobs(AutoModelForCausalLM.from_pretrained(exported).eval(), SEQUENCES)
        assert found[0] == pytest.approx(expected[0], abs=1e-4)
    assert (folder / "adapter" / "README.md").exists()
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "library_name: peft" in card
    assert "LoRA, r 4, alpha 8, all-linear" in card
    if engine == "vllm":
        _check_vllm(tmp_path, folder, expected[0])


def _check_vllm(tmp_path, folder, expected):
    """vLLM loads the merged export, and the adapter beside the start model, and scores as PEFT does."""
    code = f"""
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

options = dict(dtype="float32", max_model_len=32, kv_cache_memory_bytes=2**26, enforce_eager=True)
params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
prompt = {{"prompt_token_ids": {SEQUENCES[0]}}}

def score(llm, **how):
    found = llm.generate([prompt], params, use_tqdm=False, **how)[0]
    pairs = list(zip(found.prompt_token_ids, found.prompt_logprobs))[1:]
    return [scores[token].logprob for token, scores in pairs]

if __name__ == "__main__":
    adapter = LoRARequest("trained", 1, {str(tmp_path / "adapter")!r})
    found = {{"merged": score(LLM({str(folder / "export")!r}, **options))}}
    based = LLM({str(tmp_path / "model")!r}, enable_lora=True, max_lora_rank=8, **options)
    found["adapter"] = score(based, lora_request=adapter)
    open(sys.argv[1], "w").write(json.dumps(found))
"""
    script, out = tmp_path / "load.py", tmp_path / "scores.json"
    script.write_text(code)
    subprocess.run([sys.executable, str(script), str(out)], check=True, timeout=400)
    for scores in json.loads(out.read_text()).values():
        assert scores == pytest.approx(expected, abs=1e-3)

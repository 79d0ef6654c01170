#!/usr/bin/env bash
# The whole way of the toy-sized workload: profile, plan, check, verify, launch, export. Two CPU processes, a few minutes.
#
#   run.sh [FOLDER]     leaves everything in FOLDER (default: a new temporary one); it must not have a run yet
#
# The same at 7 billion parameters, up to the plan, for 4 nodes of 8 H100; nothing is run and no parameter is made:
#
#   SIZE=7b run.sh [FOLDER]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
clusters=$here/../../configs/clusters
out=${1:-$(mktemp -d)}
mkdir -p "$out"

if [ "${SIZE:-toy}" = 7b ]; then
  cluster=$clusters/h100-4x8.yaml
  spindle profile "$here/7b.yaml" --estimate --cluster "$cluster" -o "$out/profile.json"
  spindle plan "$out/profile.json" --cluster "$cluster" -o "$out/plan.yaml"
  spindle check "$out/plan.yaml" --profile "$out/profile.json"
  spindle show "$out/plan.yaml"
  exit
fi

cluster=$clusters/cpu-2.yaml
spindle profile "$here/toy.yaml" --cluster "$cluster" --time-limit 0.1 --accept-noise -o "$out/profile.json"
spindle plan "$out/profile.json" --cluster "$cluster" -o "$out/plan.yaml"
spindle check "$out/plan.yaml" --profile "$out/profile.json"
spindle verify "$out/plan.yaml" --steps 2 --dtype float64
spindle launch "$out/plan.yaml" --steps "${STEPS:-10}" --checkpoint-every "${STEPS:-10}" --run-dir "$out/run"
spindle export "$out/run" -o "$out/model.safetensors"

#!/usr/bin/env bash
# Plan from the committed profile, check the result, and compare it with the committed plan. Nothing here needs a GPU, torch
# or the model's code. Exit codes are spindle's: 0 fine, 1 a violation or a slower plan, 3 a bad file, 4 nothing fits.
#
#   check_plan.sh [PROFILE.json] [MAX_GROWTH_PERCENT]
#
# Leaves new-plan.yaml, check.json and diff.json in $OUT (default: a new temporary folder), for the job's artifacts.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
profile=${1:-$here/profile.json}
max_growth=${2:-3}
out=${OUT:-$(mktemp -d)}

spindle plan "$profile" --cluster "$here/cluster.yaml" -o "$out/new-plan.yaml"
spindle check "$out/new-plan.yaml" --profile "$profile" --json > "$out/check.json"
spindle diff "$here/plan.yaml" "$out/new-plan.yaml" --max-growth "$max_growth" --json > "$out/diff.json"
echo "the plan holds: see $out" >&2

#!/usr/bin/env bash
# Make the example's profile and plan again, after a change to the workload, the cost model or the planner.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
cp configs/clusters/a800-2x8.yaml examples/ci/cluster.yaml
spindle profile configs/workloads/clip-4.yaml --cluster examples/ci/cluster.yaml --estimate -o examples/ci/profile.json
spindle plan examples/ci/profile.json --cluster examples/ci/cluster.yaml -o examples/ci/plan.yaml
sed -i '1i # yaml-language-server: $schema=../../schemas/plan.json' examples/ci/plan.yaml # for editors

"""The files that are damaged, and what lies beside them; paths relative to a case's folder."""

from __future__ import annotations

from pathlib import Path

from spindle_cli.checkpoint.index import INDEX_FILE, SUMS_FILE, shard_name
from spindle_cli.files.request import capture_path, error_path, journal_path

PROFILE, CLUSTER_FILE, PLAN, WORKLOAD_FILE, METRICS = (
    "profile.json",
    "cluster.yaml",
    "plan.yaml",
    "workload.yaml",
    "run/metrics.jsonl",
)
# A tiny workload in Python, and the folder of a run of it (run_folder.py).
TINY, TINY_PROFILE, TINY_PLAN, RUN = "tiny.py", "tiny.json", "tiny.yaml", "trained"
STEP = 2
CHECKPOINT = f"{RUN}/checkpoints/step-{STEP:06d}"
INDEX, SUMS = f"{CHECKPOINT}/{INDEX_FILE}", f"{CHECKPOINT}/{SUMS_FILE}"
SHARD = f"{CHECKPOINT}/{shard_name(0)}"
TRAINED_METRICS, PREDICTED, TIMELINE, RUN_PLAN = (
    f"{RUN}/{name}" for name in ("metrics.jsonl", "predicted.json", "timeline.json", "run-plan.yaml")
)
REQUEST, MEMO, OWNER, EXITS, ERROR, JOURNAL = (
    f"{RUN}/workers/{name}"
    for name in (
        "node-0.json",
        "node-0.memo.json",
        "owner-1.json",
        "node-0.exits.json",
        error_path(Path(), 0).name,
        journal_path(Path(), 0).name,
    )
)
CAPTURE = capture_path(Path(RUN), "final", 0).as_posix()

"""Plans on the cluster that HAP (EuroSys 2024) was measured on, beside HAP's own alternation.

    python scripts/bench_hap.py [--only MODEL ...]

Estimates the curves of HAP's models for its two types of GPU, plans by `spindle`, even shares and shares by
peaks, runs HAP's alternation anew (`hap_bench/`), prices what it finds by the same curves and links, and
writes docs/benchmarks/hap.json and the tables of hap.md beside it. Rows that are not made again are kept.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml
from bench_tables import put_between_markers, table
from hap_bench.alternate import alternate
from hap_bench.operators import MODELS
from hap_bench.program import Prices, Rule
from hap_bench.truth import Curves, taken_by
from paper_profiles import FOLDER, NOBODY, ROOT

from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.profiling import estimate_profile
from spindle_cli.profile.types import Profile
from spindle_cli.simulate.run import simulate

CLUSTER = "v100-16-p100-48"
# 32 for each of 64 devices, as HAP's configuration has it.
BATCH_SIZE = 2048
TASKS = {"vgg19": "classify", "vit": "classify", "bert-base": "read", "bert-moe": "fill_in"}
RECORDS = ROOT / "docs" / "benchmarks"
DATA, PAGE = RECORDS / "hap.json", RECORDS / "hap.md"


@dataclass(frozen=True)
class Row:
    """One model; seconds of an iteration unless told.

    Attributes:
        bound_s: no schedule of compute ends earlier.
        idle: devices that the plan of `spindle` leaves idle.
        hap_s: HAP's program as it runs; `hap_hidden_s`: if all that moves was hidden behind compute, or all
            compute behind what moves.
        ratios: of a batch, what a device of each type has by HAP.
        rules: how many operators HAP computes in which way.
        rounds, hap_search_s, planning_s: of the alternation; processor seconds of it, and of `spindle`.
    """

    model: str
    spindle_s: float
    simulated_s: float
    bound_s: float
    idle: int
    dp_even_s: float
    dp_flops_s: float
    hap_s: float
    hap_hidden_s: float
    hap_price_s: float
    ratios: tuple[float, ...]
    rules: dict[str, int]
    rounds: int
    hap_search_s: float
    planning_s: float


def main() -> None:
    """Plan, alternate and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="MODEL")
    arguments = parser.parse_args()
    kept = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else []
    rows = {row["model"]: Row(**row) for row in kept}
    for model in arguments.only:
        rows[model] = row_of(model)
        print(rows[model], flush=True)
        in_order = [rows[name] for name in MODELS if name in rows]
        DATA.write_text(json.dumps([asdict(row) for row in in_order], indent=1) + "\n", encoding="utf-8")
        put_between_markers(PAGE, _tables(in_order))


def row_of(model: str) -> Row:
    """A model by everybody."""
    cluster = Cluster.read(ROOT / "configs" / "clusters" / f"{CLUSTER}.yaml")
    profile = Profile.read(_profile_path(model, cluster))
    begun_s = time.process_time()
    plan = make_plan(profile, cluster)
    planning_s = time.process_time() - begun_s
    operators = MODELS[model]
    curves = Curves(seen_on(profile, cluster), cluster, operators)
    prices = Prices(cluster, curves.flops_per_s(operators, BATCH_SIZE))
    begun_s = time.process_time()
    found = alternate(operators, BATCH_SIZE, prices)
    hap_search_s = time.process_time() - begun_s
    taken = taken_by(found.program, found.ratios, curves, prices, BATCH_SIZE)
    return Row(
        model=model,
        spindle_s=plan.predicted.iteration_s,
        simulated_s=simulate(plan).iteration_s,
        bound_s=plan.predicted.lower_bound_s,
        idle=cluster.num_devices - len(_used(plan)),
        dp_even_s=make_plan(profile, cluster, "dp-even").predicted.iteration_s,
        dp_flops_s=make_plan(profile, cluster, "dp-flops").predicted.iteration_s,
        hap_s=taken.in_turn_s,
        hap_hidden_s=taken.hidden_s,
        hap_price_s=found.price_s,
        ratios=found.ratios,
        rules=dict(Counter(step.rule.value for step in found.program)),
        rounds=found.rounds,
        hap_search_s=hap_search_s,
        planning_s=planning_s,
    )


def _used(plan: Plan) -> set[int]:
    return {device for piece in plan.slices for device in piece.devices}


def _profile_path(model: str, cluster: Cluster) -> Path:
    """Estimated in float32, which is what both types train in, unless it has been before."""
    path = FOLDER / f"{model}-on-{CLUSTER}-x{BATCH_SIZE}.json"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        workload = yaml.safe_load((ROOT / "configs" / "workloads" / f"{model}.yaml").read_text("utf-8"))
        workload["args"] = {**workload.get("args", {}), "batch_sizes": {TASKS[model]: BATCH_SIZE}}
        workload["train"] = {**workload["train"], "shard_optimizer": True}
        source = path.with_suffix(".yaml")
        source.write_text(yaml.safe_dump(workload), encoding="utf-8")
        estimate_profile(str(source), path, NOBODY, cluster=cluster, precision="float32", check=False)
    return path


def _tables(rows: Sequence[Row]) -> str:
    times = [
        [
            row.model,
            *(_ms(s) for s in (row.spindle_s, row.dp_even_s, row.dp_flops_s, row.hap_s, row.hap_hidden_s)),
            f"{row.dp_even_s / row.spindle_s:.2f}",
            f"{row.hap_s / row.spindle_s:.2f}",
            f"{row.hap_hidden_s / row.spindle_s:.2f}",
            f"{row.simulated_s / row.spindle_s - 1:+.1%}",
            str(row.idle),
            _ms(row.bound_s),
        ]
        for row in rows
    ]
    head = ["model", "spindle", "dp-even", "dp-flops", "HAP", "HAP, all hidden"]
    head += ["over dp-even", "over HAP", "over HAP, all hidden", "simulated", "idle", "bound of compute"]
    ways = [
        [
            row.model,
            ", ".join(f"{count} by {_RULES[rule]}" for rule, count in row.rules.items()),
            " : ".join(f"{1e3 * ratio:.1f}" for ratio in row.ratios),
            _ms(row.hap_price_s),
            str(row.rounds),
            f"{row.hap_search_s:.1f}",
            f"{row.planning_s:.1f}",
        ]
        for row in rows
    ]
    of_hap = ["model", "HAP's operators", "ratios, thousandths", "its own price", "rounds", "search, s"]
    return f"{table(head, times)}\n\n{table([*of_hap, 'spindle plans in, s'], ways)}"


_RULES = {rule.value: rule.value for rule in Rule}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"


if __name__ == "__main__":
    main()

"""What has to be timed."""

from __future__ import annotations

import pytest
from tiny_workload import build

from helpers.analysed import analysed
from spindle_cli.profile.op.jobs import OpRef, degrees_beyond, make_jobs, valid_degrees
from spindle_cli.workload.graph import WorkloadGraph


@pytest.fixture(scope="module")
def graph() -> WorkloadGraph:
    return analysed(build())


def test_equal_ops_on_equal_shares_are_one_job_whatever_their_task_and_degree(graph: WorkloadGraph) -> None:
    table = make_jobs(graph, 4, 8)
    inner = [OpRef("classify", 1), OpRef("classify", 2), OpRef("spread", 1), OpRef("spread", 2)]
    assert len({table.key(op, 8) for op in inner}) == 1
    # Shares of 16, 8, 4 of one task and of 8, 4, 2 of the other, and of 1 for micro-batches: five in all.
    assert sum(job.op == table.stand_ins[inner[0]] for job in table.jobs) == 5


def test_ops_with_other_glue_or_gradients_are_other_jobs(graph: WorkloadGraph) -> None:
    table = make_jobs(graph, 4, 8)
    first, inner, last = (table.class_of[OpRef("classify", op)] for op in (0, 1, 3))
    assert len({first, inner, last}) == 3


def test_the_task_with_the_largest_batch_stands_in_so_that_every_share_has_its_rows(
    graph: WorkloadGraph,
) -> None:
    table = make_jobs(graph, 4, 8)
    assert table.stand_ins[OpRef("spread", 1)] == OpRef("classify", 1)
    for job in table.jobs:
        assert job.rows <= graph.tasks[job.op.task].task.batch_size


def test_degrees_divide_the_batch_and_a_coupled_metaop_has_one(graph: WorkloadGraph) -> None:
    assert valid_degrees(graph.by_name["classify/layers"], 16, 6) == (1, 2, 4)
    assert valid_degrees(graph.by_name["classify/layers"], 12, 64) == (1, 2, 3, 4, 6, 12)
    assert valid_degrees(graph.by_name["spread/loss"], 8, 8) == (1,)


def test_batches_are_cut_further_for_micro_batches_where_no_op_needs_all_of_them(
    graph: WorkloadGraph,
) -> None:
    layers, loss = graph.by_name["classify/layers"], graph.by_name["spread/loss"]  # of 16, and of 8 samples
    assert degrees_beyond(graph, layers, 2, 1000) == (4, 8, 16)
    assert degrees_beyond(graph, layers, 1, 1000) == (2, 4, 8, 16)
    assert degrees_beyond(graph, layers, 2, 8) == (8,)  # measured: one size, 4 to a device
    assert degrees_beyond(graph, layers, 16, 8) == ()
    assert degrees_beyond(graph, loss, 2, 1000) == ()  # its samples depend on each other


def test_few_points_of_a_long_curve_are_timed(graph: WorkloadGraph) -> None:
    rows = {job.rows for job in make_jobs(graph, 16, 3).jobs if job.op == OpRef("classify", 3)}
    assert rows == {16, 4, 1}

"""An outer step, by workers in threads: by numbers worked out by hand, and by torch's own SGD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from alone import world_of_one
from torch import Tensor, nn

from spindle_cli.errors import InputError, RunFailedError
from spindle_cli.files.request import RunRequest
from spindle_cli.process.environment import WorkerEnvironment
from spindle_cli.runtime.islands import outer
from spindle_cli.runtime.islands.island import Island
from spindle_cli.runtime.islands.outer import OuterOptimizer, rounded, scales_of, spread
from spindle_cli.runtime.islands.outer_steps import OuterSteps
from spindle_cli.runtime.islands.peer_replicas import PeerReplicas, ToldStep
from spindle_cli.runtime.step.losses import LossAccumulator
from spindle_cli.runtime.update.owned_ranges import OwnedRange
from spindle_cli.workload.settings.types import LocalSgd
from spindle_cli.workload.types import Task

T = TypeVar("T")


def on_islands(count: int, work: Callable[[PeerReplicas], T]) -> list[T]:
    """What each of several islands of one worker comes to."""
    store = dist.HashStore()

    def run(number: int) -> T:
        island = Island(number, count, 0, 1, Path("run"))
        return work(PeerReplicas(island, store, 30.0))

    with ThreadPoolExecutor(count) as threads:
        return [done.result() for done in [threads.submit(run, number) for number in range(count)]]


def asked(**more: object) -> LocalSgd:
    return LocalSgd(**{"islands": 2, "every": 1, **more})


def owned(*values: Sequence[float]) -> list[OwnedRange]:
    return [
        OwnedRange(f"a.w{place}", None, nn.Parameter(torch.tensor(each, dtype=torch.float64)))
        for place, each in enumerate(values)
    ]


def names(ranges: Sequence[OwnedRange]) -> list[str]:
    return [each.name for each in ranges]


def stepped(settings: LocalSgd, moves: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """A parameter of each island after outer steps, each behind updates by these amounts.

    Args:
        moves: by outer step, by island.
    """

    def work(peer_replicas: PeerReplicas) -> list[float]:
        (weight,) = ranges = owned([1.0] * len(moves[0][0]))
        optimizer = OuterOptimizer(settings, ranges, names(ranges), peer_replicas)
        optimizer.begin()
        for of_islands in moves:
            weight.tensor.detach().add_(torch.tensor(of_islands[peer_replicas.island.number]))
            optimizer.step()
        return weight.tensor.tolist()

    with world_of_one():
        return on_islands(settings.islands, work)


def test_the_mean_of_the_islands_is_local_sgd() -> None:
    plain = asked(outer={"lr": 1, "momentum": 0})
    assert stepped(plain, [[[0.5, 0.0], [0.25, -1.0]]]) == [[1.375, 0.5]] * 2


def test_momentum_is_nesterovs_unless_told() -> None:
    """Both islands move by -1 twice: g = 1; m = 1, then 1.5; Nesterov steps by g + 0.5 m: 1.5, then 1.75."""
    moves = [[[-1.0], [-1.0]]] * 2
    nesterov = {"lr": 0.5, "momentum": 0.5}
    assert stepped(asked(outer=nesterov), moves) == [[1 - 0.5 * 1.5 - 0.5 * 1.75]] * 2
    assert stepped(asked(outer={**nesterov, "nesterov": False}), moves) == [[1 - 0.5 * 1.0 - 0.5 * 1.5]] * 2


def test_three_islands_step_as_torchs_sgd_and_stay_alike_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent in several parts, as there are more elements than at once."""
    monkeypatch.setattr(outer, "SENT_AT_ONCE", 5)
    drawn = torch.Generator().manual_seed(0)
    moves = torch.randn(3, 3, 4, generator=drawn).tolist()
    settings = asked(islands=3)
    found = stepped(settings, moves)
    assert found[0] == found[1] == found[2]
    common = nn.Parameter(torch.ones(4, dtype=torch.float64))
    sgd = torch.optim.SGD([common], lr=0.7, momentum=0.9, nesterov=True)
    for of_islands in moves:
        common.grad = -torch.tensor(of_islands, dtype=torch.float64).mean(0)
        sgd.step()
    assert found[0] == pytest.approx(common.tolist(), rel=1e-14)


def test_each_parameter_is_rounded_by_its_own_largest_move_on_its_island() -> None:
    """8 bits: 127 multiples of 1 / 127 and of 4 / 127; 0.3 x 127 = 38.1 and 1 x 127 / 4 = 31.75."""
    plain = asked(bits=8, outer={"lr": 1, "momentum": 0})
    found = stepped(plain, [[[1.0, 0.3], [-4.0, 1.0]]])
    means = [(1 - 4) / 2, (38 / 127 + 32 * 4 / 127) / 2]
    assert found[0] == found[1] == pytest.approx([1 + mean for mean in means], rel=1e-14)


def test_parts_of_a_parameter_are_rounded_by_the_largest_move_of_all() -> None:
    """8 bits: 127 multiples of 4 / 127, in either order; 1 x 127 / 4 = 31.75."""

    def work(peer_replicas: PeerReplicas) -> list[float]:
        ranges = [
            OwnedRange("a.w", (place, place + 1), nn.Parameter(torch.zeros(1, dtype=torch.float64)))
            for place in range(3)
        ]
        optimizer = OuterOptimizer(
            asked(bits=8, outer={"lr": 1, "momentum": 0}), ranges, ["a.w"], peer_replicas
        )
        optimizer.begin()
        for each, move in zip(ranges, (1.0, -4.0, 1.0), strict=True):
            each.tensor.detach().add_(move)
        optimizer.step()
        return [each.tensor.item() for each in ranges]

    with world_of_one():
        found = on_islands(2, work)
    rounded_one = 32 * 4 / 127
    assert found[0] == found[1] == pytest.approx([rounded_one, -4.0, rounded_one], rel=1e-14)


def test_several_parameters_of_two_sizes_keep_their_own_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "SENT_AT_ONCE", 3)

    def work(peer_replicas: PeerReplicas) -> list[list[float]]:
        ranges = owned([0.0, 0.0], [0.0], [0.0, 0.0])
        settings = asked(bits=16, outer={"lr": 1, "momentum": 0})
        optimizer = OuterOptimizer(settings, ranges, names(ranges), peer_replicas)
        optimizer.begin()
        moves = ([1.0, 0.5], [100.0], [0.0, 0.0])
        for each, move in zip(ranges, moves, strict=True):
            each.tensor.detach().add_(torch.tensor(move))
        optimizer.step()
        return [each.tensor.tolist() for each in ranges]

    with world_of_one():
        first, second = on_islands(2, work)
    half = 16384 / 32767  # of 16383.5, to the even one
    assert first == second
    assert first[0] == pytest.approx([1.0, half], rel=1e-12)
    assert first[1:] == [[100.0], [0.0, 0.0]]


def test_as_many_ranges_are_sent_at_once_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3 elements at once; those of another dtype go by themselves."""
    monkeypatch.setattr(outer, "SENT_AT_ONCE", 3)
    ranges = owned([0.0] * 2, [0.0], [0.0], [0.0] * 2, [0.0] * 4, [0.0])
    ranges.append(OwnedRange("b", None, nn.Parameter(torch.zeros(1, dtype=torch.float32))))
    kept = [outer._Kept(each, each.tensor.detach(), None) for each in ranges]
    assert [[len(each.common) for each in some] for some in outer._at_once(kept)] == [
        [2, 1],
        [1, 2],
        [4],
        [1],
        [1],
    ]


def test_multiples_are_of_the_largest_and_halves_go_to_the_even_one() -> None:
    scales = scales_of(torch.tensor([254.0, 0.0]), 8)
    assert scales.tolist() == [2.0, 1.0]
    values = torch.tensor([254.0, -254.0, 3.0, 5.0, -1.0])
    assert rounded(values, spread(scales, [5, 0]), 8).tolist() == [127, -127, 2, 2, 0]
    assert rounded(values, spread(scales, [5, 0]), 8).dtype == torch.int8
    assert rounded(values, spread(scales, [5, 0]), 16).dtype == torch.int16
    assert scales_of(torch.tensor([32767.0]), 16).tolist() == [1.0]


def test_islands_that_begin_apart_are_refused_with_the_parameter() -> None:
    def work(peer_replicas: PeerReplicas) -> None:
        ranges = owned([1.0], [float(peer_replicas.island.number)])
        OuterOptimizer(asked(), ranges, names(ranges), peer_replicas).begin()

    with pytest.raises(RunFailedError, match=r"a\.w1: island . begins with other values of it than island"):
        on_islands(2, work)


def test_a_rank_that_trains_nothing_takes_part() -> None:
    def work(peer_replicas: PeerReplicas) -> None:
        optimizer = OuterOptimizer(asked(bits=8), [], ["a.w0"], peer_replicas)
        optimizer.begin()
        optimizer.step()

    with world_of_one():
        on_islands(2, work)


def test_what_is_saved_goes_on_and_what_is_not_begins_where_the_parameters_are() -> None:
    def work(peer_replicas: PeerReplicas) -> tuple[dict[str, Tensor], list[float]]:
        ranges = owned([1.0], [2.0])
        optimizer = OuterOptimizer(asked(), ranges, names(ranges), peer_replicas)
        saved = {"common": torch.tensor([5.0]), "outer_momentum": torch.tensor([3.0])}
        optimizer.resume(ranges[0], saved)
        ranges[1].tensor.detach().fill_(4.0)
        optimizer.begin()
        states = [dict(optimizer.state_of(each)) for each in ranges]
        return states[0], states[1]["common"].tolist() + states[1]["outer_momentum"].tolist()

    for first, second in on_islands(2, work):
        assert {key: value.item() for key, value in first.items()} == {"common": 5.0, "outer_momentum": 3.0}
        assert second == [4.0, 0.0]


def test_the_first_island_saves_when_all_others_have() -> None:
    order: list[int] = []

    def work(peer_replicas: PeerReplicas) -> None:
        steps = OuterSteps(peer_replicas, OuterOptimizer(asked(), [], [], peer_replicas), 2)
        steps.save(lambda: order.append(peer_replicas.island.number))
        assert [step for step in range(6) if steps.is_due(step)] == [1, 3, 5]
        assert peer_replicas.all_say(peer_replicas.island.number < 3)
        assert not peer_replicas.all_say(peer_replicas.island.number < 2)

    on_islands(3, work)
    assert order[-1] == 0
    assert sorted(order) == [0, 1, 2]


# Results of a step


def test_losses_are_means_and_all_else_is_what_any_says() -> None:
    """Two tasks, of which the first counts something; a rank's memory and wait; whether to stop; a norm."""
    tasks = [Task(name, nn.Linear(1, 1), 1) for name in "ab"]
    shares = {"a": SimpleNamespace(num_counts=1), "b": SimpleNamespace(num_counts=0)}
    accumulator = LossAccumulator(tasks, torch.device("cpu"), 1, shares, 0, 1)  # type: ignore[arg-type]
    nan = float("nan")
    told = torch.tensor([[1.0, 4.0, 0.0, 10.0, 0.5, 0.0, 7.0], [3.0, 5.0, 6.0, 20.0, 0.25, 1.0, nan]])
    merged = accumulator.of_islands(told.double())
    assert merged[:6].tolist() == [2.0, 4.5, 0.0, 20.0, 0.5, 1.0]
    assert merged[6].isnan()


def test_a_step_is_told_once_and_its_results_change_in_place() -> None:
    def work(peer_replicas: PeerReplicas) -> list[float]:
        number = float(peer_replicas.island.number)
        losses, norm = torch.tensor([number, 1.0]), torch.tensor([10 * number])
        told = ToldStep(peer_replicas, lambda all_of_them: all_of_them.amax(0), [losses, norm])
        assert not told.has_arrived()
        told.begin()
        told.begin()
        losses.fill_(0.0)  # what is told is what was there then
        told.finish()
        told.finish()
        assert told.has_arrived()
        return [*losses.tolist(), *norm.tolist()]

    assert on_islands(3, work) == [[2.0, 1.0, 20.0]] * 3


# Who is where


def request(**more: object) -> RunRequest:
    return RunRequest(plan=Path("/plan.yaml"), workload="a:b", run_dir=Path("/run"), **more)


def environment(rank: int, world_size: int, local_rank: int) -> WorkerEnvironment:
    return WorkerEnvironment(rank, local_rank, world_size, world_size, "127.0.0.1", 1)


def test_ranks_count_inside_of_an_island() -> None:
    """Two islands of two nodes with two workers each: rank 7 is the last of the second node of the second."""
    island = Island.of(request(islands=2), environment(7, 8, 1))
    assert island is not None
    assert (island.number, island.rank, island.size, island.rank_among_all) == (1, 3, 4, 7)
    own = island.environment_of(environment(7, 8, 1))
    assert (own.rank, own.world_size, own.rank - own.local_rank) == (3, 4, 2)
    assert island.journal == Path("/run/workers/rank-00007.journal")


def test_one_machine_that_stands_in_for_all_nodes_is_one_node_of_each_island() -> None:
    island = Island.of(request(islands=2), environment(3, 4, 3))
    assert island is not None
    own = island.environment_of(environment(3, 4, 3))
    assert own.rank - own.local_rank == 0


def test_without_islands_there_are_none_and_uneven_ones_are_refused() -> None:
    assert Island.of(request(), environment(0, 3, 0)) is None
    with pytest.raises(InputError, match="3 workers were started for 2 islands"):
        Island.of(request(islands=2), environment(0, 3, 0))


def test_an_island_writes_in_a_folder_of_its_own_and_keeps_one_checkpoint_more(tmp_path: Path) -> None:
    whole = request(islands=2).model_copy(update={"run_dir": tmp_path, "capture_dir": tmp_path / "captured"})
    first, second = (Island(number, 2, 0, 1, tmp_path).request_of(whole) for number in range(2))
    assert (first.run_dir, first.capture_dir, first.keep, first.island) == (
        tmp_path,
        tmp_path / "captured",
        3,
        0,
    )
    own = tmp_path / "islands" / "1"
    assert (second.run_dir, second.capture_dir, second.keep, second.island) == (own, own / "captured", 4, 1)
    assert (own / "captured").is_dir()

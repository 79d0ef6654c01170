"""Of parameters of which a rank keeps ranges alone these are, bit for bit, what a full build gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from spindle_cli.analysis.localise import load_local
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.building import partial as partial_builds
from spindle_cli.workload.building.load import Births, load, parameters_born
from spindle_cli.workload.building.partial import drawing_as_if_real
from spindle_cli.workload.building.ranged import Ranged, RangesOnlyError
from spindle_cli.workload.graph import ParameterTable, WorkloadGraph
from spindle_cli.workload.initial.types import OwnPart

from . import inits, shapes_of_models

pytestmark = pytest.mark.usefixtures("analysed_once")

BUILDS = [f"{inits.__name__}:{build}" for build in ("reading", "mixed", "copied", "tied", "loaded")]
SHAPES = [f"{found.__module__}:{name}" for name, found in shapes_of_models.ALL.items()]


def some_of(name: str, shape: tuple[int, ...]) -> tuple[OwnPart, ...]:
    """Two parts of a parameter: some elements in the middle, and the last ones of its last rows."""
    count = nn.Parameter(torch.empty(shape, device="meta")).numel()
    middle = OwnPart(f"{name}/middle", None, (count // 3, count - count // 4))
    if not shape:
        return (middle,)
    box = ((shape[0] // 2, shape[0]), *((0, size) for size in shape[1:]))
    inside = count // shape[0] * (shape[0] - shape[0] // 2)
    return middle, OwnPart(f"{name}/last", box, (inside // 2, inside))


def ranges_of_all(graph: WorkloadGraph) -> dict[int, tuple[OwnPart, ...]]:
    table = ParameterTable.of(graph)
    return {
        id(parameter): some_of(name, tuple(parameter.shape))
        for name, parameter in table.parameters.items()
        if table.users[name]
    }


def all_ops(graph: WorkloadGraph) -> dict[str, range]:
    return {name: range(len(task.ops)) for name, task in graph.tasks.items()}


@pytest.mark.parametrize("source", BUILDS + SHAPES)
def test_ranges_are_those_of_a_full_build(source: str) -> None:
    expected = {
        f"{task.name}.{dotted}": tensor.detach()
        for task in load(source).workload.tasks
        if hasattr(task, "module")
        for dotted, tensor in task.module.named_parameters(remove_duplicate=False)
    }
    state = torch.get_rng_state()
    local = load_local(source, all_ops, parts_of=ranges_of_all)
    assert torch.equal(torch.get_rng_state(), state)
    table = ParameterTable.of(local.graph)
    names = {id(parameter): name for name, parameter in table.parameters.items()}
    assert local.part_values.keys() == ranges_of_all(local.graph).keys()
    for key, found in local.part_values.items():
        assert table.parameters[names[key]].is_meta
        for own in found:
            if names[key] in expected:
                whole = expected[names[key]]
                assert torch.equal(own.values, own.part.of(whole)), own.part
                assert own.values.dtype == whole.dtype


@pytest.mark.parametrize("source", [*BUILDS[1:], *SHAPES])
def test_no_more_than_two_parameters_are_whole_at_a_time(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each looks at itself alone, by torch's own ways."""
    made: list[Ranged] = []

    def noted(wanted: dict[int, tuple[OwnPart, ...]]) -> Ranged:
        made.append(Ranged(wanted))
        return made[-1]

    monkeypatch.setattr(partial_builds, "Ranged", noted)
    local = load_local(source, all_ops, parts_of=ranges_of_all)
    assert len(made) == 1, "built again with all of them whole"
    largest = max(p.numel() * p.itemsize for p in ParameterTable.of(local.graph).parameters.values())
    assert made[0].most_bytes <= 2 * largest


def built(fill: Callable[[nn.Linear], None], part: OwnPart) -> tuple[Births, nn.Linear]:
    """A layer of 4 x 6 of whose weight a part is kept."""
    births = Births(ranged=Ranged({0: (part,)}))
    with parameters_born(births, keep=lambda number: number != 0), drawing_as_if_real(births):
        torch.manual_seed(0)
        layer = nn.Linear(6, 4)
        # Others are filled meanwhile, so that the weight is true in its range alone.
        births.ranged.take((), torch.zeros(3), torch.empty(3, device="meta"))
        births.ranged.take((), torch.zeros(3), torch.empty(3, device="meta"))
        fill(layer)
    return births, layer


def scaled(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(0.5).add_(torch.arange(24.0).view(4, 6))


def cast(layer: nn.Linear) -> None:
    layer.to(torch.bfloat16)


def filled_row(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight[2].fill_(7)
        layer.weight.data[1, 2:].normal_()
        layer.weight[3] = 5
        layer.weight.data[:2, 4] = 1.5


def drawn_again(layer: nn.Linear) -> None:
    nn.init.trunc_normal_(layer.weight.data, std=0.02)
    layer.weight.data.div_(layer.weight.norm())


def spread(layer: nn.Linear) -> None:
    nn.init.orthogonal_(layer.weight)
    layer.weight.data = layer.weight.data.clone().clamp_(-0.2, 0.2)


def sparse(layer: nn.Linear) -> None:
    nn.init.sparse_(layer.weight, 0.5)


def by_device(layer: nn.Linear) -> None:
    if not layer.weight.is_meta and layer.weight.device.type == "cpu":
        nn.init.ones_(layer.weight)
        layer.weight.data += torch.rand_like(layer.weight)


@pytest.mark.parametrize("fill", [scaled, cast, filled_row, drawn_again, spread, by_device, sparse])
def test_what_is_done_to_a_parameter_is_done_to_its_range(fill: Callable[[nn.Linear], None]) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(6, 4)
    fill(plain)
    state = torch.get_rng_state()
    part = OwnPart("weight", ((1, 4), (0, 6)), (3, 14))
    births, layer = built(fill, part)
    assert torch.equal(torch.get_rng_state(), state)
    assert not births.ranged.failed
    found = births.ranged.values_of(layer.weight)
    assert found is not None
    assert torch.equal(found[0].values, part.of(plain.weight.detach()))
    assert found[0].values.dtype == plain.weight.dtype


def normalised(layer: nn.Linear) -> None:
    layer.weight.data.div_(layer.weight.norm())


def shifted(layer: nn.Linear) -> None:
    layer.weight.data[1:].copy_(layer.weight.data[:-1].clone())


def moved(layer: nn.Linear) -> None:
    layer.weight.data[1:].copy_(layer.weight.data[:-1])


def summed(layer: nn.Linear) -> None:
    layer.weight.data.cumsum_(0)


def mixed(layer: nn.Linear) -> None:
    layer.weight.data.mul_(layer.weight.data.flip(0))


def by_columns(layer: nn.Linear) -> None:
    layer.weight.data[:, :4].mul_(layer.weight.data.t()[:4, :].t().contiguous())
    layer.weight.data[:4, :4].add_(layer.weight.data[:4, :4].t())


def unknown(layer: nn.Linear) -> None:
    layer.weight.data.fill_(1).add_(torch.ones(4, 6, device="meta"))


def partly_filled(layer: nn.Linear) -> None:
    layer.weight.data[1:].fill_(1)
    normalised(layer)


def copied(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.clone()
    normalised(layer)


def copied_in_part(layer: nn.Linear) -> None:
    layer.weight.data[:2].clone()


BY_OTHERS = [normalised, shifted, moved, summed, mixed, by_columns]
REFUSED = [*BY_OTHERS, partly_filled, copied, copied_in_part, unknown]


@pytest.mark.parametrize("fill", REFUSED)
def test_what_looks_at_elements_that_are_not_kept_is_refused(fill: Callable[[nn.Linear], None]) -> None:
    with pytest.raises(WorkloadError, match="more of a parameter than its own range"):
        built(fill, OwnPart("weight", None, (3, 14)))


def test_a_refusal_that_is_caught_still_counts() -> None:
    def quiet(layer: nn.Linear) -> None:
        try:
            normalised(layer)
        except WorkloadError:
            nn.init.ones_(layer.weight)

    births, _ = built(quiet, OwnPart("weight", None, (3, 14)))
    assert births.ranged.failed


def test_two_of_them_are_not_operated_on_together() -> None:
    """Of either there is a range, and not the same."""
    births, layer = built(lambda _: None, OwnPart("weight", None, (3, 14)))
    other = torch.empty(4, 6, device="meta")
    births.ranged.take((OwnPart("other", None, (0, 9)),), torch.ones(4, 6), other)
    for _ in range(2):
        births.ranged.take((), torch.zeros(3), torch.empty(3, device="meta"))
    with drawing_as_if_real(births), torch.no_grad(), pytest.raises(RangesOnlyError):
        layer.weight.mul_(other)


def own_tensor() -> torch.Tensor:
    return torch.empty(4, 6)


def test_a_parameter_whose_memory_somebody_else_has_is_not_taken_apart() -> None:
    """Who may fill it later, by that."""
    for kept in (own_tensor(), None):
        births = Births(ranged=Ranged({0: (OwnPart("weight", None, (3, 14)),)}))
        with parameters_born(births, keep=lambda number: number != 0), drawing_as_if_real(births):
            layer = nn.Module()
            layer.weight = nn.Parameter(own_tensor() if kept is None else kept)
        births.ranged.values_of(layer.weight)
        assert births.ranged.failed == (kept is not None)


def test_parts_of_one_tensor_are_those_of_a_full_build() -> None:
    source = f"{inits.__name__}:parts_of_one"
    expected = dict(load(source).workload.tasks[0].module.named_parameters())
    local = load_local(source, all_ops, parts_of=ranges_of_all)
    table = ParameterTable.of(local.graph)
    for name, parameter in table.parameters.items():
        for own in local.part_values[id(parameter)]:
            assert torch.equal(own.values, own.part.of(expected[name.removeprefix("only.")].detach()))


def prints(fill: Callable[[Tensor], object]) -> tuple[int | None, int | None]:
    """Of two ranks with other ranges, of which one lets go of it before it is filled, and after."""

    def whole(layer: nn.Linear) -> None:
        fill(layer.weight.data)

    first, one = built(whole, OwnPart("weight", None, (0, 3)))
    second = Births(ranged=Ranged({0: (OwnPart("weight", None, (9, 24)),)}))
    with parameters_born(second, keep=lambda number: number != 0), drawing_as_if_real(second):
        torch.manual_seed(0)
        other = nn.Linear(6, 4)
        fill(other.weight.data)
    ends = first.ranged.values_of(one.weight), second.ranged.values_of(other.weight)
    assert ends[0] is not None and ends[1] is not None
    return ends[0][0].fingerprint, ends[1][0].fingerprint


def test_ranks_with_other_ranges_of_a_parameter_have_one_fingerprint_of_it() -> None:
    drawn = prints(lambda weight: weight.normal_())
    assert drawn[0] == drawn[1] is not None
    assert prints(lambda weight: weight.fill_(2.0)) != drawn
    untouched = prints(lambda _: None)
    assert untouched[0] == untouched[1] is not None
    assert prints(lambda weight: weight.mul_(3.0)) == (None, None)
    assert prints(lambda weight: weight[1:].fill_(3.0)) == (None, None)

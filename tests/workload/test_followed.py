"""Moving averages and bounds: those that a workload declares, those that a forward makes at its start, and
what neither can say.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.training.optimizing.groups import groups_of_graph
from spindle_cli.workload.building.checks import check_workload
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import Constrained, Following, move_towards
from spindle_cli.workload.types import Constraint, Follows, Task, Workload

WIDTH = 4


class Items:
    """Eight samples."""

    def __init__(self) -> None:
        self.x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index]}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Distilled(nn.Module):
    """`move`: what forward does to the teacher at its start."""

    def __init__(self, move: Callable[[Distilled], None] | None = None) -> None:
        super().__init__()
        self.student = nn.Sequential(Layer(), Layer())
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("center", torch.zeros(WIDTH))
        self.move, self.decay = move, 0.75

    def forward(self, x: Tensor) -> Tensor:
        if self.move is not None:
            self.move(self)
        with torch.no_grad():
            target = self.teacher(x)
        return nn.functional.mse_loss(self.student(x) * self.scale, target)


def pairs(model: Distilled) -> list[tuple[nn.Parameter, nn.Parameter]]:
    return list(zip(model.teacher.parameters(), model.student.parameters(), strict=True))


@torch.no_grad()
def in_place(model: Distilled) -> None:
    for slow, fast in pairs(model):
        slow.mul_(0.75).add_(fast, alpha=0.25)


@torch.no_grad()
def as_a_product(model: Distilled) -> None:
    for slow, fast in pairs(model):
        slow.copy_(0.75 * slow + (1 - 0.75) * fast)


def of_data(model: Distilled) -> None:
    for slow, fast in pairs(model):
        slow.data = slow.data * 0.75 + fast.data * 0.25


def of_data_in_place(model: Distilled) -> None:
    for slow, fast in pairs(model):
        slow.data.mul_(0.75).add_(fast.detach().data, alpha=0.25)


@torch.no_grad()
def by_lerp(model: Distilled) -> None:
    for slow, fast in pairs(model):
        slow.lerp_(fast, 0.25)


@torch.no_grad()
def by_difference(model: Distilled) -> None:
    for slow, fast in pairs(model):
        slow -= (slow - fast) * 0.25


@torch.no_grad()
def by_a_clone(model: Distilled) -> None:
    for slow, fast in pairs(model):
        made = slow.clone()
        made.mul_(3).add_(fast)
        slow.copy_(made.div(4))


@torch.no_grad()
def at_once(model: Distilled) -> None:
    slow, fast = (list(part.parameters()) for part in (model.teacher, model.student))
    torch._foreach_mul_(slow, 0.75)
    torch._foreach_add_(slow, fast, alpha=0.25)


@torch.no_grad()
def at_once_by_lerp(model: Distilled) -> None:
    torch._foreach_lerp_(list(model.teacher.parameters()), list(model.student.parameters()), 0.25)


def in_training(model: Distilled) -> None:
    if model.training:
        in_place(model)


def workload(model: nn.Module, **more: object) -> Workload:
    evaluated = Items() if more.pop("evaluates", False) else None
    numbers = {"decay": lambda step: 0.75} if more.pop("by_step", False) else {}
    task = Task("t", model, batch_size=4, dataset=Items(), eval_dataset=evaluated, step_values=numbers)
    return check_workload(Workload("w", [task], operators=(Layer,), **more), "here")  # type: ignore[arg-type]


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


WAYS = (
    in_place,
    as_a_product,
    of_data,
    of_data_in_place,
    by_lerp,
    by_difference,
    by_a_clone,
    at_once,
    at_once_by_lerp,
    in_training,
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_forward_that_moves_its_teacher_is_followed_however_it_is_written(
    way: Callable[[Distilled], None],
) -> None:
    model = Distilled(way)
    before = values(model)
    (found,) = analysed(workload(model)).following
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())  # not once, either
    assert (found.when, found.forwards_of) == ("before_forward", "t")
    assert len(found.pairs) == 4
    assert ("t.teacher.1.linear.bias", "t.student.1.linear.bias") in found.pairs
    way(model)  # for real
    for slow, fast in found.pairs:
        made = before[slow.removeprefix("t.")].clone()
        move_towards([made], [before[fast.removeprefix("t.")]], found.decay_at(0))
        assert torch.allclose(made, values(model)[slow.removeprefix("t.")], rtol=0, atol=1e-7)


def test_whoever_has_the_average_has_what_it_follows_and_the_fingerprint_says_so() -> None:
    graph = analysed(workload(Distilled(in_place)))
    by_target = {op.target: op for op in graph.tasks["t"].ops}
    assert by_target["teacher.0"].followed == ("student.0.linear.weight", "student.0.linear.bias")
    assert by_target["teacher.0"].computed_with == ("teacher.0.linear.weight", "teacher.0.linear.bias")
    assert by_target["student.0"].followed == ()
    assert graph.notes == (
        "task 't': 4 parameters that forward moves at its start (t.teacher.0.linear.weight towards "
        "t.student.0.linear.weight, say) are moved ahead of its batches by whoever holds them",
    )
    model = Distilled()
    declared = analysed(workload(model, follows=[Follows(model.teacher, model.student, 0.75)]))
    assert len({graph.fingerprint, declared.fingerprint, analysed(workload(Distilled())).fingerprint}) == 3


@torch.no_grad()
def of_the_state(model: Distilled) -> None:
    student = model.student.state_dict()
    for name, value in model.teacher.state_dict().items():
        if value.dtype.is_floating_point:
            value *= 0.75
            value += 0.25 * student[name].detach()


def test_a_whole_state_is_moved_with_what_no_loss_takes_and_what_is_frozen() -> None:
    model = Distilled(of_the_state)
    for part in (model.student, model.teacher):
        part.spare = nn.Linear(2, 2)
        part.forward = partial(_chained, part)
    model.teacher.requires_grad_(False)
    model.student[0].requires_grad_(False)
    graph = analysed(workload(model))
    assert len(graph.following[0].pairs) == 6
    first = next(op for op in graph.tasks["t"].ops if op.target == "teacher.0")
    assert {"teacher.spare.weight", "student.spare.weight", "student.0.linear.bias"} <= set(first.followed)


def _chained(part: nn.Sequential, x: Tensor) -> Tensor:
    return part[1](part[0](x))


@torch.no_grad()
def by_too_little(model: Distilled) -> None:
    for slow, fast in pairs(model):
        slow.mul_(0.75).add_(fast, alpha=0.3)


@torch.no_grad()
def of_two(model: Distilled) -> None:
    one, _, two, _ = model.student.parameters()
    slow = next(iter(model.teacher.parameters()))
    slow.mul_(0.5).add_(one, alpha=0.25).add_(two, alpha=0.25)


@torch.no_grad()
def by_rows(model: Distilled) -> None:
    for slow, fast in pairs(model):
        slow[0].copy_(fast[0])


@torch.no_grad()
def by_sizes(model: Distilled) -> None:
    for slow, fast in pairs(model):
        slow.mul_(fast)


@torch.no_grad()
def by_a_buffer(model: Distilled) -> None:
    for slow, _ in pairs(model):
        slow.mul_(model.center[0])


@torch.no_grad()
def the_student(model: Distilled) -> None:
    for slow, fast in pairs(model):
        fast.copy_(slow)


def by_a_number_of_the_step(model: Distilled) -> None:
    with torch.no_grad():
        for slow, fast in pairs(model):
            slow.mul_(model.decay).add_(fast, alpha=1 - model.decay)


def by_data_and_a_number_of_the_step(model: Distilled) -> None:
    for slow, fast in pairs(model):
        slow.data.mul_(model.decay).add_(fast.data, alpha=1 - model.decay)


REFUSED = {
    by_too_little: "forward makes of 'teacher.0.linear.weight' between operators 0.75 "
    "teacher.0.linear.weight + 0.3 student.0.linear.weight, which is no moving average",
    of_two: "0.25 student.1.linear.weight, which is no moving average",
    by_rows: "forward changes 'teacher.0.linear.weight' between operators",
    by_sizes: "forward changes 'teacher.0.linear.weight' between operators",
    the_student: "'t.student.0.linear.weight' takes a gradient, so that the optimizer would move it too",
    by_a_buffer: "forward changes a parameter by mul_ of a traced value, between operators",
    by_a_number_of_the_step: "forward changes a parameter by mul_ of a traced value, between operators",
    by_data_and_a_number_of_the_step: "forward changes a parameter by mul_ of a traced value, between",
}
ADVISED = {
    by_a_number_of_the_step: "with a function of the step for a decay that changes, and 'before_forward'",
}


@pytest.mark.parametrize("way", REFUSED, ids=lambda way: way.__name__)
def test_what_is_no_moving_average_is_refused_with_the_line(way: Callable[[Distilled], None]) -> None:
    by_step = way in (by_a_number_of_the_step, by_data_and_a_number_of_the_step)
    with pytest.raises(WorkloadError) as caught:
        analysed(workload(Distilled(way), by_step=by_step))
    assert REFUSED[way] in str(caught.value)
    assert "test_followed.py:" in str(caught.value)
    assert ADVISED.get(way, "") in str(caught.value.hint)


@torch.no_grad()
def in_bounds(model: Distilled) -> None:
    model.scale.clamp_(0.001, 0.5)


def in_bounds_of_data(model: Distilled) -> None:
    model.scale.data.clamp_(0.001, 0.5)


def in_bounds_in_new_memory(model: Distilled) -> None:
    model.scale.data = model.scale.data.clamp(0.001, 0.5)


@torch.no_grad()
def of_length_1(model: Distilled) -> None:
    weight = model.student[0].linear.weight
    weight.copy_(nn.functional.normalize(weight, dim=1))


@pytest.mark.parametrize(
    "way", [in_bounds, in_bounds_of_data, in_bounds_in_new_memory, of_length_1], ids=lambda way: way.__name__
)
def test_bounds_in_forward_are_refused_and_may_be_declared(way: Callable[[Distilled], None]) -> None:
    with pytest.raises(WorkloadError) as caught:
        analysed(workload(Distilled(way)))
    assert "test_followed.py:" in str(caught.value)
    assert "constraints=[Constraint(parameter, clamp=(low, high))]" in str(caught.value.hint)
    model = Distilled()
    rows = model.student[0].linear.weight
    bounds = [Constraint(model.scale, clamp=(0.001, 0.5)), Constraint(rows, unit_norm=1)]
    assert [each.name for each in analysed(workload(model, constraints=bounds)).constraints] == [
        "t.scale",
        "t.student.0.linear.weight",
    ]


class Late(Distilled):
    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        in_place(self)
        return loss


def test_what_is_moved_behind_its_use_is_refused() -> None:
    with pytest.raises(WorkloadError, match="after it has computed with it") as caught:
        analysed(workload(Late()))
    assert "follows=[Follows(teacher, student, decay)]" in str(caught.value.hint)


def test_an_evaluation_that_would_move_it_is_refused_unless_it_is_guarded() -> None:
    with pytest.raises(WorkloadError, match=r"moves 'teacher\.0.linear.weight' in eval mode too"):
        analysed(workload(Distilled(in_place), evaluates=True), evaluates=True)
    graph = analysed(workload(Distilled(in_training), evaluates=True), evaluates=True)
    assert len(graph.following) == 1


def test_one_that_two_tasks_use_has_to_be_declared() -> None:
    one, two = Distilled(in_place), Distilled()
    two.teacher = one.teacher
    tasks = [Task(name, model, batch_size=4, dataset=Items()) for name, model in (("one", one), ("two", two))]
    with pytest.raises(
        WorkloadError, match=r"moves 'one\.teacher\.0.linear.weight', which task 'two' uses too"
    ):
        analysed(Workload("w", tasks, operators=(Layer,)))


class Matched(nn.Module):
    """Takes a teacher without its student."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.teacher, self.head = teacher, nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.teacher(x)).mean()


def test_whoever_uses_a_teacher_has_to_hold_its_student() -> None:
    model = Distilled()
    tasks = [
        Task(name, module, batch_size=4, dataset=Items())
        for name, module in (("one", model), ("two", Matched(model.teacher)))
    ]
    follows = [Follows(model.teacher, model.student, 0.9)]
    with pytest.raises(WorkloadError, match=r"task 'two' uses a moving average of 'one\.student") as caught:
        analysed(Workload("w", tasks, operators=(Layer,), follows=follows))
    assert "(self.student = student)" in str(caught.value.hint)
    tasks[1].module.student = model.student
    graph = analysed(Workload("w", tasks, operators=(Layer,), follows=follows))
    ops = {op.target: op for op in graph.tasks["two"].ops}
    assert ops["teacher.1"].followed == ("student.1.linear.weight", "student.1.linear.bias")


def declared(**changes: object) -> Callable[[], Workload]:
    def make() -> Workload:
        model = Distilled()
        given = {"slow": model.teacher, "fast": model.student, "decay": 0.9, **changes}
        for key in changes.keys() & {"slow", "fast"}:
            given[key] = changes[key](model)  # type: ignore[operator]
        return workload(model, follows=[Follows(**given)])  # type: ignore[arg-type]

    return make


def bounded(**changes: object) -> Callable[[], Workload]:
    def make() -> Workload:
        model = Distilled()
        given = {"of": model.scale, **changes}
        if callable(changes.get("of")):
            given["of"] = changes["of"](model)  # type: ignore[operator]
        return workload(model, constraints=[Constraint(**given)])  # type: ignore[arg-type]

    return make


WRONG = [
    (declared(decay=1.5), "follows: decay is 1.5, expected a number from 0 to 1, or a function"),
    (declared(decay="0.9"), "follows: decay is '0.9', expected a number"),
    (declared(decay=float("nan")), "follows: decay is nan, expected a number"),
    (
        declared(when="sometimes"),
        "follows: when is 'sometimes', expected one of after_update, before_forward",
    ),
    (
        declared(slow=lambda model: "teacher"),
        "follows: slow is a str, expected an nn.Parameter or an nn.Module",
    ),
    (declared(slow=lambda model: model.center), "follows: slow is a Tensor, expected an nn.Parameter"),
    (declared(fast=lambda model: model.scale), "slow is a Sequential and fast a Parameter, expected two"),
    (declared(fast=lambda model: model.student[0]), "slow (a Sequential) and fast have not both a parameter"),
    (declared(slow=lambda model: model.student), "'t.student.0.linear.weight' takes a gradient"),
    (declared(fast=lambda model: model.teacher), "'t.teacher.0.linear.weight', which is itself an average"),
    (
        declared(fast=lambda model: copy.deepcopy(model.student)),
        "fast has a parameter of shape (4, 4) that no",
    ),
    (bounded(), "clamp is None and unit_norm None, expected one of them"),
    (bounded(clamp=(0, 1), unit_norm=0), "clamp is (0, 1) and unit_norm 0, expected one of them"),
    (bounded(clamp=(1, 0)), "clamp is (1, 0), expected (low, high) with low <= high"),
    (bounded(clamp=(None, None)), "clamp is (None, None), expected (low, high)"),
    (bounded(clamp=3.0), "clamp is 3.0, expected (low, high)"),
    (bounded(unit_norm="rows"), "unit_norm is 'rows', expected a dimension"),
    (bounded(unit_norm=0), "t.scale has shape (), which has no dimension 0"),
    (bounded(of=lambda model: model.teacher, clamp=(0, 1)), "no trained task's module holds a trained"),
    (bounded(of=lambda model: 3, clamp=(0, 1)), "constraints: of is a int, expected an nn.Parameter"),
]


@pytest.mark.parametrize(("make", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_a_wrong_declaration_is_refused(make: Callable[[], Workload], message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        analysed(make())
    assert message in str(caught.value)


def test_what_is_declared_twice_or_by_no_list_is_refused() -> None:
    model = Distilled()
    twice = [Follows(model.teacher, model.student, 0.9), Follows(model.teacher[0], model.student[0], 0.5)]
    with pytest.raises(WorkloadError, match=r"'t\.teacher\.0\.linear\.weight' is moved by two of these"):
        analysed(workload(model, follows=twice))
    with pytest.raises(WorkloadError, match=r"expected a list of spindle_cli\.Follows"):
        workload(model, follows=twice[0])
    with pytest.raises(WorkloadError, match=r"constraints: found a Follows, expected spindle_cli.Constraint"):
        workload(model, constraints=twice)


def test_a_teacher_that_no_loss_takes_needs_none() -> None:
    model = Distilled()
    model.spare = copy.deepcopy(model.student).requires_grad_(False)
    with pytest.raises(WorkloadError, match=r"no loss of a trained task depends on 't\.spare") as caught:
        analysed(workload(model, follows=[Follows(model.spare, model.student, 0.9)]))
    assert "`ema`" in str(caught.value.hint)


def test_a_decay_of_the_step_has_to_be_a_number_from_0_to_1() -> None:
    following = Following((("a", "b"),), lambda step: 1 - 0.1 * step, "after_update")
    assert [following.decay_at(step) for step in (0, 10)] == [1.0, 0.0]
    with pytest.raises(
        WorkloadError, match=r"decay gave -0\.10.* for step 11, expected a number from 0 to 1"
    ):
        following.decay_at(11)
    assert Following((), lambda _: torch.tensor(0.5), "after_update").decay_at(3) == 0.5


def test_settings_that_do_not_go_with_it_are_refused() -> None:
    model = Distilled()
    graph = analysed(workload(model, follows=[Follows(model.teacher, model.student, 0.9)]))
    sgd = {"optimizer": "SGD", "lr": 0.1}
    with pytest.raises(WorkloadError, match=r"bf16 holds t\.teacher\.0.linear.weight in 8 bits"):
        groups_of_graph(TrainSettings(**sgd, precision="bf16"), graph)
    islands = TrainSettings(**sgd, local_sgd={"islands": 2, "every": 2})
    with pytest.raises(WorkloadError, match="local_sgd does not go with the workload's follows"):
        groups_of_graph(islands, graph)
    bound = analysed(workload(model, constraints=[Constraint(model.scale, clamp=(0, 1))]))
    with pytest.raises(WorkloadError, match="local_sgd does not go with the workload's constraints"):
        groups_of_graph(islands, bound)
    assert groups_of_graph(TrainSettings(**sgd, precision="bf16"), bound).treats_elements_alone("t.scale")


def test_vectors_of_length_1_are_stepped_whole() -> None:
    model = Distilled()
    rows = [Constraint(model.student[0].linear.weight, unit_norm=1)]
    groups = groups_of_graph(
        TrainSettings(optimizer="SGD", lr=0.1), analysed(workload(model, constraints=rows))
    )
    assert not groups.treats_elements_alone("t.student.0.linear.weight")
    assert not groups.treats_elements_alone("t.student.0.linear.weight[0:2]")
    assert groups.treats_elements_alone("t.student.0.linear.bias")


def test_constraints_are_what_torch_does() -> None:
    values = torch.tensor([[3.0, 4.0], [-0.5, 0.0]])
    Constrained("w", None, 1).apply(values)
    assert values.tolist() == [[pytest.approx(0.6), pytest.approx(0.8)], [-1.0, 0.0]]
    Constrained("w", (-0.25, None), None).apply(values)
    assert values.tolist() == [[pytest.approx(0.6), pytest.approx(0.8)], [-0.25, 0.0]]
    Constrained("w", (None, 0.5), None).apply(values)
    assert values.tolist() == [[0.5, 0.5], [-0.25, 0.0]]


def averaged(decay: float | None) -> AveragedModel:
    way = None if decay is None else get_ema_multi_avg_fn(decay)
    return AveragedModel(Layer(), multi_avg_fn=way).requires_grad_(False)


def test_an_averaged_model_of_torch_is_refused_with_what_it_averages() -> None:
    model = Distilled()
    model.teacher = AveragedModel(model.student).requires_grad_(False)
    workload = Workload(
        "w", [Task("t", model, 4, Items())], (Layer,), follows=[Follows(model.teacher, model.student, 0.9)]
    )
    with pytest.raises(WorkloadError, match=r"Follows\(averaged\.module, model, decay\)"):
        analysed(workload)
    workload.follows = [Follows(model.teacher.module, model.student, 0.9)]
    assert next(slow for slow, _ in analysed(workload).following[0].pairs).startswith("t.teacher.module.")


@pytest.mark.parametrize(
    ("decay", "ours"), [(0.9, lambda step: 0.9 if step else 0.0), (None, lambda step: step / (step + 1))]
)
def test_the_decays_that_the_refusal_names_are_those_of_torch(
    decay: float | None, ours: Callable[[int], float]
) -> None:
    theirs, model = averaged(decay), Layer()
    slow = [torch.zeros_like(parameter) for parameter in model.parameters()]
    following = Following((), ours, "after_update")
    for step in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        theirs.update_parameters(model)
        move_towards(slow, [each.detach() for each in model.parameters()], following.decay_at(step))
        for found, expected in zip(slow, theirs.module.parameters(), strict=True):
            torch.testing.assert_close(found, expected.detach())

"""Which op each node of a trace belongs to.

* What depends on no operator (fields, parameters, constants), and what is a size and no tensor, is computed
  again in every op that uses it; what is drawn, in the first one alone.
* What comes from one op belongs to that op.
* What comes from several belongs to the last of them if that one has all it needs, else to the first op that
  uses it, else to an op of its own: the loss.
* In an evaluation, what takes parameters or buffers that one of these ops has not in training belongs to the
  first of them that has: no other device than those of that one need have them, as trained.
* A loss that is an op of its own in training is one in an evaluation.
* What mixes the samples of the batch (means, losses, batch x batch) belongs to the loss or to a coupled op:
  an op that is split over the batch would see only its share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx, nn

from spindle_cli.analysis.losses.expressions import ARITHMETIC, NotKnownError
from spindle_cli.analysis.losses.reduction import LossPart, find_part, find_part_of_whole
from spindle_cli.analysis.metaops.sharing import AtHand
from spindle_cli.analysis.own_draws import draws_random_numbers
from spindle_cli.analysis.rules.batch_norms import has_other_norms, shared_norms
from spindle_cli.analysis.rules.types import Batch, Whole
from spindle_cli.analysis.splitting.coupling import (
    BATCH_NORM,
    MIXES_BEFORE,
    NO_MEAN,
    OUT_OF_ORDER,
    WHOLE,
    WHOLE_IN_SUM,
    Trace,
    hands_on_whole,
    is_same_for_all,
    puts_samples_together,
    why_coupled,
    why_mixing,
)
from spindle_cli.analysis.tracing.faithful import changed_in_place
from spindle_cli.analysis.tracing.prepare import is_put_together, question_of
from spindle_cli.analysis.tracing.regions import Region
from spindle_cli.analysis.tracing.shapes import is_projection
from spindle_cli.workload.graph import reached
from spindle_cli.workload.types import Workload


@dataclass(frozen=True)
class Homes:
    """The op of each node; nodes that are not in `op` are computed again wherever they are used.

    `coupled`: ops that must not be split over the batch, with the reason. `num_ops` is one more than the
    number of operators if the loss is an op of its own. `loss`: what a share of the loss computes, if
    anything is known of it.
    """

    op: dict[fx.Node, int]
    coupled: dict[int, str]
    num_ops: int
    loss: LossPart | None = None


def find_homes(trace: Trace, workload: Workload, at_hand: AtHand | None = None) -> Homes:
    """Give every node its op, and find the ops that must not be split over the batch.

    `at_hand`: the tensors that devices have for each op; None: whatever it takes.
    """
    coupled: dict[int, str] = {}
    for index, node in enumerate(trace.operators):
        reason = why_coupled(trace, node, workload)
        if reason is not None:
            coupled[index] = reason
    placement, homes = _placed(trace, coupled, at_hand)
    last = len(trace.operators) - 1
    own_loss = homes.num_ops > len(trace.operators)
    if own_loss and last >= 0 and last not in coupled and hands_on_whole(trace, trace.operators[last]):
        # The last operator turned out not to hold the loss: what it hands on must then be one per sample.
        placement, homes = _placed(trace, {**coupled, last: WHOLE}, at_hand)
    return replace(homes, loss=placement.loss_part(homes))


def _placed(trace: Trace, coupled: dict[int, str], at_hand: AtHand | None) -> tuple[_Placement, Homes]:
    """All nodes in their homes; again, where these lack what some of the glue takes, or where ops hand on
    rows that cannot be cut: glue behind these that takes samples apart again is then theirs.
    """
    placement = _Placement(trace, dict(coupled), at_hand, {})
    homes = placement.place()
    while not placement.unordered.keys() <= coupled.keys():
        coupled = {**coupled, **placement.unordered}
        placement = _Placement(trace, dict(coupled), at_hand, {})
        homes = placement.place()
    if at_hand and (moved := at_hand.moved(trace.graph, homes.op, placement.consumers)):
        placement = _Placement(trace, dict(coupled), at_hand, moved)
        homes = placement.place()
    return placement, homes


class _Placement:
    """One pass over a trace, from fields to loss, for a given set of coupled operators."""

    def __init__(
        self, trace: Trace, coupled: dict[int, str], at_hand: AtHand | None, moved: Mapping[fx.Node, int]
    ) -> None:
        self._trace = trace
        self._at_hand = at_hand
        self._moved = moved
        self._shapes = trace.shapes
        self._coupled = coupled
        self._order = {node: index for index, node in enumerate(trace.graph.nodes)}
        self._home: dict[fx.Node, int] = {node: index for index, node in enumerate(trace.operators)}
        self.consumers = self._find_consumers()
        self._taken: dict[int, set[fx.Node]] = {}  # values of other ops that an op's glue takes
        self._mixed: set[fx.Node] = set()  # not one per sample, and in no coupled op: must join the loss
        self._reordering: set[fx.Node] = set()  # of those, rows that depend on other samples'
        self._taken_out: set[fx.Node] = set()  # losses that the last operator gives among other things
        self._loss_home = len(trace.operators)  # the loss as an op of its own
        self.unordered: dict[int, str] = {}  # ops that hand on rows of which no share can be cut

    def place(self) -> Homes:
        """Decide for every node into which op it goes."""
        for node in self._trace.graph.nodes:
            if node.op not in ("placeholder", "get_attr", "output") and node not in self._home:
                self._place_glue(node)
        self._place_loss()
        self._move_unordered()
        self._share_draws()
        num_ops = max(self._home.values(), default=0) + 1
        self._couple_whole_outputs()
        return Homes(self._home, self._coupled, max(num_ops, len(self._trace.operators)))

    def _share_draws(self) -> None:
        """Let the first of several ops that use a draw make it for all of them: each would draw another."""
        for node in self._order:
            if node.op == "output" or node in self._home or not self._happens_once(node):
                continue
            users = reached(node.users, lambda user: () if user in self._home else user.users)
            homes = {self._home[user] for user in users if user in self._home}
            if len(homes) > 1:
                self._home[node] = min(homes)

    def _couple_whole_outputs(self) -> None:
        """Shares of an op would each hand on another value without a batch dimension: then there is one
        share. Rows of a sample that do not lie together cannot be cut: then neither who hands them on nor who
        takes them is split.
        """
        for node, home in self._home.items():
            if not self._shapes.is_tensor(node):
                continue
            takers = {self._home.get(user, home) for user in self._users_behind_glue(node)} - {home}
            if takers and not self._trace.samples.is_cut_by_rows(node):
                self.unordered.setdefault(home, OUT_OF_ORDER.format(place=node.meta.get("place")))
                for op in (home, *takers):
                    self._coupled.setdefault(op, self.unordered[home])
            if home in self._coupled or self._has_batch(node):
                continue
            if node not in self._trace.operators and is_same_for_all(self._trace, node):
                continue  # whoever takes it takes one of the copies
            if any(self._home.get(user, home) != home for user in node.users):
                self._coupled[home] = WHOLE

    def _users_behind_glue(self, node: fx.Node) -> set[fx.Node]:
        """The nodes with a home that use a node, seen through what is computed where it is used."""

        def is_seen_through(user: fx.Node) -> bool:
            return user not in self._home and question_of(user, self._shapes) is None

        users = reached(node.users, lambda user: user.users if is_seen_through(user) else ())
        return {user for user in users if user in self._home}

    def _place_glue(self, node: fx.Node) -> None:
        if not self._shapes.gives_tensors(node) or is_put_together(node):
            return  # a size, or what holds an operator's tensors: made where it is used
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and source in self._home and is_projection(node, self._shapes):
            self._home[node] = self._home[source]
            self._note_mixing(node)
            return
        if not self._shapes.is_fixed(node):  # made of sizes and of fields that are the same in every sample
            self._place_by_sources(node)

    def _place_by_sources(self, node: fx.Node) -> None:
        """Put a node into the op that gives what it is computed from, or into the one that uses it."""
        producers = {self._home[source] for source in self._homed_inputs(node)}
        joins_loss = any(source in self._mixed for source in node.all_input_nodes)
        if len(producers) == 1 and producers <= self._coupled.keys() and not joins_loss:
            self._attach(node, producers.pop())
        elif self._is_batch_norm(node) and producers and not joins_loss:
            self._attach(node, self._best_home(node, producers))
            self._coupled.setdefault(self._home[node], BATCH_NORM)
        elif self._mixes(node):
            self._place_mixing(node)
        elif producers:
            self._attach(node, self._best_home(node, producers))
        elif node in self._moved:
            self._attach(node, self._moved[node])
        elif self.consumers[node] and self._happens_once(node):
            self._attach(node, min(self.consumers[node]))

    def _happens_once(self, node: fx.Node) -> bool:
        """Whether a node draws random numbers, is what they are drawn into, counts its batch, or is code that
        may do anything.
        """
        root = self._trace.root
        if any(
            draws_random_numbers(candidate, root)
            and (candidate is node or changed_in_place(candidate, root) is node)
            for candidate in (node, *node.users)
        ):
            return True
        if node.op != "call_module":
            return False
        module = self._module_of(node)
        return isinstance(module, Region) or bool(shared_norms(module))

    def _best_home(self, node: fx.Node, producers: set[int]) -> int:
        latest = max(producers)
        if len(producers) == 1 or self._has_all(latest, [node]):
            return latest
        return min(self.consumers[node], default=len(self._trace.operators))

    def _has_all(self, op: int, nodes: list[fx.Node]) -> bool:
        """Whether an op already has every value from other ops that these nodes need."""
        if op == self._loss_home:
            return True  # nothing comes after it
        needed = {source for node in nodes for source in self._homed_inputs(node)} - set(nodes)
        available = self._taken.get(op, set()).union(self._homed_inputs(self._trace.operators[op]))
        return all(self._home[source] == op or source in available for source in needed)

    def _attach(self, node: fx.Node, op: int) -> None:
        self._home[node] = op
        outside = (source for source in self._homed_inputs(node) if self._home[source] != op)
        self._taken.setdefault(op, set()).update(outside)

    def _note_mixing(self, node: fx.Node) -> None:
        """A loss that comes straight out of the last operator is not one per sample."""
        if self._home[node] not in self._coupled and self._shapes.is_tensor(node):
            batch = self._shapes.batch_dim(node)
            if (batch.dim is None and not is_same_for_all(self._trace, node)) or batch.mixes:
                self._mixed.add(node)
                self._taken_out.add(node)

    def _mixes(self, node: fx.Node) -> bool:
        """Whether a glue node is one for the whole batch: its value depends on which samples are there, or it
        changes a buffer.
        """
        inputs = node.all_input_nodes
        if any(source in self._mixed or self._is_own_loss(source) for source in inputs):
            return True
        sizes = list(filter(self._is_batch_size, inputs))
        if sizes and node.target in ARITHMETIC and self._shapes.is_tensor(node):
            return True
        tensors = [source for source in inputs if self._shapes.is_tensor(source)]
        if not sizes and not any(self._has_batch(source) for source in tensors):
            # What moves a buffer that no sample has a part in is done once all the same.
            moves = bool(self._trace.samples.changed(node))
            return moves and why_mixing(self._trace, node) is not None
        if self._shapes.is_tensor(node) and not self._has_batch(node):
            if puts_samples_together(self._trace, node):
                self._reordering.add(node)
            return True
        if why_mixing(self._trace, node) is not None:
            self._reordering.add(node)
            return True
        return False

    def _is_own_loss(self, node: fx.Node) -> bool:
        """Whether a node is an uncoupled operator's output without a batch: a loss of its own share."""
        is_split = node in self._trace.operators and self._home[node] not in self._coupled
        return is_split and self._shapes.is_tensor(node) and not self._has_batch(node)

    def _has_batch(self, node: fx.Node) -> bool:
        return self._shapes.batch_dim(node).dim is not None

    def _is_batch_size(self, node: fx.Node) -> bool:
        if self._shapes.is_tensor(node) or self._shapes.holds_tensors(node):
            return False
        return bool(self._shapes.values[node] != self._shapes.doubled[node])

    def _place_mixing(self, node: fx.Node) -> None:
        """Let the first operator that what mixes samples leads to run whole, with it; what leads to none
        joins the loss.
        """
        consumers = self.consumers[node]
        if not consumers:
            self._mixed.add(node)
            return
        self._attach(node, min(consumers))
        reason = MIXES_BEFORE.format(name=node.name, why=self._because(node))
        self._coupled.setdefault(self._home[node], reason)

    def _because(self, node: fx.Node) -> str:
        """Why a node mixes samples, and where, as far as it is known."""
        if self._is_batch_norm(node):
            return f": {BATCH_NORM}"
        why = self._trace.samples.why_not(node)
        return f" ({node.meta.get('place')})" if why is None else f": {why}"

    def _place_loss(self) -> None:
        """Put everything that mixes samples into the op that holds the loss; couple that op if its loss
        cannot be split.
        """
        mixed = sorted((n for n in self._mixed if n not in self._home), key=self._order.__getitem__)
        if not mixed and self._trace.loss in self._home:
            loss_op = self._home[self._trace.loss]
            reason = self._why_whole() or self._why_whole_in_sum(loss_op)
            if reason is not None:
                self._coupled.setdefault(loss_op, reason)
            return
        producers = {self._home[source] for node in mixed for source in self._homed_inputs(node)}
        loss_home = self._loss_home
        home = max(producers, default=loss_home)
        if home != loss_home and (len(producers) > 1 and not self._has_all(home, mixed)):
            home = loss_home
        reason = self._why_whole()
        if (reason is not None and home not in self._coupled) or self._trains_own_loss():
            home = loss_home
        for node in mixed or [self._trace.loss]:
            self._home[node] = home
        reason = reason or self._why_whole_in_sum(home)
        if reason is not None:
            self._coupled.setdefault(home, reason)

    def _trains_own_loss(self) -> bool:
        """Whether this is an evaluation, and the loss an op of its own in training, as it takes more there:
        what layers in between give, for further heads.
        """
        return self._at_hand is not None and len(self._at_hand.held) > self._loss_home

    def _why_whole(self) -> str | None:
        """Why the loss can only be computed for the whole batch; None: it is known how its shares add up."""
        try:
            self._find_part()
        except NotKnownError as error:
            return f"{NO_MEAN.format(reduction=self._trace.task.reduction)}: {error.reason}"
        return None

    def _why_whole_in_sum(self, op: int) -> str | None:
        return WHOLE_IN_SUM if self._trace.task.reduction == "sum" and self._takes_whole(op) else None

    def _find_part(self) -> LossPart:
        own_losses = self._own_losses()
        return find_part(
            self._trace, self._mixed | own_losses | self._fixed_of_all(), self._reordering, own_losses
        )

    def _fixed_of_all(self) -> set[fx.Node]:
        """What is made of fixed fields of all samples, computed where it is used: a share has another."""
        states = self._trace.samples.states
        made = (node for node in self._order if node.op not in ("placeholder", "get_attr", "output"))
        return {
            node
            for node in made
            if self._shapes.is_fixed(node)
            and not all(isinstance(state, Whole | Batch) for state in states(node))
        }

    def loss_part(self, homes: Homes) -> LossPart:
        """What a share of the loss computes, once all nodes have their homes."""
        op = homes.num_ops - 1
        if op not in homes.coupled:
            return self._find_part()
        return find_part_of_whole(self._trace, {node for node, home in homes.op.items() if home == op})

    def _move_unordered(self) -> None:
        """Let rows be put into an order of which no share can be cut only where they are used, behind all
        other ops.
        """
        for node in reversed(self._trace.graph.nodes):
            if node not in self._home or node in self._trace.operators:
                continue
            homes = {self._home.get(user) for user in node.users}
            if homes == {self._loss_home} and not self._trace.samples.is_cut_by_rows(node):
                self._home[node] = self._loss_home

    def _own_losses(self) -> set[fx.Node]:
        return {node for node in self._trace.operators if self._is_own_loss(node)} | self._taken_out

    def _takes_whole(self, op: int) -> bool:
        """Whether an op takes a value without a batch from another op."""
        members = [node for node, home in self._home.items() if home == op]
        every = {source for node in members for source in self._homed_inputs(node)}
        inputs = {source for source in every if self._home[source] != op}
        return any(not self._has_batch(source) for source in inputs if self._shapes.is_tensor(source))

    def _is_batch_norm(self, node: fx.Node) -> bool:
        """Whether a node normalises over the batch, in a way that cannot be summed over shares."""
        return node.op == "call_module" and has_other_norms(self._module_of(node))

    def _module_of(self, node: fx.Node) -> nn.Module:
        return self._trace.root.get_submodule(str(node.target))

    def _homed_inputs(self, node: fx.Node) -> list[fx.Node]:
        """Values of ops that a node needs, seen through what is computed where it is used."""

        def is_seen_through(source: fx.Node) -> bool:
            in_passing = source not in self._home and source not in self._mixed
            return in_passing and question_of(source, self._shapes) is None

        sources = reached(
            node.all_input_nodes, lambda source: source.all_input_nodes if is_seen_through(source) else ()
        )
        return [source for source in sources if source in self._home]

    def _find_consumers(self) -> dict[fx.Node, set[int]]:
        """For each node, the operators that it reaches through glue."""
        index = {node: op for op, node in enumerate(self._trace.operators)}
        consumers: dict[fx.Node, set[int]] = {}
        for node in reversed(self._trace.graph.nodes):
            reached: set[int] = set()
            for user in node.users:
                reached |= {index[user]} if user in index else consumers[user]
            consumers[node] = reached
        return consumers

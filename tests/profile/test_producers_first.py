"""The order of a graph: producers first, otherwise as given."""

from __future__ import annotations

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spindle_cli.profile.metagraph import CycleError, producers_first


def test_of_what_is_ready_together_the_given_order_counts() -> None:
    assert producers_first({"d": "ab", "c": (), "b": (), "a": "c"}) == ("c", "b", "a", "d")


def test_a_cycle_is_named_with_its_first_node_again_at_the_end() -> None:
    with pytest.raises(CycleError) as caught:
        producers_first({"x": (), "a": ("x", "c"), "b": "a", "c": "b"})
    assert caught.value.cycle[0] == caught.value.cycle[-1]
    assert set(caught.value.cycle) == {"a", "b", "c"}
    assert str(caught.value).count(" -> ") == 3


@given(data=st.data())
def test_it_is_that_of_the_generations_of_the_graph(data: st.DataObject) -> None:
    nodes = data.draw(st.permutations(range(8)))
    inputs = {
        node: sorted(data.draw(st.sets(st.sampled_from(range(node)), max_size=3)) if node else ())
        for node in nodes
    }
    graph = networkx.DiGraph([(producer, node) for node, of in inputs.items() for producer in of])
    graph.add_nodes_from(nodes)
    expected = [
        node for ready in networkx.topological_generations(graph) for node in sorted(ready, key=nodes.index)
    ]
    assert list(producers_first(inputs)) == expected

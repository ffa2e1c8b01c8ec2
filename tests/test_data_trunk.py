from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftloop.core.errors import InputError
from draftloop.data.trunk import Trunk, response_trunk, turn_id

trunks = st.lists(st.tuples(st.integers(0, 10**6), st.booleans()), min_size=1, max_size=30).map(
    lambda rest: Trunk("a", "s", 2, (0, *(t for t, _ in rest), 1), (False, *(m for _, m in rest), True), True)
)


@given(trunk=trunks)
def test_json_round_trip(trunk):
    assert Trunk.from_json(json.loads(json.dumps(trunk.to_json()))) == trunk


@given(trunk=trunks)
def test_spans_are_the_mask(trunk):
    assert [i in {at for a, b in trunk.spans for at in range(a, b)} for i in range(len(trunk))] == list(trunk.mask)
    assert all(b < a for (_, b), (a, _) in zip(trunk.spans, trunk.spans[1:], strict=False))  # maximal runs
    assert trunk.spans[0][0] == trunk.first == len(trunk.prompt)
    assert trunk.supervised == sum(b - a for a, b in trunk.spans)
    assert trunk.prompt == trunk.tokens[: trunk.first]


@pytest.mark.parametrize(
    ("tokens", "mask", "says"),
    [
        ((1, 2), (False, False), "no token of the trunk is supervised"),
        ((1, 2), (True, True), "first token"),
        ((1, 2), (True, False), "first token"),
        ((1, 2), (False,), "2 tokens but 1 mask"),
        ((), (), "no token of the trunk is supervised"),
    ],
)
def test_useless_masks_are_refused(tokens, mask, says):
    with pytest.raises(InputError, match=says) as caught:
        Trunk("name", "s", 0, tokens, mask, True)
    assert caught.value.where == "name"


def test_response_trunk():
    trunk = response_trunk([5, 6, 7], [8, 9], "a", "s", 3, False)
    assert trunk == Trunk("a", "s", 3, (5, 6, 7, 8, 9), (False, False, False, True, True), False)
    assert (trunk.first, trunk.spans) == (3, ((3, 5),))
    for prompt, response in (([], [1]), ([1], [])):
        with pytest.raises(InputError):
            response_trunk(prompt, response, "a", "s", 0, True)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": None},
        {"tokens": ["x"]},
        {"supervised": [[1, 9]]},
        {"supervised": [[2, 1]]},
        {"supervised": [[-1, 2]]},
        {"supervised": [1]},
        {"supervised": []},
        {"sample": "first"},
    ],
)
def test_bad_json_is_refused(change):
    good = response_trunk([5, 6], [7], "a", "s", 0, True).to_json()
    with pytest.raises(InputError):
        Trunk.from_json({**good, **change}, where="f:1")
    for key in good:
        with pytest.raises(InputError, match="f:1"):
            Trunk.from_json({k: v for k, v in good.items() if k != key}, where="f:1")


def test_turn_ids():
    assert [turn_id("a", turn) for turn in range(3)] == ["a", "a/turn2", "a/turn3"]

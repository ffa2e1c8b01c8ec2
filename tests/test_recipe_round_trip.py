"""What is dumped is what is loaded: any recipe, any YAML, every key, the fingerprint."""

from __future__ import annotations

import itertools
import os
from typing import Any, Literal, get_args, get_origin

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftloop.recipe import ObjectivePart, Part, Recipe, Source, StagePart
from draftloop.recipe_families import COMPILED, FAMILY_KEYS
from draftloop.recipe_file import dump_recipe, load_recipe, recipe_differences, recipe_fingerprint, resolved
from draftloop.recipe_reference import _options, item_of, section_of
from draftloop.recipe_yaml import dump, parse
from tests.recipe_texts import BASE, load

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_TRICKY = st.sampled_from(
    ["3e-4", "yes", "~", "", "inf", ".nan", "1:30", "010", "<<", "=", "2024-01-01", "a: b", "é\x85\u2028"]
)
_CELLS = [
    {"trunks": trunks, "anchors": anchors, "proposals": proposals}
    for trunks, anchors, proposals in itertools.product(
        *(get_args(StagePart.model_fields[name].annotation) for name in ("trunks", "anchors")),
        (*get_args(Source), {"trunk": 0.5, "sampled": 1.0}),
    )
    if (anchors != "rollout" or trunks == "rollout") and (proposals != "recorded" or anchors == "rollout")
]


def _bounds(info, attribute):
    return next((getattr(rule, attribute) for rule in info.metadata if hasattr(rule, attribute)), None)


def _strategy(annotation: Any, info: Any) -> st.SearchStrategy[Any]:
    if section := section_of(annotation):
        return _part(section)
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if item := item_of(annotation):
        return st.lists(_strategy(item, info), max_size=3)
    if get_origin(annotation) is dict:
        return st.dictionaries(st.text() | _TRICKY, _JSON, max_size=3)
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        return st.integers(min_value=_bounds(info, "ge"))
    if annotation is float:
        low, high = _bounds(info, "ge"), _bounds(info, "le")
        above, below = _bounds(info, "gt"), _bounds(info, "lt")
        endless = any(getattr(rule, "allow_inf_nan", False) for rule in info.metadata)
        return st.floats(
            min_value=above if low is None else low,
            max_value=below if high is None else high,
            exclude_min=above is not None,
            exclude_max=below is not None,
            allow_nan=False,
            allow_infinity=endless if high is None and below is None else False,
        )
    if annotation is str:
        pattern = next((rule.pattern for rule in info.metadata if getattr(rule, "pattern", None)), None)
        return st.from_regex(pattern, fullmatch=True).map(str.strip) if pattern else st.text() | _TRICKY
    return st.none()


def _part(section: type[Part]) -> st.SearchStrategy[dict[str, Any]]:
    fields = {}
    for name, info in section.model_fields.items():
        if name not in ("schema_version", "stages", "method", "start"):
            fields[name] = st.one_of(*(_strategy(option, info) for option in _options(info.annotation)))
    return st.fixed_dictionaries(fields)


@st.composite
def recipes(draw) -> Recipe:
    given_ = draw(_part(Recipe))
    if given_["data"]["response"]["temperature"] == 0:
        given_["data"]["response"] |= {"samples": 1, "top_k": 0, "top_p": 1.0}  # more would be the same answer again
    if given_["data"]["response"]["server"] is None:
        given_["data"]["response"] |= {"server_model": None, "server_key_env": None}
    else:
        given_["data"]["response"]["server"] = "http://127.0.0.1:8000/v1"
    drafter = given_["drafter"]
    drafter |= {key: None for key, families in FAMILY_KEYS.items() if drafter["family"] not in families}
    if drafter["family"] not in COMPILED:
        given_["compile_drafter"] = False
    drafter |= {"markov_rank": None} if drafter.get("markov") == "none" else {}
    if drafter["draft_vocab"] != "target":
        drafter["draft_vocab"] = abs(drafter["draft_vocab"] or 0) or None
    given_["stages"] = []
    for position in range(draw(st.integers(0, 2))):
        stage = draw(_part(StagePart)) | draw(st.sampled_from(_CELLS))
        stage["name"] += f"-{position}"
        stage["method"] = draw(st.sampled_from(get_args(StagePart.model_fields["method"].annotation)))
        stage["start"] = draw(st.sampled_from(["previous", "init", *(other["name"] for other in given_["stages"])]))
        objective = stage["objective"]
        if objective["kind"] not in ("tv", "e2e_tv") or 0 < objective["temperature"] < 1e-6:
            objective["temperature"] += 0.5  # 0 is for these two, and next to nothing for none
        if drafter["family"] != "dspark" or drafter["confidence"] is False:
            objective["confidence_weight"] = None
        if 0 < stage["branch"]["temperature"] < 1e-6:
            stage["branch"]["temperature"] += 0.5
        if stage["proposals"] == "trunk" and objective["kind"] == "draft_opd":
            objective["kind"] = "reverse_kl"
        if "sampled" in stage["proposals"] and objective["accepted"] == "ce":
            objective["correction"] = False  # a sampled branch has no correction token
        given_["stages"].append(stage)
    return Recipe.model_validate(given_)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(recipe=recipes())
def test_load_of_dump_is_the_same_recipe(tmp_path, recipe):
    path = tmp_path / "out.yaml"
    dump_recipe(recipe, path)
    again = load_recipe(path)
    assert again == recipe
    assert recipe_fingerprint(again) == recipe_fingerprint(recipe)
    assert recipe_differences(recipe, again) == []
    assert resolved(again) == resolved(recipe)
    assert os.listdir(tmp_path) == ["out.yaml"]


@settings(max_examples=200, deadline=None)
@given(tree=st.dictionaries(st.text() | _TRICKY, _JSON | _TRICKY, max_size=4))
def test_yaml_round_trip_keeps_values_types_and_order(tree):
    again = parse(dump(tree), "here").tree
    assert repr(again) == repr(tree)


@settings(max_examples=100, deadline=None)
@given(tree=st.dictionaries(st.text("abc", min_size=1), st.text() | _TRICKY, max_size=4))
def test_other_yaml_readers_see_the_same_text(tree):
    assert yaml.safe_load(dump(tree)) == tree


def test_dump_writes_every_key_in_the_order_of_the_models(tmp_path):
    recipe = load(tmp_path, BASE)
    dump_recipe(recipe, tmp_path / "out.yaml")
    tree = yaml.safe_load((tmp_path / "out.yaml").read_text())
    assert list(tree)[:3] == ["schema", "name", "out"]
    assert list(tree)[-1] == "evaluate"
    assert list(tree["stages"][0])[:3] == ["name", "method", "start"]
    assert set(tree["stages"][0]["objective"]) == set(ObjectivePart.model_fields)


def test_fingerprint_changes_with_every_value_but_out(tmp_path):
    base = load(tmp_path, BASE)
    seen = {recipe_fingerprint(base)}
    for override in ("seed=1", "stages.1.objective.gamma=0.7", "data.template_kwargs={a: 1}", "threads=1", "name=y"):
        seen.add(recipe_fingerprint(load(tmp_path, BASE, override)))
    assert len(seen) == 6
    assert recipe_fingerprint(load(tmp_path, BASE, "out=elsewhere")) == recipe_fingerprint(base)


def test_differences_name_what_came_and_went(tmp_path):
    found = recipe_differences(load(tmp_path, BASE), load(tmp_path, BASE, "data.train=[b, c]", "out=x"))
    assert found == ["`data.train.0`: a.jsonl, now b", "`data.train.1`: absent, now c"]

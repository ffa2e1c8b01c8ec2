"""Recipes from YAML and overrides: round trips, every way to get one wrong, and no input that ends in a traceback."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftloop.core.errors import InputError
from draftloop.recipe import ObjectivePart, Part, Recipe, Source, StagePart
from draftloop.recipe_families import FAMILY_KEYS
from draftloop.recipe_file import dump_recipe, load_recipe, recipe_differences, recipe_fingerprint, resolved
from draftloop.recipe_reference import _options, item_of, section_of
from draftloop.recipe_yaml import dump, parse

BASE = """\
name: x
data:
  train: [a.jsonl]
drafter:
stages:
  - name: sft
    method: sft
    steps: 100
  - {name: v1.5, method: draft-opd, steps: 5}
"""
ROOT = Path(__file__).parents[1]


def load(tmp_path: Path, text: str, *overrides: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path, overrides)


def complaint(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load(tmp_path, text, *overrides)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


# ---------------------------------------------------------------------------------------------- reading and overriding


def test_defaults_alone():
    assert load_recipe(None) == Recipe()
    assert load_recipe(None, ["drafter.layers=5"]).drafter.layers == 5


def test_reads_what_is_written(tmp_path):
    recipe = load(tmp_path, BASE)
    assert recipe.data.train == ["a.jsonl"]
    assert recipe.drafter == Recipe().drafter  # an empty section has its defaults
    assert [stage.steps for stage in recipe.stages] == [100, 5]
    assert recipe.stages[1].objective.kind == "draft_opd"
    assert recipe.stages[1].optimiser.lr == 3e-4


def test_overrides_of_every_kind(tmp_path):
    recipe = load(
        tmp_path,
        BASE,
        "stages.0.optimiser.lr=3e-4",
        "stages.sft.steps=7",
        "stages.v1.5.steps=8",  # a name with a dot
        "data.train=[a.jsonl,b.jsonl]",
        "data.train.1=c.jsonl",  # upon what the one before gave
        "data.template_kwargs.enable_thinking=false",
        "data.template_kwargs.deep.date=2024-07-26",
        "drafter={layers: 3, taps: 4}",
        "drafter.taps=null",
        "stages.sft.objective.decay=inf",
        "out=runs/a=b",
        "data.dir=",
        "data.dir='3'",
    )
    first, second = recipe.stages
    assert first.optimiser.lr == 3e-4
    assert first.steps == 7
    assert second.steps == 8
    assert recipe.data.train == ["a.jsonl", "c.jsonl"]
    assert recipe.data.template_kwargs == {"enable_thinking": False, "deep": {"date": "2024-07-26"}}
    assert (recipe.drafter.layers, recipe.drafter.taps) == (3, None)
    assert first.objective.decay == float("inf")
    assert recipe.out == "runs/a=b"
    assert recipe.data.dir == "3"


def test_a_cell_given_beats_its_method_wherever_it_was_given(tmp_path):
    recipe = load(tmp_path, BASE, "stages.sft.method=draft-opd", "stages.sft.trunks=rollout", "stages.1.optimiser.lr=1")
    assert recipe.stages[0].anchors == "rollout"
    assert recipe.stages[1].optimiser.lr == 1.0
    assert load(tmp_path, BASE, "stages.1.optimiser.clip=2").stages[1].optimiser.lr == 3e-4  # the method's stays


def test_an_override_changes_nothing_else(tmp_path):
    before, after = load(tmp_path, BASE), load(tmp_path, BASE, "stages.sft.optimiser.lr=0.5")
    assert recipe_differences(before, after) == ["`stages.0.optimiser.lr`: 0.001, now 0.5"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E3", 1000.0),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("010", 10),
        ("+7", 7),
        ("inf", float("inf")),
        ("-.INF", float("-inf")),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2024-07-26", "2024-07-26"),
        ("e5", "e5"),
        ("nano", "nano"),
        ("infinite", "infinite"),
        ("'3e-4'", "3e-4"),
        ("!!str 3", "3"),
        ("", None),
        ("~", None),
        ("True", True),
    ],
)
def test_scalars(text, value):
    found = parse(text, "here").tree
    assert found == value
    assert type(found) is type(value)


def test_anchors_and_merges():
    tree = parse("a: &a {x: 1, y: 2}\nb: &b {y: 3, z: 4}\nc: {<<: [*a, *b], z: 5}\nd: *a\n", "here").tree
    assert tree["c"] == {"x": 1, "y": 2, "z": 5}
    assert tree["d"] == tree["a"]
    assert tree["d"] is not tree["a"]


def test_lines():
    lines = parse("a: 1\nb:\n  - x\n  - y: 2\n", "here").lines
    assert lines == {("a",): 1, ("b",): 2, ("b", 0): 3, ("b", 1): 4, ("b", 1, "y"): 4}


# ------------------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        ("lr: 3\n", [":10:", "no key `lr`", "belongs in `stages.N.optimiser`"]),
        ("dtype: float32\n", ["belongs in `target`"]),
        ("sead: 1\n", [":10:", "no key `sead`", "mean `seed`"]),
        ("batchsize: 4\n", ["`stages.N.batch_size`", "`evaluate.batch_size`"]),
        ("xyzzy: 1\n", ["no key `xyzzy`", "It may hold schema, name"]),
        (
            "evaluate:\n  prompts: 3\n",
            [":11:", "`evaluate.prompts`", "mean `evaluate.audit_prompts`", "`stages.N.rollout`"],
        ),
        ("schema_version: 1\n", ["no key `schema_version`", "mean `schema`"]),
        ("1: 2\n", ["no key `1`"]),
        ("name: y\n", [":10:", "`name` is given twice", "line 1"]),
        ("target:\n  model: a\n  model: b\n", [":12:", "`target.model` is given twice", "line 11"]),
        ("a: [\n", [":11:1:", "not valid YAML"]),
        ("\tb: 1\n", [":10:1:", "not valid YAML"]),
        ("b: *q\n", [":10:4:", "undefined alias"]),
        ("b: &b [*b]\n", [":10:", "alias"]),
        ("b: !!python/object:os.system {}\n", [":10:", "tag"]),
        ("b: !!int x\n", [":10:", "'x' is no int"]),
        ("? [a]\n: 3\n", [":10:", "key must be a single word"]),
        ("<<: 3\n", [":10:", "`<<` takes a mapping"]),
        ("--- \nfoo: 1\n", [":10:1:", "single document"]),
        ("x: \x01\n", ["not valid YAML"]),
        ("schema: 2\nfoo: 3\n", [":10:", "schema 2 is not 1"]),
        ("schema: '1'\n", ["schema 1 is not 1"]),
        ("target: {model: 3}\n", [":10:", "`target.model` cannot be 3", "takes text", "Quote"]),
        ("target:\n  dtype: half\n", [":11:", "cannot be 'half'", "auto, float32 or bfloat16"]),
        ("target: smollm2\n", ["`target` cannot be 'smollm2'", "a section"]),
        ("seed: -1\nthreads: 0\n", [":10:", "`seed` cannot be -1", "a whole number of at least 0"]),
        ("threads: 0\nseed: -1\n", [":10:", "`threads` cannot be 0", "at least 1, or null"]),  # the first in the file
    ],
)
def test_mistakes_in_the_file(tmp_path, extra, parts):
    message = complaint(tmp_path, BASE + extra)
    assert str(tmp_path / "recipe.yaml") in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("stages.0.lr=1", ["no key `stages.0.lr`", "belongs in `stages.0.optimiser`"]),
        ("stages.sft.optimizer.lr=1", ["no key `stages.0.optimizer`", "mean `stages.0.optimiser`"]),
        ("stages.2.steps=3", ["`stages` has no entry '2'", "0 (sft), 1 (v1.5)"]),
        ("stages.-1.steps=3", ["no entry '-1'"]),
        ("stages.foo.steps=3", ["no entry 'foo'"]),
        ("data.train.1=b", ["`data.train` has no entry '1'", "It has 0"]),
        ("data.test.0=b", ["`data.test` has no entry '0'", "no entries"]),
        ("drafter.layers.x=1", ["`drafter.layers` holds a single value"]),
        ("data.train.0.x=1", ["`data.train.0` holds a single value"]),
        ("stages.0.steps", ["no override", "dotted.path=value"]),
        ("=3", ["no override"]),
        ("data..dir=3", ["no override"]),
        ("stages.0.steps=[", ["not valid YAML"]),
        ("stages.0.steps=-1", ["cannot be -1", "a whole number of at least 1, or null"]),
        ("stages.0.steps=1.0", ["cannot be 1.0"]),
        ("stages.0.steps=true", ["cannot be true"]),
        ("stages.0.steps='3'", ["cannot be '3'"]),
        (
            "stages.0.method=[sft]",
            ["`stages.0.method` cannot be a list", "sft, off-policy-kl, overlap, draft-opd, specopd or custom"],
        ),
        ("stages.0.optimiser.lr=.nan", ["cannot be nan", "a number above 0"]),
        ("stages.0.optimiser.lr=inf", ["cannot be inf"]),
        ("stages.0.objective.decay=.nan", ["cannot be nan"]),
        ("stages.0.optimiser.beta1=1", ["cannot be 1", "at least 0 and below 1"]),
        ("stages.0.optimiser.lr={a: 1}", ["cannot be a mapping"]),
        ("drafter.mask_token=1.5", ["cannot be 1.5", "a whole number, or text, or null"]),
        ("drafter.target_layers=[1,a]", ["`drafter.target_layers.1` cannot be 'a'", "list of whole numbers"]),
        ("data.train=a.jsonl", ["a list of texts"]),
        ("name=a b", ["cannot be 'a b'"]),
        ("target.trust_remote_code=yes", ["cannot be 'yes'", "true or false"]),
        ("stages=[{steps: 3}]", ["`stages.0` has no `name`"]),
        ("stages={sft: {steps: 3}}", ["`stages` cannot be a mapping", "list of sections"]),
        ("stages=[3]", ["`stages.0` cannot be 3"]),
        ("stages=[{name: a, foo: 1}]", ["no key `stages.0.foo`"]),
        ("schema=0", ["schema 0 is not 1"]),
        ("schema=true", ["schema true is not 1"]),
    ],
)
def test_mistakes_in_an_override(tmp_path, override, parts):
    message = complaint(tmp_path, BASE, override)
    assert f"override {override!r}" in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("stages.0.objective.kind=draft_opd", "draft_opd needs proposals"),
        ("stages.0.anchors=rollout", "need trunks: rollout"),
        ("stages.1.start=later", "no earlier stage"),
        ("stages.0.name=v1.5", "is taken"),
        ("stages.0.proposals={}", "needs at least one of trunk, sampled"),
        ("stages.0.proposals={trunk: 0.5, sampeld: 1}", "did you mean sampled"),
        ("stages.0.proposals={trunk: 0, sampled: 1}", "the weight of trunk is 0"),
        ("stages.0.proposals={trunk: .inf}", "must be a number above 0"),
        ("stages.0.proposals={trunk: true}", "the weight of trunk is True"),
        ("data.response.server=garbage", "is no URL"),
        ("data.response.top_k=5", "top_k and top_p have no effect at temperature 0"),
    ],
)
def test_cells_that_contradict_each_other(tmp_path, override, part):
    assert part in complaint(tmp_path, BASE, override)


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n", "3\n", "[" * 3000])
def test_no_mapping(tmp_path, text):
    complaint(tmp_path, text)


def test_files_that_cannot_be_read(tmp_path):
    for path, part in ((tmp_path / "none.yaml", "no such recipe"), (tmp_path, "directory")):
        with pytest.raises(InputError, match=part):
            load_recipe(path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"name: \xff\xfe")
    with pytest.raises(InputError, match="byte 6 is not UTF-8"):
        load_recipe(binary)
    with pytest.raises(InputError, match="cannot be read"):
        load_recipe(binary / "below")


def test_schema_may_be_missing(tmp_path):
    assert load(tmp_path, BASE) == load(tmp_path, "schema: 1\n" + BASE)


def test_byte_order_mark(tmp_path):
    assert load(tmp_path, "\ufeff" + BASE) == load(tmp_path, BASE)


_KEYISH = st.sampled_from(["name", "stages", "stages.0", "data.train", "target", "steps", "x", "0", "<<", "schema", ""])
_VALUEISH = st.sampled_from(
    ["1", "-1", "[", "{}", "[1]", "~", "{name: a}", "[{name: a}]", "*a", "&a", "!!x", "'", "1e999"]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.tuples(_KEYISH, _VALUEISH) | st.tuples(st.text(max_size=8), st.text(max_size=8)), max_size=4),
    overrides=st.lists(st.tuples(_KEYISH, _VALUEISH).map("=".join) | st.text(max_size=12), max_size=2),
)
def test_no_input_ends_in_a_traceback(tmp_path, lines, overrides):
    try:
        recipe = load(tmp_path, "".join(f"{key}: {value}\n" for key, value in lines), *overrides)
    except InputError as error:
        message = str(error)
    else:
        message = ""
        assert isinstance(recipe, Recipe)
    assert "\n" not in message


# --------------------------------------------------------------------------------------------------------- round trips

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


# ----------------------------------------------------------------------------------------------------------- the models


def test_assignment_is_checked_and_keeps_the_rest():
    stage = StagePart(name="a", method="draft-opd")
    stage.optimiser.lr = 0.5
    stage.steps = 3
    assert (stage.optimiser.lr, stage.steps, stage.anchors) == (0.5, 3, "rollout")
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        stage.steps = 0


@pytest.mark.parametrize("name", ["sft", "draft-opd", "specopd"])
def test_committed_recipes(name):
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    assert recipe.stages
    assert all(stage.steps for stage in recipe.stages)
    assert any(stage.method == name for stage in recipe.stages)

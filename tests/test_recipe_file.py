"""Recipes from YAML and overrides: round trips, every way to get one wrong, and no input that ends in a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftloop.core.errors import InputError
from draftloop.drafter.families import FAMILIES
from draftloop.recipe import Recipe, StagePart
from draftloop.recipe_file import load_recipe, recipe_differences
from draftloop.recipe_yaml import parse
from tests.recipe_texts import BASE, load

ROOT = Path(__file__).parents[1]


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


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_is_not_compiled_is_refused_when_the_recipe_is_read(tmp_path, family):
    overrides = ("compile_drafter=true", f"drafter={{family: {family}}}")
    if family in ("eagle3", "mtp"):
        assert f"compile_drafter means nothing for drafter.family {family}" in complaint(tmp_path, BASE, *overrides)
    else:
        (tmp_path / "recipe.yaml").write_text(BASE, encoding="utf-8")
        assert load_recipe(tmp_path / "recipe.yaml", overrides).compile_drafter


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

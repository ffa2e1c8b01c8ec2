"""Measurements run by a list: order, failures, limits, going on after a kill; and the list behind the published figures."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import yaml

from draftloop.recipe_file import load_recipe

ROOT = Path(__file__).parents[1]


@pytest.fixture
def lanes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import lanes

    return lanes


@pytest.fixture
def go(lanes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(tasks, *words):
        text = tasks if isinstance(tasks, str) else yaml.safe_dump(tasks, sort_keys=False)
        Path("list.yaml").write_text(text, encoding="utf-8")
        return lanes.main(["list.yaml", *words, "--state", "state"])

    return run


def told(name):
    return {"run": f"echo {name} >> order", "minutes": 1}


def order():
    return Path("order").read_text(encoding="utf-8").split()


def test_what_is_needed_comes_first_and_what_failed_is_not_built_upon(go, capsys):
    tasks = {
        "b": told("b"),
        "broken": {"run": "false; echo never >> order", "minutes": 1},
        "on-broken": told("on-broken") | {"needs": ["broken"]},
        "on-that": told("on-that") | {"needs": ["on-broken"]},
        "last": told("last") | {"needs": ["b"], "after": ["broken"]},
    }
    assert go(tasks, "--lanes", "2") == 1
    assert order() == ["b", "last"]
    said = capsys.readouterr().out
    assert "broken: failed (exit status 1)" in said
    assert "on-broken: left (for want of broken)" in said
    assert "on-that: left (for want of on-broken)" in said


def test_what_is_done_is_not_done_again_and_a_name_brings_its_needs(go):
    tasks = {"a": told("a"), "b": told("$DRAFTLOOP_TASK") | {"needs": ["a"]}, "c": told("c")}
    assert go(tasks, "b") == 0
    assert order() == ["a", "b"]
    assert go(tasks, "b", "c") == 0
    assert order() == ["a", "b", "c"]


def test_two_lanes_work_side_by_side_and_one_does_not(go):
    meet = "touch $DRAFTLOOP_TASK; for i in $(seq 100); do [ -e {other} ] && exit 0; sleep 0.05; done; exit 1"
    tasks = {one: {"run": meet.replace("{other}", other), "minutes": 1} for one, other in (("x", "y"), ("y", "x"))}
    assert go(tasks, "--lanes", "2") == 0


def test_a_measurement_over_its_minutes_is_ended_with_all_that_it_began(go, capsys):
    tasks = {"slow": {"run": "(sleep 2; touch survivor) & sleep 60", "minutes": 0.01}, "next": told("next")}
    began = time.monotonic()
    assert go(tasks, "--lanes", "1") == 1
    assert time.monotonic() - began < 20
    assert "slow: failed (over 0.01 minutes)" in capsys.readouterr().out
    assert order() == ["next"]
    time.sleep(2.2)
    assert not Path("survivor").exists()


def test_nothing_is_begun_that_might_not_end_in_time(go, capsys):
    assert go({"long": told("long") | {"minutes": 5}, "short": told("short") | {"minutes": 0.5}}, "--minutes", "1") == 1
    assert order() == ["short"]
    assert "long: left (for want of time)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: {run: x}", "a has run and minutes"),
        ("a: {run: x, minutes: 1, need: [b]}", "and nothing else"),
        ("a: {run: x, minutes: 1, needs: [b]}\nb: {run: x, minutes: 1}", "does not stand above it"),
        ("- a", "lanes: "),
    ],
)
def test_a_wrong_list_is_one_sentence(go, capsys, text, why):
    assert go(text) == 2
    assert why in capsys.readouterr().err
    assert go({"a": told("a")}, "z") == 2
    assert "there is no measurement z; there are a" in capsys.readouterr().err


def test_the_published_list_names_what_there_is(lanes):
    tasks = lanes.read(ROOT / "benchmarks" / "h200.yaml")
    text = "\n".join(task.run.replace("$DRAFTLOOP_TASK", task.name) for task in tasks)
    scripts = set(re.findall(r"benchmarks/(\w+\.py)", text))
    recipes = set(re.findall(r"recipes/[\w/-]+\.yaml", text))
    assert {"families.py", "small_hybrid.py", "decode_compare.py", "branch_throughput.py"} <= scripts
    assert len(recipes) == 6
    assert all((ROOT / "benchmarks" / one).is_file() for one in scripts)
    for one in recipes:
        load_recipe(ROOT / one)

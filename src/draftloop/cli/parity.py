"""The command that compares an engine with our own decoding: `parity`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from draftloop.cli.app import AsJson, Files, TargetName, Trust, app, drafter_folder, engine_target, say
from draftloop.cli.early import check_inputs, note_idle
from draftloop.core.errors import InputError


@app.command()
def parity(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="Drafter folder, run directory or ngram: what the engine should serve.")],
    engine: Annotated[Literal["vllm"], typer.Option(help="The engine to compare with.")] = "vllm",
    engine_python: Annotated[
        Path | None, typer.Option(help="Python of the engine's environment (default: $DRAFTLOOP_VLLM_PYTHON).")
    ] = None,
    prompts: Files = ["builtin:test"],  # noqa: B006
    target: TargetName = "smollm2",
    count: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 128,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 96,
    temperature: Annotated[list[float], typer.Option(min=0, help="May be repeated.")] = [0.0, 1.0],  # noqa: B006
    exported: Annotated[
        Path | None, typer.Option(help="Serve this folder instead of RUN's own drafter, which stays the reference.")
    ] = None,
    draft_sample_method: Annotated[
        Literal["greedy", "probabilistic"],
        typer.Option(help="The engine's; with probabilistic only independent decoding can be compared."),
    ] = "greedy",
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of both sides; in float32 few differences are rounding.")
    ] = "float32",
    diagnose: Annotated[bool, typer.Option("--diagnose", help="Try counterfactuals, and name the cause.")] = False,
    out: Annotated[Path, typer.Option("--out", "-o", help="For raw rows; the same command goes on there.")] = Path(
        "runs/parity"
    ),
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Whether an engine accepts what our own decoding accepts. Exit 1, and where it first differs, if not.

    The engine answers at batch 1; our drafter is walked over its very text, so every verification is compared. Example:

        draftloop parity runs/mine --engine-python ~/vllm/bin/python --prompts gsm8k.jsonl --diagnose
    """
    from draftloop.data.chat import encode_prompt
    from draftloop.data.prompts import read_prompts
    from draftloop.drafter.build import for_decoding
    from draftloop.drafter.mtp import MTPSpec
    from draftloop.drafter.ngram import ngram_spec
    from draftloop.drafter.spec import DFlashSpec
    from draftloop.engines.parity import Question, Setting
    from draftloop.engines.parity import parity as compare
    from draftloop.engines.serve import find_engine
    from draftloop.engines.variants import read_as_is
    from draftloop.engines.verdict import summarise
    from draftloop.engines.verdict_table import verdict_table
    from draftloop.engines.vllm import chosen_python, read_rows
    from draftloop.formats.load import load_drafter
    from draftloop.formats.mtp import NATIVE, native_folder
    from draftloop.formats.serving import check_served
    from draftloop.target.load import load_target
    from draftloop.train.material import alone, command, hardware, versions
    from draftloop.train.progress import reporting

    native, lookup = str(run) == NATIVE, ngram_spec(run)
    if lookup is not None and (exported or diagnose or draft_sample_method != "greedy"):
        what = "n-gram lookup has no checkpoint to replace or to diagnose, and never draws its drafts"
        raise InputError(what, where=str(run), fix="Leave out --exported, --diagnose and --draft-sample-method.")
    named = exported or drafter_folder(run)
    if not native and lookup is None and not (named / "config.json").is_file():
        raise InputError("there is no checkpoint", where=str(named), fix="Give the folder that the engine is to load.")
    check_inputs([run], prompts, count, folders=[out])
    if not any(temperature):
        note_idle(context, "at temperature 0", "seed")
    found_engine = find_engine(engine, chosen_python(engine_python))
    loaded = load_target(target, dtype=dtype, trust_remote_code=trust_remote_code)
    folder = native_folder(loaded) if native else drafter_folder(run)
    served = exported or folder
    drafter = for_decoding(load_drafter(folder, loaded), loaded)
    asked = read_prompts(prompts, Path("."), count)
    questions = [
        Question(
            p.id, p.set, tuple(encode_prompt(loaded.tokenizer, list(p.question), template_kwargs={}, tools=p.tools))
        )
        for p in asked
    ]
    setting = Setting(tuple(sorted(set(temperature))), max_new_tokens, draft_sample_method, seed)
    plain, beside = isinstance(drafter.spec, DFlashSpec), isinstance(drafter.spec, MTPSpec)
    if diagnose and not (plain or beside):
        raise InputError("the counterfactuals are those of DFlash and MTP", where="--diagnose", fix="Leave it out.")
    check_served(engine, "", drafter.spec)
    if exported:  # what cannot be read should not cost an engine's start
        read_as_is(served, loaded) if plain else load_drafter(served, loaded)
    with alone(out):
        served_by = _holding(loaded, served, drafter.spec, out) if beside else engine_target(target) or target
        rows = compare(
            loaded,
            drafter,
            questions,
            found_engine,
            target_folder=served_by,
            served=served,
            folder=out,
            setting=setting,
            facts={"command": command(), "versions": versions(), "hardware": hardware()},
            advance=lambda what: reporting(what, unit="answers", silent=as_json),
        )
        found = summarise(read_rows(rows))
        if diagnose:
            found["diagnosis"] = _diagnosis(loaded, drafter, served, questions, out, setting, as_json)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        console = Console()
        console.print(verdict_table(found))
        console.print(found["sentence"], highlight=False, markup=False)
        for part in found.get("diagnosis", {}).values():
            console.print(part["sentence"], highlight=False, markup=False)
        if not (found["passed"] and found["lawful"]):
            more = [] if diagnose or not (plain or beside) else ["--diagnose looks for the cause, one fact at a time."]
            for said in (*found_engine.cautions, *more):
                console.print(f"note: {said}", highlight=False, markup=False)
    if not (found["passed"] and found["lawful"]):
        raise typer.Exit(1)


def _holding(target: Any, served: Path, spec: Any, out: Path) -> str:
    """The folder that the engine loads the target from, a head in it: the target's own for its own head."""
    from draftloop.formats.beside import target_with_head
    from draftloop.formats.mtp import native_folder

    own = native_folder(target)
    return str(own if own.resolve() == served.resolve() else target_with_head(own, served, spec, out / "target"))


def _diagnosis(
    target: Any,
    drafter: Any,
    served: Path,
    questions: list[Any],
    out: Path,
    setting: Any,
    quiet: bool,
    few: int = 16,
    many: int = 48,
) -> dict[str, Any]:
    """The counterfactuals, against the engine where it can be replayed and on fixed texts in any case."""
    from draftloop.core.files import write_json
    from draftloop.drafter.mtp import MTPSpec
    from draftloop.engines.compare import recorded_answers
    from draftloop.engines.diagnose import diagnose, explain, greedy_texts
    from draftloop.engines.parity import FILE
    from draftloop.engines.variants import read_as_is
    from draftloop.engines.vllm import read_rows

    found = {}
    some, beside = questions[:few], isinstance(drafter.spec, MTPSpec)
    say(quiet)("trying counterfactuals ...")
    if setting.draft_sample_method == "greedy":
        t = setting.temperatures[0]
        answers = recorded_answers(read_rows(out / FILE), {(q.set, q.id): q.ids for q in some}, t)
        head = None if beside else read_as_is(served, target).head
        found["engine"] = explain(target, drafter, answers, temperature=t, head=head).to_json()
    if not beside:  # nothing that its checkpoint says can be silently wrong
        texts = greedy_texts(target, [(q.id, q.set, q.ids) for q in questions[:many]], min(setting.max_new_tokens, 64))
        found["checkpoint"] = diagnose(served, target, texts).to_json()
    write_json(out / "diagnosis.json", {"kind": "diagnosis", **found})
    return found

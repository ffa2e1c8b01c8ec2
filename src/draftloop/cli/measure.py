"""The commands that measure: `evaluate`, `audit`, `doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from draftloop.cli.app import AsJson, Files, TargetName, Trust, app, drafter_folder
from draftloop.core.errors import EnvironmentFault, InputError


@app.command()
def evaluate(
    drafter: Annotated[Path, typer.Argument(help="A drafter folder, or a run directory.")],
    prompts: Files = ["builtin:test"],  # noqa: B006  (typer reads the default, nothing writes to it)
    target: TargetName = "smollm2",
    decode: Annotated[bool, typer.Option("--decode", help="Decode for real, timed, not the exact walk.")] = False,
    temperature: Annotated[float, typer.Option(min=0, help="Of real decoding; 0 = greedy.")] = 0.0,
    rule: Annotated[
        Literal["match", "ratio"], typer.Option(help="Verification rule at a temperature above 0.")
    ] = "match",
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Use at most this many prompts.")] = None,
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="Of the target.")] = "auto",
    cache: Annotated[Path, typer.Option(help="Where the target's greedy answers are kept.")] = Path("runs/evaluate"),
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Acceptance length, per-position acceptance and (with --decode) speed of a drafter on prompt files."""
    from draftloop import api
    from draftloop.evaluate.table import evaluation_table
    from draftloop.train.progress import reporting

    if temperature and not decode:
        raise InputError("the exact walk is for temperature 0", where="--temperature", fix="Add --decode.")
    loaded = api.load_target(target, dtype=dtype, trust_remote_code=trust_remote_code)
    model = api.load_drafter(drafter_folder(drafter), loaded)
    with reporting("evaluate", unit="responses", silent=as_json) as advance:
        found = api.evaluate(
            loaded,
            model,
            prompts,
            folder=cache,
            how="decode" if decode else "walk",
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            rule=rule,
            batch_size=batch_size,
            limit=limit,
            advance=advance,
        )
    if as_json:
        print(json.dumps({"how": found.how, "acceptance": found.acceptance.to_json(), "speed": found.speed}, indent=2))
        return
    console = Console()
    console.print(evaluation_table(found.acceptance, name=str(drafter)))
    if found.speed:
        plain, arm = found.speed["plain"], found.speed["arms"][0]
        verdict = "faster" if arm["speedup"] > 1 else "SLOWER"
        console.print(
            f"plain {plain['tokens_per_s']:.1f} tokens/s, speculative {arm['tokens_per_s']:.1f} tokens/s:"
            f" {arm['speedup']:.2f}x ({verdict}); a round costs {arm['round_cost']:.2f} plain steps,"
            f" so it pays above tau {arm['break_even_tau']:.2f}.",
            highlight=False,
        )


@app.command()
def audit(
    drafter: Annotated[Path, typer.Argument(help="A drafter folder, or a run directory.")],
    prompts: Files = ["builtin:test"],  # noqa: B006
    target: TargetName = "smollm2",
    count: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 64,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Losslessness: greedy speculative against plain output, token for token, in float32. Exit 1 if not equal."""
    from draftloop import api
    from draftloop.data.prompts import read_prompts

    asked = [list(p.question) for p in read_prompts(prompts, Path("."), count)]
    loaded = api.load_target(target, dtype="float32", trust_remote_code=trust_remote_code)
    found = api.audit(loaded, api.load_drafter(drafter_folder(drafter), loaded), asked, max_new_tokens=max_new_tokens)
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        arm = found.arms[0]
        verdict = "lossless" if found.equal else "NOT LOSSLESS"
        print(
            f"{verdict}: {found.prompts} prompts, {found.tokens} tokens, {arm.steps} verifications, "
            f"{arm.accepted} drafts accepted; {found.near_ties} near-ties (gap below {found.gap:g}), "
            f"{arm.at_ties} responses parted at one."
        )
        if arm.first_difference:
            print(f"first difference: {arm.first_difference}")
    if not found.equal:
        raise typer.Exit(1)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check this machine: versions, device, memory, cache, attention. Exit 3 if something is missing."""
    from draftloop.doctor import diagnose, healthy, render

    findings = diagnose()
    print(json.dumps([asdict(finding) for finding in findings], indent=2) if as_json else render(findings))
    if not healthy(findings):
        raise typer.Exit(EnvironmentFault.exit_code)

"""The command that puts running servers under load: `bench`."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from draftloop.cli.app import AsJson, Files, Trust, app
from draftloop.cli.rows import row_writer
from draftloop.core.errors import EnvironmentFault, InputError

LEVELS = [1, 2, 4, 8, 16, 32]


@app.command()
def bench(
    url: Annotated[str, typer.Option("--url", help="The speculative server, e.g. http://127.0.0.1:8000/v1.")],
    plain_url: Annotated[
        str | None, typer.Option("--plain-url", help="A server of the same target without a drafter.")
    ] = None,
    prompts: Files = ["builtin:test"],  # noqa: B006
    concurrency: Annotated[
        list[int] | None, typer.Option("--concurrency", "-c", min=1, help="Requests at a time; may be repeated.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests for each server and concurrency.")] = 32,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="Use at most this many prompts.")] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model on the servers; default: the only one.")] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", "-t", help="Send token ids by this target's tokenizer, not chat messages."),
    ] = None,
    key_env: Annotated[str | None, typer.Option(help="Environment variable that holds the API key.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the raw rows there, as JSON lines.")] = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Tokens per second, latency and tau of a running OpenAI-compatible server, speculative against plain.

    Greedy, streamed, at each concurrency (default 1, 2, 4, ... 32). Only the addresses that you give are talked to.

    Example:
        draftloop bench --url http://127.0.0.1:8000/v1 --plain-url http://127.0.0.1:8001/v1 -c 1 -c 8 -o rows.jsonl
    """
    from draftloop.engines.bench import Arm
    from draftloop.engines.bench import bench as run
    from draftloop.engines.bench_table import bench_table, summarise
    from draftloop.target.server import Server
    from draftloop.train.progress import reporting

    asks = _asks(prompts, limit, target, trust_remote_code)
    arms = []
    for name, address in (("plain", plain_url), ("speculative", url)):
        if address is not None:
            server = Server(address, key_env=key_env, reply_s=120.0)
            arms.append(Arm(name, server, str(server.pick_model(model)["id"])))
    levels = sorted(set(concurrency or LEVELS))
    head = {"kind": "bench", "prompts": [Path(name).name for name in prompts], "requests": requests}
    head |= {"max_new_tokens": max_new_tokens, "concurrencies": levels, "prompts_as": "token ids" if target else "chat"}
    with ExitStack() as stack:
        write = row_writer(stack, out, {**head, **_machine()})
        advance = stack.enter_context(reporting("bench", unit="requests", silent=as_json))
        rows = run(
            arms,
            asks,
            concurrencies=levels,
            requests=requests,
            max_new_tokens=max_new_tokens,
            write=write,
            advance=advance,
        )
    found = summarise(rows)
    if as_json:
        print(json.dumps({"levels": found}, indent=2))
    else:
        Console().print(bench_table(found))
    failed = sum(one["failed"] for one in found)
    if failed:
        what = f"{failed} of {sum(one['requests'] for one in found)} requests failed"
        why = next(row["error"] for row in rows if row["kind"] == "request" and row["error"])
        raise EnvironmentFault(f"{what} (first: {why})", where=url, fix="Look into the servers' logs.")


def _asks(prompts: list[str], limit: int | None, target: str | None, trust: bool) -> list[Any]:
    from draftloop.data.chat import encode_turn
    from draftloop.data.prompts import read_prompts
    from draftloop.engines.bench import Ask
    from draftloop.target.load import load_tokenizer

    read = read_prompts(prompts, Path("."), limit)
    if not read:
        raise InputError("there is no prompt", where=", ".join(prompts), fix="Give another --prompts.")
    if target is None:
        return [Ask(one.id, messages=[dict(message) for message in one.question]) for one in read]
    tokenizer = load_tokenizer(target, trust_remote_code=trust)
    return [Ask(one.id, ids=encode_turn(tokenizer, one, [], template_kwargs={})) for one in read]


def _machine() -> dict[str, Any]:
    from draftloop.train.material import hardware, versions

    return {"client": {"versions": versions(), "hardware": hardware()}}

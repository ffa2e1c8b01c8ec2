"""A running OpenAI-compatible server: requests to it, and what its refusals mean.

Knows HTTP and the shape of the API. Does not know tokenizers, prompts or any model. It talks to the address that it was
given and to no other: no redirects, no proxies.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2 as httpx

from draftloop.core.errors import DraftloopError, EnvironmentFault, InputError

_CONNECT_S, _QUICK_S, _SILENCE_S = 5.0, 15.0, 5.0
_RETRIES = 6  # waits of 0.5, 1, 2, 4, 8, 8 seconds
_BUSY = (429, 503)

Job = TypeVar("Job")
Done = TypeVar("Done")


class Server:
    """One server.

    Args:
        url: where its API begins, e.g. http://127.0.0.1:8000/v1.
        key_env: the environment variable that holds the API key; None = no key.
        reply_s: longest wait for the next bytes of a reply, in seconds.
        fix: what the user can do when the server is gone.

    Raises:
        InputError: the URL is none, or the variable is not set.
    """

    def __init__(
        self,
        url: str,
        *,
        key_env: str | None = None,
        reply_s: float = 600.0,
        fix: str = "Start it, or check the address.",
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError("this is not the URL of a server", where=url, fix="Give e.g. http://127.0.0.1:8000/v1.")
        self.url, self.fix = url.rstrip("/"), fix
        headers = {}
        if key_env is not None:
            key = os.environ.get(key_env)
            if not key:
                raise InputError("the environment variable for the API key is not set", where=key_env, fix="Export it.")
            headers["Authorization"] = f"Bearer {key}"
        self._client = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(reply_s, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def models(self) -> list[dict[str, Any]]:
        """What the server serves; answers at once, so it also tells whether the server is alive.

        Raises:
            EnvironmentFault: it cannot be reached, or is in trouble.
            InputError: it refuses, or is no such server.
        """
        reply = self._send("GET", f"{self.url}/models", None, _QUICK_S)
        found = reply.get("data")
        if not isinstance(found, list) or not all(isinstance(one, dict) and one.get("id") for one in found):
            raise InputError("this server does not list its models", where=self.url, fix="Give the URL up to /v1.")
        return found

    def pick_model(self, wanted: str | None = None) -> dict[str, Any]:
        """The entry of the model to ask for: the one that is wanted, or the only one.

        Raises:
            InputError: it is not served, or several are.
        """
        found = self.models()
        names = [str(one["id"]) for one in found]
        if wanted is None and len(found) == 1:
            return found[0]
        if wanted in names:
            return found[names.index(wanted)]
        what = f"does not serve {wanted}" if wanted else f"serves {len(found)} models, and none is named"
        raise InputError(f"the server {what}", where=self.url, fix=f"Name one of: {', '.join(names) or 'none'}.")

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """POST /completions; a server that is busy (429, 503) is asked again, with growing pauses.

        Raises:
            EnvironmentFault: it cannot be reached, went away, or stays busy.
            InputError: it refuses the request.
        """
        return self._send("POST", f"{self.url}/completions", body, None)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
        """POST and read the events of the reply as they come, each with its time (`time.perf_counter`); asked once.

        Raises:
            EnvironmentFault, InputError: as in `complete`.
        """
        try:
            with self._client.stream("POST", f"{self.url}{path}", json={**body, "stream": True}) as reply:
                if reply.status_code != 200:
                    reply.read()
                    raise self._refusal(reply)
                ended = False
                for line in reply.iter_lines():
                    if line.startswith("data:"):
                        text = line.removeprefix("data:").strip()
                        if text == "[DONE]":
                            ended = True
                            break
                        yield time.perf_counter(), self._object(text)
                if not ended:
                    raise self.gone("the stream ended before its end mark")
        except httpx.HTTPError as error:
            raise self.gone(_reason(error)) from error

    def metrics(self) -> str | None:
        """The server's Prometheus page (/metrics beside /v1), or None where it has none."""
        root = self.url.removesuffix("/v1")
        try:
            reply = self._client.get(f"{root}/metrics", timeout=_QUICK_S)
        except httpx.HTTPError:
            return None
        return reply.text if reply.status_code == 200 else None

    def gone(self, reason: str) -> EnvironmentFault:
        """The fault of a server that does not answer."""
        return EnvironmentFault(f"the server does not answer ({reason})", where=self.url, fix=self.fix)

    def _send(self, method: str, url: str, body: dict[str, Any] | None, wait_s: float | None) -> dict[str, Any]:
        timeout = httpx.USE_CLIENT_DEFAULT if wait_s is None else httpx.Timeout(wait_s, connect=_CONNECT_S)
        for attempt in range(_RETRIES + 1):
            try:
                reply = self._client.request(method, url, json=body, timeout=timeout)
            except httpx.HTTPError as error:
                raise self.gone(_reason(error)) from error
            if reply.status_code not in _BUSY or attempt == _RETRIES:
                break
            time.sleep(min(0.5 * 2**attempt, 8.0))
        if reply.status_code != 200:
            raise self._refusal(reply)
        return self._object(reply.text)

    def _object(self, text: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise InputError("the server's reply is no JSON object", where=self.url, fix="Give the URL up to /v1.")
        if "error" in found and "choices" not in found:
            raise EnvironmentFault(f"the server reports: {_told(found)}", where=self.url, fix=self.fix)
        return found

    def _refusal(self, reply: httpx.Response) -> DraftloopError:
        status = reply.status_code
        try:
            told = _told(reply.json())
        except ValueError:
            told = reply.reason_phrase
        if status in (401, 403):
            fix = "Name the environment variable that holds its API key."
            return InputError(f"the server refuses the key ({status})", where=self.url, fix=fix)
        if status == 404:
            return InputError(f"the server knows no such address ({told})", where=self.url, fix="Check URL and model.")
        if status in _BUSY or status >= 500:
            return EnvironmentFault(f"the server is in trouble ({status}: {told})", where=self.url, fix=self.fix)
        return InputError(f"the server refuses the request ({status}: {told})", where=self.url, fix="Change it.")


def _told(reply: Any) -> str:
    """The server's own words, cut to one short clause."""
    error = reply.get("error", reply) if isinstance(reply, dict) else reply
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:200].rstrip(".")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": .")


def side_by_side(
    jobs: Sequence[Job],
    work: Callable[[Job], Done],
    follow: Callable[[Job, Done], Job | None] = lambda job, done: None,
    *,
    concurrency: int,
    check: Callable[[], object] = lambda: None,
) -> None:
    """Do every job on a bounded number of threads.

    Args:
        jobs: what to begin with.
        work: a job's request; runs on a thread of its own.
        follow: called on this thread with a job and its outcome, as they come; may return a further job.
        concurrency: jobs under way at a time.
        check: called whenever nothing has come back for five seconds; raises where there is no more hope.

    Raises:
        Exception: whatever the first job that fails, `follow` or `check` raises; jobs under way are then given up.
    """
    todo: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    came: queue.SimpleQueue[tuple[Job, Done | None, BaseException | None]] = queue.SimpleQueue()
    stop = threading.Event()

    def run() -> None:
        while (job := todo.get()) is not None and not stop.is_set():
            try:
                came.put((job, work(job), None))
            except BaseException as error:
                stop.set()  # here, not where it is read: nothing more is sent once a job has failed
                came.put((job, None, error))

    count = min(concurrency, len(jobs))
    for job in jobs:
        todo.put(job)
    for _ in range(count):
        threading.Thread(target=run, daemon=True).start()  # daemon: a server that hangs must not hold up our end
    left = len(jobs)
    try:
        while left:
            try:
                job, done, error = came.get(timeout=_SILENCE_S)
            except queue.Empty:
                check()
                continue
            if error is not None:
                raise error
            following = follow(job, done)  # type: ignore[arg-type]
            if following is None:
                left -= 1
            else:
                todo.put(following)
    finally:
        stop.set()
        for _ in range(count):
            todo.put(None)

"""A small OpenAI-compatible server on 127.0.0.1, in this process: it answers by a tiny target, or misbehaves as asked."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from draftloop.core.law import Sampling
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options, Request

MODEL = "toy"
COUNTERS = """# HELP vllm:spec_decode_num_drafts_total x
vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {accepted}
vllm:spec_decode_num_accepted_tokens_created{{engine="0"}} 1.7e9
"""


@dataclass
class Fake:
    """What the server does, and what it saw.

    Args:
        target: answers; None = a scripted reply of `pieces`.
        ids: tell token ids (as vLLM does), or text alone.
        change: applied to each reply before it is sent.
        dies_after: completions after which every connection is dropped.
        busy: the next so many completions are refused with 429.
        counters: publish /metrics.
    """

    target: object = None
    ids: bool = True
    change: object = None
    dies_after: int | None = None
    busy: int = 0
    counters: bool = True
    pieces: tuple = ("one", " two", " three", " four")
    pause_s: float = 0.0
    drop_stream: bool = False
    key: str | None = None
    models: tuple = (MODEL,)
    seen: list = field(default_factory=list)
    drafts: int = 5
    under_way: int = 0
    most_under_way: int = 0
    lock: object = field(default_factory=threading.Lock)

    def answer(self, body):
        ids, target = body["prompt"], self.target
        sampling = Sampling(body["temperature"], max(body["top_k"], 0), body["top_p"])
        options = Options(body["max_tokens"], sampling, seed=body["seed"])
        with self.lock:
            (made,) = decode(target, None, [Request(tuple(ids), body["seed"])], options)
        text = target.tokenizer.decode(made.tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        choice = {"text": text, "finish_reason": "stop" if made.finished else "length", "stop_reason": None}
        if self.ids:
            choice |= {"token_ids": list(made.tokens), "prompt_token_ids": list(ids)}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(made.tokens)}
        reply = {"choices": [choice], "usage": usage}
        if self.change is not None:
            self.change(reply)
        return reply


@contextlib.contextmanager
def serving(fake: Fake):
    """Run `fake`; yields the URL of its API."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def send(self, status, body, kind="application/json"):
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def dead(self):
            posts = len([path for path, _ in fake.seen])
            return fake.dies_after is not None and posts >= fake.dies_after

        def drop(self):
            self.close_connection = True
            self.connection.close()

        def do_GET(self):
            if self.dead():
                self.drop()
            elif self.path == "/metrics" and fake.counters:
                d = fake.drafts
                self.send(200, COUNTERS.format(drafts=d, drafted=7 * d, accepted=2 * d), "text/plain")
            elif self.path == "/v1/models":
                self.send(200, {"data": [{"id": name} for name in fake.models]})
            else:
                self.send(404, {"error": {"message": "not found"}})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if fake.key is not None and self.headers.get("Authorization") != f"Bearer {fake.key}":
                self.send(401, {"error": {"message": "who are you"}})
                return
            if fake.busy > 0:
                fake.busy -= 1
                self.send(429, {"error": {"message": "busy"}})
                return
            if self.dead():
                self.drop()
                return
            fake.seen.append((self.path, body))
            with fake.lock:
                fake.under_way += 1
                fake.most_under_way = max(fake.most_under_way, fake.under_way)
            try:
                if body.get("stream"):
                    self.stream(body)
                else:
                    self.send(200, fake.answer(body))
            finally:
                with fake.lock:
                    fake.under_way -= 1

        def stream(self, body):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            chat = self.path.endswith("/chat/completions")

            def event(value):
                self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
                self.wfile.flush()

            if chat:
                event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            for at, piece in enumerate(fake.pieces):
                time.sleep(fake.pause_s)
                end = "length" if at == len(fake.pieces) - 1 else None
                event(
                    {
                        "choices": [
                            {**({"delta": {"content": piece}} if chat else {"text": piece}), "finish_reason": end}
                        ]
                    }
                )
            fake.drafts += len(fake.pieces) - 1
            if fake.drop_stream:
                return
            event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3 * len(fake.pieces) - 2}})
            self.wfile.write(b"data: [DONE]\n\n")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()

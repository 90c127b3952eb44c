"""The HTTP server of rank 0: models, health, metrics, chat completions (whole and streamed)."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from .errors import EngineError
from .generate import Generator, Job
from .lane import digest

IMAGE_TOKENS = 16
BODY_LIMIT = 64 << 20


class Refused(Exception):
    """An HTTP error reply."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


class Keys:
    """API keys: given by argument or environment, or in a file that only its owner may read."""

    def __init__(self, key: str | None, path: str | None) -> None:
        self._fixed = [key] if key else []
        self._path = Path(path) if path else None
        self._stamp = 0.0
        self._read: list[str] = []
        if self._path is not None:
            mode = stat.S_IMODE(self._path.stat().st_mode)
            if mode & 0o077:
                raise EngineError(
                    "BadArgument", f"{self._path}: mode {mode:04o}, an API key file must be 0600"
                )
            self._reload()

    def _reload(self) -> None:
        if self._path is not None:
            changed = self._path.stat().st_mtime
            if changed != self._stamp:
                self._stamp = changed
                lines = self._path.read_text(encoding="utf-8").splitlines()
                self._read = [line.strip() for line in lines if line.strip()]

    def required(self) -> bool:
        return bool(self._fixed) or self._path is not None

    def allow(self, header: str | None) -> bool:
        if not self.required():
            return True
        self._reload()
        return (header or "").removeprefix("Bearer ") in [*self._fixed, *self._read]


class Server(ThreadingHTTPServer):
    """State that the handlers share."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self,
        *,
        address: tuple[str, int],
        generator: Generator,
        name: str,
        keys: Keys,
        defaults: dict[str, Any],
        vision: bool,
    ) -> None:
        super().__init__(address, Handler)
        self.generator = generator
        self.name = name
        self.keys = keys
        self.defaults = defaults
        self.vision = vision
        self.created = int(time.time())

    def models(self) -> dict[str, Any]:
        return {
            "object": "list",
            "data": [
                {
                    "id": self.name,
                    "object": "model",
                    "created": self.created,
                    "owned_by": "tensorfold",
                    "root": self.name,
                    "max_model_len": self.generator.context,
                    "context_length": self.generator.context,
                }
            ],
        }

    def health(self) -> dict[str, Any]:
        generator = self.generator
        totals, running = generator.counters, len(generator.running)
        return {
            "ok": True,
            "backend": "tensorfold",
            "busy": running > 0,
            "requests_running": running,
            "requests_total": totals.requests,
            "prompt_tokens_total": totals.prompt_tokens,
            "completion_tokens_total": totals.completion_tokens,
            "prefill_seconds_total": round(totals.prefill_seconds, 6),
            "decode_seconds_total": round(totals.decode_seconds, 6),
            "cached_tokens_total": totals.cached_tokens,
            "rounds_total": totals.rounds,
            "drafted_total": totals.drafted,
            "accepted_total": totals.accepted,
            "streams": {"decoding": running, "prefilling": 0, "max": generator.parallel},
            "context_length": generator.context,
        }

    def metrics(self) -> str:
        generator = self.generator
        totals = generator.counters
        families: list[tuple[str, str, float]] = [
            ("requests_total", "counter", totals.requests),
            ("request_errors_total", "counter", totals.errors),
            ("requests_rejected_total", "counter", totals.rejected),
            ("prompt_tokens_total", "counter", totals.prompt_tokens),
            ("cached_tokens_total", "counter", totals.cached_tokens),
            ("completion_tokens_total", "counter", totals.completion_tokens),
            ("decode_rounds_total", "counter", totals.rounds),
            ("decode_seconds_total", "counter", totals.decode_seconds),
            ("prefill_seconds_total", "counter", totals.prefill_seconds),
            ("requests_inflight", "gauge", len(generator.running)),
            ("requests_stalled", "gauge", generator.stalled()),
            ("engine_fatal", "gauge", 0),
            ("uptime_seconds", "gauge", time.time() - totals.started),
        ]
        lines: list[str] = []
        for family, kind, value in families:
            text = str(value) if isinstance(value, int) else f"{value:.6f}"
            lines.append(f"# TYPE tensorfold_{family} {kind}")
            lines.append(f'tensorfold_{family}{{model="{self.name}"}} {text}')
        return "\n".join(lines) + "\n"


def _number(body: dict[str, Any], key: str, default: Any, low: float, high: float) -> Any:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise Refused(400, f"{key} must be a number from {low} to {high}", "invalid_request_error")
    return value


class Prompt:
    """The tokens of a conversation, and the bytes of its images."""

    def __init__(self, server: Server, body: dict[str, Any], thinking: bool) -> None:
        self.tokenizer = server.generator.tokenizer
        self.vision = server.vision
        special = self.tokenizer.special
        self.tokens: list[int] = [server.generator.config.bos]
        self.images = b""
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Refused(400, "messages must be a list with at least one message", "invalid_request_error")
        for message in messages:
            if not isinstance(message, dict) or "role" not in message:
                raise Refused(400, "a message needs a role", "invalid_request_error")
            role = message["role"]
            if role in ("user", "tool"):
                self.tokens.append(special["<｜User｜>"])
            elif role == "assistant":
                self.tokens += [special["<｜Assistant｜>"], special["</think>"]]
            elif role not in ("system", "developer"):
                raise Refused(400, f"unknown role {role}", "invalid_request_error")
            self._content(message.get("content"))
            if role == "assistant":
                self.tokens.append(server.generator.config.eos)
        if body.get("tools"):
            self.tokens += self.tokenizer.encode(json.dumps(body["tools"], sort_keys=True))
        self.tokens += [special["<｜Assistant｜>"], special["<think>" if thinking else "</think>"]]

    def _content(self, content: Any) -> None:
        if content is None:
            return
        if isinstance(content, str):
            self.tokens += self.tokenizer.encode(content)
            return
        if not isinstance(content, list):
            raise Refused(400, "content must be a text or a list of parts", "invalid_request_error")
        for item in content:
            if item.get("type") == "text":
                self.tokens += self.tokenizer.encode(str(item.get("text", "")))
            elif item.get("type") == "image_url":
                self._image(str(item.get("image_url", {}).get("url", "")))
            else:
                raise Refused(400, f"unknown content part {item.get('type')}", "invalid_request_error")

    def _image(self, url: str) -> None:
        head, _, data = url.partition(",")
        if not self.vision or not head.startswith("data:image/") or not head.endswith(";base64"):
            raise Refused(400, "an image must be a data: URL", "invalid_request_error")
        try:
            self.images += hashlib.sha256(base64.b64decode(data, validate=True)).digest()
        except ValueError as error:
            raise Refused(400, "the image is not base64", "invalid_request_error") from error
        self.tokens += [self.tokenizer.special["<｜image｜>"]] * IMAGE_TOKENS


def _thinking(body: dict[str, Any], default: bool) -> bool:
    options = body.get("chat_template_kwargs") or {}
    for key in ("enable_thinking", "thinking"):
        if key in options:
            return bool(options[key])
    effort = body.get("reasoning_effort", options.get("reasoning_effort"))
    if effort is not None:
        return bool(effort != "none")
    return default


def _forced_tool(body: dict[str, Any]) -> dict[str, Any] | None:
    """The function that tool_choice names, or the first one when it only says that one is required."""
    choice = body.get("tool_choice")
    functions = [tool["function"] for tool in body.get("tools") or [] if tool.get("type") == "function"]
    if isinstance(choice, dict):
        wanted = choice.get("function", {}).get("name")
        functions = [function for function in functions if function.get("name") == wanted]
    elif choice != "required":
        return None
    if not functions:
        raise Refused(400, "tool_choice names no tool", "invalid_request_error")
    found: dict[str, Any] = functions[0]
    return found


def _arguments(function: dict[str, Any], words: list[str]) -> str:
    schema = function.get("parameters") or {}
    values: dict[str, Any] = {}
    for at, (name, kind) in enumerate((schema.get("properties") or {}).items()):
        samples = {"integer": at + 1, "number": at + 1.5, "boolean": True, "array": [], "object": {}}
        choices = kind.get("enum")
        values[name] = choices[0] if choices else samples.get(kind.get("type"), words[at % len(words)])
    return json.dumps(values)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "tensorfold"

    def log_message(self, format: str, *args: object) -> None:
        print(f"[tensorfold] {self.client_address[0]} " + format % args, flush=True)

    def _reply(self, status: int, data: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _json(self, status: int, document: object) -> None:
        self._reply(status, json.dumps(document).encode())

    def _refuse(self, error: Refused) -> None:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        self._json(error.status, {"error": {"message": error.message, "type": kind, "code": error.code}})

    def _authorize(self) -> None:
        if not self.server.keys.allow(self.headers.get("Authorization")):
            raise Refused(401, "a valid API key is required", "invalid_api_key")

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        try:
            if path == "/health":
                # With keys it says no more than that it lives, to those who have one too.
                self._json(200, {"ok": True} if self.server.keys.required() else self.server.health())
                return
            if not (path in ("/metrics", "/v1/metrics") and self.server.defaults["metrics_open"]):
                self._authorize()
            if path in ("/metrics", "/v1/metrics"):
                self._reply(200, self.server.metrics().encode(), "text/plain; version=0.0.4")
            elif path == "/v1/models":
                self._json(200, self.server.models())
            else:
                raise Refused(404, f"no route {path}", "not_found")
        except Refused as error:
            self._refuse(error)

    def do_POST(self) -> None:
        try:
            body = self._body()
            self._authorize()
            path = self.path.partition("?")[0]
            if path == "/v1/chat/completions":
                self._chat(body)
            elif path in ("/tokenize", "/v1/tokenize"):
                tokens = self.server.generator.tokenizer.encode(str(body.get("prompt", "")))
                self._json(200, {"tokens": tokens, "count": len(tokens)})
            elif path in ("/detokenize", "/v1/detokenize"):
                self._json(
                    200, {"prompt": self.server.generator.tokenizer.decode(list(body.get("tokens", [])))}
                )
            else:
                raise Refused(404, f"no route {path}", "not_found")
        except Refused as error:
            self._refuse(error)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > BODY_LIMIT:
            self.close_connection = True
            raise Refused(400, "a Content-Length is required", "invalid_request_error")
        try:
            body = json.loads(self.rfile.read(int(length)) or b"{}")
        except ValueError as error:
            raise Refused(400, "the body is no JSON", "invalid_request_error") from error
        if not isinstance(body, dict):
            raise Refused(400, "the body is no JSON object", "invalid_request_error")
        return body

    def _job(self, body: dict[str, Any]) -> Job:
        server, generator = self.server, self.server.generator
        if body.get("model") not in (None, server.name):
            raise Refused(404, f"the model {body['model']} is not served here", "model_not_found")
        if _number(body, "n", 1, 1, 1) != 1:
            raise Refused(400, "n must be 1", "invalid_request_error")
        temperature = _number(body, "temperature", server.defaults["temperature"], 0, 2)
        _number(body, "top_p", 1.0, 0, 1)
        thinking = _thinking(body, server.defaults["thinking"])
        prompt = Prompt(server, body, thinking)
        room = generator.context - len(prompt.tokens)
        default = max(min(server.defaults["max_tokens"], room), 1)
        wanted = body.get("max_completion_tokens", body.get("max_tokens"))
        limit = int(_number({"max_tokens": wanted}, "max_tokens", default, 1, 1 << 30))
        salt = b""
        if temperature > 0:
            seed = body.get("seed")
            source = repr(seed) if seed is not None else f"{prompt.tokens}"
            text = f"{os.environ.get('TENSORFOLD_SEED_SALT', '0')}:{temperature}:{source}"
            salt = digest(text.encode())
        return Job(prompt.tokens, limit, salt, thinking, bool(body.get("ignore_eos")), prompt.images)

    def _rounds(self, job: Job) -> Iterator[tuple[str, int]]:
        try:
            yield from self.server.generator.run(job)
        except EngineError as error:
            if error.name == "PromptTooLong":
                wanted = len(job.tokens) + job.max_tokens
                message = f"PromptTooLong: {wanted} positions, context {self.server.generator.context}"
                raise Refused(400, message, "context_length_exceeded") from error
            status = 503 if error.name in ("ContextFull", "NoFreeSlot") else 500
            raise Refused(status, error.name, error.name) from error

    def _usage(self, job: Job) -> dict[str, Any]:
        return {
            "prompt_tokens": len(job.tokens),
            "completion_tokens": len(job.output),
            "total_tokens": len(job.tokens) + len(job.output),
            "prompt_tokens_details": {"cached_tokens": job.cached},
            "completion_tokens_details": {"reasoning_tokens": job.reasoning_tokens},
        }

    def _log_done(self, identity: str, job: Job) -> None:
        rate = len(job.output) / job.decode_s if job.decode_s else 0.0
        print(
            f"[tensorfold] done {identity} prompt={len(job.tokens)} cached={job.cached} "
            f"thinking={job.thinking} "
            f"tokens={len(job.output)} sha={job.token_sha()} finish={job.finish} tok/s={rate:.1f} "
            f"ttft={job.prefill_s:.2f}s prefill={job.prefill_s:.2f}s rounds={job.rounds} "
            f"accepted={job.accepted}/{job.drafted}",
            flush=True,
        )

    def _chat(self, body: dict[str, Any]) -> None:
        function = _forced_tool(body)
        job = self._job(body)
        identity = uuid.uuid4().hex[:24]
        base = {"id": f"chatcmpl-{identity}", "created": int(time.time()), "model": self.server.name}
        if body.get("stream"):
            self._stream(body, job, base, function)
        else:
            texts: dict[str, list[int]] = {"reasoning": [], "content": []}
            for kind, token in self._rounds(job):
                texts[kind].append(token)
            decode = self.server.generator.tokenizer.decode
            content = decode(texts["content"]).lstrip()
            message: dict[str, Any] = {"role": "assistant", "content": content}
            if texts["reasoning"]:
                message["reasoning_content"] = decode(texts["reasoning"]).lstrip()
            finish = job.finish
            if function is not None:
                message = {
                    **message,
                    "content": None,
                    "tool_calls": [self._call(function, content, identity)],
                }
                finish = "tool_calls"
            self._json(
                200,
                {
                    **base,
                    "object": "chat.completion",
                    "choices": [{"index": 0, "message": message, "finish_reason": finish}],
                    "usage": self._usage(job),
                    "tensorfold": {
                        "prefill_s": job.prefill_s,
                        "cached": job.cached,
                        "decode_s": job.decode_s,
                        "rounds": job.rounds,
                        "drafted": job.drafted,
                        "accepted": job.accepted,
                        "drafts": self.server.generator.leader.lane.weights.drafts is not None,
                        "token_sha": job.token_sha(),
                    },
                },
            )
        self._log_done(f"req-{identity[:12]}", job)

    @staticmethod
    def _call(function: dict[str, Any], content: str, identity: str) -> dict[str, Any]:
        call = {"name": function["name"], "arguments": _arguments(function, content.split() or ["x"])}
        return {"id": f"call_{identity[:16]}", "type": "function", "function": call, "index": 0}

    def _stream(
        self, body: dict[str, Any], job: Job, base: dict[str, Any], function: dict[str, Any] | None
    ) -> None:
        rounds = self._rounds(job)
        first = next(rounds, None)  # what refuses the request is raised here, before the status line
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        decode = self.server.generator.tokenizer.decode
        words: list[int] = []

        def event(delta: dict[str, Any], finish: str | None = None) -> None:
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            chunk = {**base, "object": "chat.completion.chunk", "choices": [choice]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.flush()

        event({"role": "assistant", "content": ""})
        started = {"reasoning": False, "content": False}
        while first is not None:
            kind, token = first
            text = decode([token])
            if not started[kind]:
                text = text.lstrip()
                started[kind] = True
            if function is None:
                event({"reasoning_content" if kind == "reasoning" else "content": text})
            else:
                words.append(token)
            first = next(rounds, None)
        finish = job.finish
        if function is not None:
            event({"tool_calls": [self._call(function, decode(words).lstrip(), base["id"][9:])]})
            finish = "tool_calls"
        event({}, finish)
        if (body.get("stream_options") or {}).get("include_usage"):
            chunk = {**base, "object": "chat.completion.chunk", "choices": [], "usage": self._usage(job)}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        self.wfile.flush()

"""The HTTP face: /v1/completions, /v1/chat/completions, /v1/models and /health, as OpenAI's clients speak them."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from fathom.serve.jobs import CHAT, TEXT, Job, Refused, parse
from fathom.serve.worker import Worker

MOST_BYTES = 8 * 2**20  # of a request's body
WATCH = 0.25  # seconds between two looks whether the client is still there


def make_app(worker: Worker, name: str, timeout: float = 120.0, api_key: str | None = None) -> FastAPI:
    """The endpoint for one model. `timeout`: seconds from a request to its last token."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.thread.start()
        yield
        await asyncio.to_thread(worker.stop)

    app = FastAPI(title="fathom", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    positions = getattr(worker.model.config, "max_position_embeddings", None)
    created = int(time.time())

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        headers = {"Retry-After": "1"} if error.status == 429 else None
        return JSONResponse(described(error), error.status, headers)

    @app.middleware("http")
    async def guarded(request: Request, call_next: Any) -> Any:
        if api_key is not None and request.url.path != "/health":
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), api_key.encode()):
                error = Refused(401, "no or another API key: send the header Authorization: Bearer KEY")
                return JSONResponse(described(error), 401)
        return await call_next(request)

    @app.get("/health")
    async def health() -> JSONResponse:
        status, code = ("ok", 200) if worker.thread.is_alive() else ("stopped", 503)
        return JSONResponse({"status": status, "waiting": worker.queue.qsize()}, code)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "created": created, "owned_by": "fathom"}]}

    @app.post(f"/v1/{TEXT}")
    async def completions(request: Request) -> Any:
        return await answer(TEXT, request)

    @app.post(f"/v1/{CHAT}")
    async def chat(request: Request) -> Any:
        return await answer(CHAT, request)

    async def answer(kind: str, request: Request) -> Any:
        body = await read(request)
        job = await asyncio.to_thread(parse, kind, body, worker.tokenizer, positions, name)
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[str | None]()

        def emit(piece: str | None) -> None:
            with contextlib.suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        job.emit = emit
        worker.submit(job)
        shape = Shape(kind, name)
        if body.get("stream"):
            with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return StreamingResponse(events(shape, job, pieces, with_usage), media_type="text/event-stream")
        text = [piece async for piece in until_done(job, pieces, request)]
        if job.error is not None:
            raise job.error
        return JSONResponse(shape.whole("".join(text), job))

    async def until_done(job: Job, pieces: asyncio.Queue, request: Request | None = None) -> AsyncGenerator[str]:
        try:
            while True:
                left = job.since + timeout - time.monotonic()
                if left <= 0:
                    raise Refused(504, f"the request took more than {timeout:g} s: ask for fewer tokens")
                try:
                    piece = await asyncio.wait_for(pieces.get(), min(left, WATCH))
                except TimeoutError:
                    if request is not None and await request.is_disconnected():
                        raise Refused(499, "the client has gone") from None
                    continue
                if piece is None:
                    return
                yield piece
        finally:  # done, timed out, or the client has gone: its row ends with the next token
            job.gone = True

    async def events(shape: Shape, job: Job, pieces: asyncio.Queue, with_usage: bool) -> AsyncIterator[str]:
        try:
            async with contextlib.aclosing(until_done(job, pieces)) as text:
                async for piece in text:
                    yield event(shape.part(piece))
            if job.error is not None:
                raise job.error
        except Refused as error:
            yield event(described(error))
            return
        yield event(shape.part("", job.finish))
        if with_usage:
            yield event(shape.part(None, usage=job.usage))
        yield "data: [DONE]\n\n"

    return app


async def read(request: Request) -> Any:
    """The body's JSON. Raises Refused: 413 for too many bytes, 400 for what is no JSON object."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MOST_BYTES:
            raise Refused(413, f"the body has more than {MOST_BYTES} bytes: send less")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, f"the body is a JSON {type(body).__name__}: send an object")
    return body


def described(error: Refused) -> dict[str, Any]:
    """An error in the form that OpenAI's clients read."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.argument, "code": error.status}}


def event(value: dict[str, Any]) -> str:
    """A server-sent event that holds this value as JSON."""
    return f"data: {json.dumps(value)}\n\n"


class Shape:
    """Answers in the form of one of the two routes."""

    def __init__(self, kind: str, name: str):
        self.chat = kind == CHAT
        self.head = {"id": f"fathom-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}

    def whole(self, text: str, job: Job) -> dict[str, Any]:
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": job.finish}
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self.head, "object": kind, "choices": [choice], "usage": job.usage}

    def part(self, text: str | None, finish: str | None = None, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        said: dict[str, Any] = {"delta": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choices = [] if text is None else [{"index": 0, **said, "logprobs": None, "finish_reason": finish}]
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self.head, "object": kind, "choices": choices, **({} if usage is None else {"usage": usage})}

# ruff: noqa: E402 (the file is skipped where the server is not installed)
"""The endpoint over localhost, driven by the `openai` client: what comes back is what generate() gives."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")

import httpx
import uvicorn

from fathom.caches import StreamingLLM
from fathom.serve.app import make_app
from fathom.serve.jobs import Job
from fathom.serve.worker import Worker
from tiny import tiny_model
from tiny_checkpoint import run_cli, save_fathom, tiny_tokenizer

PROMPT = "The sea was calm"


@contextlib.contextmanager
def served(method: Any = None, model: Any = None, **options: Any) -> Iterator[tuple[str, Worker]]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    model = tiny_model(vocab_size=300, eos_token_id=0, max_position_embeddings=128) if model is None else model
    worker = Worker(model, tokenizer, method, waiting=options.pop("waiting", 128))
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(worker, "tiny", **options), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", worker
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive() and not worker.thread.is_alive()


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[str, Worker]]:
    with served() as found:
        yield found


@pytest.fixture
def client(place: tuple[str, Worker]) -> Any:
    return openai.OpenAI(base_url=f"{place[0]}/v1", api_key="none", max_retries=0, timeout=60)


def expected(worker: Worker, text: str, tokens: int) -> str:
    ids = worker.tokenizer(text, return_tensors="pt")["input_ids"]
    out = worker.model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return worker.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_completions_are_generates_text_with_usage(client: Any, place: tuple[str, Worker]) -> None:
    found = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=9, temperature=0)
    assert found.choices[0].text == expected(place[1], PROMPT, 9)
    usage = found.usage.model_dump()
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["mean_passes"] == 1 and usage["cache_bytes"] > 0
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert httpx.get(f"{place[0]}/health").json()["status"] == "ok"


def test_streams_add_up_and_chat_goes_through_the_template(client: Any, place: tuple[str, Worker]) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    stream = client.completions.create(prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **asked)
    parts = list(stream)
    whole = client.completions.create(prompt=PROMPT, **asked)
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens
    messages = [{"role": "user", "content": PROMPT}]
    chat = client.chat.completions.create(messages=messages, **asked)
    assert chat.choices[0].message.content == expected(place[1], f"user: {PROMPT}\n", 12)
    parts = list(client.chat.completions.create(messages=messages, stream=True, **asked))
    assert "".join(part.choices[0].delta.content for part in parts) == chat.choices[0].message.content


def test_stop_ends_before_its_text(client: Any, place: tuple[str, Worker]) -> None:
    whole = expected(place[1], PROMPT, 20)
    stop = whole[len(whole) // 2 :][:2]
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "stop": [stop]}
    found = client.completions.create(**asked)
    assert found.choices[0].text == whole[: whole.index(stop)] and found.choices[0].finish_reason == "stop"
    assert "".join(p.choices[0].text for p in client.completions.create(stream=True, **asked)) == found.choices[0].text


def test_a_stop_text_over_two_tokens_is_never_sent_in_part() -> None:
    sent: list[str | None] = []
    job = Job([1], 9, 0.0, 1.0, None, ("END",), emit=sent.append)
    words = {1: "a E", 2: "N", 3: "x EN", 4: "D z"}
    for token in (1, 2, 3, 4):
        job.add(token, set(), lambda tokens: "".join(words[token] for token in tokens))
    assert "".join(filter(None, sent)) == "a ENx " and job.finish == "stop"


def test_seeds_repeat_and_sampling_differs(client: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 16, "temperature": 1.5}
    texts = [client.completions.create(seed=seed, **asked).choices[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_sixty_four_at_once_get_their_own_text(place: tuple[str, Worker]) -> None:
    address, worker = place
    prompts = [PROMPT[: 3 + n % 12] for n in range(64)]
    wanted = {prompt: expected(worker, prompt, 8) for prompt in set(prompts)}

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            found = await asyncio.gather(
                *(client.completions.create(model="tiny", prompt=p, max_tokens=8, temperature=0) for p in prompts)
            )
        return [each.choices[0].text for each in found]

    assert asyncio.run(asyncio.wait_for(ask(), 60)) == [wanted[prompt] for prompt in prompts]


def test_a_client_that_leaves_midway_leaves_nothing(place: tuple[str, Worker]) -> None:
    address, worker = place
    for _ in range(3):
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 100, "stream": True, "temperature": 1.0}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=30) as answer:
            next(answer.iter_lines())
    found = httpx.post(f"{address}/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}, timeout=30)
    assert found.status_code == 200

    def jobs_held() -> int:
        gc.collect()
        return sum(type(each) is Job for each in gc.get_objects())

    until = time.monotonic() + 20  # the server's coroutine of a broken stream ends when its loop comes to it
    while jobs_held() > 1 and time.monotonic() < until:
        time.sleep(0.05)
    assert worker.queue.empty() and not worker.held
    assert jobs_held() <= 1


MALFORMED: list[Any] = [
    b"", b"{", b"null", b"[]", b'"text"', b"\xff\xfe", b"{" * 500, {}, {"prompt": None}, {"prompt": 5}, {"prompt": ""},
    {"prompt": []}, {"prompt": ["a", "b"]}, {"prompt": {}}, {"prompt": [1, 2]}, {"prompt": "a", "max_tokens": 0},
    {"prompt": "a", "max_tokens": -1}, {"prompt": "a", "max_tokens": "9"}, {"prompt": "a", "max_tokens": 1.5},
    {"prompt": "a", "max_tokens": True}, {"prompt": "a", "max_tokens": 10**30}, {"prompt": "a", "temperature": -1},
    {"prompt": "a", "temperature": 3}, {"prompt": "a", "temperature": "hot"}, {"prompt": "a", "temperature": []},
    {"prompt": "a", "top_p": 1.1}, {"prompt": "a", "top_p": -0.1}, {"prompt": "a", "top_p": False},
    {"prompt": "a", "stop": 5}, {"prompt": "a", "stop": [""]}, {"prompt": "a", "stop": ["a"] * 5},
    {"prompt": "a", "stop": [1]}, {"prompt": "a", "stop": {}}, {"prompt": "a", "stream": "yes"},
    {"prompt": "a", "stream_options": 1}, {"prompt": "a", "n": 2}, {"prompt": "a", "best_of": 3},
    {"prompt": "a", "echo": True}, {"prompt": "a", "logprobs": 3}, {"prompt": "a", "presence_penalty": 1},
    {"prompt": "a", "frequency_penalty": 0.5}, {"prompt": "a", "logit_bias": {"5": 1}}, {"prompt": "a", "suffix": "b"},
    {"prompt": "a", "seed": -1}, {"prompt": "a", "seed": "x"}, {"prompt": "a", "seed": 2**70},
    {"prompt": "a", "unknown": 1}, {"prompt": "a", "tools": [{}]}, {"prompt": "a", "model": "other"},
    {"prompt": "a " * 400},
]  # fmt: skip


def test_fifty_malformed_requests_are_each_one_clear_line(place: tuple[str, Worker]) -> None:
    assert len(MALFORMED) == 50
    with httpx.Client(base_url=place[0], timeout=30) as http:
        for body in MALFORMED:
            sent = {"content": body} if isinstance(body, bytes) else {"content": json.dumps(body).encode()}
            found = http.post("/v1/completions", **sent)
            assert 400 <= found.status_code < 500, (body, found.status_code)
            error = found.json()["error"]
            assert error["message"] and "\n" not in error["message"]
        assert http.post("/v1/completions", json={"prompt": "a " * 400}).status_code == 413
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 128}).status_code == 413
        assert http.post("/v1/completions", content=b" " * (9 * 2**20)).status_code == 413
        bad = [{}, {"messages": []}, {"messages": [{"role": "user"}]}, {"messages": "hi"}, {"messages": [1]}]
        assert all(http.post("/v1/chat/completions", json=body).status_code == 400 for body in bad)
        assert http.get("/health").json()["status"] == "ok"


def test_keys_queue_and_time_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"prompt": "a"}
    with served(api_key="secret", waiting=1, timeout=0.6) as (address, worker):
        assert httpx.post(f"{address}/v1/completions", json=asked).status_code == 401
        assert httpx.get(f"{address}/health").status_code == 200
        held = threading.Event()
        monkeypatch.setattr(worker, "generate", lambda jobs: held.wait(10))
        keyed = httpx.Client(base_url=address, headers={"Authorization": "Bearer secret"}, timeout=20)
        found: list[int] = []
        threads = [
            threading.Thread(target=lambda: found.append(keyed.post("/v1/completions", json=asked).status_code))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        held.set()
        assert set(found) == {429, 504} and found.count(504) <= 2


def test_a_compressed_cache_and_adaptive_passes_are_told() -> None:
    with served(StreamingLLM(budget=16, n_sink=2)) as (address, _):
        usage = httpx.post(f"{address}/v1/completions", json={"prompt": PROMPT, "max_tokens": 60}).json()["usage"]
        assert usage["cache_bytes"] <= 2 * 2 * 2 * 16 * 8 * 4  # layers, keys and values, heads, budget, width, bytes
    model = tiny_model(vocab_size=300, eos_token_id=0, depth={"name": "adaponderlm", "steps": 2, "threshold": 0.5})
    with served(model=model) as (address, _):
        usage = httpx.post(f"{address}/v1/completions", json={"prompt": PROMPT, "max_tokens": 9}).json()["usage"]
        assert 1 <= usage["mean_passes"] <= 3


def test_the_command_refuses_a_port_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, error = run_cli(monkeypatch, capsys, "serve", save_fathom(tmp_path), "--port", port)
        assert code == 2 and f"--port={port}" in error
    code, _, error = run_cli(monkeypatch, capsys, "serve", tmp_path, "--budget", 5)
    assert code == 2 and "--cache" in error

"""The picture of adaptive steps against passes and losses taken from one forward, and what `fathom inspect` shows."""

import json

import pytest
import torch
from matplotlib.image import imread

from fathom.evaluate import steps_run
from fathom.inspect import StepMap, offered
from fathom.inspect.base import token_texts
from fathom.inspect.step_map import classify
from tiny import tiny_model, tokens
from tiny_checkpoint import TEXT, run_cli, save_fathom, tiny_tokenizer

DEPTHS = [
    {"name": "adaptive_latent_cot", "steps": 3, "threshold": 0.25, "router_bias": 0.0},
    {"name": "adaponderlm", "steps": 3, "threshold": 0.45},
    {"name": "ponderlm3", "thoughts": 2},
]
every = pytest.mark.parametrize("depth", DEPTHS, ids=lambda depth: depth["name"])


def model_of(depth):
    return tiny_model(vocab_size=300, depth=depth)


@torch.no_grad()
def by_hand(model, ids):
    """Passes and losses of one window: entry i reads token i and predicts token i + 1."""
    found = []
    hook = model.depth.register_forward_hook(lambda module, args, out: found.append(out.trace["passes"][0]))
    logits = model(ids[None, :-1], use_cache=False).logits[0]
    hook.remove()
    return found[0], -logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


@every
def test_steps_and_losses_are_those_of_the_forward(depth):
    model, ids = model_of(depth), tokens(1, 40)[0]
    passes, losses = by_hand(model, ids)
    found = steps_run(model, ids, window=64)
    assert torch.equal(found.passes, passes)
    torch.testing.assert_close(found.losses, losses)
    assert found.ran == pytest.approx([(passes > k).double().mean().item() for k in range(found.most)])
    picture = StepMap.measure(model, tiny_tokenizer(), ids, window=64)
    assert picture.window == 39
    assert picture.mean == pytest.approx(passes.double().mean().item())
    assert picture.histogram == [(passes == n).sum().item() for n in range(1, found.most + 1)]
    for n, loss in enumerate(picture.losses, start=1):
        assert loss == (pytest.approx(losses[passes == n].mean().item(), rel=1e-5) if (passes == n).any() else None)
    assert [row[1] for row in picture.passage] == passes.tolist()
    order = sorted(range(39), key=lambda i: losses[i].item())
    assert picture.bins[0]["loss"] == pytest.approx(losses[order[:4]].mean().item(), rel=1e-5)
    assert picture.bins[0]["steps"] == pytest.approx(passes[order[:4]].double().mean().item())
    whole = [c for c in picture.classes if "piece" not in c["name"]]
    assert sum(c["share"] for c in whole) == pytest.approx(1)
    assert sum(c["tokens"] for c in whole) == 39


def test_windows_give_every_token_once():
    model, ids = model_of(DEPTHS[0]), tokens(1, 46)[0]
    found = steps_run(model, ids, window=16, batch_size=2)
    places = [(0, 0), (8, 8), (16, 8), (24, 8), (29, 11)]
    parts = [by_hand(model, ids[start : start + 17]) for start, _ in places]
    assert torch.equal(found.passes, torch.cat([p[first:] for (p, _), (_, first) in zip(parts, places, strict=True)]))
    torch.testing.assert_close(
        found.losses, torch.cat([loss[first:] for (_, loss), (_, first) in zip(parts, places, strict=True)])
    )


def test_the_window_shown_is_cut_to_the_positions():
    model = tiny_model(depth=DEPTHS[0], max_position_embeddings=16)
    assert StepMap.measure(model, tiny_tokenizer(), tokens(1, 46)[0], window=1024).window == 16


def test_classes_of_tokens():
    texts = ["The", " fath", "om", "eter", " of", " 19", "42", " un", "der", ",", " ship", " ship", "\n", "'s"]
    function, other, rare = ("function words",), ("other words",), "rare words"
    first, later = "first piece of a split word", "later pieces"
    assert classify(texts) == [
        function, (rare, first), (rare, later), (rare, later), function, ("numbers",), ("numbers",),
        ("function words", first), ("function words", later), ("punctuation",), other, other, ("punctuation",),
        function,
    ]  # fmt: skip


def test_characters_of_several_tokens_and_control_characters():
    tokenizer, text = tiny_tokenizer(), "q\u0237xz \u2014 \u65e5\u672c \x1b[2Jsea \U0001f30a \u0237"
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids) and "".join(texts) == text.replace("\x1b", "\u241b")
    split = texts.index("")  # the first byte of a letter, which is in its word
    assert texts[split + 1].startswith("\u0237") and classify(texts)[split][0] == "rare words"
    assert token_texts(tokenizer, ids[: split + 1])[-1] == "\ufffd"  # a text that ends within a character
    for text in ("\ufffd\U0001f30a ok", "x\ufffd\u0237"):  # replacement characters of the text itself
        shown = "".join(token_texts(tokenizer, tokenizer(text, return_tensors="pt").input_ids[0]))
        assert shown.replace("\ufffd", "") == text.replace("\ufffd", "")


def test_offered_where_tokens_stop_on_their_own():
    assert all(StepMap in offered(model_of(depth).config) for depth in DEPTHS)
    assert StepMap not in offered(tiny_model(depth={"name": "pondering"}).config)
    for name in ("adaptive_latent_cot", "adaponderlm"):  # the ordinary decoder, a row of comparisons
        assert StepMap not in offered(tiny_model(depth={"name": name, "steps": 0}).config)
    with pytest.raises(ValueError, match="'pondering': all tokens run the same steps"):
        steps_run(tiny_model(depth={"name": "pondering"}), tokens(1, 4)[0], 8)
    with pytest.raises(ValueError, match="has 1 tokens: at least 2"):
        steps_run(model_of(DEPTHS[0]), tokens(1, 1)[0], 8)


@every
def test_inspect_writes_shaded_text_and_the_picture(depth, tmp_path, monkeypatch, capsys):
    checkpoint = save_fathom(tmp_path / "model", depth=depth)
    text, output = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(TEXT)
    code, out, _ = run_cli(monkeypatch, capsys, "inspect", checkpoint, "--text", text, "--output", output)
    assert code == 0
    assert "steps a token over" in out and "function words" in out
    page = (output / "inspect.html").read_text()
    assert "Which tokens run how many steps" in page
    assert "steps, loss " in page and "color-mix(in srgb,var(--accent)" in page
    for name in ("steps.png", "steps_dark.png"):
        assert imread(output / name).std() > 0.02
    code, out, _ = run_cli(monkeypatch, capsys, "inspect", checkpoint, "--text", text, "--json")
    assert json.loads(out)["steps"]["most"] == {"ponderlm3": 3}.get(depth["name"], 4)


def test_a_terminal_sees_deeper_tokens_darker():
    picture = StepMap.measure(model_of(DEPTHS[0]), tiny_tokenizer(), tokens(1, 40)[0], window=64)
    *_, shaded = picture.summary()
    colours = {n: f"\x1b[48;5;{254 - 6 * (n - 1)}m" for n in range(1, 5)}
    for _, n, _ in picture.passage:
        assert colours[n] in shaded
    assert shaded.count("\x1b[0m") == 39

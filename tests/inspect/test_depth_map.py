"""The depth map against α recomputed from the projections' outputs, and what `fathom inspect` says and writes."""

import json
import math

import pytest
import torch
from matplotlib.image import imread

from fathom.inspect import DepthMap, offered
from tiny import tiny_model, tokens
from tiny_checkpoint import TEXT, run_cli, save_fathom, save_stock, tiny_tokenizer

LOOP, PONDERING = {"name": "loop", "passes": 2}, {"name": "pondering", "steps": 1}
CASES = [
    ("qwen3", {}, None),
    ("llama", {"source_schedule": "all"}, None),
    ("llama", {"mix_rule": "uniform", "recent_window": 1}, None),
    ("gpt2", {"source_schedule": "first_only", "score_dtype": "float32"}, None),
    ("qwen3", {}, LOOP),
    ("llama", {"loop_sources": "unrolled_stride", "stride": 3}, LOOP),
    ("llama", {"loop_sources": "same_layer"}, PONDERING),
]


def mixing_model(family="llama", depth=None, **options):
    return tiny_model(
        family, vocab_size=300, num_hidden_layers=4, depth=depth, mixer={"name": "depth_attention", **options}
    )


def sources_of(model, index):
    """D by the schedules of CASES, over pass·L + ℓ; layers 4."""
    o, passes = model.model.mixer.options, model.config.passes
    r, layer = divmod(index, 4)
    stride = {"first_only": 8, "all": 1, "absolute_stride": o.stride or 2}[o.source_schedule]
    if passes > 1 and o.loop_sources == "unrolled_stride":
        return [j for j in range(index) if j % stride == 0]
    within = {4 * r + j for j in range(layer) if j % stride == 0 or layer - j <= o.recent_window}
    earlier = {4 * p + layer for p in range(r)}
    return sorted(earlier if passes > 1 and o.loop_sources == "same_layer" else earlier | within)


@torch.no_grad()
def alpha_of_window(model, ids):
    """α [heads, tokens, sources + 1] by index, from what q_proj and k_proj put out. Without rotation: a product of two
    vectors that are rotated alike does not change."""
    c, seen = model.config, []
    heads, groups, width = c.num_attention_heads, c.num_key_value_heads, c.head_dim

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * weight

    def record(attention):
        def after(module, inputs, output):
            seen.append((attention, output[0].double().unflatten(-1, (-1, width))))

        return after

    hooks = []
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            hooks.append(projection.register_forward_hook(record(layer.self_attn)))
    model(ids[None])
    for hook in hooks:
        hook.remove()
    queries, keys = [], []
    for n, (attention, x) in enumerate(seen):
        if c.qk_norm:
            x = norm(x, (attention.k_norm if n % 2 else attention.q_norm).weight.double())
        (keys if n % 2 else queries).append(x)
    found = {}
    for index, query in enumerate(queries):
        sources = sources_of(model, index)
        if not sources:
            continue
        alpha = torch.zeros(groups, len(ids), len(sources) + 1, dtype=torch.float64)
        for g in range(groups):
            for t in range(len(ids)):
                mean = query[t, g * (heads // groups) : (g + 1) * (heads // groups)].mean(0)
                e = [math.exp(float(mean @ keys[j][t, g]) / math.sqrt(width)) for j in [*sources, index]]
                alpha[g, t] = torch.tensor(e) / sum(e)
        if model.model.mixer.options.mix_rule == "uniform":
            alpha[:] = 1 / alpha.shape[-1]
        found[index] = alpha
    return found


def depth_map(model, ids, **options):
    return DepthMap.measure(model, tiny_tokenizer(), ids, **options)


@pytest.mark.parametrize(("family", "options", "depth"), CASES)
def test_weights_are_the_mean_alpha_of_all_tokens_but_the_first(family, options, depth) -> None:
    model, ids = mixing_model(family, depth, **options), tokens(1, 21)[0]
    found, alpha = depth_map(model, ids, window=64), alpha_of_window(model, ids)
    assert [row["index"] for row in found.rows] == list(alpha)
    half = 2 * model.config.passes
    for row in found.rows:
        assert row["sources"] == sources_of(model, row["index"])
        expected = alpha[row["index"]][:, 1:].mean(1)
        torch.testing.assert_close(torch.tensor(row["weights"]).double(), expected, rtol=1e-5, atol=1e-6)
        assert [sum(head) for head in row["weights"]] == pytest.approx([1.0] * len(expected), abs=1e-6)
    drawn = [
        sum(float(a[:, t, [j < half for j in sources_of(model, i)] + [False]].sum(-1).mean()) for i, a in alpha.items())
        / len(alpha)
        for t in range(1, 21)
    ]
    assert [weight for _, weight in found.passage] == pytest.approx(drawn, abs=1e-6)
    assert found.shallow == pytest.approx(sum(drawn) / 20, abs=1e-6)
    assert (found.tokens, found.passes, found.heads) == (20, model.config.passes, model.config.num_key_value_heads)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_long_text_is_read_in_windows_and_every_token_counts_once(batch_size) -> None:
    model, ids = mixing_model("qwen3"), tokens(1, 45)[0]
    found = depth_map(model, ids, window=16, batch_size=batch_size)
    # windows of 16 that move by 8; each gives the tokens that no window before it has given
    places = [(0, 0), (8, 8), (16, 8), (24, 8), (29, 11)]
    parts = [alpha_of_window(model, ids[start : start + 16]) for start, _ in places]
    for row in found.rows:
        given = [part[row["index"]][:, first:] for part, (_, first) in zip(parts, places, strict=True)]
        expected = torch.cat(given, dim=1)
        assert expected.shape[1] == 45
        torch.testing.assert_close(torch.tensor(row["weights"]).double(), expected[:, 1:].mean(1), rtol=1e-5, atol=1e-6)


def test_tokens_that_draw_most_and_least() -> None:
    model, ids = mixing_model(source_schedule="all"), tokens(1, 50)[0] % 9 + 50
    found = depth_map(model, ids, window=64)
    mean = {}
    for text in {text for text, _ in found.passage}:
        mean[text] = torch.tensor([weight for other, weight in found.passage if other == text]).mean().item()
    ranked = sorted((text for text in mean if text.strip()), key=lambda text: -mean[text])
    assert [entry["token"] for entry in found.most] == ranked[: len(found.most)]
    assert [entry["token"] for entry in found.least] == ranked[::-1][: len(found.least)]
    assert found.most and found.most[0]["weight"] == pytest.approx(mean[ranked[0]], abs=1e-6)
    assert sum(entry["count"] for entry in found.most) <= 49


def test_uniform_weights_rank_no_token() -> None:
    found = depth_map(mixing_model(mix_rule="uniform"), tokens(1, 30)[0], window=64)
    assert found.most == found.least == []
    assert "All tokens have the same weights" in found.html()


def test_which_models_offer_it() -> None:
    assert offered(mixing_model().config) == offered(mixing_model(depth=LOOP).config) == [DepthMap]
    assert offered(tiny_model().config) == []
    assert offered(mixing_model(source_schedule="explicit", sources=()).config) == []
    assert offered(mixing_model(depth={"name": "pause"}).config) == []


def test_a_text_of_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="has 1 tokens: at least 2"):
        depth_map(mixing_model(), tokens(1, 1)[0], window=8)


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def run(monkeypatch, capsys):
    return lambda *arguments: run_cli(monkeypatch, capsys, "inspect", *arguments)


def test_command_writes_picture_and_page(run, tmp_path, book) -> None:
    folder = save_fathom(tmp_path / "model", num_hidden_layers=4, depth=LOOP, mixer={"name": "depth_attention"})
    out = tmp_path / "seen"
    code, said, _ = run(folder, "--text", book, "--window", 32, "--output", out)
    assert code == 0
    assert "layer  1·3  itself 0." in said and "0·3: 0." in said and "draw most: " in said
    assert f"Page: {out / 'inspect.html'}" in said
    assert sorted(path.name for path in out.iterdir()) == ["depth_map.png", "depth_map_dark.png", "inspect.html"]
    assert imread(out / "depth_map.png").std() > 0.05
    page = (out / "inspect.html").read_text()
    assert "loop (passes=2) + depth_attention" in page and "http://" not in page and "https://" not in page


def test_command_prints_json_and_writes_nothing(run, tmp_path, book, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = save_fathom(tmp_path / "model", num_hidden_layers=4, mixer={"name": "depth_attention"})
    before = sorted(tmp_path.iterdir())
    code, said, _ = run(folder, "--text", book, "--json")
    found = json.loads(said)["depth_map"]
    assert code == 0 and sorted(tmp_path.iterdir()) == before
    assert [row["index"] for row in found["rows"]] == [1, 2, 3]
    assert DepthMap(**found).summary()[1].startswith("layer    1  itself")


@pytest.mark.parametrize("save", [save_fathom, save_stock])
def test_a_checkpoint_without_a_picture_says_which_have_one(run, tmp_path, book, save) -> None:
    folder = save(tmp_path / "model")
    code, _, err = run(folder, "--text", book)
    assert code == 2 and err.count("\n") == 1
    found = "an ordinary decoder" if save is save_fathom else "a stock gpt2 model"
    assert f"{folder}: nothing to show of {found}; pictures are of models with mixer depth_attention" in err

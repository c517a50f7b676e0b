"""The picture of RoPE++'s heads, against attention weights of transformers' eager form."""

import math

import pytest
import torch

from fathom.inspect import HeadMap, offered
from fathom.inspect.head_map import nats, noisy
from fathom.report.plots import THEMES
from tiny import perturb, tiny_model
from tiny_checkpoint import TEXT, tiny_tokenizer


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = tiny_model(positions="rope_pp", vocab_size=300, num_hidden_layers=2)
    perturb(made)
    return made.eval()


@torch.no_grad()
def test_shares_are_those_of_the_attention_weights(model):
    ids = torch.tensor(tiny_tokenizer()(TEXT * 4)["input_ids"])[:24]
    picture = HeadMap.measure(model, tiny_tokenizer(), ids, window=12)
    assert picture.windows == 2 and picture.edges == [0, 1, 2, 4, 8]
    model.set_attn_implementation("eager")
    weights = model(ids.view(2, 12), output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation("sdpa")
    place = torch.arange(12)
    for layer, found in enumerate(weights):
        for group, first in (("real", 0), ("imaginary", 1)):
            mean = found[:, first::2].mean((0, 1))
            for bucket, low in enumerate(picture.edges):
                high = [*picture.edges, 12][bucket + 1]
                distance = place[:, None] - place
                share = mean[(distance >= low) & (distance < high)].sum() / 12
                assert picture.shares[group][layer][bucket] == pytest.approx(float(share), abs=1e-5)
    assert picture.curves["real"][0] == 1 and picture.curves["imaginary"][0] == 0
    expected = model(ids.view(2, 12), labels=ids.view(2, 12)).loss
    assert picture.loss == pytest.approx(float(expected), rel=1e-5)
    assert len(picture.summary()) == 3 and "stretches" in picture.html()
    for colours in THEMES.values():
        assert len(picture.figure(colours).axes) == 3


def test_noise_reaches_one_group_alone_and_goes_again(model):
    rows = torch.arange(20).view(2, 10)
    plain = nats(model, rows, 2)
    seen = []
    attention = model.model.layers[0].self_attn
    before = attention.expand
    for group in ("real", "imaginary"):
        with noisy(model, group, 1.0):
            seen.append(nats(model, rows, 2))
            tables = (torch.ones(1, 3, 4), torch.zeros(1, 3, 4))
            query = torch.randn(1, attention.config.num_attention_heads, 3, attention.head_dim)
            moved = attention.expand(tables, query, query)[0] - before(tables, query, query)[0]
        inside = moved[:, group == "imaginary" :: 2]
        assert 0.5 < float(inside.std()) < 1.5 and float(moved.abs().sum() - inside.abs().sum()) < 1e-4
    assert nats(model, rows, 2) == plain and all(math.isfinite(x) and x != plain for x in seen)


def test_which_checkpoints_have_it(model):
    assert HeadMap in offered(model.config) and HeadMap not in offered(tiny_model().config)
    assert HeadMap not in offered(tiny_model(positions={"name": "rope_pp", "mode": "imagh"}).config)

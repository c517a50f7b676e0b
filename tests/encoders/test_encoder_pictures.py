"""The pictures of encoders: Fovea's nodes against the published example, spectra against SciPy's of stock states."""

import dataclasses
import json

import numpy as np
import pytest
import scipy.fft
import torch
from seq2seq_models import VOCABULARY, stock_bart, stock_longt5
from transformers import BertConfig, BertModel

from fathom.inspect import NodeMap, Spectrum, offered
from fathom.inspect.spectrum import BINS, bands
from fathom.models.encoder_configs import FathomBartConfig, FathomEncoderConfig, FathomLongT5Config
from fathom.models.seq2seq_bart import FathomBartForConditionalGeneration
from fathom.models.seq2seq_longt5 import FathomLongT5ForConditionalGeneration
from fathom.models.sequence_classification import FathomForSequenceClassification
from fathom.report.plots import THEMES
from tiny_checkpoint import TEXT, run_cli, tiny_tokenizer

IDS = torch.randint(3, VOCABULARY, (40,), generator=torch.Generator().manual_seed(0))


def nodes(tokens, **options):
    config = FathomLongT5Config.from_pretrained(stock_longt5()[0], encoder={"name": "fovea", "block_len": 4, **options})
    model = type("Model", (), {"config": config})  # nothing else of it is read
    return NodeMap.measure(model, None, torch.zeros(tokens, dtype=torch.long), window=10**6)


def test_nodes_and_unseen_stretches_are_those_of_the_published_example():
    picture = nodes(16 * 4 - 1)
    assert picture.lists[5] == [[2, 1], [4, 0], [5, 0], [6, 0], [7, 1], [9, 2]]
    assert picture.unseen(5) == [(0, 1), (13, 15)] and picture.unseen(0) == []
    assert picture.levels[0].tolist() == [0, 0, 1, 1, 2, 2, 2, 2, *[3] * 8]
    assert picture.keys[5] == 24 and round(picture.unseen_share, 2) == 0.27
    assert nodes(64, boundary="fill").unseen_share == 0 and nodes(64, stop_level=1).keys == [64] * 16
    assert picture.summary()[1] == "block    0 reads 0  1  2–3 (/2)  4–7 (/4)  8–15 (/8);  unseen: none"
    for found in (picture, nodes(3), nodes(64, steps="two", stop_level=3)):
        again = NodeMap(**json.loads(json.dumps(dataclasses.asdict(found))))
        assert again == found and len(found.figure(THEMES["light"]).axes) == 2 and "blocks" in found.html()


@torch.no_grad()
def test_spectra_of_stock_bart_and_bert_are_scipys_of_their_hidden_states():
    torch.manual_seed(0)
    bert = BertModel(BertConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                intermediate_size=24, max_position_embeddings=20))  # fmt: skip
    for model in (stock_bart()[1], stock_longt5("local")[1], bert.eval()):
        picture = Spectrum.measure(model, None, IDS, window=18, batch_size=1)
        rows = IDS[:36].view(2, 18)
        encoder = model.get_encoder() if model.config.is_encoder_decoder else model
        states = encoder(rows, output_hidden_states=True).hidden_states
        assert picture.tokens == [18] * len(states) and picture.windows == 2
        last = len(states) - model.config.model_type.endswith("t5")  # stock T5's last one is behind the final norm
        for layer, x in enumerate(states[:last]):
            energy = (scipy.fft.dct(x.double().numpy(), axis=1, norm="ortho") ** 2).sum((0, 2))
            assert picture.means[layer] == pytest.approx(energy[0] / energy.sum(), rel=1e-4)
            assert sum(picture.energy[layer]) == pytest.approx(1)
            half = (energy[1:9].sum() + energy[9] / 2) / energy[1:].sum()  # the ninth of 17 lies on both sides
            assert picture.lowest(0.5)[layer] == pytest.approx(half, rel=1e-4)


def test_bands_part_what_lies_in_two_and_noise_is_level():
    assert bands(torch.ones(1 + 2 * BINS)) == pytest.approx([1 / BINS] * BINS)
    few = bands(torch.tensor([7.0, 3.0, 1.0]))  # a frequency in the lower half of the bands, one in the upper
    assert np.sum(few[: BINS // 2]) == pytest.approx(0.75) and np.sum(few) == pytest.approx(1)


def test_equal_states_have_no_frequencies():
    """T5 has no positions of its own: one token again and again has one state again and again."""
    picture = Spectrum.measure(stock_longt5("local")[1], None, torch.full((36,), 5), window=18)
    assert not np.any(picture.energy) and picture.means == pytest.approx([1.0] * len(picture.tokens))
    assert "all states are equal" in picture.summary()[1] and len(picture.figure(THEMES["light"]).axes) == 3
    json.dumps(dataclasses.asdict(picture), allow_nan=False)
    assert bands(torch.zeros(5)) == [0.0] * BINS


@torch.no_grad()
def test_a_filter_shows_in_the_lengths_of_layers():
    section = {"name": "fourier", "ratio": 0.5, "filter_layers": [1]}
    bart = FathomBartForConditionalGeneration.from_pretrained(stock_bart()[0], encoder=section).eval()
    picture = Spectrum.measure(bart, None, IDS, window=20)
    assert picture.tokens == [20, 20, 10, 10, 20]  # the last adds the residual of the source's length
    assert "Tokens of the layers' outputs: [20, 20, 10, 10, 20]" in picture.html()
    config = FathomEncoderConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        encoder=section | {"filter_layers": [0]}, pooling="cls", max_position_embeddings=33,
    )  # fmt: skip
    found = Spectrum.measure(FathomForSequenceClassification(config).eval(), None, IDS, window=64)
    assert found.window == 32 and found.tokens == [33, 17, 17] and len(found.figure(THEMES["dark"]).axes) == 3
    plain = FathomBartForConditionalGeneration.from_pretrained(stock_bart()[0]).eval()
    stock = Spectrum.measure(stock_bart()[1], None, IDS, window=20)
    np.testing.assert_allclose(Spectrum.measure(plain, None, IDS, window=20).energy, stock.energy, rtol=1e-4)
    assert "run_layer" not in vars(plain.model.encoder)
    with pytest.raises(ValueError, match="a window of 1 tokens"):
        Spectrum.measure(plain, None, IDS[:1], window=20)


def test_inspect_draws_an_encoders_pictures(tmp_path, monkeypatch, capsys):
    tokenizer = tiny_tokenizer()
    config = FathomLongT5Config.from_pretrained(
        stock_longt5()[0], encoder={"name": "fovea", "block_len": 4}, vocab_size=len(tokenizer)
    )
    FathomLongT5ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["inspect", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), "--window", "32"]
    code, out, _ = run_cli(monkeypatch, capsys, *words, "--output", str(tmp_path / "out"))
    assert (
        code == 0
        and "blocks of 4" in out
        and "embeddings" in out
        and "fovea" in (tmp_path / "out/inspect.html").read_text()
    )
    assert {path.name for path in (tmp_path / "out").glob("*.png")} >= {"nodes.png", "spectrum.png"}
    assert offered(FathomBartConfig.from_pretrained(stock_bart()[0]).stock_config()) == [Spectrum]

"""The picture of the order in which a diffusion model writes, against the sampler's own trace."""

import pytest
import torch

from fathom import FathomConfig, FathomForMaskedDiffusion
from fathom.inspect import RevealMap, nothing_to_show, offered
from fathom.inspect.step_map import CLASSES
from fathom.report.plots import THEMES
from tiny import SIZES, perturb, tiny_model
from tiny_checkpoint import TEXT, save_masked, tiny_tokenizer


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    section = {"name": "masked", "mask_token_id": 300}
    made = FathomForMaskedDiffusion(FathomConfig(**{**SIZES, "vocab_size": 301}, diffusion=section))
    perturb(made)
    return made.eval()


def test_the_picture_is_the_samplers_trace(model):
    ids = torch.tensor(tiny_tokenizer()(TEXT * 4)["input_ids"])
    picture = RevealMap.measure(model, tiny_tokenizer(), ids, window=24, batch_size=3)
    block = picture.block
    assert block == 12 and picture.rows == 16
    out = model.generate(ids[None, :12], max_new_tokens=block, block_length=block, return_dict_in_generate=True)
    assert [step for _, step, _ in picture.passage] == (out.revealed[0, 12:] + 1).tolist()
    assert [sure for *_, sure in picture.passage] == pytest.approx(out.confidence[0, 12:].tolist(), abs=1e-5)
    assert "".join(text for text, *_ in picture.passage) and picture.prompt
    shares = torch.tensor(picture.shares)
    assert torch.allclose(shares.sum(0), torch.ones(block)) and torch.allclose(shares.sum(1), torch.ones(block))
    assert picture.mean == pytest.approx((shares * torch.arange(1, block + 1)).sum(1).tolist(), abs=1e-5)
    counted = sum(entry["tokens"] for entry in picture.classes if entry["name"] in CLASSES)
    assert counted == picture.rows * block
    assert len(picture.summary()) >= 4 and picture.html().count("<span") == block
    for colours in THEMES.values():
        assert len(picture.figure(colours).axes) == 3


def test_which_checkpoints_have_it(model):
    assert RevealMap in offered(model.config) and RevealMap not in offered(tiny_model().config)
    assert "diffusion models (masked)" in str(nothing_to_show("mine", tiny_model().config))
    with pytest.raises(ValueError, match="give at least two"):
        RevealMap.measure(model, tiny_tokenizer(), torch.tensor([1]), window=24)


def test_the_verb_draws_it(tmp_path, monkeypatch, capsys):
    from tiny_checkpoint import run_cli

    save_masked(tmp_path / "model", TEXT, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    (tmp_path / "text.txt").write_text(TEXT)
    code, out, _ = run_cli(
        monkeypatch, capsys, "inspect", tmp_path / "model", "--text", tmp_path / "text.txt", "--window", 16,
        "--output", tmp_path / "page", "--device", "cpu",
    )  # fmt: skip
    assert code == 0 and "revealed at step" in out
    assert (tmp_path / "page" / "reveals.png").exists()
    assert "shaded more" in (tmp_path / "page" / "inspect.html").read_text()

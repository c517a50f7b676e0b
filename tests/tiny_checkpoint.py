"""Tiny checkpoints on disk with a tokenizer of their own, and the command line run in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import fathom_cli as cli
from fathom import FathomConfig, FathomForMaskedDiffusion
from fathom.data import train_bpe
from fathom.tasks.masked_diffusion import with_mask
from tiny import tiny_model

TEXT = "The sea was calm — naïve, almost. Ünder the keel: 40 fathoms, then 400; then nothing to sound. " * 6


def tiny_tokenizer(vocab_size: int = 300) -> PreTrainedTokenizerFast:
    return train_bpe([TEXT], vocab_size)


def save_fathom(folder: Path, **fields: Any) -> Path:
    """A Fathom checkpoint with its tokenizer."""
    tiny_model(vocab_size=300, eos_token_id=0, bos_token_id=None, **fields).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_stock(folder: Path) -> Path:
    """A stock GPT-2 checkpoint with its tokenizer."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `fathom …`."""
    capsys.readouterr()  # what came before
    monkeypatch.setattr(sys, "argv", ["fathom", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    out, err = capsys.readouterr()
    assert "Traceback" not in err and "Loading weights" not in err  # a progress bar, which a pipe cannot redraw
    return int(stopped.value.code or 0), out, err


def save_masked(folder: Path, text: str, **sizes: Any) -> str:
    """A masked diffusion model with random weights, and a tokenizer of this text."""
    tokenizer = with_mask(train_bpe([text], 280))
    torch.manual_seed(0)
    section = {"name": "masked", "mask_token_id": tokenizer.mask_token_id}
    config = FathomConfig(vocab_size=281, eos_token_id=tokenizer.eos_token_id, diffusion=section, **sizes)
    FathomForMaskedDiffusion(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)

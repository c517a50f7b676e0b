"""Block diffusion (`diffusion: block`) against the plain decoder of diffusion_reference.py, run block after block."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from diffusion_reference import PlainModel
from transformers import AutoModelForMaskedLM

from fathom import FathomConfig, FathomForMaskedDiffusion
from fathom.diffusion import sampling
from fathom.diffusion.likelihood import bound
from fathom.ops import kernels
from fathom.ops.visibility import Blocks, TwoStreams
from fathom.tasks.masked_diffusion import MaskedDiffusion
from recording import Pretended
from tiny import FAMILY_SIZES, SIZES, perturb

MASK = 96


def model(size: int = 3, family: str = "llama", **fields) -> FathomForMaskedDiffusion:
    torch.manual_seed(3)
    section = {"name": "block", "mask_token_id": MASK, "block_length": size}
    config = FathomConfig(backbone=family, **{**SIZES, **FAMILY_SIZES[family], **fields}, diffusion=section)
    made = FathomForMaskedDiffusion(config).double()
    perturb(made, 3)
    with torch.no_grad():
        made.lm_head.weight.mul_(2)
    return made.eval()


def ids(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, MASK, (rows, length), generator=torch.Generator().manual_seed(seed))


class PlainBlocks:
    """Log-probabilities of a row's tokens, block after block, each given the earlier ones as they are."""

    def __init__(self, tested):
        self.plain, self.size = PlainModel(tested), tested.config.diffusion["block_length"]
        self.layers = tested.config.num_hidden_layers

    def block(self, clean, noisy, number):
        """{column: log p over the vocabulary} for the tokens of one block, some of which are hidden in `noisy`."""
        store = [{} for _ in range(self.layers)]
        spans = [range(a, min(a + self.size, len(noisy))) for a in range(0, len(noisy), self.size)]
        for span in spans[:number]:
            self.plain.run(clean, span, store)
        states = self.plain.run(noisy, spans[number], store)
        out = {}
        for column, state in states.items():
            logits = self.plain.weights["lm_head.weight"] @ state
            logits[MASK] = -torch.inf
            out[column] = logits.log_softmax(-1)
        return out


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_both_streams_are_the_blocks_one_after_the_other(family):
    """Every block of one pass is predicted from itself and from clean earlier ones; the last one is short."""
    tested, clean = model(family=family), ids(2, 8)
    noisy = clean.clone()
    noisy[0, [1, 2, 3, 7]] = noisy[1, [4, 6]] = MASK
    logits = tested(noisy, clean_ids=clean).logits
    assert logits.shape == (2, 8, 97)
    logits = logits.masked_fill(torch.arange(97) == MASK, -torch.inf).log_softmax(-1)
    for row, number in itertools.product(range(2), range(3)):
        for column, expected in PlainBlocks(tested).block(clean[row].tolist(), noisy[row].tolist(), number).items():
            torch.testing.assert_close(logits[row, column], expected, rtol=1e-5, atol=1e-6)
    # a plain forward sees earlier blocks as they stand in it
    one = tested(torch.cat([clean[:1, :6], noisy[:1, 6:]], 1)).logits.masked_fill(torch.arange(97) == MASK, -torch.inf)
    torch.testing.assert_close(one.log_softmax(-1)[0, 6:], logits[0, 6:], rtol=1e-5, atol=1e-6)
    padded = tested(F.pad(noisy, (0, 2), value=5), clean_ids=F.pad(clean, (0, 2), value=7),
                    attention_mask=F.pad(torch.ones_like(clean), (0, 2))).logits[:, :8]  # fmt: skip
    padded = padded.masked_fill(torch.arange(97) == MASK, -torch.inf).log_softmax(-1)
    torch.testing.assert_close(padded, logits, rtol=1e-5, atol=1e-6)


def test_who_sees_whom():
    """By the three rules of BD3-LM, written out."""
    size, length = 2, 5
    sees = TwoStreams(size, length)(torch.arange(2 * length)[:, None], torch.arange(2 * length))
    for q, k in itertools.product(range(2 * length), repeat=2):
        own, other = q % length // size, k % length // size
        same = (q < length) == (k < length)
        diagonal, offset = same and own == other, q < length <= k and other < own
        causal = q >= length and k >= length and other <= own
        assert bool(sees[q, k]) == (diagonal or offset or causal)
    assert sees.double().sum(1).mean() == TwoStreams(size, length).mean_keys(2 * length)


def test_one_block_is_masked_diffusion():
    whole, clean = model(16), ids(2, 8)
    masked = FathomForMaskedDiffusion(
        FathomConfig(**{**whole.config.to_dict(), "diffusion": {"name": "masked", "mask_token_id": MASK}})
    ).double()
    masked.load_state_dict(whole.state_dict())
    noisy = clean.clone()
    noisy[:, ::2] = MASK
    torch.testing.assert_close(whole(noisy, clean_ids=clean).logits, masked.eval()(noisy).logits)
    answer = torch.ones_like(clean, dtype=torch.bool)
    for found, expected in zip(*(bound(m, clean, answer, 4, mask_token_id=MASK) for m in (whole, masked)), strict=True):
        torch.testing.assert_close(found, expected)


def test_the_bound_is_exact_for_blocks_of_one_token_and_an_average_else():
    clean = ids(2, 5)
    answer = torch.ones_like(clean, dtype=torch.bool)
    answer[:, 0] = False
    single = model(1)
    nats, error = bound(single, clean, answer, 1, mask_token_id=MASK)
    for row in range(2):
        text = clean[row].tolist()
        exact = sum(
            -float(PlainBlocks(single).block(text, [*text[:j], MASK, *text[j + 1 :]], j)[j][text[j]])
            for j in range(1, 5)
        )
        assert float(nats[row]) == pytest.approx(exact, rel=1e-5) and float(error[row]) == 0
    # blocks of 2: every block's mean over the sets that may be hidden, weighted by L / l, in closed form
    pairs, text = model(2), clean[0].tolist()
    expected = 0.0
    for number, columns in enumerate(([1], [2, 3], [4])):
        for count in range(1, len(columns) + 1):
            sets = list(itertools.combinations(columns, count))
            for hidden in sets:
                noisy = [MASK if j in hidden else x for j, x in enumerate(text)]
                log_p = PlainBlocks(pairs).block(text, noisy, number)
                loss = sum(-float(log_p[j][text[j]]) for j in hidden)
                expected += loss * len(columns) / count / len(sets) / len(columns)
    draws = [float(bound(pairs, clean[:1], answer[:1], 8, mask_token_id=MASK, seed=s)[0]) for s in range(30)]
    spread = torch.tensor(draws).std() / len(draws) ** 0.5
    assert abs(sum(draws) / len(draws) - expected) < 4 * float(spread) < 0.03 * expected


@pytest.mark.parametrize(
    ("prompt", "policy"),  # without a prompt all states of the first block are equal, and so are confidences
    [(0, "left_to_right"), (4, "low_confidence"), (6, "low_confidence")],
)
def test_samples_are_those_of_the_blocks_one_after_the_other(prompt, policy, monkeypatch):
    """The likeliest tokens, in the policy's order, by a loop without a cache; recorded passes give the same."""
    tested, start, length = model(), ids(1, prompt), 9
    canvas = start[0].tolist() + [MASK] * length
    for number in range(prompt // 3, -(-len(canvas) // 3)):
        while MASK in canvas[3 * number : 3 * number + 3]:
            log_p = PlainBlocks(tested).block(canvas, canvas, number)
            open_columns = [c for c in log_p if canvas[c] == MASK]
            best = open_columns[0]
            if policy == "low_confidence":
                best = max(open_columns, key=lambda c: float(log_p[c].max()))
            canvas[best] = int(log_p[best].argmax())
    given = {"max_new_tokens": length, "block_length": 3, "policy": policy, "return_dict_in_generate": True}
    out = tested.generate(start, **given)
    assert out.sequences[0].tolist() == canvas
    finished = (prompt + length - 1) // 3 - prompt // 3
    assert out.nfe["block"] == length + finished and out.nfe.get("full", 0) == (prompt >= 3)
    double = Pretended()
    monkeypatch.setattr(sampling, "recorder_for", lambda device: double)
    monkeypatch.setattr(kernels, "TRITON", False)
    assert torch.equal(tested.generate(start, **given).sequences, out.sequences) and double.recordings


def test_rows_of_a_batch_are_rows_alone():
    """Padding on the left of whole blocks, in whichever row; other lengths are refused."""
    tested, prompts = model(family="qwen2"), ids(3, 7)
    options = {"max_new_tokens": 6, "block_length": 3, "steps": 4, "temperature": 1.0}
    for starts in ((0, 3, 6), (6, 0, 3)):
        mask = (torch.arange(7) >= torch.tensor(starts)[:, None]).long()
        out = tested.generate(prompts, mask, seed=[5, 6, 7], **options)
        for row, start in enumerate(starts):
            alone = tested.generate(prompts[row : row + 1, start:], seed=[5 + row], **options)
            assert torch.equal(out[row, start:], alone[0])
    mask[1, 0] = 0
    with pytest.raises(ValueError, match=r"inputs: rows end at \[0, 1\] tokens of a block of 3"):
        tested.generate(prompts, mask, **options)


def test_training_is_the_weighted_loss_of_the_blocks():
    """From rows to the loss, with one t a row or one a block; gradients reach all weights."""
    for granularity in ("sequence", "block"):
        task = MaskedDiffusion(random_length=0.0, block_length=3, t_granularity=granularity)
        rows = [{"input_ids": ids(1, 8, seed)[0], "labels": ids(1, 8, seed)[0], "draw": torch.tensor([0, seed])}
                for seed in range(40)]  # fmt: skip
        batch = task.collate(rows)
        hidden = batch["input_ids"] == -1
        weights = [set(w[h].tolist()) for w, h in zip(batch["loss_weights"], hidden, strict=True)]
        assert max(map(len, weights)) == (1 if granularity == "sequence" else 3)
        some = {name: x[:2] for name, x in batch.items()}
        tested = model().train()
        loss = task.forward(tested, **some).loss
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in tested.parameters())
        expected = 0.0
        for row in range(2):
            clean = [int(x) for x in torch.where(hidden[row], batch["labels"][row], batch["input_ids"][row])]
            noisy = [MASK if x == -1 else int(x) for x in batch["input_ids"][row]]
            plain = PlainModel(tested)
            for column in hidden[row].nonzero().flatten().tolist():
                store = [{} for _ in range(2)]
                for a in range(0, column // 3 * 3, 3):
                    plain.run(clean, range(a, a + 3), store)
                own = range(column // 3 * 3, min(8, column // 3 * 3 + 3))
                logits = plain.weights["lm_head.weight"] @ plain.run(noisy, own, store)[column]
                expected -= float(logits.log_softmax(-1)[clean[column]] * batch["loss_weights"][row, column])
        assert loss.item() == pytest.approx(expected / 14, rel=1e-5)
        held_out = task.collate([{"input_ids": ids(1, 8)[0], "labels": ids(1, 8)[0]}])
        assert math.isfinite(float(task.forward(tested.eval(), **held_out).loss))


def test_saved_loaded_and_refused(tmp_path):
    tested = model()
    tested.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert loaded.config.diffusion == {"name": "block", "mask_token_id": MASK, "block_length": 3}
    assert Blocks(3) == Blocks(loaded.diffusion.block_length)
    given = {"max_new_tokens": 6, "block_length": 3}
    for options, said in (
        ({"block_length": 6}, "block_length=6: the model fills blocks of 3; give 3"),
        ({"block_cache": "dual"}, "block_cache='dual': a model of block diffusion keeps earlier blocks exactly"),
        ({"infill": True, "max_new_tokens": 0}, "infill=True: a block of this model sees no later ones"),
    ):
        with pytest.raises(ValueError, match=said):
            tested.generate(ids(1, 3), **{**given, **options})
    with pytest.raises(ValueError, match="block_length=0: must be at least 1"):
        model(0)
    for mask in ([0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0]):
        with pytest.raises(ValueError, match="padding on the right alone"):
            tested(ids(1, 6), clean_ids=ids(1, 6), attention_mask=torch.tensor([mask]))
    with pytest.raises(ValueError, match="t_granularity='block' with diffusion='masked'"):
        MaskedDiffusion(t_granularity="block").completed({"vocab_size": 97}, None)
    with pytest.raises(ValueError, match="only a vanilla model is a stock llama"):
        tested.save_stock_pretrained(tmp_path / "stock")


def test_training_counts_both_streams():
    """Twice the layers, each query with the keys of its block and of earlier ones; the head once."""
    from fathom.cost import forward_flops_per_token, training_flops_per_token

    config = model().config
    forward = forward_flops_per_token(config, 8)
    assert forward.attention == config.num_hidden_layers * 4 * config.head_dim * config.num_attention_heads * (
        (3 * 3 + 3 * 6 + 2 * 8) / 8
    )
    assert training_flops_per_token(config, 8) == 3 * (2 * (forward.matmul - forward.head) + forward.head)

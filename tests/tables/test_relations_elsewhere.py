"""Relations in encoders of BERT's form and in decoders' prompts, against pairs in float64 and against stock models."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from fathom.tables.other_hosts import relate

SHAPE = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
B, T = 2, 7


def bert():
    torch.manual_seed(0)
    return BertModel(BertConfig(**SHAPE, attn_implementation="eager"), add_pooling_layer=False).double().eval()


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, num_key_value_heads=1, attn_implementation="eager", pad_token_id=0, eos_token_id=39)
    return LlamaForCausalLM(config).double().eval()


def inputs():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 39, (B, T), generator=generator)
    mask = torch.ones(B, T, dtype=torch.long)
    relations = torch.randint(0, 46, (B, T, T), generator=generator, dtype=torch.uint8)
    return ids, mask, relations


def read(model, ids, mask):
    out = model(input_ids=ids, attention_mask=mask)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


@pytest.mark.parametrize("make", [bert, llama])
def test_zero_tables_are_the_stock_model(make):
    """Whose eager attention has a softmax in fp32."""
    ids, mask, relations = inputs()
    mask[1, -2:] = 0
    expected = read(make(), ids, mask)
    model = make()
    related = relate(model, {"name": "rasat", "init": "zero"})
    with related.reads(relations):
        torch.testing.assert_close(read(model, ids, mask)[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(read(model, ids, mask)[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-6)


def test_first_layer_of_bert_is_the_equation_pair_by_pair():
    ids, mask, relations = inputs()
    model = bert()
    related = relate(model, {"name": "rasat"})
    keys, values = (table.double() for table in related.method.tables())
    x, attention = model.embeddings(ids), model.encoder.layer[0].attention.self
    q, k, v = (f(x).view(B, T, 3, 8).transpose(1, 2) for f in (attention.query, attention.key, attention.value))
    expected = torch.empty(B, 3, T, 8, dtype=torch.double)
    for b in range(B):
        for h in range(3):
            for i in range(T):
                pairs = [(k[b, h, j] + keys[r], v[b, h, j] + values[r]) for j, r in enumerate(relations[b, i].tolist())]
                weights = torch.stack([q[b, h, i] @ key / 8**0.5 for key, _ in pairs]).softmax(0)
                expected[b, h, i] = sum(w * value for w, (_, value) in zip(weights, pairs, strict=True))
    seen = []
    attention.register_forward_hook(lambda module, given, out: seen.append(out[0]))
    with related.reads(relations):
        read(model, ids, mask)
    torch.testing.assert_close(seen[0], expected.transpose(1, 2).reshape(B, T, 24))


def test_a_prompt_is_read_with_relations_and_its_continuation_without():
    """Greedy decoding and beams with a cache are those of whole texts whose answer has no relations."""
    ids, mask, relations = inputs()
    model = llama()
    related = relate(model, {"name": "rasat"})
    with related.reads(relations):
        said = model.generate(ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        beams = model.generate(ids, attention_mask=mask, max_new_tokens=3, num_beams=3, do_sample=False)
    assert beams.shape[0] == B
    whole = torch.zeros(B, said.shape[1], said.shape[1], dtype=torch.uint8)
    whole[:, :T, :T] = relations
    with related.reads(whole):
        logits = read(model, said, torch.ones_like(said))
    logits[..., model.config.eos_token_id] = -torch.inf  # at the last token, too, as `generate` was told
    assert torch.equal(logits[:, T - 1 : -1].argmax(-1), said[:, T:])
    with related.reads(torch.zeros_like(whole)):
        assert not torch.allclose(read(model, said, torch.ones_like(said)), logits)


def test_padding_on_the_left_changes_nothing():
    """Though a rotated query meets the tables, whose scores its place decides."""
    ids, mask, relations = inputs()
    model = llama()
    related = relate(model, {"name": "rasat"})
    with related.reads(relations):
        expected = read(model, ids, mask)
    padded = [torch.nn.functional.pad(x, (3, 0)) for x in (ids, mask)]
    with related.reads(torch.nn.functional.pad(relations, (3, 0, 3, 0))):
        torch.testing.assert_close(read(model, *padded)[:, 3:], expected, rtol=1e-5, atol=1e-6)


def test_tables_train_with_the_model_and_are_saved(tmp_path):
    ids, mask, relations = inputs()
    model = llama().train()
    related = relate(model, {"name": "rasat"})
    with related.reads(relations):
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    named = dict(model.named_parameters())
    assert named["relations.method.keys.weight"].grad[1:].abs().sum() > 0
    assert named["relations.method.values.weight"].grad[0].abs().sum() == 0
    related.save_pretrained(tmp_path)
    other = relate(llama(), {"name": "rasat"})
    other.load(tmp_path)
    for a, b in zip(related.method.tables(), other.method.tables(), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match="call relate"):
        relate(llama(), {"name": "rasat", "edges": "minimal"}).load(tmp_path)


def test_reading_within_reading_goes_back_to_what_was_read():
    ids, mask, relations = inputs()
    model = llama()
    related = relate(model, {"name": "rasat"})
    with related.reads(relations):
        expected = read(model, ids, mask)
        with related.reads(torch.zeros_like(relations)):
            assert not torch.allclose(read(model, ids, mask), expected)
        assert torch.equal(read(model, ids, mask), expected)
    assert not torch.allclose(read(model, ids, mask), expected)


def test_what_does_not_fit_is_refused():
    ids, mask, relations = inputs()
    model = llama()
    related = relate(model, {"name": "rasat"})
    with pytest.raises(ValueError, match="relation_ids of 6 tokens"), related.reads(relations[:, :6, :6]):
        read(model, ids, mask)
    three = torch.cat([ids, ids[:1]])
    with pytest.raises(ValueError, match="relation_ids of 2 texts: the model reads 3 texts"), related.reads(relations):
        read(model, three, torch.ones_like(three))
    with pytest.raises(ValueError, match="of 1 texts: the model reads 2"), related.reads(relations[:1]):
        read(model.train(), ids, mask)  # else the texts would count as beams of one
    with pytest.raises(ValueError, match="has the id 46"), related.reads(torch.full_like(relations, 46)):
        read(model, ids, mask)
    with pytest.raises(ValueError, match="has no tables"):
        relate(llama(), {"name": "none"})
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="encoder-decoder"):
        relate(t5, {"name": "rasat"})

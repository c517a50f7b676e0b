"""Methods that read attention: what they see is what stock towers and language models compute eagerly, and what they
leave is what plain loops over that leave, in a prompt and in every step after it."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from test_vision_families import batch
from vision_cases import CLIP, TEXT, clip, method_of, pair, perturbed, picture, tokenizer

from fathom.models.hf_versions import CACHE_NAME
from fathom.vision import compress_vision, convert_vision, from_dict

GRID = (6, 6)


def eager_tower(family_model):
    """The tower's output with all states and attentions, by its eager attention."""
    tower = copy.deepcopy(family_model.model.vision_tower)
    tower.set_attn_implementation("eager")
    return lambda pixels: tower(pixels, output_hidden_states=True, output_attentions=True)


def keys_and_queries(tower, layer, states):
    """Those of every token, neither split into heads."""
    block = tower.get_submodule(next(name for name, _ in tower.named_modules() if name.endswith(f"layers.{layer}")))
    normed = block.layer_norm1(states)
    return block.self_attn.k_proj(normed), block.self_attn.q_proj(normed)


@torch.no_grad()
def test_visionzip_is_a_loop_over_the_towers_own_attention():
    model, processor = pair("llava")
    pixels = batch("llava", processor).pixel_values
    out = eager_tower(model)(pixels)
    layer = CLIP["num_hidden_layers"] - 2  # which wrote hidden_states[-2]
    keys, _ = keys_and_queries(model.model.vision_tower, layer, out.hidden_states[-3])
    method = from_dict({"name": "visionzip", "tokens": 12, "contextual": 0.25})
    expected = []
    for states, weights, key in zip(out.hidden_states[-2][:, 1:], out.attentions[layer], keys):
        score = weights[:, 0, 1:].sum(0).tolist()
        order = sorted(range(36), key=lambda i: (-score[i], i))
        dominant, others = order[:9], sorted(order[9:])
        targets = others[:: len(others) // 3][:3]
        key = key[1:].unflatten(-1, (2, -1)).mean(1)
        groups = {t: [] for t in targets}
        for i in others:
            if i not in targets:
                groups[max(targets, key=lambda t: torch.cosine_similarity(key[i], key[t], 0).item())].append(i)
        made = {i: states[i] for i in dominant}
        for t, group in groups.items():
            made[t] = states[t] + (torch.stack([states[i] for i in group]).mean(0) if group else 0)
        expected.append(torch.stack([made[i] for i in sorted(made)]))
    found = features_kept(model, processor, method, pixels)
    assert (found - torch.stack(expected)).abs().max() < 1e-5 * found.abs().max()


@torch.no_grad()
@pytest.mark.parametrize(("name", "layer"), [("visionzip", 1), ("prumerge", 2)])
def test_what_dinov2s_token_attended_to_is_seen(name, layer, monkeypatch):
    torch.manual_seed(0)
    tower = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 24, "patch_size": 4}
    config = hf.LlavaConfig(
        vision_config=hf.Dinov2Config(**tower), text_config=hf.LlamaConfig(**TEXT), image_token_index=2
    )
    model = perturbed(hf.LlavaForConditionalGeneration(config))
    method, taken = from_dict({"name": name, "tokens": 9}), []
    call = type(method).__call__
    monkeypatch.setattr(
        type(method), "__call__", lambda self, x, grid, seen: [taken.append(seen), call(self, x, grid, seen)][1]
    )
    pixels = torch.randn(2, 3, 24, 24)
    ids = torch.full((2, 9), 2)
    with compress_vision(model, None, method):
        model(input_ids=ids, pixel_values=pixels)
    whole = eager_tower(model)(pixels).attentions[layer]
    assert taken[0].heads == 2
    torch.testing.assert_close(taken[0].attention(), whole[:, :, 0, 1:], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_prumerge_is_a_loop_over_the_next_layers_keys():
    model, processor = pair("llava")
    pixels = batch("llava", processor).pixel_values
    out = eager_tower(model)(pixels)
    keys, queries = keys_and_queries(model.model.vision_tower, CLIP["num_hidden_layers"] - 1, out.hidden_states[-2])
    method = from_dict({"name": "prumerge", "tokens": 7, "neighbours": 4})
    expected = []
    for states, key, query in zip(out.hidden_states[-2][:, 1:], keys, queries):
        share = (key @ query[0] / math.sqrt(len(query[0]))).softmax(0)[1:]
        key = key[1:]
        kept = sorted(sorted(range(36), key=lambda i: (-share[i].item(), i))[:7])
        rows = []
        for i in kept:
            near = sorted(
                (j for j in range(36) if j != i), key=lambda j: -torch.cosine_similarity(key[i], key[j], 0).item()
            )
            rows.append(states[i] + sum(share[j] * states[j] for j in near[:4]))
        expected.append(torch.stack(rows))
    found = features_kept(model, processor, method, pixels)
    assert (found - torch.stack(expected)).abs().max() < 1e-5 * found.abs().max()


def features_kept(model, processor, method, pixels):
    """What goes into the projector's first matrix."""
    taken = []
    hook = model.model.multi_modal_projector.linear_1.register_forward_pre_hook(lambda _, given: taken.append(given[0]))
    with compress_vision(model, processor, method):
        model.model.get_image_features(pixels)
    hook.remove()
    return taken[0]


@pytest.fixture(scope="module")
def deep():
    """A LLaVA model of five layers and its processor."""
    torch.manual_seed(1)
    text = hf.LlamaConfig(**{**TEXT, "num_hidden_layers": 5})
    config = hf.LlavaConfig(vision_config=hf.CLIPVisionConfig(**CLIP), text_config=text, image_token_index=2)
    processor = hf.LlavaProcessor(
        clip(), tokenizer(), patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return perturbed(hf.LlavaForConditionalGeneration(config)), processor


METHODS = {
    "fastv": from_dict({"name": "fastv", "tokens": 7, "layer": 2}),
    "sparsevlm": from_dict({"name": "sparsevlm", "tokens": 8, "layers": [0.2, 0.6]}),
}


def layer_by_layer(model, inputs, name, new=()):
    """Logits of a prompt of one row and of the tokens after it, which choose nothing."""
    inner, prompt = model.model, inputs.input_ids.shape[1]
    lm = inner.language_model
    ids = torch.cat((inputs.input_ids[0], torch.tensor(new, dtype=torch.long)))
    h = inner.get_input_embeddings()(ids).clone()
    is_image = ids == 2
    h[is_image] = torch.cat(inner.get_image_features(inputs.pixel_values).pooler_output)
    positions = torch.arange(len(ids))
    seen = [len(ids)]
    text = [i for i in range(prompt) if i > is_image.nonzero().max()]
    close = (h[is_image] @ h[text].T).softmax(-1).mean(0)
    raters = [text[i] for i in range(len(text)) if close[i] > close.mean()] if name == "sparsevlm" else [prompt - 1]
    for number, layer in enumerate(lm.layers):
        rotary = lm.rotary_emb(h[None], positions[None])
        mask = torch.full((len(h), len(h)), -torch.inf).triu(1)[None, None]
        attention = copy.copy(layer.self_attn)
        attention.config = copy.copy(attention.config)
        attention.config._attn_implementation = "eager"
        normed = layer.input_layernorm(h)[None]
        mixed, weights = attention(hidden_states=normed, position_embeddings=rotary, attention_mask=mask)
        h = h + mixed[0]
        h = h + layer.mlp(layer.post_attention_layernorm(h))
        count = {"fastv": {1: 7}, "sparsevlm": {1: 17, 3: 8}}[name].get(number)  # 36·√(8/36) = 16.97
        if count is not None:
            places = positions.tolist()
            images = [i for i, place in enumerate(places) if is_image[place]]
            rows = [places.index(rater) for rater in raters]
            score = {i: weights[0, :, rows, i].mean().item() for i in images}
            order = sorted(images, key=lambda i: (-score[i], i))
            stay = dict.fromkeys(order[:count])
            if name == "sparsevlm":
                gone = len(images) - count
                clusters = int(0.3 * gone) // 10 + 1
                stay = dict.fromkeys(order[: count - clusters])
                best = order[count - clusters :][: int(0.3 * gone) + 1]
                stay |= clustered(h, best, clusters)
            keep = [i for i in range(len(places)) if not is_image[places[i]] or i in stay]
            h = torch.stack([h[i] if stay.get(i) is None else stay[i] for i in keep])
            positions = positions[keep]
        seen.append(len(h))
    return model.lm_head(lm.norm(h)), positions, seen[:-1]


def clustered(h, best, clusters):
    """{place of a centre: mean of its cluster}, by density peaks."""
    apart = {(i, j): ((h[i] - h[j]).norm() / math.sqrt(h.shape[1])).item() for i in best for j in best}
    density = {i: math.exp(-sum(sorted(apart[i, j] ** 2 for j in best)[:clusters]) / clusters) for i in best}
    far = max(apart.values())
    peak = {i: min([apart[i, j] for j in best if density[j] > density[i]], default=far) * density[i] for i in best}
    centres = sorted(best, key=lambda i: -peak[i])[:clusters]
    groups = {c: [c] for c in centres}
    for i in best:
        if i not in centres:
            groups[min(centres, key=lambda c: apart[i, c])].append(i)
    return {c: torch.stack([h[i] for i in group]).mean(0) for c, group in groups.items()}


@pytest.mark.parametrize("name", METHODS)
@torch.no_grad()
def test_a_prompt_and_its_steps_are_those_of_a_loop_over_layers(deep, name):
    model, processor = deep
    with compress_vision(model, processor, METHODS[name]):
        inputs = processor(images=picture(60, 90), text="a <image> what is red this cat", return_tensors="pt")
        assert (inputs.input_ids == 2).sum() == 36
        logits = model(**inputs).logits[0]
        made = model.generate(
            **inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False, suppress_tokens=[2, 3, 4],
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    expected, positions, seen = layer_by_layer(model, inputs, name)
    assert (logits[positions] - expected).abs().max() < 1e-5 * expected.abs().max()
    new = made.sequences[0, -4:].tolist()
    steps, _, seen = layer_by_layer(model, inputs, name, new[:3])
    for found, right in zip(made.logits, steps[-4:]):
        assert (found[0] - right).abs().max() < 2e-5 * right.abs().max()
    cache = getattr(made, "cache", None) or made.past_key_values
    assert [layer.keys.shape[2] for layer in cache.layers] == seen
    assert [tokens + len(inputs.input_ids[0]) - 36 + 3 for tokens in METHODS[name].read(GRID, 5)] == seen


@pytest.mark.parametrize("name", METHODS)
@torch.no_grad()
def test_steps_of_padded_rows_are_those_of_rows_alone(deep, name):
    """Rows of one picture, of two and of none, beams, and a prompt's second round."""
    model, processor = deep
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "suppress_tokens": [2, 3, 4, 31]}
    with compress_vision(model, processor, METHODS[name]):
        together = model.generate(**batch("llava", processor, (0, 1, 2, 3)), **settings)
        for row in range(4):
            alone = model.generate(**batch("llava", processor, (row,)), **settings)
            assert together[row, -5:].equal(alone[0, -5:])
        beams = model.generate(**batch("llava", processor, (0, 2)), num_beams=2, **settings)
        assert beams[1, -5:].equal(model.generate(**batch("llava", processor, (2,)), num_beams=2, **settings)[0, -5:])


@torch.no_grad()
def test_the_innermost_block_alone_counts(deep):
    model, processor = deep
    half = from_dict({"name": "average_pooling", "tokens": 9})

    def logits():
        return model(**batch("llava", processor)).logits

    with compress_vision(model, processor, half):
        expected = logits()
    for name, method in METHODS.items():
        with compress_vision(model, processor, method):
            with compress_vision(model, processor, half):
                assert logits().equal(expected), name  # before the outer one has seen a picture
            outer = logits()
            with compress_vision(model, processor, half):
                assert logits().equal(expected), name
            assert logits().equal(outer), name


@torch.no_grad()
def test_a_cache_that_was_cropped_into_the_prompt_is_refused(deep):
    model, processor = deep
    with compress_vision(model, processor, METHODS["fastv"]):
        inputs = processor(images=picture(48, 48), text="a <image> what is", return_tensors="pt")
        found = model(**inputs, use_cache=True)
        cache = getattr(found, "cache", None) or found.past_key_values
        model(input_ids=inputs.input_ids[:, -1:], **{CACHE_NAME: cache})
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, :2], layer.values[:, :, :2]
        with pytest.raises(ValueError, match="cache: it was cropped into a prompt that method 'fastv' has thinned"):
            model(input_ids=inputs.input_ids[:, -1:], **{CACHE_NAME: cache})


@pytest.mark.parametrize("name", METHODS)
def test_layers_that_would_run_again_are_refused_and_a_picture_may_end_a_prompt(deep, name):
    model, processor = copy.deepcopy(deep[0]), deep[1]
    with compress_vision(model, processor, METHODS[name]):
        inputs = processor(images=picture(48, 48), text="what is this <image>", return_tensors="pt")
        assert model(**inputs).logits.isfinite().all()
        model.gradient_checkpointing_enable()
        with pytest.raises(ValueError, match="cannot run layers again; switch it off"):
            model.train()(**inputs, use_cache=False)


def test_what_cannot_be_watched_is_refused(deep, tmp_path):
    model, processor = deep
    fastv, zipped = METHODS["fastv"], method_of("visionzip", 9)
    config = model.config.text_config
    stock = config._attn_implementation
    config._attn_implementation_internal = "flash_attention_2"
    try:
        with (
            pytest.raises(
                ValueError, match="'flash_attention_2': this method reads attention weights, which it does not"
            ),
            compress_vision(model, processor, fastv),
        ):
            pass
    finally:
        config._attn_implementation_internal = stock
    nexts, their = pair("llava_next")
    for method in (fastv, zipped):
        with pytest.raises(ValueError, match="keeps no grid"), compress_vision(nexts, their, method):
            pass
    deepest = from_dict({"name": "fastv", "tokens": 7, "layer": 5})
    for method, message in ((deepest, "has 5 layers; use less"), (method_of("mqt", 9), "which this model lacks")):
        with pytest.raises(ValueError, match=message), compress_vision(model, processor, method):
            pass
    full = copy.deepcopy(model.config)
    full.vision_feature_select_strategy = "full"
    model.model.config, kept = full, model.model.config
    try:
        with pytest.raises(ValueError, match="reads the CLS token"), compress_vision(model, processor, zipped):
            pass
    finally:
        model.model.config = kept
    with compress_vision(model, processor, fastv):
        inputs = batch("llava", processor, (0,))
        cache = model(input_ids=torch.tensor([[5, 6]]), use_cache=True)
        name = "cache" if getattr(cache, "cache", None) is not None else "past_key_values"
        with pytest.raises(ValueError, match="start with a new cache"):
            model(**{**inputs, "attention_mask": None, name: getattr(cache, name)})
        with pytest.raises(ValueError, match="keeps a cache that grows"):
            model.generate(**inputs, max_new_tokens=2, cache_implementation="static", disable_compile=True)
        right = inputs.attention_mask.clone()
        right[:, -1] = 0
        with pytest.raises(ValueError, match="pad on the left"):
            model(**{**inputs, "attention_mask": right})
        embeddings = model.get_input_embeddings()(inputs.input_ids)
        with pytest.raises(ValueError, match="finds vision tokens by input_ids"):
            model(inputs_embeds=embeddings, pixel_values=inputs.pixel_values)
    model.save_pretrained(tmp_path / "stock")
    processor.save_pretrained(tmp_path / "stock")
    with pytest.raises(ValueError, match="which no stock checkpoint has"):
        convert_vision(tmp_path / "stock", tmp_path / "ours", method_of("mqt", 9))
    convert_vision(tmp_path / "stock", tmp_path / "ours", fastv)
    loaded = hf.AutoModelForImageTextToText.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad(), compress_vision(model, processor, fastv):
        assert loaded(**inputs).logits.equal(model(**inputs).logits)


@torch.no_grad()
def test_the_resampler_is_attention_written_out():
    method = from_dict({"name": "mqt", "tokens": 5, "queries": 9, "heads": 2})
    part, x = method.resampler(8).double(), torch.randn(2, 12, 8, dtype=torch.float64)
    for parameter in part.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    places = torch.zeros(9, 8, dtype=torch.float64)
    for i in range(9):
        for half, at in ((0, i % 3), (4, i // 3)):
            for k in range(2):
                places[i, half + k] = math.sin(at / 10_000 ** (k / 2))
                places[i, half + 2 + k] = math.cos(at / 10_000 ** (k / 2))
    image = F.interpolate(places.T.reshape(1, 8, 3, 3).float(), (3, 4), mode="bicubic").double()[0].reshape(8, 12).T

    def normed(norm, value):
        centred = value - value.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight + norm.bias

    weights = part.attention.in_proj_weight.chunk(3)
    biases = part.attention.in_proj_bias.chunk(3)
    q = normed(part.norm_query, part.query.weight[:5] + places[:5]) @ weights[0].T + biases[0]
    k = normed(part.norm_key, image) @ weights[1].T + biases[1]
    v = normed(part.norm_value, x) @ weights[2].T + biases[2]
    heads = []
    for part_of in (slice(0, 4), slice(4, 8)):
        shares = (q[:, part_of] @ k[:, part_of].T / 2).softmax(-1)
        heads.append(shares @ v[..., part_of])
    expected = torch.cat(heads, -1) @ part.attention.out_proj.weight.T + part.attention.out_proj.bias
    assert torch.allclose(part(x, (3, 4), 5), expected, atol=1e-7)
    counts = {method.in_training().tokens for _ in range(60)}
    assert counts == {2, 4} and from_dict({**method.to_dict(), "elastic": False}).in_training().tokens == 5

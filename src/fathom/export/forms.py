"""Which forms a checkpoint can take, and writing it in one.

    stock   the class of transformers that computes the same, without Fathom
    llada   LLaDA's layout (arXiv 2502.09992), for its authors' code
    gguf    one file for llama.cpp, of a stock Llama

What is written is read again by the class that it is for, and must give the same logits.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoTokenizer

from fathom.export import gguf
from fathom.models.checkpoints import diffusion
from fathom.models.checkpoints import stock as decoders
from fathom.models.configuration import FathomConfig
from fathom.models.encoder_configs import EncoderSection
from fathom.models.local_paths import refuse_absent
from fathom.models.model_card import describe, facts_of
from fathom.models.registry import ENCODER_PLAIN, nearest
from fathom.tables.text.configuration import TableSection
from fathom.writing import new_folder, write_json

CHECKED = 32  # tokens whose logits are compared
CLOSE = 1e-4  # of the largest logit, both in float32
NO_FORM = {  # model types that no other program computes
    "fathom_encoder": "no stock class has its head on a decoder's blocks",
    "fathom_latent": "no stock class has encoder, denoiser and contextual decoder in one",
    "fathom_mova": "its towers and bridge are Fathom's, and no stock pipeline runs them together",
}
USE = {
    "stock": None,  # as the Auto class says
    "llada": "The folder has LLaDA's layout. Its authors' `configuration_llada.py` and `modeling_llada.py`\n"
    "read it, as does `FathomForMaskedDiffusion.from_pretrained`.",
    "gguf": f"```sh\nllama-cli -m {gguf.NAME}\n```",
}
FORMS = tuple(USE)


def forms_of(config: Any) -> dict[str, str | ValueError]:
    """Every form for a model with this config: its class or format, or the error that says why it is impossible."""
    found: dict[str, str | ValueError] = {}
    kinds: dict[str, Callable[[Any], str]] = {"stock": _stock, "llada": _llada, "gguf": _gguf}
    for name, ask in kinds.items():
        try:
            found[name] = ask(config)
        except ValueError as error:
            found[name] = error
    return found


def export(checkpoint: str, folder: str | Path, form: str = "stock") -> dict[str, Any]:
    """Write the checkpoint in `form` to a new folder, with tokenizer and card. Returns its class and the error of
    logits.

    Raises:
        ValueError: a form that the model cannot take, or another than `FORMS`; logits that are not the same.
        FileExistsError: `folder` is there and not empty.
        ImportError: gguf without the package.
    """
    if form not in FORMS:
        raise ValueError(f"form={form!r}: must be one of {', '.join(FORMS)}{nearest(form, list(FORMS))}")
    config = read_config(checkpoint)
    what = forms_of(config)[form]
    if isinstance(what, ValueError):
        raise ValueError(f"{checkpoint}: no {form} form: {what}")
    if form == "stock" and not _own(config):
        raise ValueError(f"{checkpoint}: is a stock checkpoint already; there is nothing to write")
    if form == "gguf" and importlib.util.find_spec("gguf") is None:
        raise ImportError("writing GGUF needs the gguf package: pip install 'fathom-lm[gguf]'")
    model, tokenizer, facts = _model(checkpoint, config), _tokenizer(checkpoint), facts_of(checkpoint)
    vocabulary = gguf.vocabulary(tokenizer, checkpoint, config.vocab_size) if form == "gguf" else None
    with new_folder(Path(folder)) as work:
        if vocabulary is not None:
            with tempfile.TemporaryDirectory() as place:
                licence = (facts or {}).get("license")
                gguf.write(_plain(model, place), vocabulary, work / gguf.NAME, Path(folder).name, licence)
        else:
            (_write_llada if form == "llada" else _write_stock)(model, work)
            if tokenizer is not None:
                tokenizer.save_pretrained(work)
        difference = _compare(model, work, form, checkpoint)
        shown = AutoConfig.from_pretrained(work) if form == "stock" else model.config
        describe(work, shown, sum(weight.numel() for weight in model.parameters()), facts, USE[form])
    return {"checkpoint": checkpoint, "form": form, "what": what, "folder": str(folder), "difference": difference}


def read_config(checkpoint: str) -> Any:
    """The config of a checkpoint, ours or stock."""
    refuse_absent(checkpoint, f"checkpoint={checkpoint!r}")
    place = Path(checkpoint)
    if (place / "adapter_config.json").is_file():
        raise ValueError(
            f"{checkpoint}: has an adapter (adapter_config.json); merge it into its base (peft: merge_and_unload), "
            "save that and export it"
        )
    if place.is_dir():
        if not (place / "config.json").is_file():
            raise FileNotFoundError(f"{checkpoint}: no config.json; give the folder of a trained model")
        if "mova" in json.loads((place / "config.json").read_text(encoding="utf-8")):
            from fathom.audiovideo.configuration import MovaConfig

            return MovaConfig.from_pretrained(checkpoint)
    return AutoConfig.from_pretrained(checkpoint)


def _own(config: Any) -> bool:
    return str(config.model_type).startswith("fathom")


def _stock(config: Any) -> str:
    kind = str(config.model_type)
    if kind in NO_FORM:
        raise ValueError(f"{kind}: {NO_FORM[kind]}")
    if getattr(config, "vision_compress", None) is not None:
        name = config.vision_compress["name"]
        raise ValueError(
            f"vision_compress={name!r}: no stock class compresses vision tokens; its stock form is the checkpoint that "
            "it was made from"
        )
    if isinstance(config, EncoderSection):
        family = str(config.stock.model_type)  # type: ignore[union-attr]
        section = getattr(config, config.section) if hasattr(config, config.section) else None
        if section is not None and section["name"] != ENCODER_PLAIN[config.section]:
            raise ValueError(f"{config.section}={section['name']!r}: stock {family} has no such {config.section}")
        if isinstance(config, TableSection) and (config.method.adapts or config.method.prefixes):
            part = "adapter" if config.method.adapts else "prefix"
            raise ValueError(f"table={config.table['name']!r}: stock {family} has no {part} such as its own")
        return f"stock {family}"
    if not isinstance(config, FathomConfig):
        return f"stock {kind}"
    target = decoders.stock_config(config)
    if config.tie_word_embeddings and config.embed_scale != 1.0:
        raise ValueError(
            f"embed_scale={config.embed_scale:g} cannot be folded into an input table that the head shares; train with "
            "tie_word_embeddings: false or embed_scale: 1"
        )
    return f"stock {target.model_type}"


def _llada(config: Any) -> str:
    if not isinstance(config, FathomConfig) or config.diffusion["name"] != "masked":
        raise ValueError("LLaDA is a masked diffusion model, and this is none")
    if config.diffusion["shift"]:
        raise ValueError("diffusion option shift=True: LLaDA predicts each token at its own place")
    _stock(config)
    if decoders.family_of(config) != "llama" or config.attention_bias or config.mlp_bias:
        raise ValueError(f"backbone={config.backbone!r} with these options: LLaDA is a Llama decoder without biases")
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        raise ValueError(f"head_dim={config.head_dim}: LLaDA's heads share out hidden_size={config.hidden_size}")
    return "LLaDA's layout"


def _gguf(config: Any) -> str:
    _stock(config)  # says why a model of ours has no form at all
    target = config
    if isinstance(config, FathomConfig):
        target = decoders.stock_config(config)
    elif isinstance(config, EncoderSection):
        target = config.stock_config()
    gguf.check(target)
    return "GGUF of a stock llama"


def _model(checkpoint: str, config: Any) -> Any:
    """The model, in eval mode and in the precision of its files; in float32 where a scale is to be folded into the
    input table, which 16 bits would round."""
    auto: Any = AutoModelForCausalLM
    if config.is_encoder_decoder:
        auto = AutoModelForSeq2SeqLM
    elif isinstance(config, FathomConfig) and config.diffusion["name"] != "none":
        auto = AutoModelForMaskedLM
    folds = isinstance(config, FathomConfig) and config.embed_scale != 1.0
    return auto.from_pretrained(checkpoint, dtype=torch.float32 if folds else "auto").eval()


def _tokenizer(checkpoint: str) -> Any:
    """None where there is none: a model alone can be exported, too."""
    try:
        return AutoTokenizer.from_pretrained(checkpoint)
    except (OSError, ValueError):
        return None


def _plain(model: Any, place: str) -> Any:
    """The stock model that it is, by way of the folder `place`."""
    if not _own(model.config):
        return model
    _write_stock(model, Path(place))
    return AutoModelForCausalLM.from_pretrained(place, dtype="auto")


def _write_stock(model: Any, folder: Path) -> None:
    if hasattr(model, "save_stock_pretrained"):
        model.save_stock_pretrained(folder)
        return
    # a table's model extends a stock class, whose weights it has: `_stock` refuses methods that add some
    stock = next(cls for cls in type(model).__mro__ if cls.__module__.startswith("transformers.models."))
    made: Any = stock(model.config.stock_config())
    made.load_state_dict(model.state_dict())
    made.generation_config = model.generation_config
    made.to(model.dtype).save_pretrained(folder)


def _write_llada(model: Any, folder: Path) -> None:
    from safetensors.torch import save_file

    state = diffusion.llada_state(model)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", diffusion.llada_fields(model.config, model.dtype))


@torch.no_grad()
def _compare(model: Any, folder: Path, form: str, checkpoint: str) -> float:
    """Largest difference of logits / largest logit, on random tokens in float32. Raises ValueError if it is above
    `CLOSE`.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.get_text_config().vocab_size, (1, CHECKED), generator=generator)
    given = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens[:, : CHECKED // 2]
    found = _read_again(folder, form).eval()(**given).logits
    right = model.float()(**given).logits
    if form == "stock" and getattr(model, "diffusion", None) is not None and model.diffusion.shift:
        right = torch.cat([right[:, 1:], found[:, -1:]], 1)  # ours are of the token at their place, stock's of the next
    difference = ((found - right).abs().max() / right.abs().max().clamp(min=1e-30)).item()
    if not difference < CLOSE:
        raise ValueError(
            f"{checkpoint}: its {form} form, read again, has logits that differ by {difference:.1g} of the largest "
            "one; not written"
        )
    return difference


def _read_again(folder: Path, form: str) -> Any:
    if form == "gguf":
        return AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf.NAME, dtype=torch.float32)
    if form == "llada":
        from fathom.models.masked_diffusion import FathomForMaskedDiffusion

        return FathomForMaskedDiffusion.from_pretrained(folder, dtype=torch.float32)
    encodes = AutoConfig.from_pretrained(folder).is_encoder_decoder
    auto: Any = AutoModelForSeq2SeqLM if encodes else AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32)

"""A model and its tokenizer from a folder or the hub: Fathom checkpoints and transformers' causal language models."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fathom import FathomForCausalLM  # importing it registers FathomConfig with the Auto classes
from fathom.models import hf_versions
from fathom.models.checkpoints import depth_attention as depth_attention_checkpoints
from fathom.models.checkpoints.adapter import find_adapter
from fathom.models.checkpoints.stock import STOCK, check_names, damage_named
from fathom.models.configuration import FathomConfig
from fathom.models.device import device_of
from fathom.models.encoder_configs import FathomEncoderConfig
from fathom.models.local_paths import refuse_absent

READ_BY = {  # families of ours that continue no text, or only tables
    "fathom_latent": "`fathom generate` and `fathom latents recovery`",
    "fathom_mova": "`fathom video make`",
    "fathom_t5": "`fathom table ask` and `fathom table show`",
    "fathom_table_bart": "`fathom table describe`",
    "fathom_table_llama": "`fathom table describe`",
    "fathom_table_t5": "`fathom table describe`",
}


def load_checkpoint(
    checkpoint: str, device: str | None = None, trust_remote_code: bool = False
) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model, in eval mode and the dtype it was saved in, and its tokenizer.

    Args:
        checkpoint: folder or hub name of a model, or of an adapter of peft on one.
        device: "cpu", "cuda", "cuda:1", …; None is the GPU if there is one.
        trust_remote_code: run Python code that comes with the checkpoint.

    Raises:
        FileNotFoundError: no such folder, or no config.json in it.
        ValueError: unreadable config; a family that is no causal language model; damaged or missing weights; no
            tokenizer, or one with more ids than the model has embeddings; a device that is not there.
    """
    place = device_of(device)
    local = Path(checkpoint).expanduser().is_dir()
    weights, adapter = find_adapter(checkpoint, {}) if local else (checkpoint, None)
    config = load_config(weights, trust_remote_code)
    if not local:  # now it is known to be there
        weights, adapter = find_adapter(checkpoint, {})
    family = config.model_type
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if family not in {FathomConfig.model_type, *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} and not remote:
        raise ValueError(
            f"{checkpoint}: family {family!r} is not supported, it is no causal language model of transformers"
            f"{_read_by(family)}; supported: {FathomConfig.model_type}, {', '.join(STOCK)} (methods run on these) and "
            f"{len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - len(STOCK)} more as they are"
        )
    tokenizer = _tokenizer(weights, trust_remote_code)
    needed = max(tokenizer.get_vocab().values()) + 1
    size = config.get_text_config().vocab_size
    if needed > size:
        raise ValueError(
            f"{checkpoint}: its tokenizer has {needed} token ids, more than the model's vocab_size={size}; "
            "put the tokenizer that the model was trained with into the folder"
        )
    if depth_attention_checkpoints.recognised(config):  # transformers would take it for a plain Llama
        authors: Any = FathomForCausalLM.from_pretrained(checkpoint, dtype="auto")
        return authors.to(place).eval(), tokenizer
    with damage_named(checkpoint), hf_versions.weights_alone() as alone:
        try:
            diffusion = family == FathomConfig.model_type and config.diffusion["name"] != "none"
            loaded: Any = (AutoModelForMaskedLM if diffusion else AutoModelForCausalLM).from_pretrained(
                weights, dtype="auto", output_loading_info=True, trust_remote_code=trust_remote_code, **alone
            )
        except OSError as error:
            raise ValueError(f"{checkpoint}: no weights could be read ({_first_line(error)})") from error
    model, report = loaded
    check_names(weights, report["missing_keys"])  # what other families leave unread, transformers says
    if adapter is not None:
        of_adapter = model.load_adapter(adapter[0], adapter_kwargs=adapter[1])
        check_names(adapter[0], of_adapter.missing_keys, of_adapter.unexpected_keys)
    return model.to(place).eval(), tokenizer


def load_encoder(checkpoint: str, device: str | None = None) -> tuple[Any, PreTrainedTokenizerBase]:
    """A sequence-to-sequence model, a classifier of ours, or BERT's layers, in eval mode, and its tokenizer.

    Raises what `load_checkpoint` does.
    """
    place, config = device_of(device), load_config(checkpoint)
    made: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModel
    if config.model_type == FathomEncoderConfig.model_type:
        made = AutoModelForSequenceClassification
    tokenizer = _tokenizer(checkpoint, False)
    with damage_named(checkpoint):
        try:
            return made.from_pretrained(checkpoint, dtype="auto").to(place).eval(), tokenizer
        except OSError as error:
            raise ValueError(f"{checkpoint}: no weights could be read ({_first_line(error)})") from error


def refuse_other_families(checkpoint: str, families: Container[str], wanted: str) -> None:
    """Raise ValueError, naming what is `wanted`, for a checkpoint of a family outside `families`, and FileNotFoundError
    or ValueError for what is no checkpoint.

    transformers would read the config as whatever class it is asked for, and fail later with an unclear message.
    """
    _refuse_no_checkpoint(checkpoint)
    try:
        family = PreTrainedConfig.get_config_dict(checkpoint)[0].get("model_type")
    except OSError as error:
        raise _unread(checkpoint, error) from error
    if family not in families:
        raise ValueError(f"{checkpoint}: family {family!r}; give {wanted}{_read_by(family)}")


def load_config(checkpoint: str, trust_remote_code: bool = False) -> Any:
    """The checkpoint's transformers config. Raises FileNotFoundError or ValueError as `load_checkpoint` does."""
    _refuse_no_checkpoint(checkpoint)
    try:
        return AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    except OSError as error:
        raise _unread(checkpoint, error) from error
    except (ValueError, TypeError, AttributeError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{checkpoint}: needs Python code that comes with it, and that is not run unasked; read it, then pass "
                "trust_remote_code=True (--trust-remote-code)"
            ) from error
        for family in READ_BY:  # one that the Auto classes do not know
            if f"`{family}`" in str(error):
                raise ValueError(f"{checkpoint}: family {family!r}{_read_by(family)}") from error
        hint = ""
        if "model_type" in str(error) or "model type" in str(error):
            hint = (
                f" Fathom's methods run on the families {', '.join(STOCK)}; "
                "transformers' other causal language models can be evaluated as they are"
            )
        raise ValueError(f"{checkpoint}: {_first_line(error)}{hint}") from error


def _read_by(family: str | None) -> str:
    return f"; this one is read by {READ_BY[family]}" if family in READ_BY else ""


def _refuse_no_checkpoint(checkpoint: str) -> None:
    folder = Path(checkpoint).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            inside = sorted(file.parent for file in folder.glob("*/config.json"))
            inside.sort(key=lambda path: path.name != "model")  # which a run has beside its checkpoint-N
            raise FileNotFoundError(
                f"{checkpoint}: no config.json in this folder, so it is no checkpoint"
                + "".join(f"; did you mean {path}?" for path in inside[:1])
            )
    elif folder.exists():
        raise ValueError(f"{checkpoint}: is a file; give the folder of a checkpoint, or a hub name")
    refuse_absent(checkpoint, checkpoint)


def _unread(checkpoint: str, error: OSError) -> Exception:
    folder = Path(checkpoint).expanduser()
    if folder.is_dir():
        return ValueError(f"{folder / 'config.json'}: cannot be read ({_first_line(error)})")
    return FileNotFoundError(
        f"{checkpoint}: no such folder here, and the hub gave no model of this name ({_first_line(error)})"
    )


def _tokenizer(checkpoint: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
        if not set(tokenizer.get_vocab()) - set(tokenizer.get_added_vocab()):  # transformers makes an empty one
            raise ValueError("it has no vocabulary")
        return tokenizer
    except Exception as error:  # the many tokenizer formats raise a wide range of types
        raise ValueError(
            f"{checkpoint}: no tokenizer could be loaded ({_first_line(error)}); "
            "save the one it was trained with into the folder"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

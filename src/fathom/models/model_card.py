"""The model card beside a checkpoint's weights: what the model is, how it was trained, what was measured, its licence.

A card is made from metadata alone: the config, and `fathom.json`, in which training records its facts. Facts stay with
a model that is loaded and saved again; if its weights have changed since, the card says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open

from fathom.models import registry
from fathom.models.saved_files import CODE
from fathom.writing import write_json, write_text

CARD, FACTS = "README.md", "fathom.json"
WRITTEN = "<!-- Written by Fathom from the checkpoint's metadata. Delete this line, and it is never written again. -->"
GENERIC = "has been automatically generated"  # in the card that transformers uploads for models without one
# What a config's other sections are called, and the plain method of each: a model with it has none of ours there.
WHOLE = ("codar", "mova")  # whose method is all that the config is about
SECTIONS = {**registry.ENCODER_PLAIN, "table": "table_plain", "vision_compress": None, **dict.fromkeys(WHOLE)}
KINDS = {  # Auto class -> what it loads, and the hub's name of what that is for
    "AutoModelForCausalLM": ("A causal language model", "text-generation"),
    "AutoModelForMaskedLM": ("A masked diffusion language model", "text-generation"),
    "AutoModelForSeq2SeqLM": ("An encoder and a decoder", None),
    "AutoModelForSequenceClassification": ("A classifier of texts", "text-classification"),
    "AutoModelForImageTextToText": ("A vision-language model", "image-text-to-text"),
    "AutoModel": ("A latent diffusion model of text", "text-generation"),
    "MovaPipeline": ("A diffusers pipeline that makes clips with their sound", "text-to-video"),
}


class Published:
    """A mixin for models: `save_pretrained` writes the card, and `push_to_hub` uploads it with the weights."""

    def save_pretrained(self, save_directory: Any, *args: Any, push_to_hub: bool = False, **kwargs: Any) -> Any:
        """As in transformers, with a model card unless the folder has one that a person wrote."""
        hub: dict[str, Any] = {
            name: kwargs.pop(name) for name in ("repo_id", "commit_message", "create_pr") if name in kwargs
        }
        if push_to_hub:
            hub.update({name: kwargs.pop(name) for name in ("private", "revision") if name in kwargs})
        written = super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        config = self.card_config
        saves = getattr(self, "should_save_on_this_rank", bool)(kwargs.get("is_main_process", True))
        if saves and not Path(save_directory).is_file() and not getattr(self, "_hf_peft_config_loaded", False):
            facts = facts_of(getattr(config, "name_or_path", ""))
            write_card(save_directory, config, self.parameter_count, facts)
            if push_to_hub:
                upload(save_directory, token=kwargs.get("token"), **{"repo_id": Path(save_directory).name, **hub})
        return written

    @property
    def card_config(self) -> Any:
        """The config that the card describes."""
        return self.config  # type: ignore[attr-defined]

    @property
    def parameter_count(self) -> int:
        return sum(weight.numel() for weight in self.parameters())  # type: ignore[attr-defined]

    def _push(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "50GB",
        tags: list[str] | None = None,
    ) -> str:
        """The URL of the commit that uploads the model with its card. A card there that a person wrote stays.

        Raises ConnectionError where the hub may not be asked (HF_HUB_OFFLINE).
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, max_shard_size=max_shard_size)
            wanted = [*(getattr(self, "model_tags", None) or ()), *([tags] if isinstance(tags, str) else tags or ())]
            return upload(
                folder, repo_id, commit_message=commit_message, commit_description=commit_description,
                private=private, token=token, revision=revision, create_pr=create_pr, tags=wanted,
            )  # fmt: skip

    push_to_hub: Any = _push  # Any: the bases of a model disagree about its arguments


def upload(folder: str | os.PathLike, repo_id: str, tags: list[str] | None = None, private: bool | None = None,
           token: Any = None, **commit: Any) -> str:  # fmt: skip
    """The URL of the commit that uploads a checkpoint's folder. A card there that a person wrote stays."""
    from huggingface_hub import HfApi, ModelCard
    from huggingface_hub.errors import EntryNotFoundError, OfflineModeIsEnabled

    api = HfApi(token=token)
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    except OfflineModeIsEnabled as error:
        raise ConnectionError(
            f"push_to_hub({repo_id!r}): HF_HUB_OFFLINE forbids it; unset it, or save_pretrained(folder) here and "
            f"`hf upload {repo_id} folder` where there is a network"
        ) from error
    try:
        there = ModelCard.load(repo_id, token=token).content
    except EntryNotFoundError:
        there = WRITTEN
    keep = WRITTEN not in there and GENERIC not in there
    if tags and not keep:
        card = ModelCard.load(Path(folder) / CARD)
        card.data.tags = list(dict.fromkeys([*(card.data.tags or ()), *tags]))
        card.save(Path(folder) / CARD)
    commit = {name: value for name, value in commit.items() if value is not None}
    commit.setdefault("commit_message", "Upload model")
    done = api.upload_folder(
        repo_id=repo_id, folder_path=Path(folder), ignore_patterns=[CARD] if keep else None, **commit
    )  # fmt: skip
    return str(done)


def describe(
    folder: str | os.PathLike, config: Any, parameters: int, facts: dict[str, Any] | None, use: str | None = None
) -> None:
    """Write the facts of a training beside the weights that it made, and the card that shows them."""
    write_card(folder, config, parameters, facts and {**facts, "weights": weights_digest(folder)}, use)


def write_card(
    folder: str | os.PathLike,
    config: Any,
    parameters: int,
    facts: dict[str, Any] | None = None,
    use: str | None = None,
) -> None:
    """Write README.md, unless a person wrote one, and the facts, so that whoever loads the model next has them.

    use: how the model is loaded, where the config's class does not say it.
    """
    place, facts = Path(folder) / CARD, facts or {}
    if place.exists() and WRITTEN not in place.read_text(encoding="utf-8"):
        return
    changed = bool(facts) and facts.get("weights") != weights_digest(folder)
    if facts:
        write_json(Path(folder) / FACTS, facts)
    write_text(place, card_text(config, parameters, facts, changed, use))


def card_text(
    config: Any, parameters: int, facts: dict[str, Any], changed: bool = False, use: str | None = None
) -> str:
    """The text of the card. changed: whether the weights are no longer those that the facts describe."""
    from huggingface_hub import EvalResult, ModelCardData

    active, auto, own = sections_of(config), auto_class(config), str(config.model_type).startswith("fathom")
    kind, task = KINDS.get(auto, ("A model", None))
    title = " + ".join(section["name"] for section in active.values())
    title = title or f"{getattr(config, 'backbone', config.model_type)}, no method"
    scores = [] if changed else [s for s in facts.get("scores", ()) if s["value"] is not None]
    base = facts.get("base_model") or ""
    trained_on = facts.get("held_out_name", "held-out data")
    results = [
        EvalResult(task or "other", "fathom", trained_on, score["name"], score["value"], metric_name=score["unit"])
        for score in scores
    ]
    data = ModelCardData(
        library_name="diffusers" if auto == "MovaPipeline" else "transformers",
        pipeline_tag=task,
        license=facts.get("license"),
        base_model=base if "/" in base else None,  # else a folder's name, which on the hub is somebody else's model
        tags=["fathom", *dict.fromkeys(section["name"] for section in active.values())],
        model_name=title if results else None,
        eval_results=results or None,
    )
    parts = [f"---\n{data.to_yaml()}\n---\n\n{WRITTEN}\n\n# {title}\n", _what(config, kind, parameters, active)]
    if facts:
        parts += [_training(facts), _measured(facts, changed)]
    parts += [f"## Use\n\n{use or _use(auto, own)}\n", _licence(facts)]
    return "\n".join(parts)


def sections_of(config: Any) -> dict[str, dict[str, Any]]:
    """The methods of a model other than the plain ones, by section of its config."""
    plain = {name: section.plain for name, section in registry.SECTIONS.items()}
    plain |= {name: () if method is None else (method,) for name, method in SECTIONS.items()}
    found = {}
    for name, methods in plain.items():
        value = getattr(config, name, None)
        if isinstance(value, dict) and ("name" in value or name in WHOLE):
            value = {"name": name, **value}
            if value["name"] not in methods or value["name"] == "masked":
                found[name] = value
    return found


def auto_class(config: Any) -> str:
    """The name of transformers' class that loads the model."""
    if isinstance(getattr(config, "mova", None), dict):
        return "MovaPipeline"
    named = [name for name in getattr(config, "auto_map", None) or () if name != "AutoConfig"]
    if named:
        return named[0]
    if getattr(config, "vision_config", None) is not None:
        return "AutoModelForImageTextToText"
    architecture = (getattr(config, "architectures", None) or [""])[0]
    ends = {"ForConditionalGeneration": "AutoModelForSeq2SeqLM", "ForCausalLM": "AutoModelForCausalLM",
            "ForSequenceClassification": "AutoModelForSequenceClassification"}  # fmt: skip
    return next((auto for end, auto in ends.items() if architecture.endswith(end)), "AutoModel")


def weights_digest(folder: str | os.PathLike) -> str | None:
    """A hash of all tensors, by which changed weights are noticed; None without safetensors.

    It does not depend on how tensors are spread over files, but does on their precision.
    """
    found = {}
    for file in _files(folder):
        part = file.parent.relative_to(folder).as_posix()
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  it is no mapping
                tensor = tensors.get_tensor(name)
                content = tensor.contiguous().flatten().view(torch.uint8).numpy()
                found[f"{part}/{name}"] = [list(tensor.shape), str(tensor.dtype), hashlib.sha256(content).hexdigest()]
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest() if found else None


def _files(folder: str | os.PathLike) -> list[Path]:
    """The weight files in a folder, or in the folders of a pipeline's parts."""
    pattern = "*/*.safetensors" if (Path(folder) / "model_index.json").exists() else "*.safetensors"
    return [file for file in sorted(Path(folder).glob(pattern)) if not file.name.startswith("adapter")]


def facts_of(folder: str | os.PathLike) -> dict[str, Any] | None:
    """The facts in the checkpoint that a model was loaded from; None if it has none or is no folder."""
    try:
        found = json.loads((Path(folder) / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if os.fspath(folder) and isinstance(found, dict) else None


def _what(config: Any, kind: str, parameters: int, active: dict[str, dict[str, Any]]) -> str:
    said = f"{kind} of [Fathom](https://pypi.org/project/fathom-lm) of {parameters:,} parameters"
    if getattr(config, "backbone", None):
        said += (
            f": a {config.backbone} decoder's blocks ({config.num_hidden_layers} layers, width {config.hidden_size}, "
            f"vocabulary {config.vocab_size:,})"
        )
    methods = [f"- `{name}`: `{json.dumps(section, default=str)}`" for name, section in active.items()]
    if not methods:
        return f"{said}, without any method.\n"
    more = "`fathom methods NAME` shows what a method computes, what it costs and what was measured."
    return f"{said}, with these methods:\n\n" + "\n".join(methods) + f"\n\n{more}\n"


def _training(facts: dict[str, Any]) -> str:
    recipe = yaml.safe_dump(facts["recipe"], sort_keys=False, allow_unicode=True, width=100)
    fence = "````" if "```" in recipe else "```"
    length = f"{facts['tokens']:,} tokens in {facts['steps']:,} steps, {facts['train_flops']:.3g} FLOPs"
    notes = "".join(f"- {note}\n" for note in facts.get("notes", ()))
    said = f"## Training\n\n{length}; seed {facts['seed']}. The recipe:\n\n{fence}yaml\n{recipe}{fence}\n"
    return said + (notes and f"\n{notes}")


def _measured(facts: dict[str, Any], changed: bool) -> str:
    scores = [score for score in facts["scores"] if score["value"] is not None]
    rows = [f"| {_cell(score['name'])} | {score['value']:.4g} | {_cell(score['meaning'])} |" for score in scores]
    if not rows:
        return "## Measured\n\nNothing: the training had no held-out data.\n"
    about = f"On {facts['held_out']}, one seed, by Fathom {facts['versions']['fathom']} on {facts['device']}."
    if changed:
        about += (
            " **These numbers are of the checkpoint that this one came from: its weights have changed since** (by "
            "further training, or to another precision), and the new weights were not measured."
        )
    table = "\n".join(["| score | value | how it is computed |", "|---|---|---|", *rows])
    return f"## Measured\n\n{about}\n\n{table}\n"


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")


def _use(auto: str, own: bool) -> str:
    extra = "'fathom-lm[media]'" if auto in ("MovaPipeline", "AutoModelForImageTextToText") else "fathom-lm"
    if auto == "MovaPipeline":
        code = 'from fathom.audiovideo.pipeline import MovaPipeline\n\npipeline = MovaPipeline.from_pretrained("PATH")'
    else:
        reads = "AutoProcessor" if auto == "AutoModelForImageTextToText" else "AutoTokenizer"
        first = "import fathom\n" if own else ""
        code = (
            f"{first}from transformers import {auto}, {reads}\n\n"
            f'model = {auto}.from_pretrained("PATH")\n{reads[4:].lower()} = {reads}.from_pretrained("PATH")'
        )
    without = ""
    if own and auto != "MovaPipeline":
        such = ", such as `lm_eval --model hf`," if reads == "AutoTokenizer" else ""
        without = (
            f"\nPrograms that do not import fathom{such} load it with `trust_remote_code=True`: the only code\n"
            f"in this folder, `{CODE.name}`, imports fathom.\n"
        )
    return f"```sh\npip install {extra if own else 'transformers'}\n```\n\n```python\n{code}\n```\n{without}"


def _licence(facts: dict[str, Any]) -> str:
    if facts.get("license"):
        return f"## Licence\n\n`{facts['license']}`, as the recipe says.\n"
    base = facts.get("base_model")
    of_base = f" It contains weights of `{base}`, whose licence still applies." if base else ""
    return (
        f"## Licence\n\nNone was stated (a recipe's `license` does).{of_base} Whoever publishes this model must say "
        "under which\nit is, by the rights in the data and in the weights it began with.\n"
    )

"""What lies beside a checkpoint's weights, so that a stranger can load it: a way to the classes, and a card."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathom.models import registry

if TYPE_CHECKING:
    from fathom.models.causal_lm import FathomForCausalLM

CODE = Path(__file__).with_name("modeling_fathom.py")
AUTO_MAP = {
    "AutoConfig": f"{CODE.stem}.FathomConfig",
    "AutoModelForCausalLM": f"{CODE.stem}.FathomForCausalLM",
}
DIFFUSION_AUTO_MAP = {
    "AutoConfig": f"{CODE.stem}.FathomConfig",
    "AutoModelForMaskedLM": f"{CODE.stem}.FathomForMaskedDiffusion",
}
CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [fathom{tags}]
---

# {title}

A causal language model of [Fathom](https://pypi.org/project/fathom-lm): a {family} decoder of {parameters:,} parameters
({layers} layers, width {width}, vocabulary {vocabulary:,}) with these methods:

{methods}

`fathom methods NAME` says what a method computes, what it costs and what was measured of it.

```sh
pip install fathom-lm
```

```python
import fathom
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```

Programs that do not import fathom, such as `lm_eval --model hf`, load it with `trust_remote_code=True`: the only code
in this folder, `{code}`, imports fathom.
"""


def write_code(folder: str | os.PathLike) -> None:
    """The file that `AUTO_MAP` names."""
    if not Path(folder).is_file():  # transformers refuses that
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(CODE, Path(folder) / CODE.name)


def write_card(model: FathomForCausalLM, folder: str | os.PathLike) -> None:
    """README.md, unless there is one, which somebody may have written, or what is saved is an adapter."""
    config, place = model.config, Path(folder) / "README.md"
    if place.exists() or Path(folder).is_file() or getattr(model, "_hf_peft_config_loaded", False):
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    plain = type(config)()  # the ordinary decoder
    sections: dict[str, dict[str, Any]] = {name: getattr(config, name) for name in registry.filled()}
    active = {name: section for name, section in sections.items() if section["name"] != getattr(plain, name)["name"]}
    methods = [f"- `{name}`: `{json.dumps(section)}`" for name, section in (active or {"depth": config.depth}).items()]
    place.write_text(
        CARD.format(
            tags="".join(f", {section['name']}" for section in active.values()),
            title=" + ".join(section["name"] for section in active.values()) or f"{config.backbone}, no method",
            family=config.backbone,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            vocabulary=config.vocab_size,
            methods="\n".join(methods),
            code=CODE.name,
        ),
        encoding="utf-8",
    )

"""Fathom: published language-model methods on today's PyTorch and Hugging Face stack, measured on the same footing.

Importing it registers `FathomConfig` and `FathomForCausalLM` with transformers' Auto classes. Everything else is
imported when it is first named: `dir(fathom)` lists what there is.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from fathom.models import registry
from fathom.models.configuration import FathomConfig
from fathom.models.lazy_configs import PLACES as _CONFIGS
from fathom.models.lazy_configs import STAND_INS as _STAND_INS
from fathom.version import __version__

if TYPE_CHECKING:  # what `_PLACES` says, for editors and type checkers
    # ruff: noqa: F401
    from fathom import diffusion, lineage
    from fathom.caches import (  # type: ignore[no-redef]  # mypy takes the function for its module
        H2O,
        KIVI,
        TOVA,
        VQKV,
        FourierAttention,
        FreqKV,
        Full,
        PyramidKV,
        Scored,
        SnapKV,
        StreamingLLM,
        TreeKV,
        WeightedKV,
        compress,
        compression_report,
    )
    from fathom.diffusion import DiffusionGenerationConfig
    from fathom.evaluate import evaluate_tasks, evaluate_text, load_checkpoint
    from fathom.latents.configuration import FathomLatentConfig
    from fathom.latents.model import FathomForLatentDiffusion
    from fathom.latents.sampling import LatentGenerationConfig
    from fathom.models.causal_lm import FathomForCausalLM
    from fathom.models.encoder_configs import FathomBartConfig, FathomEncoderConfig, FathomLongT5Config, FathomT5Config
    from fathom.models.masked_diffusion import FathomForMaskedDiffusion
    from fathom.models.seq2seq_bart import FathomBartForConditionalGeneration
    from fathom.models.seq2seq_longt5 import FathomLongT5ForConditionalGeneration
    from fathom.models.seq2seq_t5 import FathomT5ForConditionalGeneration
    from fathom.models.sequence_classification import FathomForSequenceClassification
    from fathom.report.compare import compare
    from fathom.tables.text.configuration import FathomTableBartConfig, FathomTableLlamaConfig, FathomTableT5Config
    from fathom.tables.text.models import (
        FathomTableBartForConditionalGeneration,
        FathomTableLlamaForCausalLM,
        FathomTableT5ForConditionalGeneration,
    )
    from fathom.train import Phases, load_recipe
    from fathom.vision import FourierVLM, compress_vision


def _cache_methods() -> list[str]:
    """Classes of cache methods, as their files name them: importing these takes a second."""
    files = Path(__file__).parent.joinpath("caches", "methods").glob("*.py")
    classes = [part for file in files for part in file.read_text(encoding="utf-8").split("\nclass ")[1:]]
    return [part[: re.match(r"\w+", part).end()] for part in classes if "\n    name = " in part]  # type: ignore[union-attr]


_PLACES = {
    "FathomForCausalLM": "fathom.models.causal_lm",
    "FathomForSequenceClassification": "fathom.models.sequence_classification",
    "FathomBartForConditionalGeneration": "fathom.models.seq2seq_bart",
    "FathomLongT5ForConditionalGeneration": "fathom.models.seq2seq_longt5",
    "FathomT5ForConditionalGeneration": "fathom.models.seq2seq_t5",
    "FathomForMaskedDiffusion": "fathom.models.masked_diffusion",
    "FathomTableBartForConditionalGeneration": "fathom.tables.text.models",
    "FathomTableLlamaForCausalLM": "fathom.tables.text.models",
    "FathomTableT5ForConditionalGeneration": "fathom.tables.text.models",
    "DiffusionGenerationConfig": "fathom.diffusion",
    "FathomForLatentDiffusion": "fathom.latents.model",
    "LatentGenerationConfig": "fathom.latents.sampling",
    **dict.fromkeys(("compress", "compression_report", *_cache_methods()), "fathom.caches"),
    **dict.fromkeys(("evaluate_tasks", "evaluate_text", "load_checkpoint"), "fathom.evaluate"),
    "compare": "fathom.report.compare",
    **dict.fromkeys(("compress_vision", "FourierVLM"), "fathom.vision"),
    **dict.fromkeys(("Phases", "load_recipe"), "fathom.train"),
    **{
        name: module
        for module, kinds in _CONFIGS.items()
        for name in kinds.values()
        if module != "fathom.vision.configuration"
    },
}
_MODULES = ("diffusion", "lineage")
__all__ = ["FathomConfig", "__version__", *_PLACES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"fathom.{name}")
    raise AttributeError(f"module 'fathom' has no attribute {name!r}{registry.nearest(name, __all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _fill_registries() -> None:
    """Import the wings, whose methods register themselves, and hand the model to AutoModelForCausalLM."""
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSequenceClassification,
    )

    import fathom.depth
    import fathom.diffusion
    import fathom.encoders
    import fathom.feed_forward
    import fathom.mixers
    import fathom.positions
    import fathom.residuals
    import fathom.tables.no_relations
    import fathom.tables.rasat
    from fathom.latents.configuration import FathomLatentConfig
    from fathom.latents.model import FathomForLatentDiffusion
    from fathom.models.causal_lm import FathomForCausalLM
    from fathom.models.encoder_configs import FathomBartConfig, FathomEncoderConfig, FathomLongT5Config, FathomT5Config
    from fathom.models.masked_diffusion import FathomForMaskedDiffusion
    from fathom.models.seq2seq_bart import FathomBartForConditionalGeneration
    from fathom.models.seq2seq_longt5 import FathomLongT5ForConditionalGeneration
    from fathom.models.seq2seq_t5 import FathomT5ForConditionalGeneration
    from fathom.models.sequence_classification import FathomForSequenceClassification
    from fathom.tables.text.configuration import FathomTableBartConfig, FathomTableLlamaConfig, FathomTableT5Config
    from fathom.tables.text.models import (
        FathomTableBartForConditionalGeneration,
        FathomTableLlamaForCausalLM,
        FathomTableT5ForConditionalGeneration,
    )

    AutoModelForCausalLM.register(FathomConfig, FathomForCausalLM, exist_ok=True)
    AutoModel.register(FathomLatentConfig, FathomForLatentDiffusion, exist_ok=True)
    AutoModelForMaskedLM.register(FathomConfig, FathomForMaskedDiffusion, exist_ok=True)
    AutoModelForSequenceClassification.register(FathomEncoderConfig, FathomForSequenceClassification, exist_ok=True)
    AutoModelForSeq2SeqLM.register(FathomBartConfig, FathomBartForConditionalGeneration, exist_ok=True)
    AutoModelForSeq2SeqLM.register(FathomLongT5Config, FathomLongT5ForConditionalGeneration, exist_ok=True)
    AutoModelForSeq2SeqLM.register(FathomT5Config, FathomT5ForConditionalGeneration, exist_ok=True)
    AutoModelForCausalLM.register(FathomTableLlamaConfig, FathomTableLlamaForCausalLM, exist_ok=True)
    AutoModelForSeq2SeqLM.register(FathomTableBartConfig, FathomTableBartForConditionalGeneration, exist_ok=True)
    AutoModelForSeq2SeqLM.register(FathomTableT5Config, FathomTableT5ForConditionalGeneration, exist_ok=True)


# Every FathomConfig looks its methods up, so the model is known to AutoModelForCausalLM as soon as there is a config
# to build it from, and `import fathom` need not wait for either.
registry.fill_with(_fill_registries)
for _kind, _config in {"fathom": FathomConfig, **_STAND_INS}.items():
    AutoConfig.register(_kind, _config, exist_ok=True)

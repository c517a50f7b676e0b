"""Stand-ins for configs that few need at once: most subclass a stock family's, whose import takes most of a second.

`import fathom` hands `STAND_INS` to `AutoConfig`, which asks a config class for two things alone: to be called, and
`from_dict`. Both give a config of the real class, whose module is imported then and registers it in the stand-in's
place.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig

# module: {model type: class}
PLACES = {
    "fathom.latents.configuration": {"fathom_latent": "FathomLatentConfig"},
    "fathom.models.encoder_configs": {
        "fathom_bart": "FathomBartConfig",
        "fathom_encoder": "FathomEncoderConfig",
        "fathom_longt5": "FathomLongT5Config",
        "fathom_t5": "FathomT5Config",
    },
    "fathom.tables.text.configuration": {
        "fathom_table_bart": "FathomTableBartConfig",
        "fathom_table_llama": "FathomTableLlamaConfig",
        "fathom_table_t5": "FathomTableT5Config",
    },
    "fathom.vision.configuration": {
        "fathom_llava": "FathomLlavaConfig",
        "fathom_llava_next": "FathomLlavaNextConfig",
        "fathom_qwen2_5_vl": "FathomQwen2_5_VLConfig",
        "fathom_smolvlm": "FathomSmolVLMConfig",
    },
}


class StandIn(PreTrainedConfig):
    """Gives configs of the class that it stands for; no instance of it exists."""

    place: ClassVar[tuple[str, str]]  # module and class

    @classmethod
    def real(cls) -> Any:
        module, name = cls.place
        return getattr(importlib.import_module(module), name)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.real()(*args, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return cls.real().from_dict(config_dict, **kwargs)


STAND_INS = {
    kind: type(f"{name}StandIn", (StandIn,), {"__module__": __name__, "model_type": kind, "place": (module, name)})
    for module, classes in PLACES.items()
    for kind, name in classes.items()
}
globals().update({cls.__name__: cls for cls in STAND_INS.values()})


def register(*configs: Any) -> None:
    """Hand real configs to `AutoConfig`; the module that defines them calls this."""
    for config in configs:
        AutoConfig.register(config.model_type, config, exist_ok=True)

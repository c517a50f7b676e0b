"""Loading and saving of models with an `encoder` section."""

from __future__ import annotations

import os
import re
from typing import Any, ClassVar

from transformers import PreTrainedModel

from fathom.models.model_card import Published
from fathom.models.registry import ENCODER_PLAIN


class EncoderModel(Published, PreTrainedModel):  # type: ignore[misc]
    """Loading and saving, alone or mixed into a stock class of transformers.

    Attributes:
        dropped: patterns of tensors of a stock checkpoint that the model does not need.
    """

    dropped: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers. Raises ValueError for a tensor that the files lack, which transformers would fill with
        random numbers, and for a tensor without a place unless it is one of `dropped`."""
        wanted = kwargs.pop("output_loading_info", False)
        read: Any = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        model, report = read
        new = cls.absent(pretrained_model_name_or_path, model.config)
        missing = sorted(key for key in report["missing_keys"] if not any(re.search(p, key) for p in new))
        unknown = [key for key in report["unexpected_keys"] if not any(re.search(p, key) for p in cls.dropped)]
        for names, fault in ((missing, "is missing"), (sorted(unknown), "has no place")):
            if names and pretrained_model_name_or_path is not None:
                more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
                raise ValueError(
                    f"{pretrained_model_name_or_path}: tensor {names[0]!r}{more} {fault}: load a complete checkpoint "
                    f"of this model, {model.config.model_type}"
                )
        return (model, report) if wanted else model

    @classmethod
    def absent(cls, path: Any, config: Any) -> tuple[str, ...]:
        """Patterns of tensors that these files need not have, as the method initialises them."""
        return ()

    @classmethod
    def is_custom_code(cls) -> bool:
        """False. Otherwise transformers would not initialise modules whose tensors are all in their layers, such as
        T5's attention, and these would start with a standard deviation of 1, far above T5's.
        """
        return False

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing: transformers would copy this class's source into every checkpoint saved afterwards."""

    def save_stock(self, folder: str | os.PathLike, stock: type[PreTrainedModel]) -> None:
        """Write the model as a checkpoint of the stock class."""
        section, plain_name = self.config.section, ENCODER_PLAIN[self.config.section]
        name = getattr(self.config, section)["name"]
        if name != plain_name:
            raise ValueError(
                f"{section}={name!r}: stock {stock.__name__} has no such {section}; save_pretrained keeps it, or load "
                f"the model with {section}={plain_name!r} first"
            )
        plain: Any = stock(self.config.stock_config())
        plain.load_state_dict(self.state_dict())
        plain.to(self.dtype)
        if self.generation_config is not None:
            plain.generation_config = self.generation_config
        plain.save_pretrained(folder)

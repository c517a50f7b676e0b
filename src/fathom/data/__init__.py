"""Text to token ids to packed fixed-length blocks."""

from fathom.data.config import EMBEDDED, DataConfig
from fathom.data.packing import StreamingBlocks, collate
from fathom.data.prepared import PreparedData, prepare
from fathom.data.sources import Source
from fathom.data.tokenizer import add_atoms, check_vocabulary, load_tokenizer, token_byte_lengths, train_bpe

__all__ = [
    "EMBEDDED",
    "DataConfig",
    "PreparedData",
    "Source",
    "StreamingBlocks",
    "add_atoms",
    "check_vocabulary",
    "collate",
    "load_tokenizer",
    "prepare",
    "token_byte_lengths",
    "train_bpe",
]

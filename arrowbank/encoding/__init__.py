"""The stage `encode`: token bank → feature bank."""

from arrowbank.encoding.config import ENCODING_METHOD, EncodeConfig, Encoder, RunOptions
from arrowbank.encoding.stage import EncodePlan, encode

__all__ = ["ENCODING_METHOD", "EncodeConfig", "EncodePlan", "Encoder", "RunOptions", "encode"]

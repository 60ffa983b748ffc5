"""DDTree speculative decoding for SGLang, as a plugin beside the stock package."""

__version__ = "0.1.0"

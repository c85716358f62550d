"""What can be trained on: text, lines of JSON, files of tokens, and data of one's own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .block import Block
from .units import PositiveInt

ENTRY_PATTERN = r"^[A-Za-z_][\w]*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"


class TokenDataset(Block):
    """Base of the data sets that are one row of tokens, cut into runs of `seq_len`."""

    path: Annotated[str, Field(min_length=1)]
    """A file, or a folder of files."""
    seq_len: PositiveInt
    """Tokens per sample."""


class TextDataset(TokenDataset):
    """Plain text, cut into runs of `seq_len` tokens."""

    type: Literal["text"]
    path: Annotated[str, Field(min_length=1)]
    """A file, a folder of files, or `python:stdlib` (the standard library's own source text)."""
    tokenizer: Literal["bytes"] = "bytes"
    """How text becomes tokens; `bytes`: one token per byte."""


class JsonlDataset(TokenDataset):
    """The texts in files of one JSON object a line, a newline behind each, cut into runs of `seq_len` tokens."""

    type: Literal["jsonl"]
    path: Annotated[str, Field(min_length=1)]
    """A file, or a folder in which the files named `*.jsonl` are taken; the texts are kept in memory."""
    field: Annotated[str, Field(min_length=1)] = "text"
    """Key of each object that has its text."""
    tokenizer: Literal["bytes"] = "bytes"
    """How text becomes tokens; `bytes`: one token per byte."""


class TokensDataset(TokenDataset):
    """Files of token ids and nothing else, as nanoGPT and others write them, cut into runs of `seq_len` tokens."""

    type: Literal["tokens"]
    path: Annotated[str, Field(min_length=1)]
    """A file, or a folder in which the files named `*.bin` are taken; they are mapped, not read into memory."""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """How one token id is written, its lowest byte first."""


class PythonDataset(Block):
    """Your own data: `entry(**kwargs)` returns an object with `__len__` and `__getitem__`."""

    type: Literal["python"]
    entry: Annotated[str, Field(pattern=ENTRY_PATTERN)]
    """`module:callable`, imported from the working directory, the spec's folder or what is installed."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the callable."""


Dataset = TextDataset | JsonlDataset | TokensDataset | PythonDataset

"""Turn rows of texts into token ids, once: the result is kept in a file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtl.checks import InputError, first_line, require

from ..files.cache import cached
from ..files.identity import digest
from ..files.reading import quote
from .rows import RaggedRows, Texts

CACHE_VERSION = 1  # of the cache; increase it when the content changes
TOKENIZER_HINT = "Give the folder of a tokenizer, or null for a vocabulary trained on your texts"
ROWS_PER_CHUNK = 10_000  # rows tokenised at a time: the tokenizer's own results take far more memory than the ids


@dataclass(frozen=True)
class Encoder:
    """A tokenizer (``tokenizers.Tokenizer``); its ids are below ``vocab``, and ``pad`` is the id of padding."""

    tokenizer: Any
    vocab: int
    pad: int
    source: str

    @staticmethod
    def of(tokenizer: Any, pad: str, cls: str, source: str) -> Encoder:
        """Return the Encoder of a tokenizer whose rows begin with the token ``cls``. Raises InputError."""
        _reset(tokenizer)
        pad_id, cls_id = tokenizer.token_to_id(pad), tokenizer.token_to_id(cls)
        begins = cls_id is not None and tokenizer.encode("a", "b").ids[:1] == [cls_id]
        require(
            begins and pad_id is not None,
            f"data.tokenizer={source}: its rows must begin with a token such as [CLS], and it must have one for "
            "padding, as the tokenizers of BERT and MiniLM do",
        )
        return Encoder(tokenizer, max(tokenizer.get_vocab().values()) + 1, pad_id, source)

    def state(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer.to_str(), "vocab": self.vocab, "pad": self.pad}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Encoder:
        """Return the Encoder of a ``state``. Raises InputError if it holds no tokenizer."""
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_str(state["tokenizer"])
        except Exception as error:  # the tokenizer's errors have no common base class
            raise InputError(f"the tokenizer in the checkpoint cannot be read: {error}") from error
        _reset(tokenizer)
        return Encoder(tokenizer, int(state["vocab"]), int(state["pad"]), "that of the checkpoint")

    def digest(self) -> str:
        """Return a digest of all that decides which tokens a text has."""
        return digest(self.tokenizer.to_str())

    def vocabulary_digest(self) -> str:
        """Return a digest of the tokens and their ids, which weights depend on."""
        ids = self.tokenizer.get_vocab()
        return hashlib.sha256("\n".join(sorted(ids, key=ids.__getitem__)).encode()).hexdigest()

    def rows(self, texts: Texts, task: str, max_length: int, cache: Path) -> RaggedRows:
        """Return the rows of ``texts``, of at most ``max_length`` tokens each, with labels for ``task``.

        The tokens are kept in the folder ``cache``, by the content of the texts, the tokenizer and ``max_length``.
        """
        key = (CACHE_VERSION, texts.digest(), self.digest(), max_length)
        content = cached(cache / "tokens" / "rows.pt", lambda: self.encode(texts, max_length), key)
        return self.ragged(content, {task: texts.labels}, texts.groups)

    def ragged(
        self, content: dict[str, Tensor], targets: dict[str, Tensor], groups: Tensor | None = None
    ) -> RaggedRows:
        """Return the rows with the ``content`` that ``encode`` returns."""
        inputs = {name: content[name] for name in ("marks",) if name in content}
        fields = {name: value for name, value in content.items() if name not in inputs}
        return RaggedRows(**fields, targets=targets, pad=self.pad, inputs=inputs, groups=groups)

    def encode(self, texts: Texts, max_length: int) -> dict[str, Tensor]:
        """Return ``tokens``, ``offsets`` and ``boundary`` as in ``RaggedRows``.

        Of a pair that is too long, the longer text is shortened first. If ``texts`` has marks, the result has ``marks
        [N, 2, 2]`` too, the first and the last token of each marked word; raise InputError if it was cut off.
        """
        self.tokenizer.enable_truncation(max_length, strategy="longest_first")
        try:
            tokens, lengths, boundary, marks = [], [], [], []
            # Without the places of the characters, it is faster
            encode = self.tokenizer.encode_batch_fast if texts.marks is None else self.tokenizer.encode_batch
            for start in range(0, len(texts), ROWS_PER_CHUNK):
                rows: list[Any] = texts.first[start : start + ROWS_PER_CHUNK]
                if texts.second is not None:
                    rows = list(zip(rows, texts.second[start : start + ROWS_PER_CHUNK], strict=True))
                ids = []
                for row, encoding in enumerate(encode(rows), start):
                    ids += encoding.ids
                    lengths.append(len(encoding.ids))
                    boundary.append(encoding.type_ids.count(0))
                    if texts.marks is not None:
                        marks.append(_marked(encoding, texts.marks[row].tolist(), max_length))
                tokens.append(torch.tensor(ids, dtype=torch.int32))
        except InputError:
            raise
        except Exception as error:  # the tokenizer's errors have no common base class
            raise InputError(f"data.tokenizer={self.source} fails on these texts: {error}") from error
        finally:
            self.tokenizer.no_truncation()
        return {
            "tokens": torch.cat(tokens),
            "offsets": torch.tensor([0, *lengths]).cumsum(0),
            "boundary": torch.tensor(boundary, dtype=torch.int32),
            **({} if texts.marks is None else {"marks": torch.tensor(marks).view(-1, 2, 2)}),
        }


def load_pretrained(name: str) -> Encoder:
    """Return the tokenizer ``name``: a folder, or a name on the hub of Hugging Face. Raises InputError."""
    from transformers import AutoTokenizer

    folder, tokenizer, problem = Path(name).expanduser(), None, ""
    for local in (True, False):  # where the network does not answer, its cache is enough
        try:
            where = str(folder) if folder.is_dir() else name
            tokenizer = AutoTokenizer.from_pretrained(where, local_files_only=local, trust_remote_code=False)
            break
        except Exception as error:  # a missing or damaged file can raise almost any exception
            problem = quote(first_line(error), 150)
    if tokenizer is None:
        raise InputError(f"data.tokenizer={name} cannot be read: {problem}. {TOKENIZER_HINT}")
    is_usable = bool(tokenizer.is_fast and tokenizer.pad_token and tokenizer.cls_token)
    message = f"data.tokenizer={name}: it must be a fast tokenizer with tokens for padding and [CLS]. {TOKENIZER_HINT}"
    require(is_usable, message)
    return Encoder.of(tokenizer.backend_tokenizer, tokenizer.pad_token, tokenizer.cls_token, name)


def _marked(encoding: Any, marks: list[list[int]], max_length: int) -> list[list[int]]:
    """Return the first and the last token of the marked word in each text; ``marks``: its begin and end."""
    spans = []
    for text, (begin, end) in enumerate(marks):
        tokens = zip(encoding.sequence_ids, encoding.offsets, strict=True)
        of_text = ((token, ends) for token, (sequence, ends) in enumerate(tokens) if sequence == text)
        marked = [token for token, (low, high) in of_text if low < end and high > begin]
        require(bool(marked), f"data.max_length={max_length} cuts off the marked word of a text: increase it")
        spans.append([marked[0], marked[-1]])
    return spans


def _reset(tokenizer: Any) -> None:
    """Switch off padding and truncation, and read "[PAD]" in a text as text; the tokenizer stores none of these."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True

"""Train a WordPiece vocabulary on texts; the same texts give the same vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mtl.files.writing import write_json, write_text

from ..files.cache import keyed, locked
from .encoder import Encoder
from .rows import Texts

logger = logging.getLogger(__name__)

VERSION = 2  # of the vocabulary; increase it when the result changes
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PREFIX = "##"  # of the pieces that continue a word
FILE = "tokenizer.json"
MAX_WORD_LETTERS = 100  # letters of a word; a longer one is unknown, as in BERT
TEXTS_PER_CHUNK = 1_000  # texts whose characters are listed at a time


def trained(texts: Sequence[Texts], size: int, cache: Path) -> Encoder:
    """Return the Encoder of a vocabulary of about ``size`` tokens, trained on ``texts``.

    It is kept as a folder in ``cache``, which ``data.tokenizer`` accepts.
    """
    from tokenizers import Tokenizer

    folder = keyed(cache / "vocabulary", (VERSION, size, *(rows.digest() for rows in texts)))
    if not (folder / FILE).exists():
        with locked(cache / f".{folder.name}.lock", f"training the vocabulary {folder}"):
            if not (folder / FILE).exists():
                logger.info("training a vocabulary of %d tokens on %d rows", size, sum(map(len, texts)))
                _save(tokenizer(train(texts, size)), folder)
    logger.info("vocabulary: %s", folder)
    return Encoder.of(Tokenizer.from_file(str(folder / FILE)), SPECIAL[0], SPECIAL[2], str(folder))


def train(texts: Sequence[Texts], size: int) -> list[str]:
    """Return the tokens of a vocabulary in the order of their ids: special ones, characters, then longer pieces.

    Words of more than ``MAX_WORD_LETTERS`` are left out: the time that a word takes grows with its length squared.
    """
    from tokenizers import Regex, pre_tokenizers
    from tokenizers.trainers import WordPieceTrainer

    # The trainer numbers the forms "##a" of the characters in the order of a hash table, which differs from run to
    # run and decides later ties. As special tokens they are numbered as listed.
    forms = [PREFIX + character for character in sorted(_inner(texts))]
    trainer = WordPieceTrainer(vocab_size=size, min_frequency=2, show_progress=False, special_tokens=[*SPECIAL, *forms])
    model = tokenizer(list(SPECIAL))
    short = pre_tokenizers.Split(Regex(rf"^.{{{MAX_WORD_LETTERS + 1},}}$"), "removed")
    model.pre_tokenizer = pre_tokenizers.Sequence([model.pre_tokenizer, short])
    model.train_from_iterator(_lines(texts), trainer)
    ids = model.get_vocab(with_added_tokens=False)
    return sorted(ids, key=ids.__getitem__)


def tokenizer(vocabulary: Sequence[str]) -> Any:
    """Return the ``tokenizers.Tokenizer`` of a vocabulary, with BERT's rules: lower case, words, punctuation."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import BertProcessing

    ids = {token: index for index, token in enumerate(vocabulary)}
    options = {"continuing_subword_prefix": PREFIX, "max_input_chars_per_word": MAX_WORD_LETTERS}
    model = WordPiece(ids, unk_token=SPECIAL[1], **options)
    bert = Tokenizer(model)
    bert.add_special_tokens(list(SPECIAL))
    bert.normalizer, bert.pre_tokenizer = BertNormalizer(lowercase=True), BertPreTokenizer()
    bert.post_processor = BertProcessing(*((token, ids[token]) for token in (SPECIAL[3], SPECIAL[2])))
    return bert


def _lines(texts: Sequence[Texts]) -> Iterator[str]:
    for rows in texts:
        yield from rows.first
        yield from rows.second or ()


def _inner(texts: Sequence[Texts]) -> set[str]:
    """Return the characters that occur in the texts and can continue a word: letters and digits of most scripts."""
    model, characters, lines = tokenizer(SPECIAL), set[str](), list(_lines(texts))
    for start in range(0, len(lines), TEXTS_PER_CHUNK):
        characters |= set(model.normalizer.normalize_str("\n".join(lines[start : start + TEXTS_PER_CHUNK])))
    return {character for character in characters if len(model.pre_tokenizer.pre_tokenize_str(f"a{character}b")) == 1}


def _save(trained_tokenizer: Any, folder: Path) -> None:
    """Write the files that ``AutoTokenizer`` reads into ``folder``; it is complete when it has ``FILE``."""
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, **dict(zip(names, SPECIAL, strict=True))}
    ids = trained_tokenizer.get_vocab()
    write_text(folder / "vocab.txt", "".join(f"{token}\n" for token in sorted(ids, key=ids.__getitem__)))
    write_json(folder / "tokenizer_config.json", config)
    write_text(folder / FILE, trained_tokenizer.to_str(pretty=True))

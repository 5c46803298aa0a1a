"""Tokens: vocabularies, tokenizers, truncation, ragged rows, the cache, and what happens without the extra [text]."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import pytest
import torch
from mtl.data_modules.glue import GlueDataModule
from mtl.data_modules.texts import vocabulary
from mtl.data_modules.texts.encoder import Encoder, load_pretrained
from mtl.data_modules.texts.rows import RaggedRows, Texts

from mtl.checks import InputError
from tests.glue_files import sentence


def texts(count: int = 60, seed: int = 0, second: bool = True) -> Texts:
    draw = random.Random(seed)
    first = [f"{sentence(draw)}, Straße {draw.randrange(1000)}!" for _ in range(count)]
    return Texts(first, [sentence(draw) for _ in range(count)] if second else None, torch.arange(float(count)))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def encoder(cache: Path) -> Encoder:
    return vocabulary.trained([texts()], 200, cache)


def test_training_a_vocabulary_is_deterministic() -> None:
    first, again, third = (vocabulary.train([texts()], 120) for _ in range(3))
    assert first == again == third
    assert first[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert len(first) == len(set(first)) == 120
    assert "##e" in first
    assert "##," not in first  # punctuation is a word of its own
    assert vocabulary.train([texts(seed=1)], 120) != first


def test_words_of_more_than_100_letters_are_unknown() -> None:
    rows, draw = texts(), random.Random(0)
    huge = "".join(draw.choices("aest", k=100_000))
    longer = Texts([*rows.first, f"{huge} {'ß' * 101},", f"{huge[:150]} the"], None, torch.zeros(len(rows) + 2))
    shorter = Texts([*rows.first, ",", "the"], None, longer.labels)
    began = time.perf_counter()
    assert vocabulary.train([longer], 200) == vocabulary.train([shorter], 200)
    made = vocabulary.tokenizer(vocabulary.train([rows], 200))
    found = made.encode_batch([f"the {huge}, the", f"the {'e' * 100}"])
    assert time.perf_counter() - began < 5
    assert found[0].tokens == ["[CLS]", "the", "[UNK]", ",", "the", "[SEP]"]
    assert "[UNK]" not in found[1].tokens


def test_pairs_have_special_tokens_and_segments(encoder: Encoder) -> None:
    found = encoder.encode(Texts(["the cat", "a dog"], ["sees the dog", "[PAD] [SEP]"], torch.zeros(2)), 64)
    rows = RaggedRows(**found, targets={}, pad=encoder.pad)
    batch = rows.select(torch.arange(2))
    names = [
        encoder.tokenizer.id_to_token(token) for token in batch.inputs["tokens"][0].tolist() if token != encoder.pad
    ]
    assert names == ["[CLS]", "the", "cat", "[SEP]", "sees", "the", "dog", "[SEP]"]
    assert batch.inputs["segments"][0, : len(names)].tolist() == [0] * 4 + [1] * 4
    special = encoder.tokenizer.token_to_id("[SEP]")
    inside = rows.tokens[rows.offsets[1] : rows.offsets[2]].tolist()
    assert encoder.pad not in inside  # a text that says [PAD] is text
    assert inside.count(special) == 2


@pytest.mark.parametrize(("first", "second", "kept"), [(40, 4, (9, 4)), (40, 40, (7, 6)), (3, 40, (3, 10))])
def test_the_longer_text_of_a_pair_is_shortened_first(
    encoder: Encoder, first: int, second: int, kept: tuple[int, int]
) -> None:
    found = encoder.encode(Texts([" ".join(["cat"] * first)], [" ".join(["dog"] * second)], torch.zeros(1)), 16)
    ids = found["tokens"].tolist()
    assert len(ids) == 16
    counts = tuple(ids.count(encoder.tokenizer.token_to_id(word)) for word in ("cat", "dog"))
    assert sum(counts) == 13
    assert counts in (kept, kept[::-1] if first == second else kept)
    assert found["boundary"].tolist() == [counts[0] + 2]


def test_rows_are_padded_to_the_longest_of_the_batch(encoder: Encoder) -> None:
    given = Texts(["cat", "the old cat sees a bird", ""], None, torch.tensor([1.0, 2.0, 3.0]))
    rows = RaggedRows(**encoder.encode(given, 64), targets={"y": given.labels}, pad=encoder.pad)
    assert rows.lengths.tolist() == [3, 8, 2]
    batch = rows.select(torch.tensor([2, 0]))
    assert batch.inputs["tokens"].shape == batch.inputs["segments"].shape == (2, 3)
    assert (batch.inputs["tokens"] == encoder.pad).tolist() == [[False, False, True], [False, False, False]]
    assert batch.inputs["tokens"].dtype == batch.inputs["segments"].dtype == torch.int64
    assert batch.inputs["segments"].sum() == 0
    assert batch.targets["y"].tolist() == [3.0, 1.0]
    assert rows.select(torch.tensor([1, 0])).inputs["tokens"].shape == (2, 8)
    empty = rows.select(torch.arange(0))
    assert empty.inputs["tokens"].shape == empty.inputs["segments"].shape == (0, 1)
    assert empty.targets["y"].shape == (0,)


def test_texts_are_tokenised_again_only_if_something_changed(
    encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda self, *args: calls.append(1) or real(self, *args))
    first = encoder.rows(texts(), "a", 32, tmp_path)
    again = encoder.rows(texts(), "b", 32, tmp_path)
    assert len(calls) == 1
    assert torch.equal(first.tokens, again.tokens)
    assert list(again.targets) == ["b"]
    changed = texts()
    changed.first[3] += "x"
    encoder.rows(changed, "a", 32, tmp_path)
    encoder.rows(texts(), "a", 16, tmp_path)
    other = Encoder.of(vocabulary.tokenizer(vocabulary.train([texts()], 100)), "[PAD]", "[CLS]", "other")
    other.rows(texts(), "a", 32, tmp_path)
    assert len(calls) == 4


def test_digest_tells_texts_apart() -> None:
    labels = torch.zeros(2)
    cases = [
        Texts(["ab", "c"], None, labels),
        Texts(["a", "bc"], None, labels),
        Texts(["ab", "c"], ["", ""], labels),
        Texts(["", ""], ["ab", "c"], labels),
    ]
    assert len({case.digest() for case in cases}) == 4


def test_trained_vocabulary_is_a_folder_that_the_option_accepts(cache: Path, encoder: Encoder) -> None:
    loaded = load_pretrained(encoder.source)
    assert (loaded.vocab, loaded.pad) == (encoder.vocab, encoder.pad)
    for name, value in loaded.encode(texts(), 32).items():
        assert torch.equal(value, encoder.encode(texts(), 32)[name])
    lines = (Path(encoder.source) / "vocab.txt").read_text().splitlines()
    assert [encoder.tokenizer.token_to_id(line) for line in lines] == list(range(encoder.vocab))


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data\.tokenizer=.* cannot be read: .* null for a vocab"):
        load_pretrained(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    with pytest.raises(InputError, match=r"data\.tokenizer=.* cannot be read: .*Give the folder"):
        load_pretrained(str(tmp_path))


def test_tokenizer_whose_rows_do_not_begin_with_cls(tmp_path: Path) -> None:
    made = vocabulary.tokenizer(vocabulary.train([texts()], 100))
    from tokenizers.processors import BertProcessing

    made.post_processor = BertProcessing(*((name, made.token_to_id(name)) for name in ("[CLS]", "[SEP]")))
    with pytest.raises(InputError, match=r"data\.tokenizer=x: its rows must begin with a token such as \[CLS\]"):
        Encoder.of(made, "[PAD]", "[CLS]", "x")


def test_unknown_name_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **options: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", offline)
    with pytest.raises(InputError, match=r"data\.tokenizer=nobody/nothing cannot be read: .*no route to host"):
        load_pretrained("nobody/nothing")


@pytest.mark.parametrize(
    ("missing", "options"), [("tokenizers", {}), ("transformers", {"tokenizer": "some/checkpoint"})]
)
def test_without_the_extra_one_message_names_it(
    missing: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        InputError, match=rf"^a data set of texts needs the package {missing}: pip install -e '\.\[text\]'$"
    ):
        GlueDataModule("nowhere", batch_size=2, **options)

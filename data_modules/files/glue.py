"""The tasks of GLUE (Wang et al. 2018) and those that MT-TaG adds: their files, columns and classes; fetch them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mtl.checks import require
from mtl.files.writing import write_text
from mtl.types import TaskKind

from .cache import locked
from .download import fetch, move_missing, unpacked
from .reading import read_lines

SITE = "https://dl.fbaipublicfiles.com"
UTF8 = "utf-8-sig"
MRPC_TRAIN = ("msr_paraphrase_train.txt", "60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89")
MRPC_DEV_IDS = ("mrpc_dev_ids.tsv", "971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7")
ARCHIVES = {  # the sha256 of each archive, if it is known
    "RTE.zip": "6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee",
    "STS-B.zip": "e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85",
    "CoLA.zip": "f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff",
    "SST-2.zip": "d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa",
    "WNLI.zip": "ae0e8e4d16f4d46d4a0a566ec7ecceccfd3fbfaa4a7a4b4e02848c0f2561ac46",
    "QQP-clean.zip": "40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0",
    "QNLIv2.zip": "e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5",
    "MNLI.zip": "e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633",
    "CB.zip": "8d641383298d54554066ba1c93f56ae7410af75df621b90c63028806bbbbb535",
    "COPA.zip": "405906cddac74bc1e1ce8220f1107d1025b66a25ef10149d91b10bb30651125f",
    "MultiRC.zip": "b3cd440856e72eb166b2edcd37b798455f1ebd51f2c3de64c0c2a4e1971d2737",
    "BoolQ.zip": "853fbe7922f70c59629f06a39e8d9ca440c3d740e760fd3b87a5ddf3dcba2436",
    "WiC.zip": "ee7e67f4ae9eafbf533780faa198e62167f3cda54256cdf261877be3c0e90900",
    "aclImdb_v1.tar.gz": "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
    "SciTailV1.1.zip": "3fccd37350a94ca280b75998568df85fc2fc62843a3198d644fcbf858e6943d5",
}


@dataclass(frozen=True)
class Source:
    """A task: its folder, the columns of its files with the texts, and its archive.

    ``classes``: the labels as written in the files, in the order of their ids; empty for a regression. ``rows``: the
    official number of rows of each part; the parts are ``train`` and development parts. ``columns``: of files without a
    line that names them. ``skip_short``: lines with too few cells are left out, as is usual for QQP's older files.
    ``files``: the names of the files of a part. ``site``: the address of the archive, or, without a sha256, the page
    that has it. ``marked``: each of the two texts has a marked word. ``metrics``: the main one first.
    """

    folder: str
    texts: tuple[str, ...]
    classes: tuple[str, ...]
    rows: dict[str, int] = field(repr=False)
    archive: str
    label: str = "label"
    columns: tuple[str, ...] = ()
    skip_short: bool = False
    files: tuple[str, ...] = ("{part}.tsv",)
    site: str = f"{SITE}/glue/data"
    marked: bool = False
    metrics: tuple[str, ...] = ("accuracy",)

    @property
    def sha256(self) -> str | None:
        return ARCHIVES.get(self.archive)

    @property
    def kind(self) -> TaskKind:
        return "multiclass" if len(self.classes) > 2 else "binary" if self.classes else "regression"

    @property
    def dev(self) -> list[str]:
        """The parts with development rows."""
        return [part for part in self.rows if part != "train"]

    def paths(self, *parts: str) -> list[str]:
        """Return the files of ``parts``, by default of all, as paths in the folder of GLUE."""
        names = [file.format(part=part) for part in parts or self.rows for file in self.files]
        return [str(Path(self.folder, name)) for name in dict.fromkeys(names)]


Task = Literal[
    "rte", "mrpc", "stsb", "cola", "sst2", "wnli", "qqp", "qnli", "mnli",
    "cb", "copa", "multirc", "boolq", "wic", "imdb", "rt", "yelp", "scitail",
]  # fmt: skip
SENTENCES, PREMISE = ("sentence1", "sentence2"), ("premise", "hypothesis")
NUMBERS, NO_YES, NEG_POS = ("0", "1"), ("false", "true"), ("neg", "pos")
ENTAILMENT = ("not_entailment", "entailment")
SUPERGLUE: dict[str, Any] = {"files": ("{part}.jsonl",), "site": f"{SITE}/glue/superglue/data/v2"}
SOURCES: dict[str, Source] = {
    "rte": Source("RTE", SENTENCES, ENTAILMENT, {"train": 2490, "dev": 277}, "RTE.zip"),
    "mrpc": Source(
        *("MRPC", ("#1 String", "#2 String"), NUMBERS, {"train": 3668, "dev": 408}, ""),
        label="Quality",
        metrics=("accuracy", "f1"),
    ),
    "stsb": Source(
        *("STS-B", SENTENCES, (), {"train": 5749, "dev": 1500}, "STS-B.zip"),
        label="score",
        metrics=("spearman", "pearson"),
    ),
    "cola": Source(
        *("CoLA", ("sentence",), NUMBERS, {"train": 8551, "dev": 1043}, "CoLA.zip"),
        columns=("source", "label", "mark", "sentence"),
        metrics=("matthews",),
    ),
    "sst2": Source("SST-2", ("sentence",), NUMBERS, {"train": 67349, "dev": 872}, "SST-2.zip"),
    "wnli": Source("WNLI", SENTENCES, NUMBERS, {"train": 635, "dev": 71}, "WNLI.zip"),
    "qqp": Source(
        *("QQP", ("question1", "question2"), NUMBERS, {"train": 363846, "dev": 40430}, "QQP-clean.zip"),
        label="is_duplicate",
        skip_short=True,
        metrics=("accuracy", "f1"),
    ),
    "qnli": Source("QNLI", ("question", "sentence"), ENTAILMENT, {"train": 104743, "dev": 5463}, "QNLIv2.zip"),
    "mnli": Source(
        *("MNLI", SENTENCES, ("entailment", "neutral", "contradiction")),
        {"train": 392702, "dev_matched": 9815, "dev_mismatched": 9832},
        "MNLI.zip",
        label="gold_label",
    ),
    "cb": Source(
        *("CB", PREMISE, ("entailment", "contradiction", "neutral"), {"train": 250, "val": 56}, "CB.zip"), **SUPERGLUE
    ),
    "copa": Source(  # a row is a choice; of the two rows of a question, the more probable one is the answer
        *("COPA", ("premise_and_question", "choice"), NO_YES, {"train": 800, "val": 200}, "COPA.zip"),
        metrics=("hit_rate@1",),
        **SUPERGLUE,
    ),
    "multirc": Source(
        *("MultiRC", ("paragraph_and_question", "answer"), NO_YES, {"train": 27243, "val": 4848}, "MultiRC.zip"),
        metrics=("f1",),
        **SUPERGLUE,
    ),
    "boolq": Source("BoolQ", ("question", "passage"), NO_YES, {"train": 9427, "val": 3270}, "BoolQ.zip", **SUPERGLUE),
    "wic": Source(
        *("WiC", ("marked_sentence1", "marked_sentence2"), NO_YES, {"train": 5428, "val": 638}, "WiC.zip"),
        marked=True,
        **SUPERGLUE,
    ),
    "imdb": Source(  # read from its archive, which has a file for each review
        *("", ("text",), NEG_POS, {"train": 25000, "test": 25000}, "aclImdb_v1.tar.gz"),
        files=("aclImdb_v1.tar.gz",),
        site="https://ai.stanford.edu/~amaas/data/sentiment",
    ),
    "rt": Source(  # has no official split: as in the library datasets, the first 80 % of each class are for training,
        # the next 10 % for development, the last 10 % unused
        *("rt-polaritydata", ("text",), NEG_POS, {"train": 8530, "dev": 1066}, "rt-polaritydata.tar.gz"),
        files=("rt-polarity.neg", "rt-polarity.pos"),
        site="https://www.cs.cornell.edu/people/pabo/movie-review-data",
    ),
    "yelp": Source(
        *("yelp_review_polarity_csv", ("text",), ("1", "2"), {"train": 560000, "test": 38000}),
        "yelp_review_polarity_csv.tgz",
        files=("{part}.csv",),
        site="https://course.fast.ai/datasets",
    ),
    "scitail": Source(
        *("SciTailV1.1/tsv_format", PREMISE, ("neutral", "entails"), {"train": 23596, "dev": 1304}, "SciTailV1.1.zip"),
        columns=("premise", "hypothesis", "label"),
        files=("scitail_1.0_{part}.tsv",),
        site="http://data.allenai.org.s3.amazonaws.com/downloads",
    ),
}


def prepare(root: Path, task: str, download: bool, base_url: str | None = None) -> None:
    """Put the files of ``task`` into its folder in ``root``; do nothing if they are there. Raises InputError."""
    source, addresses, missing = SOURCES[task], _addresses(task), _missing(root, SOURCES[task])
    if not missing:
        return
    by_hand = f"{missing[0]} is missing: get {source.archive} from {source.site}, and unpack it in {root}"
    require(bool(addresses), by_hand)
    for site, name, sha256 in addresses:
        fetch(f"{site.replace(SITE, base_url or SITE)}/{name}", root / name, sha256, download)
    with locked(root / ".fetch.lock", f"unpacking GLUE in {root}"):
        if _missing(root, source):
            _split_mrpc(root) if task == "mrpc" else _unpack(root, source)


def _missing(root: Path, source: Source) -> list[Path]:
    return [root / path for path in source.paths() if not (root / path).exists()]


def _addresses(task: str) -> list[tuple[str, str, str]]:
    """Return the site, the name and the sha256 of each official file of ``task``; none if no sha256 is known."""
    if task == "mrpc":  # GLUE may not redistribute its rows
        return [(f"{SITE}/senteval/senteval_data", *MRPC_TRAIN), (SOURCES[task].site, *MRPC_DEV_IDS)]
    source = SOURCES[task]
    return [(source.site, source.archive, source.sha256)] if source.sha256 else []


def _unpack(root: Path, source: Source) -> None:
    """Unpack the archive, and move its files into place where they are missing."""
    with unpacked(root / source.archive) as content:
        for path in source.paths():
            # Only at the same depth: GLUE's archives also have the original files that its own were made from
            pattern = str(Path("[!_.]*", *Path(path).parts[1:]))
            files = [file for file in sorted(content.glob(pattern)) if file.is_file()]
            require(bool(files), f"{root / source.archive} contains no {Path(path).name}: delete it and start again")
            move_missing(files[0], root / path)


def _split_mrpc(root: Path) -> None:
    """Write train.tsv and dev.tsv from Microsoft's training rows and GLUE's list of the development pairs."""
    rows, dev_ids = root / MRPC_TRAIN[0], root / MRPC_DEV_IDS[0]
    header, *lines = read_lines(rows, UTF8)["line"]
    pairs = {tuple(line.split("\t")[:2]) for line in read_lines(dev_ids, UTF8)["line"]}
    parts: dict[str, list[str]] = {"train": [header], "dev": [header]}
    for line in lines:
        parts["dev" if tuple(line.split("\t")[1:3]) in pairs else "train"].append(line)
    folder = root / SOURCES["mrpc"].folder
    for stem, content in parts.items():
        if not (folder / f"{stem}.tsv").exists():
            write_text(folder / f"{stem}.tsv", "\n".join(content) + "\n")

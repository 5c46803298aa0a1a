"""Two images on one canvas: their positions, disjoint splits, pairs drawn anew in each epoch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mtl.data_modules.multi_mnist import MultiMNISTDataModule, compose
from torch import Tensor

from mtl.types import Batch
from tests.digit_files import write_digits


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_digits(folder / "MNIST" / "raw")
    return folder


def module(root: Path, **options: object) -> MultiMNISTDataModule:
    data = MultiMNISTDataModule(str(root), **{"rows": [300, 80, 90], "batch_size": 50, "eval_batch_size": 64} | options)
    data.prepare_data()
    data.setup()
    return data


def sources(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the number of the bottom right image, encoded in its last pixels, and the class of the top left one."""
    image = batch.inputs["image"][:, 0].long()
    return image[:, 35, 35] + 250 * image[:, 35, 34], batch.targets["top_left"]


def test_composition_by_hand() -> None:
    images = torch.stack([torch.full((28, 28), value, dtype=torch.uint8) for value in (100, 200)])
    batch = compose(images, torch.tensor([3, 8]), torch.tensor([[0, 1], [1, 1]]))
    canvas = batch.inputs["image"][0, 0].long()
    assert canvas.shape == (36, 36)
    assert (canvas[:8, :28] == 100).all()
    assert (canvas[:28, :8] == 100).all()
    assert (canvas[8:28, 8:28] == 255).all()  # 100 + 200, clipped
    assert (canvas[28:, 8:] == 200).all()
    assert (canvas[8:, 28:] == 200).all()
    assert (canvas[:8, 28:] == 0).all()
    assert (canvas[28:, :8] == 0).all()
    assert batch.targets["top_left"].tolist() == [3, 8]
    assert batch.targets["bottom_right"].tolist() == [8, 8]


def test_splits_share_no_image(root: Path) -> None:
    data = module(root, rows=[3000, 800, 900])
    used = {name: set(sources(rows)[0].tolist()) for name, rows in data.splits.items()}
    assert not used["train"] & used["val"]
    assert not used["train"] & used["test"]
    assert not used["val"] & used["test"]
    assert used["train"] | used["val"] == set(range(120))
    assert used["test"] == set(range(120, 160))
    assert {name: len(rows) for name, rows in data.splits.items()} == {"train": 3000, "val": 800, "test": 900}


def test_fresh_pairs_every_epoch(root: Path) -> None:
    def epoch(data: MultiMNISTDataModule, number: int, done: int = 0) -> Tensor:
        loop = SimpleNamespace(
            epoch_progress=SimpleNamespace(current=SimpleNamespace(processed=number)),
            epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(current=SimpleNamespace(ready=done))),
        )
        data.trainer = SimpleNamespace(
            training=True,
            overfit_batches=0,
            fit_loop=loop,
            num_training_batches=6,
            global_rank=0,
            world_size=1,
        )
        return torch.cat([batch.inputs["image"] for batch in data.train_dataloader()])

    fresh, fixed = module(root, fresh=True), module(root)
    assert torch.equal(epoch(fresh, 1), epoch(module(root, fresh=True), 1))
    assert torch.equal(epoch(fresh, 1)[100:], epoch(fresh, 1, done=2))  # from the middle of an epoch
    seen = [set(map(bytes, epoch(fresh, number).numpy().reshape(300, -1))) for number in (0, 1)]
    assert len(seen[0] & seen[1]) < 20
    seen = [set(map(bytes, epoch(fixed, number).numpy().reshape(300, -1))) for number in (0, 1)]
    assert seen[0] == seen[1]
    val = {bytes(row) for row in fresh.splits["val"].inputs["image"].numpy().reshape(80, -1)}
    assert val == {bytes(row) for row in fixed.splits["val"].inputs["image"].numpy().reshape(80, -1)}

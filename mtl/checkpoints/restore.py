"""Restore the state of a data module from a checkpoint, and report which of its files have changed since."""

from __future__ import annotations

import logging
from typing import Any, Literal

from mtl.checkpoints.files import Checkpoint
from mtl.checks import require

log = logging.getLogger(__name__)

Purpose = Literal["resume", "test", "use"]


def restore_data(data: Any, checkpoint: Checkpoint, purpose: Purpose, accept: bool = False) -> None:
    """Prepare ``data`` with the state of its checkpoint, before ``data.setup()``.

    Vocabularies, scales and classes are then those of the training. If files have changed, ``purpose`` "resume" raises
    InputError unless ``accept`` is true; in other cases a warning names the changes. With ``purpose`` "test", only the
    test rows will be loaded.
    """
    data.load_state_dict(checkpoint.data(), test_only=purpose == "test")
    data.prepare_data()
    changes = data.changed_files()
    if purpose == "resume":
        require(
            accept or not changes,
            f"{'; '.join(changes.values())} since the checkpoint was written: the run would go on with other rows. "
            "Give the file that it was trained on, or on_data_change=accept to go on with the vocabularies, scales and "
            "classes of the checkpoint",
        )
    for change in changes.values():
        log.warning(
            "%s since the training: its rows are not those of the run, and rows that the network was trained on may be "
            "among those it is tested on",
            change,
        )

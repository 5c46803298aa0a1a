"""Should these tasks share? ``mtl share data=table data.path=visits.csv seeds=5`` trains them, and answers for each.

They are trained alone, together, with gates and in groups, and compared by pairs of runs of the same seed.

Words that ``conf/share.yaml`` lists are its own options, all others are options of every run. The same command, started
again or on other machines, works on the same runs; at the end it prints the answers and writes a page. ``show=true``
answers from the runs that there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import hydra

from mtl.cli.study import check_names, start
from mtl.config.compose import own_options, split_overrides
from mtl.jobs.process import prepare
from mtl.overrides import last_of_each

OWN = own_options("share.yaml")


def run(overrides: Sequence[str]) -> dict[str, Any]:
    """Compose and check the runs, do those that are missing, write the page, and return the content of share.json."""
    share_overrides, others = split_overrides(overrides, OWN)
    cfg = hydra.compose("share", share_overrides)
    check_names(others, OWN)
    for gate in cfg.gates:
        check_names(last_of_each([*others, f"gate={gate}"]), OWN)
    if not cfg.show:
        prepare()
    from mtl.sharing.command import share  # imports slow packages, as runs do
    from mtl.sharing.page import write

    return write(share(cfg, others), overrides)


main = partial(start, "share.yaml", __doc__ or "", run)

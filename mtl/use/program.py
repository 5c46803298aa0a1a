"""Export a network as a program that needs neither this package nor a configuration, by torch.export and as ONNX."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from mtl.files.writing import check_place, reported, write_bytes
from mtl.predictions import readable
from mtl.types import Bag, Categorical, Exportable, Image, InputSpec, Numeric


class Readable(nn.Module):
    """Map inputs to the predictions of ``network`` by name, as ``mtl.predictions.readable`` gives them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = self.network(inputs).predictions
        tasks: Any = self.network.tasks
        return readable({task.name: task for task in tasks}, {task.name: outputs[task.name] for task in tasks})


def exportable(network: nn.Module) -> nn.Module:
    """Return a copy of ``network`` in evaluation mode that can be exported as a program, with the same outputs.

    A program cannot choose operations by the values of tensors. Therefore layers whose gate depends on the example
    compute all experts; where the gate is static, experts that no task uses are left out.
    """
    copied = copy.deepcopy(network).eval()
    replace_parts(copied, Exportable, lambda part: part.constant())
    return copied


def replace_parts(module: nn.Module, kind: Any, change: Callable[[Any], nn.Module]) -> None:
    """Replace each submodule of a ``kind`` that is in no other one by ``change`` of it."""
    for name, child in list(module.named_children()):
        if isinstance(child, kind):
            setattr(module, name, change(child))
        else:
            replace_parts(child, kind, change)


def random_inputs(inputs: Mapping[str, InputSpec], rows: int = 256) -> dict[str, Tensor]:
    """Return random inputs of ``rows`` rows; the ids of texts end with padding in the last row."""
    return {name: _random(spec, rows) for name, spec in inputs.items()}


def _random(spec: InputSpec, rows: int) -> Tensor:
    if isinstance(spec, Categorical):
        return torch.randint(spec.size, (rows,))
    if isinstance(spec, Bag):
        return torch.randint(spec.size, (rows, spec.length))
    if isinstance(spec, Numeric):
        return torch.randn(rows, spec.width)
    if isinstance(spec, Image):
        return torch.randint(256, (rows, spec.channels, spec.height, spec.width), dtype=torch.uint8)
    ids = torch.randint(spec.vocab, (rows, min(spec.length, 9)))
    ids = torch.where(ids == spec.pad, (spec.pad + 1) % spec.vocab, ids)
    ids[-1, 4:] = spec.pad
    return ids


def export(module: nn.Module, inputs: Mapping[str, Tensor], texts: Collection[str] = ()) -> ExportedProgram:
    """Return a program of ``module``, which maps a dict like ``inputs`` to a tensor or a dict of tensors.

    The number of rows may vary, and so may the length of the inputs named in ``texts``. The values of ``inputs`` do not
    matter.
    """
    example = {name: torch.zeros_like(value[:1]).repeat(2, *[1] * (value.dim() - 1)) for name, value in inputs.items()}
    # All inputs share the number of rows, and texts the length: torch infers which dimensions are equal
    sizes = {name: {0: Dim.AUTO, 1: Dim.AUTO} if name in texts else {0: Dim.AUTO} for name in example}
    with torch.no_grad(), quiet():
        return torch.export.export(module, (example,), dynamic_shapes=(sizes,), strict=True)


def save(program: ExportedProgram, path: Path) -> nn.Module:
    """Write ``program`` to ``path``; return it read back. ``torch.export.load(path).module()`` needs torch alone."""
    content = io.BytesIO()  # torch ends the process if it cannot write to a file
    with quiet():
        torch.export.save(program, content)
        write_bytes(path, content.getvalue())  # getbuffer() crashes Python 3.12.1 if the write fails
        return torch.export.load(path).module()


def save_onnx(program: ExportedProgram, names: Collection[str], tasks: Collection[str], path: Path) -> Any:
    """Write ``program`` to ``path`` as ONNX; return a session of onnxruntime. Raises InputError without the packages.

    ``names`` are the names of the inputs, ``tasks`` the names of the outputs. ONNX needs a different name for each
    value, so an output that is named like an input gets the suffix "_prediction".
    """
    import onnxruntime  # takes seconds

    with quiet(), reported(path), TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        converted = torch.onnx.export(program, verbose=False)
        assert converted is not None
        _rename(converted.model.graph, list(names), tasks)
        converted.save(Path(folder) / path.name, external_data=False)
        for file in sorted(Path(folder).iterdir(), reverse=True):  # weights first: beyond 2 GB they are a separate file
            check_place(path.with_name(file.name))
            file.replace(path.with_name(file.name))
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def _rename(graph: Any, inputs: Sequence[str], tasks: Collection[str]) -> None:
    """Name inputs and outputs of an ONNX graph; all other values get names that are longer than any of these."""
    outputs = list[str]()
    for task in tasks:
        name = task
        while name in inputs or name in outputs or (name != task and name in tasks):
            name += "_prediction"
        outputs.append(name)
    longest = max([*inputs, *outputs], key=len)
    for value in [*graph.initializers.values(), *(value for node in graph.all_nodes() for value in node.outputs)]:
        value.name = longest + value.name
    for values, names in ((graph.inputs, inputs), (graph.outputs, outputs)):
        for value, name in zip(values, names, strict=True):
            value.name = name


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress messages of torch and ONNX about their own code inside this context."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)

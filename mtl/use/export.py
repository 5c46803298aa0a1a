"""Export a trained network as a program for other places: ``mtl export RUN``.

Writes ``model.pt2``, which needs torch alone (``torch.export.load``), with ``--onnx`` also ``model.onnx``, and
``preprocessing.json``: how rows become inputs, and what the outputs are. Both programs map a batch of any size to
probabilities (binary and multiclass tasks) and to values in the units of the labels (regressions), by task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtl.checks import require, require_packages
from mtl.files.writing import write_json
from mtl.networks.mixture import MixtureOfExperts
from mtl.nn.calibration import STEPS
from mtl.predictions import conditional, task_summary
from mtl.types import Tokens
from mtl.use import program
from mtl.use.trained import TrainedModel, load

LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)  # of intervals
WIDENED = "subtract the number of a level from the lowest value, and add it to the highest"
MAX_DIFFERENCE = 1e-5  # difference of a program's probabilities, and of values in standard deviations
MEANINGS = {
    "binary": "probability of the second class, [rows]",
    "multiclass": "probabilities of the classes, [rows, classes]",
    "regression": "value, [rows]",
    "quantile": "quantiles, ascending, [rows, quantiles]",
    "span": "logits of each token to be the first and the last of the answer, [rows, length, 2]",
}


@torch.no_grad()
def export_run(
    path: str | Path, folder: Path, onnx: bool = False, trust: Sequence[str] = (), model: str | None = None
) -> dict[str, Any]:
    """Export the ``model`` of a checkpoint into ``folder``; return ``differences`` by file, and ``dense``.

    ``model``: see ``mtl.load``. A difference is the largest one between predictions of the exported file and of the
    network, on random rows; ``dense`` lists the layers that compute all experts. Raises InputError if a difference
    exceeds 1e-5.
    """
    if onnx:
        require_packages("--onnx", "onnx", "onnx", "onnxruntime", "onnxscript")
    loaded = load(path, trust, "cpu", model=model)
    marked = [task.name for task in loaded.spec.tasks if task.marked]
    require(not marked, f"task {', '.join(marked)} reads marked words, which an exported network cannot")
    inputs = program.random_inputs(loaded.spec.inputs)
    texts = [name for name, spec in loaded.spec.inputs.items() if isinstance(spec, Tokens)]
    exported = program.export(program.Readable(program.exportable(loaded.network)), inputs, texts)
    write_json(folder / "preprocessing.json", preprocessing(loaded, inputs))
    expected = program.Readable(loaded.network)(inputs)
    names = list(expected)
    actual = program.save(exported, folder / "model.pt2")(inputs)
    differences = {"model.pt2": difference(loaded, actual, expected)}
    if onnx:
        session = program.save_onnx(exported, list(inputs), names, folder / "model.onnx")
        values = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        actual = dict(zip(names, map(torch.from_numpy, values), strict=True))
        differences["model.onnx"] = difference(loaded, actual, expected)
    for file, value in differences.items():
        most = f"by up to {value:.1e}; at most {MAX_DIFFERENCE:g} is allowed"
        require(value <= MAX_DIFFERENCE, f"{folder / file}: its predictions differ from the network's {most}")
    layers = loaded.core.named_modules()
    dense = [name for name, layer in layers if isinstance(layer, MixtureOfExperts) and not layer.is_static]
    return {"differences": differences, "dense": dense}


def difference(model: TrainedModel, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference of predictions; for regressions, in standard units of the labels."""
    tasks = {task.name: task for task in model.spec.tasks}

    def standard(name: str, value: Tensor) -> Tensor:
        return tasks[name].standardize(value) if name in tasks else value

    return max(float((standard(name, actual[name]) - standard(name, expected[name])).abs().max()) for name in expected)


def preprocessing(model: TrainedModel, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Describe as plain data how rows become ``inputs``, and what the outputs are.

    Its entry ``data`` is the state of the data module in the checkpoint: the vocabulary and the scaling of each column.
    """
    described_inputs = {}
    for name, spec in model.spec.inputs.items():
        shape = ["rows", "length"] if isinstance(spec, Tokens) else ["rows", *inputs[name].shape[1:]]
        described_inputs[name] = {"shape": shape, "dtype": str(inputs[name].dtype).removeprefix("torch.")}
    outputs = {}
    for task in model.spec.tasks:
        kind = "quantile" if task.quantiles and task.outputs > 1 else task.kind
        outputs[task.name] = {**task_summary(task), "meaning": MEANINGS[kind]}
        if task.kind == "regression" and task.calibration:
            levels = [level for level in LEVELS if level <= len(task.calibration.scores) / STEPS]
            margins = {f"{level:g}": task.interval_margin(level) for level in levels}
            ends = "; no end is below 0" if task.not_negative or task.loss == "poisson" else ""
            widened = WIDENED + (" of the logarithms" if task.transform else ends)
            outputs[task.name]["interval"] = {"add": widened, **margins}
        if task.after is not None:
            outputs[conditional(task)] = outputs[task.name] | {"meaning": f"the same, given {task.after}, [rows]"}
    return {"inputs": described_inputs, "outputs": outputs, "data": model.stored["data"]}

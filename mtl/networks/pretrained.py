"""Build an encoder of the library `transformers`: from a configuration, a folder, or a name on its hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mtl.checks import InputError, first_line, require, require_packages

TYPES = ("bert", "electra")  # MiniLM is a bert


def encoder(
    pretrained: str | None, config: Mapping[str, Any] | None, vocab: int, dropout: float | None, weights: bool = True
) -> Any:
    """Return an encoder of `transformers` for ``vocab`` token ids: BERT, MiniLM or ELECTRA.

    ``pretrained`` is a folder, or a name on the hub, that gives configuration and weights; ``config`` replaces its
    configuration, or stands alone for random weights; without both, the encoder is a small random one (see
    ``from_scratch``). ``weights=False`` leaves the pretrained weights out. ``dropout`` replaces the probabilities of
    the configuration. Raises InputError.
    """
    require_packages("network=transformer", "text", "transformers")
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # else it reports missing weights
    location = "network.config"
    if pretrained is None or config is not None:
        built = from_scratch(dict(config or {}), vocab)
    else:
        location = f"network.pretrained={pretrained}"
        built = read(transformers.AutoConfig, pretrained, trust_remote_code=False)
    require(built.model_type in TYPES, f"{location}: model_type {built.model_type!r} is not one of {', '.join(TYPES)}")
    require(built.hidden_act == "gelu", f"{location}: hidden_act={built.hidden_act!r}: only gelu is supported")
    require(
        vocab <= built.vocab_size,
        f"{location} has embeddings of {built.vocab_size} tokens, but data.tokenizer gives ids up to {vocab - 1}: use "
        "the tokenizer of the same checkpoint",
    )
    if dropout is not None:
        built.hidden_dropout_prob = built.attention_probs_dropout_prob = dropout
    model = {"bert": transformers.BertModel, "electra": transformers.ElectraModel}[built.model_type]
    options: dict[str, Any] = {"add_pooling_layer": False} if built.model_type == "bert" else {}
    if pretrained is None or not weights:
        return model(built, **options).to(torch.get_default_dtype())
    loaded, info = read(model, pretrained, config=built, output_loading_info=True, dtype="float32", **options)
    missing = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    require(not missing, f"network.pretrained={pretrained} lacks the weights {', '.join(missing[:4])}")
    return loaded.to(torch.get_default_dtype()).train()  # from_pretrained returns it in evaluation mode


def from_scratch(config: dict[str, Any], vocab: int) -> Any:
    """Return the configuration of an encoder with random weights; ``config`` holds options of `transformers`.

    Defaults: ``model_type`` bert, 2 layers, ``hidden_size`` 128, feed-forward layers 4 times as wide, attention heads
    64 wide.
    """
    import transformers

    kind = config.pop("model_type", "bert")
    require(kind in TYPES, f"network.config.model_type={kind!r}: must be one of {', '.join(TYPES)}")
    classes = {"bert": transformers.BertConfig, "electra": transformers.ElectraConfig}
    defaults = classes[kind]().to_dict()
    unknown = sorted(set(config) - set(defaults))
    require(not unknown, f"network.config.{(unknown or [''])[0]}: {kind} has no such option")
    hidden = config.setdefault("hidden_size", 128)
    config.setdefault("num_hidden_layers", 2)
    config.setdefault("intermediate_size", 4 * hidden)
    config.setdefault("num_attention_heads", max(1, hidden // 64))
    config.setdefault("vocab_size", vocab)
    heads = config["num_attention_heads"]
    require(hidden % heads == 0, f"network.config: hidden_size={hidden} is no multiple of num_attention_heads={heads}")
    try:
        return classes[kind](**config)
    except (TypeError, ValueError) as error:
        raise InputError(f"network.config: {error}") from error


def read(kind: Any, pretrained: str, **options: Any) -> Any:
    """Return what the class ``kind`` of `transformers` reads from a folder, from its cache, or else from the hub.

    Raises InputError if it cannot.
    """
    problem = ""
    for local in (True, False):
        try:
            return kind.from_pretrained(pretrained, local_files_only=local, **options)
        except Exception as error:  # whatever a missing or damaged file makes its libraries raise
            problem = first_line(error)
    raise InputError(f"network.pretrained={pretrained}: {problem}")

"""Reads adapters from folders in the format of the PEFT library: which tensors there are, what they change.

A folder holds ``adapter_config.json`` and ``adapter_model.safetensors``. What of it
this version can't compute is refused by name, and a tensor that would be passed over
is an error: an adapter is applied whole or not at all. Source of the format: PEFT's
``LoraConfig`` and the names its ``save_pretrained`` writes.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.models.checkpoint import MappedFile, Part
from engine.models.config import DecoderConfig
from engine.models.errors import InvalidAdapter, InvalidCheckpoint, UnsupportedAdapter
from engine.models.loader import Parts
from engine.models.lora import Adapter, LayerAdapter, LowRank
from engine.models.sharding import Shard
from engine.models.values import integer, number, read_json, understood
from kernels import ops

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

#: What must hold what, since another value would change the result in a way that is not computed here.
_NEUTRAL: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "peft_type": ("LORA", ("LORA",)),
    "task_type": ("CAUSAL_LM", (None, "CAUSAL_LM")),
    "use_dora": ("false", (None, False)),
    "bias": ("none", (None, "none")),
    "lora_bias": ("false", (None, False)),
    "modules_to_save": ("absent", (None, [])),
    "fan_in_fan_out": ("false", (None, False)),
    "layer_replication": ("absent", (None, [])),
    "trainable_token_indices": ("absent", (None, [], {})),
    "target_parameters": ("absent", (None, [])),
    "use_qalora": ("false", (None, False)),
    "alora_invocation_tokens": ("absent", (None, [])),
    "rank_pattern": ("absent", (None, {})),
    "alpha_pattern": ("absent", (None, {})),
}
#: These change the base's weights when training begins, and what is saved belongs to the changed ones.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
_TENSOR = re.compile(r"base_model\.model\.model\.layers\.(\d{1,9})\.(.+)\.lora_([AB])\.weight")

#: What norms and attention can square in float32.
_LARGEST = math.sqrt(torch.finfo(torch.float32).max)

#: The name of a projection, the part of it that is taken, and the site it belongs to.
_Pieces = dict[str, list[tuple[str, Part]]]


def load_adapters(folders: Mapping[str, str | Path], config: DecoderConfig) -> dict[str, Adapter]:
    """Read and pack adapters, by name; see ``load_adapter``."""
    return {name: load_adapter(name, Path(folder), config) for name, folder in folders.items()}


def load_adapter(name: str, folder: Path, config: DecoderConfig) -> Adapter:
    """Read and pack one adapter, in float32 whatever the base's weights are.

    Args:
        name: under which requests ask for it.
        folder: in PEFT's format.
        config: of the model it belongs to.

    Raises:
        InvalidAdapter: a file is missing or damaged, or a tensor is missing, unknown or of another shape
            than the model says.
        UnsupportedAdapter: it is well-formed, and of a kind that this version can't compute.
    """
    try:
        with understood("what it holds"):
            return _Reader(name, folder, config).read()
    except InvalidCheckpoint as error:
        raise InvalidAdapter(name, str(folder), str(error)) from error


class _Reader:
    """One adapter's folder."""

    def __init__(self, name: str, folder: Path, config: DecoderConfig) -> None:
        self._name, self._folder, self._config = name, folder, config
        if not folder.is_dir():
            raise InvalidCheckpoint("there is no such folder")
        settings = read_json(folder / CONFIG_FILE)
        self._check_kind(settings)
        self._rank = integer(settings, "r")
        if self._rank < 1:
            raise InvalidCheckpoint(f"config r must be at least 1, got {self._rank}")
        root = math.sqrt(self._rank) if settings.get("use_rslora") else self._rank
        self._scale = number(settings, "lora_alpha") / root
        self._tensors = self._named_tensors()
        self._check_targets(settings)

    def read(self) -> Adapter:
        """All layers; every tensor is used once.

        Raises:
            InvalidCheckpoint: one is not as the model needs it, or belongs to nothing here.
        """
        layers = []
        for index in range(self._config.num_layers):
            sites = self._sites(index)
            layers.append(
                LayerAdapter(**{site: self._low_rank(index, pieces) for site, pieces in sites.items()})
            )
        if self._tensors:
            layer, module, which = min(self._tensors)
            what = f"model.layers.{layer}.{module}.lora_{which}"
            raise InvalidCheckpoint(f"tensor {what} belongs to no projection that can be adapted")
        return Adapter(self._name, tuple(layers), self._rank)

    def _check_kind(self, settings: Mapping[str, Any]) -> None:
        for field, (rule, allowed) in _NEUTRAL.items():
            if settings.get(field) not in allowed:
                raise UnsupportedAdapter(self._name, field, rule, settings[field])
        start = settings.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
            rule = "one that leaves the base's weights alone (convert it with PEFT)"
            raise UnsupportedAdapter(self._name, "init_lora_weights", rule, start)

    def _named_tensors(self) -> dict[tuple[int, str, str], Tensor]:
        """The tensors by layer, projection and ``A`` or ``B``."""
        path = self._folder / WEIGHTS_FILE
        if not path.is_file():
            raise InvalidCheckpoint(f"{WEIGHTS_FILE} is missing")
        file, found = MappedFile(path), {}
        for name in file.names:
            match = _TENSOR.fullmatch(name)
            if match is None:
                rule = "low-rank matrices of the layers' projections alone"
                raise UnsupportedAdapter(self._name, "tensors", rule, name)
            tensor = file.tensor(name)
            if not tensor.is_floating_point():
                raise InvalidCheckpoint(f"tensor {name} must be of a floating point type, got {tensor.dtype}")
            tensor = tensor.float()
            if not bool(tensor.isfinite().all()):
                raise InvalidCheckpoint(f"tensor {name} must hold finite numbers")
            found[int(match[1]), match[2], match[3]] = tensor
        if not found:
            raise InvalidCheckpoint(f"{WEIGHTS_FILE} holds no tensors")
        return found

    def _check_targets(self, settings: Mapping[str, Any]) -> None:
        """Each target must be a projection that can be adapted, and have its tensors.

        A pattern (a string) may name anything; then the tensors that are there say what it means.
        """
        targets = settings.get("target_modules")
        if isinstance(targets, str):
            return
        if not isinstance(targets, list) or not targets or not all(isinstance(t, str) for t in targets):
            raise InvalidCheckpoint(f"config target_modules must be names, got {targets!r}")
        chosen = settings.get("layers_to_transform")
        is_partial = chosen is not None or settings.get("exclude_modules") is not None
        for target in dict.fromkeys(targets):
            known, lacking = False, ""
            for layer in range(self._config.num_layers):
                modules = {module for pieces in self._sites(layer).values() for module, _ in pieces}
                for module in sorted(modules):
                    path = f"model.layers.{layer}.{module}"
                    if path != target and not path.endswith(f".{target}"):
                        continue
                    known = True
                    if (layer, module, "A") not in self._tensors:
                        lacking = (
                            lacking or f"tensor {path}.lora_A is missing, though target_modules names it"
                        )
            if not known:
                names = sorted({m.rpartition(".")[2] for p in self._sites(0).values() for m, _ in p})
                raise UnsupportedAdapter(self._name, "target_modules", f"of {', '.join(names)}", target)
            if lacking and not is_partial:
                raise InvalidCheckpoint(lacking)

    def _sites(self, layer: int) -> _Pieces:
        """Projections of a layer that can be adapted: those of its experts can't."""
        config, parts = self._config, Parts(self._config, Shard())
        sites = {"qkv": parts.qkv(), "attention_out": [("self_attn.o_proj", parts.attention_out)]}
        if not config.has_experts(layer):
            sites["gate_up"] = parts.gate_up(config.names.gate_up, config.intermediate_size)
            sites["down"] = [("mlp.down_proj", parts.down(config.intermediate_size))]
        return sites

    def _low_rank(self, layer: int, pieces: list[tuple[str, Part]]) -> LowRank | None:
        """The two matrices of a projection, fused as its pieces are; None where it is not adapted."""
        found: list[tuple[Tensor, Tensor] | None] = []
        for module, part in pieces:
            a = self._matrix(layer, module, "A", (self._rank, part.shape[1]))
            b = self._matrix(layer, module, "B", (part.shape[0], self._rank))
            if (a is None) != (b is None):
                lacking = "A" if a is None else "B"
                raise InvalidCheckpoint(f"tensor model.layers.{layer}.{module}.lora_{lacking} is missing")
            found.append(None if a is None or b is None else (a, part.of_bias(b) * self._scale))
            if a is not None and b is not None:
                self._check_finite(f"model.layers.{layer}.{module}", a, b)
        for module, _ in pieces:
            self._tensors.pop((layer, module, "A"), None)
            self._tensors.pop((layer, module, "B"), None)
        if not any(found):
            return None
        rows = [len(range(part.shape[0])[part.rows]) for _, part in pieces]
        below = [pair[0] for pair in found if pair is not None]
        beside = torch.zeros(sum(rows), len(below) * self._rank)
        top = left = 0
        for height, pair in zip(rows, found, strict=True):
            if pair is not None:
                beside[top : top + height, left : left + self._rank] = pair[1]
                left += self._rank
            top += height
        return LowRank(ops.pack_linear(torch.cat(below), "fp32"), ops.pack_linear(beside, "fp32"))

    def _check_finite(self, name: str, a: Tensor, b: Tensor) -> None:
        """Bound what comes of inputs of 1, at every stage; sums of magnitudes need no product of A and B."""
        inner = a.abs().sum(dim=1, dtype=torch.float64)
        outer = b.abs().double() * self._scale
        largest = torch.stack([inner.max(), outer.max(), (outer @ inner).max()])
        if not bool((largest <= _LARGEST).all()):
            rule = f"must add at most {_LARGEST:.1e} to an output for inputs of 1, whose square is finite"
            raise InvalidCheckpoint(f"tensors {name}.lora_A and lora_B, scaled by {self._scale:g}, {rule}")

    def _matrix(self, layer: int, module: str, which: str, shape: tuple[int, int]) -> Tensor | None:
        tensor = self._tensors.get((layer, module, which))
        if tensor is not None and tuple(tensor.shape) != shape:
            name = f"model.layers.{layer}.{module}.lora_{which}"
            raise InvalidCheckpoint(f"tensor {name} must have shape {list(shape)}, got {list(tensor.shape)}")
        return tensor

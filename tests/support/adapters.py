"""LoRA adapters for tests: random ones, written in PEFT's format, and models with them merged in by hand."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def write_adapter(
    folder: Path,
    model: Any,
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8,
    targets: tuple[str, ...] = ALL,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Path:
    """Write a random adapter of transformers' ``model``; ``settings`` go into its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name.rpartition(".")[2] not in targets:
            continue
        a = torch.randn(rank, module.in_features, generator=generator) / math.sqrt(module.in_features)
        b = torch.randn(module.out_features, rank, generator=generator) * 0.3
        tensors |= {
            f"{PREFIX}{name}.lora_A.weight": a.to(dtype),
            f"{PREFIX}{name}.lora_B.weight": b.to(dtype),
        }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(targets),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "base_model_name_or_path": "tiny",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    return folder


def merged(model: Any, folder: Path) -> Any:
    """A copy of transformers' ``model`` with the adapter in ``folder`` merged into its weights."""
    config = json.loads((folder / "adapter_config.json").read_text())
    root = math.sqrt(config["r"]) if config["use_rslora"] else config["r"]
    tensors, found = load_file(folder / "adapter_model.safetensors"), copy.deepcopy(model)
    with torch.no_grad():
        for name, a in tensors.items():
            if name.endswith(".lora_A.weight"):
                b = tensors[name.replace("lora_A", "lora_B")]
                weight = found.get_parameter(name.removeprefix(PREFIX).replace("lora_A.weight", "weight"))
                added = b.double() @ a.double() * (config["lora_alpha"] / root)
                weight.copy_((weight.double() + added).float())
    return found

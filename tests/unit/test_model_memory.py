"""What loading needs beside the weights, by the books of the kernel, in a process of its own."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from tests.support.models import tiny

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
BEFORE = """
import sys
from pathlib import Path
from kernels import ops
ops.set_num_threads(1)
folder = Path(sys.argv[1])
def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
"""
OWN = """
from engine.models.config import DecoderConfig
from engine.models.loader import load_weights
config = DecoderConfig.from_folder(folder)
before = memory("VmRSS")
weights = load_weights(folder, config)
print(memory("VmHWM") - before, weights.num_bytes)
"""
TRANSFORMERS = """
from transformers.models.gpt_neox import modeling_gpt_neox
from engine.models.transformers_decoder import TransformersConfig, TransformersDecoder
config = TransformersConfig.from_folder(folder)
before = memory("VmRSS")
decoder = TransformersDecoder(folder, config, "auto", 64)
print(memory("VmHWM") - before, (folder / "model.safetensors").stat().st_size)
"""


@pytest.fixture(
    scope="module", params=[pytest.param(torch.float32, marks=pytest.mark.deep), torch.bfloat16], ids=str
)
def checkpoint(request, tmp_path_factory):
    """About 120 MB of weights in float32, half of it in bfloat16."""
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    vocab, hidden, wide = (CONFIG[name] for name in ("vocab_size", "hidden_size", "intermediate_size"))
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 2, hidden),
        "self_attn.v_proj": (hidden // 2, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    whole = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden), "model.norm": (hidden,)}
    for layer in range(CONFIG["num_hidden_layers"]):
        whole |= {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}
    save_file(
        {f"{name}.weight": torch.rand(shape).to(request.param) for name, shape in whole.items()},
        folder / "model.safetensors",
    )
    return folder


def _grown(folder, child):
    """By how much the child grew at most, and the bytes of its weights."""
    command = [sys.executable, "-c", BEFORE + child, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return map(int, done.stdout.split())


@pytest.mark.slow
def test_loading_needs_little_more_than_the_weights(checkpoint):
    grown, num_bytes = _grown(checkpoint, OWN)

    assert num_bytes > 50e6
    assert grown <= 1.2 * num_bytes, f"{grown / num_bytes:.2f} x the weights"


@pytest.mark.deep
def test_loading_through_transformers_needs_no_more(tmp_path):
    options = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
    }
    tiny("GPTNeoX", tmp_path, **options)

    grown, num_bytes = _grown(tmp_path, TRANSFORMERS)

    assert num_bytes > 200e6
    assert grown <= 1.2 * num_bytes, f"{grown / num_bytes:.2f} x the weights"

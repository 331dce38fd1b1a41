"""What launchers of norms, activations, products and sampling launch is what was compiled ahead of time."""

import dataclasses

import pytest
import torch

from kernels.gpu import activation, adjust_logits, linear, log_probs, rms_norm, sample
from kernels.gpu.device import INTERPRETING
from kernels.interface import LogitAdjustments, SamplingInputs
from tests.kernels.gpu import test_gpu_launches as others

pytestmark = pytest.mark.skipif(not INTERPRETING, reason="what a card launches is not recorded")

launched = others.launched
TYPES = {
    "*fp16": torch.float16,
    "*bf16": torch.bfloat16,
    "*fp32": torch.float32,
    "*fp64": torch.float64,
    "*i1": torch.bool,
    "*i8": torch.int8,
    "*u8": torch.uint8,
    "*i64": torch.int64,
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def listed(module):
    """A module's entries for the target that the interpreter stands for, as ``launched`` writes them."""
    return {
        (
            entry.kernel,
            tuple(sorted((name, TYPES[kind]) for name, kind in entry.arguments if kind.startswith("*"))),
            tuple(sorted((name, value) for name, value in entry.constants if name != "UPCAST")),
            entry.num_warps,
            entry.num_stages,
        )
        for entry in module.aot_entries()
        if "sm_80" in entry.targets
    }


def test_norms(launched):
    for dtype in DTYPES:
        for config in rms_norm.CONFIGS:
            for columns in (config.block_columns, config.block_columns - 1):
                if columns % 16 and columns > rms_norm.ODD_COLUMNS_MAX:
                    continue
                x, weight = torch.zeros(2, columns, dtype=dtype), torch.zeros(columns)
                rms_norm.rms_norm(x, weight, 1e-5)
                rms_norm.add_rms_norm(x, x.clone(), weight, 1e-5)

    assert launched == listed(rms_norm)


def test_activations(launched):
    for dtype in DTYPES:
        for columns in (16, 33, 4096):
            gate_up = torch.zeros(2, 2 * columns, dtype=dtype)
            activation.silu_mul(gate_up)
            activation.gelu_mul(gate_up, tanh=False)
            activation.gelu_mul(gate_up, tanh=True)

    assert launched == listed(activation)


def test_products(launched):
    weights = {"int8": torch.int8, "fp8": torch.uint8}
    for dtype in DTYPES:
        for kind in linear.KINDS:
            for inputs in (32, 33):
                weight = torch.zeros(7, inputs, dtype=weights.get(kind, dtype))
                scales = None if kind == "float" else torch.ones(7)
                for tokens in (1, 17, 65, 300):
                    x = torch.zeros(tokens, inputs, dtype=dtype)
                    for fixed in (False, True):
                        for out_dtype in {dtype, torch.float32}:
                            # That is torch's to multiply, see ``implementation.linear``.
                            if kind == "float" and out_dtype is not torch.float32 and not fixed:
                                continue
                            for bias in (None, torch.zeros(7)):
                                linear.linear(x, weight, scales, bias, out_dtype=out_dtype, fixed=fixed)

    assert launched == listed(linear)


def test_sampling(launched):
    one = torch.ones(1)
    for vocab in (32, 33):
        for banned in (0, 1):
            logits, ids = torch.zeros(1, vocab), torch.zeros(1, dtype=torch.int64)
            adjustments = LogitAdjustments(ids, ids, ids > 0, ids, one, one, one, one)
            wide = one.double()
            for typical_p in (None, wide):
                inputs = SamplingInputs(
                    wide, ids, wide, wide, ids, ids, ids[:banned], ids[:banned], adjustments
                )
                sample.sample(logits, dataclasses.replace(inputs, typical_p=typical_p))
            log_probs.argmax(logits)
            log_probs.log_sum_exp(logits)
            log_probs.log_probs(logits, ids, 2)

    assert launched == listed(sample) | listed(log_probs) | listed(adjust_logits)

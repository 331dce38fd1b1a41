"""The runner for devices on the Triton kernels: packed inputs, padded decodes, graphs, one report back."""

from collections.abc import Iterator

import pytest
import torch

from bench.gpu_kernels import Shape
from bench.gpu_model import RandomModel, exactness
from engine.runner.graphs import CudaGraphs
from engine.scheduler.plan import Plan
from kernels import ops, registry
from tests.support.device_models import Remembered

SHAPE = Shape(64, 48, 2, 1, 64, 128, 1)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = registry.active_name()
    yield
    registry.use(before)


def _tokens(kernels: str, device: torch.device, weight_type: str, *, graphs: bool) -> list[dict[str, int]]:
    """What a mixed step and two decodes sample."""
    registry.use(kernels)
    random = RandomModel(SHAPE, 4, 30, device, weight_type)
    if graphs:
        random.capture(CudaGraphs() if device.type == "cuda" else Remembered(), (4,))
    model = random.model((4,) if graphs else ())
    prompts = {0: [5, 6, 7, 8], 1: list(range(3, 22)), 2: [9]}
    first = model.run(Plan(1, tuple(random.grant(row, ids, 0, 0) for row, ids in prompts.items())))
    found = [dict(first.sampled)]
    for step in (2, 3):
        plan = Plan(
            step,
            tuple(
                random.grant(row, [found[-1][f"r{row}"]], len(ids) + step - 2, step)
                for row, ids in prompts.items()
            ),
        )
        result = model.run(plan)
        assert not result.failures
        found.append(dict(result.sampled))
    return found


def test_it_samples_what_the_reference_does(device: torch.device) -> None:
    weight_type = "fp32" if device.type == "cpu" else "bf16"
    wanted = _tokens("reference", torch.device("cpu"), weight_type, graphs=False)

    assert _tokens("triton", device, weight_type, graphs=True) == wanted


@pytest.mark.slow
def test_its_logits_are_the_same_bits_in_batch_invariant_mode(
    device: torch.device, rows_of_products_stand_alone: None
) -> None:
    registry.use("triton")
    ops.set_batch_invariant(True)
    try:
        random = RandomModel(SHAPE, 4, 48, device, "bf16" if device.type == "cuda" else "fp32")
        found = exactness(random, CudaGraphs() if device.type == "cuda" else Remembered())
    finally:
        ops.set_batch_invariant(False)

    assert found == dict.fromkeys(("batched", "chunked", "decoded", "graph"), True)

"""What holds for every implementation, and how one that cannot be had answers."""

import importlib
import inspect
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from kernels import ops, reference, registry, sampling
from kernels.cpu_build import CpuKernelsUnavailable
from kernels.gpu import available
from kernels.interface import Implementation, LogitAdjustments, UnsupportedWeightType

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
NO_CARD = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")


def _public(thing):
    return {
        name: value for name, value in vars(thing).items() if inspect.isfunction(value) and name[0] != "_"
    }


@pytest.fixture(params=registry.names())
def implementation(request):
    """A module with an implementation, imported here whatever other tests have imported."""
    name = registry._MODULES[request.param]
    if request.param == "triton" and find_spec("triton") is None:
        pytest.skip("triton is not installed")
    try:
        return importlib.import_module(name)
    except CpuKernelsUnavailable as error:
        pytest.skip(str(error))


def test_an_implementation_has_every_operation_with_its_parameters(implementation):
    where = implementation.__name__
    for name, wanted in _public(Implementation).items():
        assert hasattr(implementation, name), f"{where} has no {name}, which kernels/interface.py asks for"
        parameters = list(inspect.signature(wanted).parameters)[1:]
        offered = inspect.signature(getattr(implementation, name)).parameters
        assert list(offered)[: len(parameters)] == parameters, f"parameters of {name} in {where}"
        more = list(offered.values())[len(parameters) :]
        assert all(parameter.default is not parameter.empty for parameter in more), f"{name} in {where}"
        assert name in implementation.__all__, f"__all__ of {where} lacks {name}"


def test_every_operation_is_public():
    assert set(_public(Implementation)) <= set(ops.__all__)


@NO_CARD
@NEEDS_TRITON
def test_triton_by_name_without_a_card_is_refused_and_changes_nothing(monkeypatch):
    monkeypatch.setattr(available, "interpreting", lambda: False)
    before = registry.active_name()
    with pytest.raises(
        available.TritonKernelsUnavailable, match="kernels triton needs a GPU, and torch finds none"
    ):
        registry.use("triton")
    assert registry.active_name() == before


def test_triton_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(available.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(available.TritonKernelsUnavailable, match="needs the package triton"):
        registry.use("triton")


@pytest.fixture
def _as_before():
    before = registry.active_name()
    yield
    registry.use(before)


@NEEDS_TRITON
@pytest.mark.usefixtures("_as_before")
def test_auto_takes_triton_where_there_is_a_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Abacus 9000")
    monkeypatch.setattr(available, "interpreting", lambda: False)

    registry.use("auto")

    assert registry.active_name() == "triton"
    assert registry.active_reason() == "there is the GPU Abacus 9000"


@pytest.mark.usefixtures("_as_before")
def test_auto_says_why_it_does_not_take_triton_on_a_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    unavailable = available.TritonKernelsUnavailable("no way")
    monkeypatch.setitem(registry._REQUIREMENTS, "triton", lambda: (_ for _ in ()).throw(unavailable))
    monkeypatch.setitem(registry._MODULES, "cpu", "kernels.reference")

    registry.use("auto")

    assert registry.active_name() == "cpu"
    assert registry.active_reason() == "the quickest on a CPU, and no way"


@pytest.mark.slow
@NO_CARD
@NEEDS_TRITON
def test_under_the_interpreter_auto_stays_on_the_cpu_and_triton_can_be_had_by_name():
    program = (
        "from kernels import registry; registry.use('auto'); print(registry.active_name());"
        "registry.use('triton'); print(registry.active_name())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"TRITON_INTERPRET": "1", "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    automatic, by_name = done.stdout.split()
    assert automatic in {"cpu", "reference"}
    assert by_name == "triton"


def test_fp8_keeps_the_sign_zero_and_the_largest_of_a_row():
    weight = torch.randn(9, 31, generator=torch.Generator().manual_seed(0))
    weight[4] = 0.0
    kept = reference.pack_linear(weight, "fp8").data
    assert not kept[4].any()
    largest = weight.abs().amax(dim=1, keepdim=True)
    # Three bits of mantissa, and below 2**-6 of 448 equal steps of 2**-9.
    assert ((kept - weight).abs() <= weight.abs() / 16 + largest / 448 * 2.0**-10 * 1.001).all()
    assert torch.equal(
        kept.sign()[weight.abs() > largest / 1000], weight.sign()[weight.abs() > largest / 1000]
    )


def test_the_cpu_kernels_refuse_fp8_by_name():
    cpu = pytest.importorskip("kernels.cpu", exc_type=Exception)
    with pytest.raises(
        UnsupportedWeightType,
        match=r"weights must be one of fp32, bf16, fp16, int8 with cpu kernels, got 'fp8'",
    ):
        cpu.pack_linear(torch.zeros(2, 2), "fp8")


def test_the_reference_cannot_promise_batch_invariance():
    with pytest.raises(ops.NotBatchInvariant, match="batch_invariant must be false with reference kernels"):
        ops.set_batch_invariant(True)
    ops.set_batch_invariant(False)


def test_log_probs_by_hand():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    found = ops.log_probs(logits, torch.tensor([0, 3]), 3)
    assert found.top_ids.tolist() == [[1, 2, 3], [0, 1, 2]]
    wanted = logits.log_softmax(dim=-1)
    torch.testing.assert_close(found.chosen, wanted[[0, 1], [0, 3]])
    torch.testing.assert_close(found.top, wanted.gather(1, found.top_ids))
    torch.testing.assert_close(found.top.exp().sum(1) < 1, torch.tensor([True, True]))


@pytest.mark.parametrize("num_top", [1, 3, 20])
def test_the_likeliest_of_many_rows_are_those_of_each_whatever_is_alike(num_top):
    torch.manual_seed(3)
    for logits in (
        torch.randn(40, 1000),
        torch.randint(0, 8, (40, 50)).float(),
        torch.randint(0, 400, (40, 1000)).float(),
        torch.full((3, 50), float("-inf")),
    ):
        found = ops.log_probs(logits, torch.zeros(len(logits), dtype=torch.int64), num_top).top_ids
        assert torch.equal(found, logits.sort(dim=1, descending=True, stable=True).indices[:, :num_top])


def _adjusted(logit, *, in_prompt=False, count=0, bias=0.0, repetition=1.0, presence=0.0, frequency=0.0):
    logits = torch.tensor([[logit, 7.0]])
    one = torch.zeros(1, dtype=torch.int64)
    sampling.adjust(
        logits,
        LogitAdjustments(
            rows=one,
            token_ids=one,
            in_prompt=torch.tensor([in_prompt]),
            output_counts=torch.tensor([count]),
            bias=torch.tensor([bias]),
            repetition=torch.tensor([repetition]),
            presence=torch.tensor([presence]),
            frequency=torch.tensor([frequency]),
        ),
    )
    assert logits[0, 1] == 7.0
    return logits[0, 0].item()


def test_penalties_by_hand():
    assert _adjusted(4.0, repetition=2.0, presence=1.0, frequency=1.0) == 4.0  # never seen
    assert _adjusted(4.0, in_prompt=True, repetition=2.0, presence=1.0, frequency=1.0) == 2.0
    assert _adjusted(-4.0, in_prompt=True, repetition=2.0) == -8.0
    assert _adjusted(4.0, count=3, repetition=2.0) == 2.0
    assert _adjusted(4.0, count=3, presence=0.5, frequency=0.25) == 4.0 - 0.5 - 0.75
    assert _adjusted(4.0, count=1, bias=2.0, repetition=2.0, presence=0.5) == 2.5
    assert _adjusted(1.0, in_prompt=True, bias=-3.0, repetition=2.0) == -4.0  # the bias comes first
    assert _adjusted(4.0, bias=-1.5) == 2.5

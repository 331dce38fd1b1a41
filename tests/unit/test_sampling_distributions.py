"""20,000 draws for each sampling parameter, from the parameters of a request to its tokens.

What they must follow is computed in numpy from the definitions in docs/SAMPLING.md, without
a line of the kernels'; transformers' processors are asked as well.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from engine.request import Request, RequestId, RequestSpec
from engine.runner.batch import build_batch
from engine.sampling import SamplingParams
from engine.scheduler.plan import Grant, Plan
from kernels import ops, registry, sampling
from kernels.ops import AllowedIds

NUM_DRAWS, VOCAB = 20_000, 24
PROMPT, OUTPUT = (1, 2, 3, 3, 9), (4, 4, 4, 2, 7)
EOS = frozenset({0, 5})


@pytest.fixture(autouse=True)
def _reference():
    before = registry.active_name()
    registry.use("reference")
    yield
    registry.use(before)


def _logits(seed=3):
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


def _inputs(params):
    """How the row of a request with this prompt and output is sampled."""
    request = Request(RequestSpec(RequestId("a"), PROMPT, params, eos_token_ids=EOS), 0, 0.0)
    request.token_ids.extend(OUTPUT)
    num_tokens = len(request.token_ids)
    return build_batch(Plan(1, (Grant(request, num_tokens - 1, 1, [0, 1], len(OUTPUT)),)), 16).sampling


def _repeated(inputs, count):
    """The one row ``count`` times, each with a seed of its own."""

    def pairs(rows, ids):
        return torch.arange(count).repeat_interleave(len(rows)), ids.repeat(count)

    adjustments, allowed, typical_p = inputs.adjustments, inputs.allowed, inputs.typical_p
    if adjustments is not None:
        rows, ids = pairs(adjustments.rows, adjustments.token_ids)
        repeated = {"rows": rows, "token_ids": ids}
        for field in dataclasses.fields(adjustments):
            if field.name not in repeated:
                repeated[field.name] = getattr(adjustments, field.name).repeat(count)
        adjustments = type(adjustments)(**repeated)
    if allowed is not None:
        allowed = AllowedIds(torch.arange(count), *pairs(allowed.rows, allowed.token_ids))
    banned_rows, banned_ids = pairs(inputs.banned_rows, inputs.banned_ids)
    columns = ("temperature", "top_k", "top_p", "min_p", "output_index")
    return dataclasses.replace(
        inputs,
        **{name: getattr(inputs, name).repeat(count) for name in columns},
        seed=torch.arange(count) * 7919,
        banned_rows=banned_rows,
        banned_ids=banned_ids,
        adjustments=adjustments,
        allowed=allowed,
        typical_p=None if typical_p is None else typical_p.repeat(count),
    )


def _drawn(logits, params):
    """How often each id comes up."""
    sampled = ops.sample(logits.repeat(NUM_DRAWS, 1), _repeated(_inputs(params), NUM_DRAWS))
    assert not sampled.failed.any()
    return np.bincount(sampled.token_ids.numpy(), minlength=VOCAB)


def _expected(logits, params):
    """The distribution, from the definitions."""
    x = logits.double().numpy().copy()
    text, said = [*PROMPT, *OUTPUT], list(OUTPUT)
    for token, bias in params.logit_bias:
        x[token] += bias
    for token in set(text):
        r = params.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(said):
        x[token] -= params.presence_penalty + said.count(token) * params.frequency_penalty
    out = np.zeros(VOCAB, dtype=bool)
    out[list(params.banned_token_ids)] = True
    for *before, last in params.banned_sequences:
        out[last] |= not before or text[-len(before) :] == before
    if params.allowed_token_ids:
        out |= ~np.isin(np.arange(VOCAB), params.allowed_token_ids)
    if len(said) < params.min_tokens:
        out[[*EOS, *params.stop_token_ids]] = True
    p = np.where(out, 0.0, np.exp((x - x[~out].max()) / params.temperature))
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
        p /= p.sum()
    if params.top_p < 1:
        needed = int(np.sum(np.cumsum(p[order]) < params.top_p)) + 1
        p[order[needed:]] = 0
        p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    p /= p.sum()
    if params.typical_p < 1:
        surprise = -np.log(p, where=p > 0, out=np.full(VOCAB, np.inf))
        entropy = np.sum(p[p > 0] * surprise[p > 0])
        order = np.argsort(np.abs(surprise - entropy), kind="stable")
        needed = int(np.sum(np.cumsum(p[order]) < params.typical_p)) + 1
        p[order[needed:]] = 0
        p /= p.sum()
    return p


def _assert_follows(counts, probabilities):
    """A right sampler fails once in ten thousand; the seeds are fixed.

    The border of chi-square is Wilson and Hilferty's (1931), exact to a per cent or two.
    """
    assert counts[probabilities == 0].sum() == 0
    likely = probabilities * NUM_DRAWS >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    expected = np.append(probabilities[likely], probabilities[~likely].sum()) * NUM_DRAWS
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = float(np.sum((observed - expected) ** 2 / expected))
    spread = 2 / (9 * max(1, len(expected) - 1))
    border = max(1, len(expected) - 1) * (1 - spread + 3.719 * math.sqrt(spread)) ** 3
    assert statistic < border, (statistic, observed, expected)


CASES = {
    "nothing": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "typical_p": {"typical_p": 0.6},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "repetition_reward": {"repetition_penalty": 0.5},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "frequency_reward": {"frequency_penalty": -0.4},
    "logit_bias": {"logit_bias": ((8, 2.5), (2, -1.0), (11, -100.0))},
    "allowed_token_ids": {"allowed_token_ids": (2, 4, 8, 20)},
    "banned_token_ids": {"banned_token_ids": (3, 6, 21)},
    "banned_sequences": {"banned_sequences": ((2, 7, 12), (7, 3), (4, 7, 8), (6,))},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": (8,)},
    "all": {
        "temperature": 1.4, "top_k": 15, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9,
        "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": -0.2,
        "logit_bias": ((4, 1.0), (10, 1.5)), "banned_token_ids": (3,), "banned_sequences": ((7, 2),),
        "min_tokens": 9,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_definition(case):
    params = SamplingParams(max_tokens=64, **CASES[case])
    probabilities = _expected(_logits(), params)
    assert case == "nothing" or not np.allclose(probabilities, _expected(_logits(), SamplingParams()))

    _assert_follows(_drawn(_logits(), params), probabilities)


def test_draws_follow_what_transformers_makes_of_the_same_parameters():
    """Its processors in its order: bias, repetition, bans, temperature, top-k, top-p, min-p, typical."""
    logits, text = _logits(3), torch.tensor([[*PROMPT, *OUTPUT]])
    processors = LogitsProcessorList([
        SequenceBiasLogitsProcessor([[[8], 0.5], [[2], -1.0]]),
        RepetitionPenaltyLogitsProcessor(1.4),
        NoBadWordsLogitsProcessor([[2, 7, 12], [6]], eos_token_id=0),
        SuppressTokensLogitsProcessor([3]),
        TemperatureLogitsWarper(1.8),
        TopKLogitsWarper(16),
        TopPLogitsWarper(0.95),
        MinPLogitsWarper(0.03),
        TypicalLogitsWarper(0.7),
    ])  # fmt: skip
    params = SamplingParams(
        temperature=1.8, top_k=16, top_p=0.95, min_p=0.03, typical_p=0.7, repetition_penalty=1.4,
        logit_bias=((8, 0.5), (2, -1.0)), banned_token_ids=(3,), banned_sequences=((2, 7, 12), (6,)),
    )  # fmt: skip
    wanted = processors(text, logits.unsqueeze(0).clone()).softmax(dim=-1)[0].double().numpy()
    assert 4 < (wanted > 0).sum() < 14

    _assert_follows(_drawn(logits, params), wanted / wanted.sum())


@pytest.mark.parametrize("penalty", [0.6, 1.3, 3.0])
def test_the_repetition_penalty_is_that_of_transformers_number_by_number(penalty):
    logits = _logits(7)
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([[*PROMPT, *OUTPUT]]), logits.unsqueeze(0).clone()
    )
    got = logits.unsqueeze(0).clone()
    sampling.adjust(got, _inputs(SamplingParams(repetition_penalty=penalty)).adjustments)
    torch.testing.assert_close(got, wanted)


CUTS = [
    {}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.1}, {"typical_p": 0.5},
    {"top_k": 12, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.7},
]  # fmt: skip


@pytest.mark.parametrize("settings", CUTS)
def test_rows_choose_the_same_one_by_one_as_all_at_once(settings, monkeypatch):
    """Large vocabularies go one way, small ones the other."""
    logits = torch.randn(200, 300, generator=torch.Generator().manual_seed(1)) * 2
    inputs = _repeated(_inputs(SamplingParams(temperature=1.1, **settings)), 200)
    together = ops.sample(logits.clone(), inputs).token_ids
    monkeypatch.setattr(sampling, "MAX_SORTED_VOCAB", 0)
    assert torch.equal(ops.sample(logits.clone(), inputs).token_ids, together)


def test_what_is_not_asked_for_is_not_there():
    inputs = _inputs(SamplingParams(temperature=0.7, top_p=0.9))
    assert (inputs.adjustments, inputs.allowed, inputs.typical_p) == (None, None, None)
    assert inputs.banned_ids.numel() == 0


@pytest.mark.parametrize("bias", [0, 200])
def test_what_was_said_is_counted_from_step_to_step_however_much_it_is(bias):
    params = SamplingParams(
        repetition_penalty=1.5, max_tokens=600, logit_bias=tuple((1000 + i, 0.5) for i in range(bias))
    )
    request = Request(RequestSpec(RequestId("a"), tuple(range(0, 300, 2)), params), 0, 0.0)
    for index in range(500):
        num_tokens = len(request.token_ids)
        plan = Plan(1, (Grant(request, num_tokens - 1, 1, list(range(50)), index),))
        if index % 7:  # some steps do not sample
            build_batch(plan, 16)
        request.token_ids.append(index * index % 400)
    adjustments = build_batch(
        Plan(1, (Grant(request, len(request.token_ids) - 1, 1, list(range(50)), 500),)), 16
    ).sampling.adjustments
    columns = (adjustments.token_ids, adjustments.in_prompt, adjustments.output_counts, adjustments.bias)
    found = {row[0]: tuple(row[1:]) for row in zip(*(column.tolist() for column in columns), strict=True)}
    said = request.token_ids[150:]
    wanted = {i: (i in range(0, 300, 2), said.count(i), 0.0) for i in {*range(0, 300, 2), *said}}
    assert found == wanted | {1000 + i: (False, 0, 0.5) for i in range(bias)}
    assert len(found) == len(adjustments.rows), "no id comes twice"


def test_a_penalised_token_is_less_likely_by_hand():
    """Said three times: 4 goes from x to x / 2 - 0.5 - 3 * 0.25, for x > 0."""
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 3.0
    sampling.adjust(logits, _inputs(params).adjustments)
    assert logits[0, 4].item() == pytest.approx(3.0 / 2 - 0.5 - 0.75)
    assert logits[0, 9].item() == 0  # in the prompt alone, and at zero a factor changes nothing
    assert math.isclose(logits[0, 2].item(), -0.75, rel_tol=1e-6)

"""An account as sentences. Pure text; how it is shown is ``timeline.show``'s."""

from collections.abc import Iterable

from timeline.account import GATES, GATES_OF_FIRST, PARKINGS, PHASES, WAITING, Account, Loss, Neighbour, Part

#: Shares below this are not worth a word.
_SMALL_S = 5e-4
_NEEDS = {
    "seats": "which needed a seat",
    "blocks": "which needed KV blocks",
    "growth": "whose output needed another KV block",
    "operator": "",
    "runner": "",
}
_CAUSES = {
    "growth": "since no KV block was left for its own next token",
    "operator": "since an operator said so",
    "runner": "since the process that computes died, or a step failed, and all KV was lost",
}
#: Preemptions that get a sentence each.
_MAX_LOSSES_TOLD = 8


def duration(seconds: float) -> str:
    """A time as people write it: ``3.21 s``, ``45 ms``, ``0.4 ms``."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 0.01:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds * 1000:.1f} ms"


def counted(number: int, what: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def headline(account: Account) -> str:
    """Who it is and how it fared, in one line."""
    alias = f" ({account.server_request_id})" if account.request_id else ""
    who = f"{account.name}{alias}, {account.class_name}, level {account.level}"
    if account.tenant:
        who += f", tenant {account.tenant}"
    how = f"ended ({account.end}) after" if account.end else f"{_now(account)}; alive for"
    line = f"{who}: {how} {duration(account.total_s)}"
    if account.ttft_s is not None:
        line += f", first token after {duration(account.ttft_s)}"
    if account.tpot_s is not None:
        line += f", then {duration(account.tpot_s)} a token"
    return line


def sentences(account: Account) -> list[str]:
    """What happened to it, in order."""
    told = [*_arrival(account), *_first_wait(account), *_prefill(account)]
    told += [*_output(account), *_guesses(account), *_masks(account), *_losses(account)]
    told += [*_pauses(account), *_end(account)]
    return told


def _now(account: Account) -> str:
    present = {
        "queued": "waits for its first seat",
        "prefill": "computes its prompt",
        "held": "has a seat, and no tokens of the step",
        "decode": "produces output",
        "stalled": "has a seat, and no token of the step",
        "preempted": "was preempted and waits",
        "recompute": "computes again what it had lost",
        "parked": "is not to be computed",
        "returning": "waits for a seat after it was parked",
    }
    return present.get(account.phase, account.phase)


def _arrival(account: Account) -> Iterable[str]:
    before = None
    if account.num_ahead is not None:
        before = f"{counted(account.num_ahead, 'request')} before it in the queue"
        before = f"It came with {before if account.num_ahead else 'nobody before it in the queue'}"
    if account.num_holders:
        held = f"{_count_and_names(account.num_holders, account.holders, 'seat')}"
        yield f"{before or 'It came'}, and found {held}."
    elif before:
        yield f"{before}."
    intake_s = account.spent_s("intake")
    if intake_s >= _SMALL_S:
        yield f"It took {duration(intake_s)} to read, check and tokenise it."


def _count_and_names(number: int, others: tuple[Neighbour, ...], what: str) -> str:
    return f"{counted(number, what)} taken by {_names(number, others)}"


def _names(number: int, others: tuple[Neighbour, ...]) -> str:
    names = [f"{other.name} (level {other.level})" for other in others]
    if number > len(names):
        names.append(f"{number - len(names):,} more")
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _first_wait(account: Account) -> Iterable[str]:
    waited_s = account.spent_s("queued")
    if waited_s < _SMALL_S:
        yield "It had a seat at once." if account.phase != "queued" else "It waits for its first seat."
        return
    so_far = " so far" if account.phase == "queued" else ""
    line = f"It waited {duration(waited_s)} for its first seat{so_far}: {_gates(account, 'queued')}."
    if account.num_seated:
        seated = tuple({other.server_request_id: other for other in account.seated}.values())
        line += f" Meanwhile {counted(account.num_seated, 'other')} got a seat"
        last = "" if account.num_seated <= len(seated) else "last "
        line += f": {last}{_names(len(seated), seated)}."
    yield line


def _gates(account: Account, phase: str) -> str:
    parts = [part for part in account.parts if part.phase == phase and part.total_s >= _SMALL_S]
    return ", ".join(f"{duration(part.total_s)} because {because(part)}" for part in parts) or "no time"


def because(part: Part) -> str:
    """Why a part was spent waiting, or parked."""
    if part.phase == "parked":
        return PARKINGS.get(part.gate, "it was told to")
    behind, _, gate = part.gate.partition(":")
    if behind == "behind" and gate:
        return f"it stood behind others and {GATES_OF_FIRST.get(gate) or GATES.get(gate, gate)}"
    return GATES.get(part.gate, part.gate)


def _prefill(account: Account) -> Iterable[str]:
    spent_s = account.spent_s("prefill")
    held_s = account.spent_s("held")
    if not account.num_prefill_steps:
        return
    found = f", {account.num_cached_tokens:,} of them found in the prefix cache" * bool(
        account.num_cached_tokens
    )
    line = f"Its prompt has {counted(account.num_prompt_tokens, 'token')}{found}"
    if spent_s:
        line += f"; computing it took {duration(spent_s)}"
    if held_s >= _SMALL_S:
        line += f", and for {duration(held_s)} it had a seat and no tokens of the step (budget)"
    yield line + "."


def _masks(account: Account) -> Iterable[str]:
    waited_s = sum(part.total_s for part in account.parts if part.gate == "grammar")
    if waited_s >= _SMALL_S:
        yield f"For {duration(waited_s)} it sat steps out, since {GATES['grammar']}."


def _output(account: Account) -> Iterable[str]:
    decode_s = account.spent_s("decode")
    if account.ttft_s is None:
        return
    yield f"TTFT {duration(account.ttft_s)}: {_shares(account, before=True)}."
    if account.tpot_s is None:
        return
    line = f"TPOT {duration(account.tpot_s)} over {counted(account.num_output_tokens - 1, 'token')}"
    line += f": {_shares(account, before=False)}."
    if account.num_decode_steps and decode_s:
        line += f" A step took {duration(decode_s / account.num_decode_steps)} on average"
        if account.beside_prefill_s >= _SMALL_S:
            line += f"; {duration(account.beside_prefill_s)} went by in steps that computed prompts, too"
        line += "."
    yield line


def _guesses(account: Account) -> Iterable[str]:
    if account.num_drafted_tokens:
        were = "was" if account.num_drafted_tokens == 1 else "were"
        drafted = counted(account.num_drafted_tokens, "token")
        yield f"{drafted} {were} guessed, {account.num_accepted_tokens:,} of them right."


def _shares(account: Account, *, before: bool) -> str:
    spent: dict[str, float] = {}
    for part in account.parts:
        if part.phase != "delivery":
            seconds = part.before_s if before else part.after_s
            spent[part.phase] = spent.get(part.phase, 0.0) + seconds
    largest = sorted(spent.items(), key=lambda item: -item[1])
    told = [f"{duration(seconds)} {phase}" for phase, seconds in largest if seconds >= _SMALL_S]
    return ", ".join(told) or "next to nothing"


def _losses(account: Account) -> Iterable[str]:
    if not account.num_losses:
        return
    times = {1: "once", 2: "twice"}.get(account.num_losses, f"{account.num_losses:,} times")
    lost_s = sum(loss.lost_s for loss in account.losses)
    which = "" if account.num_losses == len(account.losses) else f" (the first {len(account.losses)} of them)"
    yield (
        f"It was preempted {times}, which cost it {duration(lost_s)} and "
        f"{counted(account.num_recomputed_tokens, 'token')} computed again{which}."
    )
    for loss in account.losses[:_MAX_LOSSES_TOLD]:
        yield _loss(loss)
    waited = _gates(account, "preempted")
    if account.spent_s("preempted") >= _SMALL_S:
        yield f"While it was preempted it waited {waited}."


def _loss(loss: Loss) -> str:
    line = f"At {duration(loss.at_s)} it gave way"
    if loss.beneficiary is not None:
        line += f" to {loss.beneficiary.name} (level {loss.beneficiary.level}), {_NEEDS[loss.reason]}"
    else:
        line += f" {_CAUSES.get(loss.reason, '')}".rstrip()
    line += f": it lost {counted(loss.num_lost_tokens, 'token')} and {counted(loss.num_blocks, 'block')}"
    line += f", waited {duration(loss.waited_s)}"
    if loss.resumed:
        again = counted(loss.num_recomputed_tokens, "token")
        if loss.num_recomputed_tokens:
            line += f" and computed {again} again in {duration(loss.recompute_s)}"
        elif loss.num_lost_tokens:
            line += " and found them all in the prefix cache"
        return f"{line}; {duration(loss.lost_s)} lost."
    return f"{line}, and did not come back."


def _pauses(account: Account) -> Iterable[str]:
    for part in account.parts:
        if part.phase == "parked" and part.total_s >= _SMALL_S:
            yield f"It was parked for {duration(part.total_s)} because {because(part)}."
    if account.spent_s("returning") >= _SMALL_S:
        waited = _gates(account, "returning")
        yield f"Then it waited {duration(account.spent_s('returning'))} for a seat: {waited}."


def _end(account: Account) -> Iterable[str]:
    if not account.end:
        return
    if account.delivered is None:
        return
    if account.delivered:
        yield f"Its last event was written {duration(account.spent_s('delivery'))} after its end."
    else:
        yield "Its last event was not written to anybody."


def rows(account: Account) -> list[tuple[str, str, float, float]]:
    """Parts for a table: phase, why, seconds, share of the whole."""
    total_s = account.total_s or 1.0
    found = []
    for part in account.parts:
        why = because(part) if part.phase in (*WAITING, "parked") else PHASES[part.phase]
        found.append((part.phase, why, part.total_s, part.total_s / total_s))
    return found

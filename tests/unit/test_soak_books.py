"""The books of a soak see what a server may do wrong, and nothing else."""

import pytest

from bench.books import Books
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types

ACCEPTED = {"accepted": gen.AcceptedEvent()}


def delta(at: int, *token_ids: int) -> dict[str, object]:
    return {"delta": gen.DeltaEvent(token_ids=token_ids, first_token_index=at)}


def finished(num_tokens: int) -> dict[str, object]:
    usage = types.Usage(output_tokens=num_tokens)
    return {"finished": gen.FinishedEvent(reason=types.FINISH_REASON_LENGTH, usage=usage)}


def told(
    books: Books, request_id: str, *events: dict[str, object], question: str = "q", first: int = 1
) -> None:
    if first == 1:
        books.sent(request_id, question, 0.0)
    for sequence, event in enumerate(events, first):
        books.got(gen.SessionResponse(request_id=request_id, sequence=sequence, **event), 1.0)


def test_a_request_that_is_served_once_is_right() -> None:
    books = Books()
    told(books, "a", ACCEPTED, delta(0, 1), delta(1, 2, 3), finished(3))
    told(books, "b", ACCEPTED, delta(0, 1, 2, 3, 4), finished(4))
    books.close()
    assert books.problems == []
    assert (books.num_accepted, books.num_accepted_ended, books.ends) == (2, 2, {"LENGTH": 2})


def test_a_refusal_needs_no_acceptance() -> None:
    books = Books()
    told(books, "a", {"failed": gen.FailedEvent()})
    books.close()
    assert (books.problems, books.num_accepted) == ([], 0)


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ((ACCEPTED, delta(0, 1)), "accepted, and never ended"),
        ((), "never answered, and never ended"),
        ((ACCEPTED, delta(0, 1), finished(1), finished(1)), "finished after its end"),
        ((ACCEPTED, ACCEPTED, finished(0)), "accepted twice"),
        ((ACCEPTED, delta(1, 1), finished(1)), "goes on at token 1, 0 have come"),
        ((ACCEPTED, delta(0, 1), delta(0, 1), finished(2)), "goes on at token 0, 1 have come"),
        ((ACCEPTED, delta(0, 1), finished(2)), "usage says 2 output tokens, 1 came"),
        ((finished(0),), "without having been accepted"),
    ],
)
def test_what_is_lost_repeated_or_wrong_is_a_problem(
    events: tuple[dict[str, object], ...], problem: str
) -> None:
    books = Books()
    told(books, "a", *events)
    books.close()
    assert any(problem in found for found in books.problems), books.problems


def test_a_sequence_that_is_not_the_next_is_a_problem() -> None:
    books = Books()
    told(books, "a", ACCEPTED)
    told(books, "a", finished(0), first=3)
    assert books.problems == ["a: finished has sequence 3 after 1"]


def test_the_same_question_answered_otherwise_is_a_problem() -> None:
    books = Books()
    told(books, "a", ACCEPTED, delta(0, 1, 2, 3), finished(3))
    told(books, "b", ACCEPTED, delta(0, 1, 9), finished(2))
    assert books.problems == ["b: 'q' was answered otherwise before, from token 1 on"]

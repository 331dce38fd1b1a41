"""What a PromQL expression looks at, by a parser that is not ours."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser as promql

#: Names that Grafana puts in before Prometheus sees them.
INTERVALS = {"$__rate_interval": "5m", "$__range": "1h"}


@dataclass(frozen=True)
class Seen:
    """One selector, or one list of labels.

    Attributes:
        metric: name as written; empty for a list of labels.
        matchers: label and value of each condition.
        labels: what an aggregation or a matching names.
        below: metrics that the list of labels is about.
    """

    metric: str = ""
    matchers: tuple[tuple[str, str], ...] = ()
    labels: tuple[str, ...] = ()
    below: frozenset[str] = frozenset()


def look(expression: str) -> list[Seen]:
    """Every selector and every list of labels.

    Raises:
        ValueError: it is no PromQL.
    """
    for name, value in INTERVALS.items():
        expression = expression.replace(name, value)
    return list(_walk(promql.parse(expression)))


def _walk(node: Any) -> Iterator[Seen]:
    match node:
        case promql.VectorSelector():
            pairs = tuple((matcher.name, matcher.value) for matcher in node.matchers.matchers)
            yield Seen(metric=node.name, matchers=pairs)
        case promql.MatrixSelector():
            yield from _walk(node.vector_selector)
        case promql.AggregateExpr():
            yield from _with_labels(node.modifier.labels if node.modifier else (), node.expr)
        case promql.BinaryExpr():
            matching = node.modifier.matching if node.modifier else None
            yield from _with_labels(matching.labels if matching else (), node.lhs)
            yield from _with_labels(matching.labels if matching else (), node.rhs)
        case promql.Call():
            for argument in node.args:
                yield from _walk(argument)
        case promql.ParenExpr() | promql.SubqueryExpr() | promql.UnaryExpr():
            yield from _walk(node.expr)
        case promql.NumberLiteral() | promql.StringLiteral():
            pass
        case _:
            raise AssertionError(f"unknown part of PromQL: {type(node).__name__}")


def _with_labels(labels: Any, node: Any) -> Iterator[Seen]:
    below = list(_walk(node))
    yield from below
    if labels:
        yield Seen(labels=tuple(labels), below=frozenset(seen.metric for seen in below if seen.metric))

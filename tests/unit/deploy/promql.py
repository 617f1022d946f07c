"""Checks names, labels and kinds in PromQL against the declared metrics. promtool checks syntax."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from common.telemetry.metrics.__main__ import sections

if TYPE_CHECKING:
    from common.telemetry.metrics.__main__ import Declared

# Suffixes of a histogram's metrics.
_PARTS = ("_bucket", "_sum", "_count")
_OWN = frozenset({"instance", "job"})  # labels that Prometheus adds
_FOREIGN = {"up": frozenset[str]()}  # metrics of Prometheus itself
_WORDS = frozenset(
    {
        *("and", "bool", "by", "group_left", "group_right", "ignoring", "offset", "on", "or"),
        *("unless", "without"),
        *("avg", "count", "max", "min", "sum"),
    }
)
_OF_COUNTERS = ("increase", "rate")
_OF_GAUGES = ("changes", "deriv")
_KNOWN = {metric.name: metric for metrics in sections().values() for metric in metrics}
# Counters that queries may use without a rate: totals since the job began.
_AMOUNTS = frozenset({"doll_spent_usd_total"})


def faults(expression: str) -> list[str]:
    """Return the contradictions between a query and the declarations of its metrics."""
    found = list[str]()
    bare = re.sub(r'"(\\.|[^"\\])*"', '""', expression)
    bare = re.sub(r"\[[^\]]*\]", "", bare)  # durations
    for name, matchers in _selectors(bare):
        try:
            labels = _labels(name)
        except KeyError:
            found.append(f"there is no metric {name}")
            continue
        matched = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        found += [f"{name} has no label {label}" for label in sorted(matched - labels)]
        found += _misused(name, bare)
    for kept, argument in _aggregations(bare):
        for name, _ in _selectors(argument):
            if _is_known(name):
                unknown = set(kept) - _labels(name)
                found += [f"{name} has no label {label} to go by" for label in sorted(unknown)]
    return found


def grouped(expression: str) -> set[str]:
    """Return the labels that the outermost aggregation keeps. All parts must keep the same."""
    kept, _ = _aggregations(expression)[0]
    return set(kept)


def names(expression: str) -> set[str]:
    """Return the metrics in a query."""
    return {name for name, _ in _selectors(re.sub(r"\[[^\]]*\]", "", expression))}


def _is_known(name: str) -> bool:
    return name in _FOREIGN or _base(name) is not None


def _base(name: str) -> Declared | None:
    if name in _KNOWN:
        return _KNOWN[name]
    for part in _PARTS:
        metric = _KNOWN.get(name.removesuffix(part))
        if metric is not None and metric.kind == "histogram" and name.endswith(part):
            return metric
    return None


def _labels(name: str) -> set[str]:
    if name in _FOREIGN:
        return {*_FOREIGN[name], *_OWN}
    metric = _base(name)
    if metric is None or (metric.kind == "histogram" and metric.name == name):
        raise KeyError(name)
    return {*metric.labels, *_OWN, *(("le",) if name.endswith("_bucket") else ())}


def _misused(name: str, expression: str) -> list[str]:
    """Return the wrong uses of a metric: a counter without its rate, or the rate of a gauge."""
    metric = _base(name)
    if metric is None:
        return []
    wanted = _OF_GAUGES if metric.kind == "gauge" else _OF_COUNTERS
    others = _OF_COUNTERS if metric.kind == "gauge" else _OF_GAUGES
    asked = re.findall(rf"(\w*)\(\s*{name}\b", expression)
    wrong = [function for function in asked if function in others]
    if metric.kind != "gauge" and name not in _AMOUNTS:
        wrong += [function or "nothing" for function in asked if function not in wanted]
        if len(asked) < len(re.findall(rf"\b{name}\b", expression)):
            wrong.append("nothing")
    return [f"{function} of {name}, which is a {metric.kind}" for function in wrong]


def _selectors(expression: str) -> list[tuple[str, str]]:
    """Return the names of a query's metrics, each with the text in its braces."""
    without = re.sub(
        r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", r"\1", expression
    )
    outside = re.sub(r"\{[^}]*\}", lambda match: "{" + " " * (len(match[0]) - 2) + "}", without)
    found = list[tuple[str, str]]()
    for match in re.finditer(r"[A-Za-z_:][\w:]*", outside):
        rest = outside[match.end() :].lstrip()
        before = outside[: match.start()]
        if match[0] in _WORDS or rest.startswith("(") or re.search(r"[\w.]$", before):
            continue
        braces = re.match(r"\s*\{([^}]*)\}", without[match.end() :])
        found.append((match[0], braces[1] if braces else ""))
    return found


def _aggregations(expression: str) -> list[tuple[list[str], str]]:
    """Return the labels of each `by`, and the expression that it aggregates."""
    found = list[tuple[list[str], str]]()
    for match in re.finditer(r"\bby\s*\(([^)]*)\)\s*\(", expression):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(expression[end], 0)
            end += 1
        found.append((re.findall(r"\w+", match[1]), expression[match.end() : end - 1]))
    return found

"""Offered versions in the job's history: their names, and earlier reports on them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as with_

from common.core.history import History
from common.core.messages import (
    GENESIS,
    AuditRecord,
    Batch,
    Drifted,
    Evaluated,
    Lead,
    ModelId,
    UpdateApplied,
    WorkerId,
)
from common.core.spans import Span
from services.evaluator.offered_versions import OfferedVersions


def batch(offset: int) -> Batch:
    return Batch(offset, WorkerId("w1"), (Span("clicks", 0, 10 * offset, 10 * offset + 10),), 10)


def update(epoch: int, version: int) -> UpdateApplied:
    return UpdateApplied(epoch, version, (batch(version),), 10, 0.5)


def evaluated(model: ModelId, *, test: bool = True, streams: bool = False) -> Evaluated:
    loss = {"loss": 0.5}
    return Evaluated(
        model, 1.0, 7 * test, loss if test else {}, {"clicks": loss} if streams else {}
    )


def fed(*records: AuditRecord | None, every: int = 2) -> OfferedVersions:
    versions = OfferedVersions(every)
    for offset, record in enumerate(records):
        versions.feed(offset, record)
    return versions


def test_version_counts_once_its_update_is_read() -> None:
    versions = fed(Lead(-1, GENESIS, "c1", 0), update(0, 1))
    assert versions.name(ModelId(0, 1)) == ModelId(0, 1)
    assert versions.name(ModelId(0, 2)) is None
    assert versions.may_come(ModelId(0, 2))
    versions.feed(2, update(0, 2))
    assert versions.name(ModelId(0, 2)) == ModelId(0, 2)


def test_base_version_of_a_leader_keeps_its_original_name() -> None:
    # offset   0      1    2    3               4
    # record   Lead   J=1  J=2  Lead, base J=2  J=3
    # epoch    0      0    0    3               3
    made = ModelId(0, 2)
    versions = fed(Lead(-1, GENESIS, "c1", 0), update(0, 1), update(0, 2))
    assert versions.name(ModelId(0, 0)) == GENESIS
    assert versions.name(ModelId(3, 2)) is None
    # Its Lead is not read yet.
    assert versions.may_come(ModelId(3, 2))
    versions.feed(3, Lead(0, made, "c2", 3))
    assert versions.name(ModelId(3, 2)) == versions.name(made) == made
    versions.feed(4, update(3, 3))
    assert versions.name(ModelId(3, 3)) == ModelId(3, 3)


def test_reverted_version_never_counts_again() -> None:
    versions = fed(
        Lead(-1, GENESIS, "c1", 0), update(0, 1), update(0, 2), Lead(0, ModelId(0, 1), "c2", 3)
    )
    assert versions.name(ModelId(0, 2)) is None
    assert not versions.may_come(ModelId(0, 2))
    # Its leader does not know yet that it was deposed.
    assert not versions.may_come(ModelId(0, 3))
    assert versions.may_come(ModelId(3, 2))


def test_version_older_than_the_base_of_the_leader_never_comes() -> None:
    versions = fed(Lead(-1, GENESIS, "c1", 0), update(0, 1), Lead(0, ModelId(0, 1), "c2", 2))
    assert not versions.may_come(ModelId(2, 0))


def of(stream: str, offset: int) -> Batch:
    return Batch(offset, WorkerId("w1"), (Span(stream, 0, offset, offset + 1),), 1)


def made(version: int, *batches: Batch, epoch: int = 0) -> UpdateApplied:
    return UpdateApplied(epoch, version, batches, len(batches), 0.5)


def test_first_batches_after_an_offered_version_are_known_by_stream() -> None:
    # offered   0          3                 6
    # updates   1  2  3    4    5     6      7
    # stream    a  b  ab   a    ab    bc     a
    a, b, both, c = of("a", 1), of("b", 2), of("a", 3), of("c", 4)
    late = of("b", 5)
    updates = (
        *(made(1, a), made(2, b), made(3, both, b)),
        *(made(4, a), made(5, both, late), made(6, b, c), made(7, a)),
    )
    versions = fed(Lead(-1, GENESIS, "c1", 0), *updates, every=3)
    assert versions.after(GENESIS) == {"a": (a,), "b": (b,)}
    assert versions.after(ModelId(0, 3)) == {"a": (a,), "b": (late,), "c": (c,)}
    assert versions.after(ModelId(0, 6)) == {"a": (a,)}
    # Version 4 would be offered only at the job's end.
    assert versions.after(ModelId(0, 4)) == {}
    assert versions.after(ModelId(0, 9)) == {}


def test_offered_versions_are_counted_in_updates_of_the_configured_group_size() -> None:
    # A version is offered at every second update of the configured K, so 3 and 7 are.
    # update      1    2    3    4    5    6    7
    # progress    1    1.5  2    2.5  3    3.5  4
    a, b = of("a", 1), of("b", 2)
    halves = [with_(made(v, b if v == 4 else a), equivalent=(v + 1) / 2) for v in range(2, 8)]
    versions = fed(Lead(-1, GENESIS, "c1", 0), made(1, a), *halves)
    assert versions.after(GENESIS) == {"a": (a,)}
    assert versions.after(ModelId(0, 3)) == {"a": (a,), "b": (b,)}
    assert versions.after(ModelId(0, 2)) == {}
    assert versions.offered_between(0, 7) == 1
    versions.feed(8, Lead(0, ModelId(0, 2), "c2", 8))
    versions.feed(9, with_(made(3, b, epoch=8), equivalent=2.5))
    assert versions.offered_between(0, 9) == 1
    assert versions.after(ModelId(8, 3)) == {}
    versions.feed(10, with_(made(4, b, epoch=8), equivalent=3.5))
    assert versions.after(ModelId(8, 3)) == {"b": (b,)}


def test_batches_of_a_reverted_update_do_not_count_as_learned() -> None:
    a, b = of("a", 1), of("b", 2)
    versions = fed(Lead(-1, GENESIS, "c1", 0), made(1, a), made(2, a), made(3, a), made(4, b))
    assert versions.after(ModelId(0, 2)) == {"a": (a,), "b": (b,)}
    versions.feed(5, Lead(0, ModelId(0, 3), "c2", 5))
    assert versions.after(ModelId(0, 2)) == {"a": (a,)}
    versions.feed(6, Lead(5, ModelId(0, 2), "c3", 6))
    assert versions.after(ModelId(0, 2)) == {}
    versions.feed(7, made(3, b, epoch=6))
    assert versions.after(ModelId(0, 2)) == {"b": (b,)}


def test_earlier_evaluations_are_known_unless_their_version_was_reverted() -> None:
    versions = fed(
        Lead(-1, GENESIS, "c1", 0),
        *(update(0, version) for version in range(1, 5)),
        evaluated(ModelId(0, 2), streams=True),
        evaluated(ModelId(0, 4)),
        # No leader made this version.
        evaluated(ModelId(9, 3), streams=True),
        Drifted(ModelId(0, 4), 1.0, "clicks", 0.1, 0.3),
    )
    assert (versions.tested, versions.predicted) == (4, 2)
    versions.feed(9, Lead(0, ModelId(0, 3), "c2", 9))
    assert (versions.tested, versions.predicted) == (2, 2)
    versions.feed(10, Lead(9, ModelId(0, 1), "c3", 10))
    assert (versions.tested, versions.predicted) == (-1, -1)


def test_unparsable_record_changes_no_version() -> None:
    versions = fed(Lead(-1, GENESIS, "c1", 0), None, update(0, 1))
    assert versions.name(ModelId(0, 1)) == ModelId(0, 1)


RECORDS = st.lists(
    st.one_of(
        st.builds(Lead, st.integers(-1, 12), st.builds(ModelId, st.just(0), st.integers(0, 5)),
                  st.just("c")),
        st.builds(update, st.integers(0, 12), st.integers(1, 6)),
        st.builds(evaluated, st.builds(ModelId, st.integers(0, 12), st.integers(0, 6))),
        st.none(),
    ),
    max_size=40,
)  # fmt: skip


@given(RECORDS)
def test_counted_versions_match_the_history(records: list[AuditRecord | None]) -> None:
    history, versions = History(), fed(*records)
    for offset, record in enumerate(records):
        history.feed(offset, record)
    for epoch in range(-1, len(records)):
        for version in range(8):
            model = ModelId(epoch, version)
            name = versions.name(model)
            assert name in (None, GENESIS, *history.path)
            assert name is None or name.version == version
            if model in history.path:
                assert name is not None
    assert versions.tested <= history.head.version

"""The list of jobs costs time in proportion to the changed jobs and the shown ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from common.api.jobs import job_summary
from common.jobs.progress import UNREAD, JobProgress, State
from services.admin.live.listing import Listing, LiveSummary
from tests.unit.admin.live.helpers import job

if TYPE_CHECKING:
    from common.api.answers import JobSummary
    from common.jobs.store import JobRecord

JOBS = 1000


class Rig:
    """Many jobs, and the names of jobs whose summaries were requested."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs = {name: job("paused", name) for name in map("j{:04}".format, range(JOBS))}
        self.summaries: dict[str, LiveSummary] = {}
        self.asked = list[str]()
        self.rendered = list[str]()
        self.listing = Listing(lambda: self.jobs, self.summary)

        def counted(record: JobRecord, *summary: Any) -> JobSummary:  # noqa: ANN401 -- as it is
            self.rendered.append(record.spec.name)
            return job_summary(record, *summary)

        monkeypatch.setattr("services.admin.live.listing.job_summary", counted)

    def summary(self, record: JobRecord) -> LiveSummary:
        """Return a job's summary."""
        self.asked.append(record.spec.name)
        default = LiveSummary(State("paused", ""), JobProgress(record).numbers(0.0))
        return self.summaries.get(record.spec.name, default)

    def page(self, sort: str = "id", count: int = 20) -> list[bytes]:
        """Return the first rows."""
        self.listing.renew()
        return [self.listing.rows[name].json for name in self.listing.order(sort)[:count]]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    made = Rig(monkeypatch)
    made.page()
    made.asked.clear()
    made.rendered.clear()
    return made


def test_second_page_of_an_unchanged_list_queries_and_renders_nothing(rig: Rig) -> None:
    assert rig.page() == rig.page()
    assert rig.asked == rig.rendered == []


def test_only_a_job_with_a_new_summary_is_queried_and_rendered(rig: Rig) -> None:
    before = rig.page()
    rig.summaries["j0003"] = LiveSummary(State("held", "look"))
    rig.listing.change("j0003")

    after = rig.page()

    assert rig.asked == rig.rendered == ["j0003"]
    assert after[3] != before[3]
    assert [*after[:3], *after[4:]] == [*before[:3], *before[4:]]
    assert rig.listing.states() == {"held": 1, "paused": JOBS - 1}
    assert rig.page("state", 1) == [after[3]]


def test_only_jobs_with_a_new_record_are_queried(rig: Rig) -> None:
    rig.jobs = {**rig.jobs, "j0005": job("running", "j0005"), "z": job("paused", "z")}
    del rig.jobs["j0007"]
    rig.summaries["j0005"] = LiveSummary(UNREAD)

    rig.page()

    assert sorted(rig.asked) == ["j0005", "z"]
    assert "j0007" not in rig.listing.order("id")
    assert rig.listing.unread() == [rig.jobs["j0005"]]
    assert rig.listing.states() == {"paused": JOBS - 1, "running": 1}


def test_list_is_sorted_again_only_after_a_change(rig: Rig) -> None:
    order = rig.listing.order("-lag")
    rig.listing.renew()
    assert rig.listing.order("-lag") is order

    rig.listing.change("j0000")
    rig.listing.renew()
    assert rig.listing.order("-lag") is not order

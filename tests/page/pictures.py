"""Takes the pictures of docs/reference/page.md in a real Chromium, from a made-up job.

    python -m tests.page.pictures             # writes docs/pictures/page-{laptop,phone}.png
    python -m tests.page.pictures --dark --out out    # with a dark color scheme

Exit status: 0 success, 2 no Chromium.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from msgspec.structs import replace
from playwright.sync_api import FloatRect, ViewportSize

from load.harness.browser import browser, chromium
from tests.page.service import PageService, served
from tests.page.world import World, make_record, make_world

_OUT = Path(__file__).parents[2] / "docs/pictures"
_SIZES = {
    "laptop": (ViewportSize(width=1280, height=800), 1.0),
    "phone": (ViewportSize(width=390, height=844), 2.0),
}
# Cards that each picture shows completely.
_CARDS = {"laptop": 7, "phone": 3}
_MARGIN = 8  # pixels below the last card


def some_jobs(now_s: float) -> dict[str, World]:
    """A job on rented machines and two others, so that the list has several."""
    by_hand = make_world("clicks", now_s, seed=3, rented=False)
    by_hand.record = make_record(
        "clicks", now_s, "paused", "until the schema of clicks-eu is repaired", rented=False
    )
    done = make_world("spam-2026-10", now_s, seed=5)
    done.record = replace(
        done.record, wanted="stopped", reason="reached stop.loss: 0.144 is below 0.145"
    )
    return {"clicks": by_hand, "fraud": make_world("fraud", now_s), "spam-2026-10": done}


def main() -> int:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=_OUT, help="default: docs/pictures")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--whole", action="store_true", help="the page to its end, and the list")
    given = parser.parse_args()
    executable = chromium()
    if executable is None:
        sys.stderr.write("Chromium was not found on PATH\n")
        return 2
    service = PageService(some_jobs(time.time()))
    with served(service) as address, browser(executable) as opened, service.training("fraud"):
        for name, (size, scale) in _SIZES.items():
            context = opened.new_context(
                viewport=size,
                device_scale_factor=scale,
                is_mobile=name == "phone",
                has_touch=name == "phone",
                color_scheme="dark" if given.dark else "light",
                timezone_id="Europe/Berlin",
                http_credentials={"username": "me", "password": service.key},
            )
            page = context.new_page()
            page.on("console", lambda message: print(message.text, file=sys.stderr))  # noqa: T201 -- of a command
            page.goto(f"{address}/#/jobs/fraud")
            page.locator(".chart.lanes").scroll_into_view_if_needed()
            for chart in page.locator(".chart").all():
                chart.scroll_into_view_if_needed()
                chart.locator(".main-svg").first.wait_for()
            page.evaluate("scrollTo(0, 0)")
            page.wait_for_timeout(12_000)  # rates cover the last 10 s
            last = page.locator(".card").nth(_CARDS[name] - 1)
            bottom: float = last.evaluate("card => card.getBoundingClientRect().bottom")
            clip = FloatRect(x=0, y=0, width=size["width"], height=bottom + _MARGIN)
            page.screenshot(
                path=given.out / f"page-{name}.png",
                full_page=True,
                clip=None if given.whole else clip,
            )
            if given.whole:
                page.goto(f"{address}/#/")
                page.locator(".jobs a").nth(2).wait_for()
                page.screenshot(path=given.out / f"page-{name}-list.png", full_page=True)
            context.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

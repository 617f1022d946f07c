"""Users sign in at a real issuer: in a browser's steps, and after its keys have changed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx2
import pytest
from joserfc.jwk import RSAKey

from common.api.keys import KeyStore
from common.config.settings import read_settings
from common.embedded.process import free_port
from common.jobs.servers import Outside
from common.kafka.memory import MemoryLog
from common.redis.memory import MemoryBoard, MemoryRedis
from common.storage.memory import MemoryBlobs
from services.admin.app import create_app
from services.admin.oidc import AGAIN_S
from tests.integration.token_issuer import token_issuer
from tests.page.service import served_app

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.nightly

CLAIMS = {"sub": "ada", "aud": ["doll"], "groups": ["ml-platform"]}


def test_user_signs_in_with_a_code_and_is_refused_once_its_key_is_withdrawn(
    tmp_path: Path,
) -> None:
    port, passed_s, log = free_port(), 0.0, MemoryLog()
    settings = read_settings(
        {
            "DOLL_OIDC_ISSUER": f"http://127.0.0.1:{port}/default",
            "DOLL_OIDC_AUDIENCE": "doll",
            "DOLL_OIDC_CLIENT_ID": "page",
            "DOLL_OIDC_OPERATORS": "ml-platform",
        }
    )
    app = create_app(
        Outside(settings, lambda: log, lambda job: MemoryBoard(MemoryRedis(), job), MemoryBlobs)
    )
    KeyStore(log).read()
    issuer = app.state.service.issuer
    real = issuer._clock  # noqa: SLF001 -- the time between questions passes at once
    issuer._clock = lambda: real() + passed_s  # noqa: SLF001 -- as above
    with served_app(app) as address, httpx2.Client(base_url=address) as browser:
        with token_issuer(tmp_path, CLAIMS, 3600, port=port):
            browser.get("/sign-in", follow_redirects=True)
            me = browser.get("/v1/me")
            assert me.json() == {"name": "oidc:ada", "role": "operator"}, me.text
            token = browser.cookies["doll-token"]
        bearer = {"Authorization": f"Bearer {token}"}
        # The issuer is unavailable.
        assert httpx2.get(f"{address}/v1/me", headers=bearer).status_code == 200

        key = json.dumps(RSAKey.generate_key(2048, {"kid": "other"}).as_dict(private=True))
        with token_issuer(tmp_path, CLAIMS, 3600, port=port, key=key):
            passed_s = AGAIN_S
            browser.cookies.clear()
            browser.get("/sign-in", follow_redirects=True)
            assert browser.get("/v1/me").status_code == 200
            assert httpx2.get(f"{address}/v1/me", headers=bearer).status_code == 401

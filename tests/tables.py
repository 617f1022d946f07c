"""The tables of docs/examples in their original form: CSV with a header."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_DATA = _ROOT.parent / "shared" / "data"
needs_tables = pytest.mark.skipif(not _DATA.is_dir(), reason="needs ../shared/data")

_FILES = {
    "prices": "streams/elec2.csv.gz",
    "connections": "streams/nsl-kdd-train-20percent.csv.gz",
    "clicks": "ctr/criteo-kaggle-train-head-1400.csv.gz",
}
# Headers of files without a header line.
_HEADERS = {
    "connections": (
        "duration,protocol_type,service,flag,src_bytes,dst_bytes,land,wrong_fragment,urgent,hot,"
        "num_failed_logins,logged_in,num_compromised,root_shell,su_attempted,num_root,"
        "num_file_creations,num_shells,num_access_files,num_outbound_cmds,is_host_login,"
        "is_guest_login,count,srv_count,serror_rate,srv_serror_rate,rerror_rate,srv_rerror_rate,"
        "same_srv_rate,diff_srv_rate,srv_diff_host_rate,dst_host_count,dst_host_srv_count,"
        "dst_host_same_srv_rate,dst_host_diff_srv_rate,dst_host_same_src_port_rate,"
        "dst_host_srv_diff_host_rate,dst_host_serror_rate,dst_host_srv_serror_rate,"
        "dst_host_rerror_rate,dst_host_srv_rerror_rate,attack,difficulty\n"
    )
}


def job_file(example: str) -> Path:
    """Return the job that reads a table."""
    return _ROOT / "docs" / "examples" / f"{example}.yaml"


def table(example: str, rows: int) -> bytes:
    """Return the first rows of a table, with its header."""
    lines = gzip.decompress((_DATA / _FILES[example]).read_bytes()).splitlines(keepends=True)
    if example in _HEADERS:
        lines.insert(0, _HEADERS[example].encode())
    return b"".join(lines[: rows + 1])

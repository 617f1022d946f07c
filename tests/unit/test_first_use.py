"""Several threads may use a type or a library for the first time at once, in a fresh process.

msgspec completes its description of a Struct at the type's first use. If two threads do that at
once, the process dies of SIGSEGV. A decoder that is built when a module is imported prevents this.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Modules whose Structs are never decoded: they stay in their process, or are only encoded.
INSIDE = {
    *("common.core.order_queue", "common.core.batching", "common.core.commands"),
    *("common.core.events", "common.core.members.replica", "common.core.grouping"),
    *("common.core.ledger", "common.core.batch_assignment", "common.core.worker_reading"),
    "common.core.worker_messages",
    *("common.spot.provisioning.commands", "common.spot.provisioning.events"),
    *("common.spot.experiments.protocol", "services.serve.protocol"),
}
# Modules whose types are converted to by one thread at a time, see `common.data.decoders`.
OPTIONS = {"common.learning.optimizers", "common.learning.task_options"}
THREADS, SWITCH_S = 6, 1e-6
PRELUDE = f"""
import gc, importlib, json, sys, threading
import msgspec

def in_threads(act):
    before = sys.getswitchinterval()
    barrier = threading.Barrier({THREADS})
    def begin():
        barrier.wait()
        act()
    threads = [threading.Thread(target=begin) for _ in range({THREADS})]
    sys.setswitchinterval({SWITCH_S})
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(before)

def kinds_of(kind):
    for each in kind.__subclasses__():
        yield each
        yield from kinds_of(each)
"""
STRUCTS = """
for module in sys.argv[1:]:
    importlib.import_module(module)
ours = {each for each in kinds_of(msgspec.Struct) if each.__module__ in sys.argv}
def described(kind):
    return any(type(each).__name__ == "StructInfo" for each in gc.get_referents(kind))
read = sorted(filter(described, ours), key=str)
def decode():
    for kind in read:
        for data in ([], {}):
            for use in (
                lambda: msgspec.json.decode(msgspec.json.encode(data), type=kind),
                lambda: msgspec.msgpack.decode(msgspec.msgpack.encode(data), type=kind),
                lambda: msgspec.convert(data, kind),
            ):
                try:
                    use()
                except msgspec.ValidationError:
                    pass
in_threads(decode)
# Base classes are never decoded.
others = {kind for kind in ours - set(read) if not kind.__subclasses__()}
print(json.dumps([len(read), sorted({kind.__module__ for kind in others})]))
"""
OPTIONS_OF_TASKS = """
from common.learning.task_options import TASK_NAMES, options_of
from common.errors import UserError
refused = []
def read():
    for name in TASK_NAMES:
        try:
            options_of(name, {"unknown": 1})
        except UserError as error:
            refused.append(str(error))
in_threads(read)
print(json.dumps([len(refused), len(set(refused))]))
"""
ANSWERS = """
import common.api.answers, pydantic
for module in sys.argv[1:]:
    importlib.import_module(module)
models = [each for each in kinds_of(pydantic.BaseModel) if each.__module__ in sys.argv]
print(json.dumps([len(models), [str(each) for each in models if not each.__pydantic_complete__]]))
"""


def in_fresh_process(program: str, *arguments: str) -> Any:  # noqa: ANN401 -- JSON
    """Run a program that prints JSON."""
    answer = subprocess.run(  # noqa: S603 -- our own interpreter and program
        [sys.executable, "-X", "faulthandler", "-c", PRELUDE + program, *arguments],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": "common/public"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def modules_that_name(library: str) -> list[str]:
    paths = [
        path
        for tree in ("common", "services")
        for path in sorted((ROOT / tree).rglob("*.py"))
        if f"import {library}" in (text := path.read_text()) or f"from {library}" in text
    ]
    names = [path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in paths]
    return [name.removeprefix("common.public.") for name in names]


def test_structs_can_be_decoded_first_by_several_threads() -> None:
    count, others = in_fresh_process(STRUCTS, *modules_that_name("msgspec"))

    assert count > 90
    assert set(others) - INSIDE - OPTIONS == set(), "build a decoder of these as a constant"


def test_task_options_can_be_read_first_by_several_threads() -> None:
    refusals, different = in_fresh_process(OPTIONS_OF_TASKS)

    assert refusals == THREADS * different
    assert different > 1


def test_pydantic_models_are_complete_after_import() -> None:
    count, incomplete = in_fresh_process(ANSWERS, *modules_that_name("pydantic"))

    assert count > 80
    assert incomplete == []

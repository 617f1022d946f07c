"""Kernels that the processor cannot run are left out, and tests that compute are found."""

from __future__ import annotations

from tests.kernels import computing_tests, kernels


def test_kernels_of_a_processor_without_avx512_exclude_skylake() -> None:
    values = {kernel.value for kernel in kernels(frozenset({"X86_V3"}))}

    assert {"Prescott", "Haswell", "default", "COMPATIBLE", "SSE41", "X86_V3"} == values


def test_computing_tests_are_found_by_their_imports() -> None:
    found = computing_tests()

    assert "tests/unit/learning/test_slices.py" in found
    assert "tests/unit/cli/test_plan.py" in found
    assert "tests/unit/deploy/test_compose.py" not in found

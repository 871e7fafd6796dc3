"""Findings name the machine that they hold for."""

from __future__ import annotations

from pathlib import Path

from workers.runtime import machine


def test_a_machine_keeps_its_name_and_without_one_nothing_is_the_same(monkeypatch, tmp_path):
    assert (
        machine.this_machine() == machine.this_machine() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    )
    monkeypatch.setattr(machine, "BOOT_ID", tmp_path / "missing")
    assert machine.this_machine() != machine.this_machine()

"""The generated index: one name imports one module, and the index is what the registry says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from panoply import index, registry

PROGRAM = """
import sys, json, io, contextlib
def methods(): return sorted(m for m in sys.modules if m.startswith("panoply.methods.") and m.count(".") == 3)
def slots(): return {m for m in sys.modules if m.startswith("panoply.slots.") and m.count(".") == 3}
from panoply import registry
registry.works(), registry.names("method"), registry.is_recipe("rlhf"), list(registry.parts("loss"))
from panoply.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(["list", "--tag", "critic"])
seen = [methods()]
registry.find("method", "grpo")
seen.append(methods())
worlds = [m for m in sys.modules if m.startswith("panoply.worlds.")]
before = slots()
registry.find_part("select", "varied_groups")
seen += [worlds, sorted(slots() - before)]
print(json.dumps(seen))
"""


def test_one_name_imports_one_module() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    none, one, worlds, part = json.loads(found.stdout)
    assert none == [], "panoply list and the names alone import no method"
    assert one == ["panoply.methods.base.grpo"]
    assert set(worlds) <= {f"panoply.worlds.{base}" for base in ("world", "measures", "presets")}
    assert part == ["panoply.slots.select.filters"]


def test_the_index_is_what_is_registered() -> None:
    """Mend it with `python -m panoply.index`."""
    assert index.FILE.read_text(encoding="utf-8") == index.made()


def test_what_the_index_does_not_know_is_found_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = json.loads(index.FILE.read_text())
    del known["works"]["grpo@1"], known["parts"]["select.varied_groups"]
    known["works"]["gone@1"] = {"kind": "method", "module": "panoply.methods.base.gone", "summary": "gone"}
    (tmp_path / "index.json").write_text(json.dumps(known))
    monkeypatch.setattr(index, "FILE", tmp_path / "index.json")
    index.works.cache_clear(), index.parts.cache_clear()
    try:
        assert registry.find("method", "grpo").id == "grpo@1"
        assert registry.find_part("select", "varied_groups").info.id == "select.varied_groups"
        with pytest.raises(registry.PanoplyError, match="Unknown method 'gone'"):
            registry.find("method", "gone")
    finally:
        index.works.cache_clear(), index.parts.cache_clear()

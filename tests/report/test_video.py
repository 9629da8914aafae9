"""Films of control policies, and what the commands around a control run print."""

from __future__ import annotations

from pathlib import Path

import pytest

import panoply as pp
from panoply.cli import main
from panoply.errors import PanoplyError
from panoply.progress import Progress
from panoply.report.text import trained
from panoply.run import Run

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("control") / "run"
    settings = {"sample.prompts": 1, "sample.group": 2, "update.minibatches": 1, "run.held_out": 2}
    pp.train("grpo", "cartpole", run=folder, steps=1, threads=1, settings=settings, progress=Progress())
    return folder


def test_a_film_has_a_picture_for_every_step(run: Path, tmp_path: Path) -> None:
    earned = pp.video(run, tmp_path / "a.gif", seed=3)
    with Image.open(tmp_path / "a.gif") as film:
        assert film.n_frames <= earned + 1  # equal pictures next to each other are kept as one
        assert film.n_frames > earned / 2
        assert film.size[0] > 50
    assert pp.video(run, tmp_path / "b.gif", seed=3) == earned
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gif", "b.gif"]


def test_what_cannot_be_filmed(run: Path, tmp_path: Path) -> None:
    with pytest.raises(PanoplyError, match=r"a .gif or an .mp4, not 'a.png'"):
        pp.video(run, tmp_path / "a.png")
    with pytest.raises(PanoplyError, match="there is nothing to film"):
        pp.video(run, tmp_path / "a.gif", world="chain")
    assert list(tmp_path.iterdir()) == []


def test_commands(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            main(list(words))
        code = end.value.code
        assert isinstance(code, int)
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    code, text = said("sample", str(run), "--video", str(tmp_path / "a.gif"))
    assert code == 0
    assert "an episode that earned" in text
    code, text = said("sample", str(run), "hello")
    assert (code, "acts and does not write" in text) == (2, True)
    code, text = said("sample", str(run))
    assert (code, "Name a prompt" in text) == (2, True)
    code, text = said("eval", str(run), "--problems", "3")
    assert code == 0
    assert "starts" in text
    assert "solved" in text
    code, text = said("eval", str(run), "--k", "4")
    assert (code, "gives returns: leave k out" in text) == (2, True)
    page = trained(pp.Trained.of(Run.open(run)))
    assert "held-out return" in page
    assert "the mark of 475 is not reached" in page

"""Whole runs on a cluster: claims and comparisons, whose runs are independent of one another.

A run is ordered as its plan with the files it names, and with its folder where it was begun before; it is made in a
temporary folder where the worker is, and the folder comes back as bytes. What it holds is what a local process makes.
"""

from __future__ import annotations

import io
import os
import queue
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panoply.errors import PanoplyError, first_line
from panoply.planning import Options
from panoply.scale.cluster import Cluster, Future, Handle, WorkerDied, WorkerFailed, open_cluster
from panoply.scale.travel import Unpacked, files_in

if TYPE_CHECKING:
    from panoply.evidence.pool import Order

News = queue.Queue[tuple[Any, dict[str, Any] | None]]
RUNNER = "runner"


class Runner:
    """The worker: makes one run after another, in folders of its own."""

    def run(self, parcel: Mapping[str, Any], measures: tuple[str, ...]) -> tuple[str | None, bytes]:
        """Why a run failed, and all folders that were made for it."""
        from panoply.evidence.worker import News, carry_out, carry_out_recipe

        root = Path(tempfile.mkdtemp(prefix="panoply-run-"))
        try:
            unfolded(parcel["folder"], root)
            opened = Unpacked(parcel["files"])
            plan, problem = opened.here(parcel["plan"]), None
            carry = carry_out_recipe if "recipe" in plan else carry_out
            with open(os.devnull, "w") as nobody:
                try:
                    carry(plan, root / parcel["name"], measures, News(nobody))
                except PanoplyError as error:
                    problem = str(error)
            for config in root.glob("*/run.json"):
                config.write_text(opened.back(config.read_text()))
            return problem, folded(root.iterdir())
        finally:
            shutil.rmtree(root, ignore_errors=True)


def staff(where: str, workers: int | None, most: int) -> Staff:
    """As many as there is work for, at most one for each core of the cluster."""
    cluster = open_cluster(Options(cluster=where, samplers=1))
    try:
        return Staff(cluster, max(1, min(workers or cluster.cores(), most)))
    except BaseException:
        cluster.close()
        raise


class Staff:
    """Workers of a cluster in place of local processes (`evidence/pool.py`)."""

    def __init__(self, cluster: Cluster, number: int):
        self.cluster, self.number = cluster, number
        self.handles = cluster.place(RUNNER, number, Runner)

    def worker(self, news: News) -> Member:
        """The next of them; one in the place of one that died."""
        handle = self.handles.pop(0) if self.handles else self.cluster.place(RUNNER, 1, Runner)[0]
        return Member(handle, news)

    def close(self) -> None:
        self.cluster.close()


class Member:
    """One of them, as the pool knows its workers: takes an order, and tells of its end."""

    order: Order | None = None

    def __init__(self, handle: Handle, news: News):
        self.handle, self.news = handle, news
        self._died = ""

    def take(self, order: Order) -> None:
        self.order = order
        plan = order.plan.to_json()
        begun = [order.folder] if order.folder.is_dir() else []
        parcel = {"plan": plan, "files": files_in(plan), "folder": folded(begun), "name": order.folder.name}
        asked = self.handle.call("run", parcel, tuple(order.measures))
        threading.Thread(target=self._listen, args=(asked, order.folder.parent), daemon=True).start()

    def _listen(self, asked: Future, root: Path) -> None:
        try:
            problem, made = asked.result()
            unfolded(made, root)
        except WorkerDied as error:
            self._died = str(error)
            self.news.put((self, None))
        except (PanoplyError, WorkerFailed, OSError) as error:
            self.news.put((self, {"ended": "failed", "why": f"{first_line(error)}."}))
        else:
            self.news.put((self, {"ended": "failed" if problem else "finished", "why": problem}))

    def last_words(self) -> str:
        return self._died

    def stop(self) -> None:
        self.handle.kill()


def folded(folders: Iterable[Path]) -> bytes:
    """Folders, with all that is in them, as bytes; locks stay where they are."""
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as archive:
        for folder in sorted(folders):
            if folder.is_dir():
                archive.add(
                    folder, folder.name, filter=lambda entry: None if entry.name.endswith("/lock") else entry
                )
    return found.getvalue()


def unfolded(data: bytes, root: Path) -> None:
    """Lay folders down, each in one move: whoever looks sees the old one or the new one."""
    with tempfile.TemporaryDirectory(dir=root, prefix=".arriving-") as place:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(place, filter="data")
        for folder in Path(place).iterdir():
            if (root / folder.name).exists():
                shutil.rmtree(root / folder.name)
            folder.rename(root / folder.name)

"""A policy at work, as a moving picture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from panoply.errors import PanoplyError, needs_extra
from panoply.policies.control import ControlPolicy
from panoply.seeds import numpy_rng
from panoply.worlds.control.world import Array, ControlWorld

MOST = 2000
"""Pictures of one episode."""


def film(
    world: ControlWorld, policy: ControlPolicy, seed: int = 0, temperature: float = 0.0
) -> tuple[list[Array], float]:
    """Pictures of one held-out episode, or game, and what it earned (the first seat)."""
    envs, seats = world.shown(), world.seats
    start, forward = world.task("test", seed), policy.model.numpy()
    rng, earned, over = numpy_rng("film", seed), 0.0, np.zeros(seats, dtype=bool)
    try:
        envs.reset(np.arange(seats), np.full(seats, start.seed))
        pictures = [envs.render(0)]
        while not over.all() and len(pictures) < MOST:
            noise = policy.head.noise(rng, seats)
            out = forward(envs.observations, np.full(seats, len(pictures) - 1))
            drawn = policy.head.act(out, noise, envs.masks, temperature)
            step = envs.step(drawn.acted)
            earned += 0.0 if over[0] else float(step.reward[0])
            over = over | step.terminated | step.truncated
            pictures.append(envs.render(0))
    finally:
        envs.close()
    if any(picture is None for picture in pictures):
        raise PanoplyError(f"{world.name} cannot be shown.")
    return [picture for picture in pictures if picture is not None], earned


def save(pictures: list[Array], file: str | Path, rate: int = 30) -> Path:
    """A GIF, or an MP4 where imageio and ffmpeg are there. The file is replaced as a whole."""
    path = Path(file)
    hidden = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if path.suffix == ".gif":
            _gif(pictures, hidden, rate)
        elif path.suffix == ".mp4":
            _mp4(pictures, hidden, rate)
        else:
            raise PanoplyError(f"A video is a .gif or an .mp4, not '{path.name}'.")
        os.replace(hidden, path)
    finally:
        hidden.unlink(missing_ok=True)
    return path


def _gif(pictures: list[Array], path: Path, rate: int) -> None:
    try:
        from PIL import Image
    except ImportError as error:
        raise needs_extra("Pillow", "video", "A GIF") from error
    first, *rest = (Image.fromarray(np.asarray(p, np.uint8)).quantize(64) for p in pictures)
    first.save(path, save_all=True, append_images=rest, duration=round(1000 / rate), loop=0)


def _mp4(pictures: list[Array], path: Path, rate: int) -> None:
    try:
        import imageio.v2 as imageio

        writer: Any = imageio.get_writer(path, fps=rate)
    except (ImportError, ValueError) as error:
        raise needs_extra("imageio with ffmpeg", "video", "An MP4") from error
    with writer:
        for picture in pictures:
            writer.append_data(np.asarray(picture, np.uint8))

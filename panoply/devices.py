"""Names of devices: which there are, and whether one is here."""

from __future__ import annotations

import re

from panoply.errors import PanoplyError


def check_name(name: str) -> None:
    """Refuse what is no device's name, on whatever machine."""
    if re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", name) is None:
        spelt = re.fullmatch(r"(?:gpu|cuda|nvidia)[ :-]?(\d{1,4})?", name.lower())
        near = f" Did you mean 'cuda{f':{spelt[1]}' if spelt[1] else ''}'?" if spelt else ""
        raise PanoplyError(f"Unknown device '{name[:40]}'.{near or ' There is: auto, cpu, cuda, cuda:1, ….'}")


def missing(name: str) -> str:
    """Why a device cannot be used here, in a sentence; empty where it can."""
    import torch

    if name in ("auto", "cpu"):
        return ""
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError):
        cards = torch.cuda.device_count()
        seen = f"it sees {cards} of them, cuda:0 to cuda:{cards - 1}" if cards else "it sees none"
        return f"There is no device '{name}' that torch {torch.__version__} can use: {seen}."
    return ""


def check(name: str) -> None:
    """Refuse a device that is not here."""
    check_name(name)
    if why := missing(name):
        raise PanoplyError(why)

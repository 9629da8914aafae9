"""Folders of models that only transformers can run: opened by it, and refused where it would make something up."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from panoply.errors import PanoplyError, first_line, needs_extra, plain
from panoply.files import read_json
from panoply.policies.config_schema import check_sizes
from panoply.policies.weights import check_finite, listed, weight_files
from panoply.seeds import ALONE

if TYPE_CHECKING:
    from panoply.policies.foreign import Foreign


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No bars and no advice while a model is opened or written; what is wrong is said by us.

    One thread at a time: transformers switches for a whole process how weights begin and tables are tied while it opens
    a model, and two threads that do so together leave it off.
    """
    from transformers.utils import logging as theirs

    logging: Any = theirs
    with ALONE, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, for its own developers
        level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity(logging.CRITICAL)
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()


def load_foreign(folder: Path, dtype: torch.dtype, device: torch.device | str, context: int = 0) -> Foreign:
    """A causal language model, run by transformers."""
    from panoply.policies.foreign import Foreign

    return Foreign(opened_by_transformers(folder, "AutoModelForCausalLM", dtype, device), context)


def opened_by_transformers(folder: Path, kind: str, dtype: torch.dtype, device: torch.device | str) -> Any:
    """Remote code is never run and not asked about, pickled weights and adapters are never opened.

    transformers makes up what a folder lacks; here that is refused.
    """
    try:
        import transformers
    except ImportError:
        raise needs_extra("transformers", "transformers", f"The architecture in {plain(folder)}") from None
    weight_files(folder)
    check_sizes(read_json(folder / "config.json", dict, finite=False), plain(folder / "config.json"))
    models: Any = getattr(transformers, kind)
    local: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        with quiet_transformers():
            config = transformers.AutoConfig.from_pretrained(folder, **local)
            vars(config).pop("auto_map", None)  # code beside the model, which is neither run nor written
            # Capped scores exist only in the eager kernel. Else it is torch's, where an architecture has that.
            kernel = "eager" if getattr(config, "attn_logit_softcapping", None) else None
            inner, report = models.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                attn_implementation=kernel,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the report
                **local,
            )
    except Exception as problem:
        raise PanoplyError(f"transformers cannot open {plain(folder)}: {first_line(problem)}.") from problem
    _check_report(report, folder)
    check_finite(inner.named_parameters(), plain(folder))
    return inner.to(device)


def _check_report(report: Mapping[str, Any], folder: Path) -> None:
    """What transformers found missing, unknown or of another shape, and would have gone on without."""
    if missing := report.get("missing_keys"):
        raise PanoplyError(f"The weights in {plain(folder)} lack {listed(missing)}.")
    if surplus := report.get("unexpected_keys"):
        raise PanoplyError(
            f"The weights in {plain(folder)} hold {listed(surplus)}, unknown to its config.json."
        )
    if wrong := report.get("mismatched_keys"):
        shapes = (f"{key[0]} is {tuple(key[1])}, not {tuple(key[2])}" for key in wrong)
        raise PanoplyError(f"The weights in {plain(folder)} do not fit its config.json: {listed(shapes)}.")
    if errors := report.get("error_msgs"):
        raise PanoplyError(f"transformers cannot open {plain(folder)}: {plain(next(iter(errors)))}.")

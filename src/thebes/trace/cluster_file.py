"""Cluster specifications: a short form stands for itself, and anything else is a file whose content decides."""

from __future__ import annotations

from pathlib import Path

from thebes.model.cluster import TIRESIAS_COLUMNS, Cluster, from_short_form, from_tiresias_csv, from_toml
from thebes.model.errors import UserError, nearest

_FORMS = "give nodes x GPUs (8x8), racks x nodes x GPUs (4x8x8), a TOML file or a Tiresias CSV"
MAX_BYTES = 16 << 20


def read_cluster(spec: str | Path) -> Cluster:
    """The cluster that the user means."""
    short = from_short_form(str(spec).strip())
    if short is not None:
        return short
    path = Path(spec)
    text = _text(path).removeprefix("\ufeff")
    if not text.strip():
        raise UserError(f"{path}: the file is empty", hint=_FORMS)
    first_line = text.lstrip().splitlines()[0]
    if any(column in first_line for column in TIRESIAS_COLUMNS):
        return from_tiresias_csv(text, str(spec))
    return from_toml(text, str(spec))


def _text(path: Path) -> str:
    try:
        if path.is_dir():
            raise UserError(f"{path} is a folder, not a cluster file", hint=_FORMS)
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path}: too large for a cluster file", hint=_FORMS)
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = nearest(path.name, beside) if path.suffix else _FORMS
        raise UserError(
            f"cluster '{path}': no such file, and not a short form either",
            hint=hint if hint.startswith("did") else _FORMS,
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file", hint=_FORMS) from None
    except (OSError, ValueError) as error:  # ValueError comes from a path that no file can have
        raise UserError(f"cluster '{path}': {getattr(error, 'strerror', error)}", hint=_FORMS) from None

"""The small JSON files that lie beside a model's weights."""

from __future__ import annotations

import json
import os
import pathlib

from rods_jax.types import Json


def read_object(path: str | os.PathLike) -> dict[str, Json]:
    """The JSON object in a file. Raises ValueError, one line with the path, where there is no
    such file or no such object in it."""
    try:
        value = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): check the path") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8: fetch it again") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error.msg} in line {error.lineno}): "
                         "fetch it again") from None
    except RecursionError:
        raise ValueError(f"{path} nests too deep: fetch it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object: fetch it again")
    return value


def read_optional(path: str | os.PathLike) -> dict[str, Json]:
    """The same, and {} where there is no such file."""
    return read_object(path) if os.path.exists(path) else {}

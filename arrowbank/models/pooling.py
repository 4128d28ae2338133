"""From T hidden states to one vector. Batches hold texts of one length, so there is no padding to mask: the mean over T is the
masked mean. Sums are taken in float32 whatever the model computes in.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from arrowbank.bank.manifest import json_in
from arrowbank.bank.names import UnsafeName, checked_place
from arrowbank.errors import InputError
from arrowbank.models.model_folder import read_json

if TYPE_CHECKING:
    import torch

_MODES = {"mean": "mean", "cls": "cls", "max": "max", "lasttoken": "last"}
_LEGACY = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


def pool(hidden_NTD: torch.Tensor, how: str) -> torch.Tensor:
    """(N, T, D) hidden states → (N, D) float32 by "mean", "last", "cls" (the first token) or "max"; by "none" (N, T, D) float32."""
    import torch

    if how == "mean":
        return hidden_NTD.mean(dim=1, dtype=torch.float32)
    if how == "last":
        return hidden_NTD[:, -1].float()
    if how == "cls":
        return hidden_NTD[:, 0].float()
    if how == "max":
        return hidden_NTD.amax(dim=1).float()
    if how == "none":
        return hidden_NTD.float()
    raise InputError(f"pooling is {how!r}; expected mean, last, cls, max or none")


def _modules(folder: Path) -> dict[str, str]:
    """The kinds of modules that the folder's sentence-transformers files list, and the folder of each; none where there is no list."""
    try:
        modules = json_in(folder / "modules.json", strict=False)
        return {str(step["type"]).rsplit(".", 1)[-1]: str(step["path"]) for step in modules}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / 'modules.json'} cannot be read ({error!r}); name a --pooling to ignore it") from error


def require_no_projection(folder: Path) -> None:
    """InputError where the folder's vectors per token are not the hidden states, but what a module makes of them (as in ColBERT models)."""
    other = sorted(set(_modules(folder)) - {"Transformer", "Pooling", "Normalize"})
    if other:
        raise InputError(
            f"{folder / 'modules.json'}: lists {', '.join(other)}, which --pooling none does not apply, so the vectors would not be this "
            "model's. Give a folder without modules.json to store the hidden states."
        )


def folder_pooling(folder: Path) -> str:
    """The pooling that "auto" means for this model: what its sentence-transformers files say, else "mean".

    Raises InputError where those files ask for what is not done here (another pooling, several at once, a dense layer).
    """
    steps = _modules(folder)
    other = sorted(set(steps) - {"Transformer", "Pooling", "Normalize"})
    if other:
        raise InputError(
            f"{folder / 'modules.json'} lists {', '.join(other)}, which arrowbank does not apply, so its vectors would not be "
            "this model's; name a --pooling to have the pooled hidden states without it"
        )
    if "Pooling" not in steps:
        return "mean"
    path = steps["Pooling"]
    try:
        file = checked_place(folder, f"{path}/config.json" if path else "config.json", folder / "modules.json", nested=True)
    except UnsafeName as error:
        raise InputError(str(error)) from None
    modes = _pooling_modes(read_json(file))
    if len(modes) != 1 or modes[0] not in _MODES:
        raise InputError(f"{file} asks for {' + '.join(modes)}; expected one of {', '.join(_MODES)}; name a --pooling instead")
    return _MODES[modes[0]]


def _pooling_modes(config: dict[str, Any]) -> list[str]:
    modes = config.get("pooling_mode")
    if modes is None:
        return [mode for key, mode in _LEGACY.items() if config.get(key)] or ["mean"]
    return [modes] if isinstance(modes, str) else [str(mode) for mode in modes]

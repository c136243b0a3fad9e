"""What makers' layouts mean, in numpy and float64, from FORMATS and not from tutel_pack: element × scales, by indexing."""

from __future__ import annotations

import numpy as np
import torch

from tests.quant.oracle import E2M1, E4M3, E8M0


def meaning(layout: str, stored: dict[str, torch.Tensor], base: str) -> np.ndarray:
    """float32 [N, K] of the weight `base`.weight: exact products in float64, rounded once; of nvfp4 the two scales are
    multiplied in float32 first, as ModelOpt does."""
    get = {name.removeprefix(base): t for name, t in stored.items() if name.startswith(base + ".")}
    data = get.get(".weight_packed", get.get(".weight"))
    scale = next(get[s] for s in (".weight_scale", ".weight_scale_inv", ".scale") if s in get)
    raw = data.view(torch.uint8).numpy()
    if layout.startswith(("fp8", "mxfp8")):
        elements = E4M3[raw]
    elif layout.startswith("int4"):
        words = data.numpy().view(np.uint32)
        elements = np.stack([(words >> (4 * i)) & 15 for i in range(8)], axis=-1).reshape(len(raw), -1).astype(np.float64) - 8
    else:
        elements = E2M1[np.stack([raw % 16, raw // 16], axis=-1).reshape(len(raw), -1)]
    spread = _scales(layout, scale, get, elements.shape)
    with np.errstate(over="ignore"):
        return (elements * spread).astype(np.float32)


def _scales(layout: str, scale: torch.Tensor, get: dict, shape: tuple[int, int]) -> np.ndarray:
    """float64 [N, K]."""
    one_byte = scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
    values = E8M0[scale.view(torch.uint8).numpy()] if one_byte else scale.double().numpy() if scale.dtype != torch.float8_e4m3fn else None
    if layout.startswith("nvfp4"):
        e4m3 = E4M3[scale.view(torch.uint8).numpy()].astype(np.float32)
        second = get[".weight_scale_2"].numpy() if ".weight_scale_2" in get else np.float32(1) / get[".weight_global_scale"].numpy()
        values = (e4m3 * np.float32(second.item())).astype(np.float64)
    block = (32, 32) if "block32" in layout else (128, 128) if "block" in layout else (1, 16) if layout.startswith("nvfp4") else (1, 32)
    if "channel" in layout:
        return np.broadcast_to(values.reshape(-1, 1), shape)
    if "tensor" in layout:
        return np.full(shape, values.item())
    return values[(np.arange(shape[0]) // block[0])[:, None], (np.arange(shape[1]) // block[1])[None, :]]

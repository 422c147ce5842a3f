# SPDX-License-Identifier: Apache-2.0
"""In which number format a net computes: float32, or bfloat16 with float32 weights."""

import logging

import torch

from beast.environments import map_nest


def autocast(flags, device):
    """Have the model compute in --precision; its weights stay float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=flags.precision == "bf16")


def to_float32(outputs):
    """Return a nest of tensors with those that are bfloat16 as float32."""
    return map_nest(lambda x: x.float() if x.dtype == torch.bfloat16 else x, outputs)


def has_bf16(device):
    """Return whether the device multiplies in bfloat16 by itself."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    features = torch.cpu.get_capabilities()
    return bool(features.get("avx512_bf16") or features.get("amx_bf16"))


def choose_precision(flags, model_class, devices):
    """Set flags.precision, where it is open, to what is fastest on all devices of the model."""
    fast = all(map(has_bf16, devices))
    if flags.precision is None:
        knows_bf16 = getattr(model_class, "knows_bf16", False)
        flags.precision = "bf16" if fast and knows_bf16 else "fp32"
    elif flags.precision == "bf16" and not fast:
        logging.warning("--precision bf16 is slower than fp32 on this machine, which emulates it")

"""Which decoding steps can be recorded as a CUDA graph: conditions on the policy, the device and the model."""

import torch
from transformers import PreTrainedConfig

from kvbench.cache.arena import steps_alike
from kvbench.cache.interface import name_of
from kvbench.cache.layout import layout_of
from kvbench.models.trial import layer_shapes
from kvbench.policies.policy import Policy


def can_record(policy: Policy) -> bool:
    """Whether a decoding step of this policy needs nothing but the token and leaves nothing but the device changed."""
    return policy.store.replayable and not policy.rates and steps_alike(policy)


def check_graph(policy: Policy, device: torch.device) -> None:
    """ValueError unless decoding steps of this policy on this device can be recorded."""
    if device.type != "cuda":
        raise ValueError(f"engine.cuda_graph=true needs a CUDA device, got device={device.type}")
    if not can_record(policy):
        raise ValueError(
            "engine.cuda_graph=true replays steps of dense stores with a head for each KV head, that attend, then "
            f"evict, and need nothing but the token; {policy.name} has no such steps: use engine.cuda_graph=false"
            f"{' or every=1' if policy.schedule.every > 1 else ''}"
        )


def can_replay(config: PreTrainedConfig, asked: bool) -> bool:
    """Whether steps of a model of this configuration can be replayed. ValueError where not, though it was asked for."""
    text = config.get_text_config(decoder=True)
    layout = layout_of(text)
    others = {
        "layers of latents, expanded in every step": layout.latent,
        "layers that read what others store": bool(layout.owners),
        "layers that differ in their KV heads": asked and len(set(layer_shapes(config).values())) > 1,
    }
    found = [kind for kind, has in others.items() if has]
    if asked and found:
        raise ValueError(
            "engine.cuda_graph=true replays steps of layers that read all they store and nothing else; "
            f"{name_of(text)} has {found[0]}: use engine.cuda_graph=false"
        )
    return not found

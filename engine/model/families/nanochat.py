"""nanochat: norms without weights, one of the embedding too, a rotation the other way round, and a
feed-forward without gate.
"""

from __future__ import annotations

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import activation, attention_biases, decoder_spec, family, head_size
from engine.model.spec import ModelSpec, TensorNames

_NAMES = TensorNames(renamed=((r"\.mlp\.fc1\.", ".mlp.up_proj."), (r"\.mlp\.fc2\.", ".mlp.down_proj.")))


@family("NanoChatForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """All depths."""
    rope = msgspec.structs.replace(config.rope(head_size(config)), backwards=True)
    return decoder_spec(
        config,
        **attention_biases(config),
        ropes=(rope,),
        activation=activation(config, default="relu2"),
        gated=False,
        norm_weights=False,
        embedding_norm=True,
        qk_norm="unit",
        qk_norm_last=True,
        logit_soft_cap=config.completed(final_logit_softcapping=15.0).optional_number(
            "final_logit_softcapping"
        ),
        names=_NAMES,
    )

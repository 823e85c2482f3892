"""Config of a model, read by transformers."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from replicas.errors import ModelLoadError, UnsupportedModel
from replicas.model.checkpoint.text_part import WRAPPERS
from replicas.model.loading.checks import modelopt_config
from replicas.model.pooling.kinds import has_output_layer, is_encoder


def read_config(model: str) -> PretrainedConfig:
    """Read the config of a model, a directory or hub id. Of a model of text and images it is that of the text part.

    Raises:
        ModelLoadError: there is no config, or it cannot be read.
        UnsupportedModel: no decoder of that architecture can be served.
    """
    if Path(model).is_absolute() and not Path(model).is_dir():
        raise ModelLoadError(f"model is {model!r}, and there is no such directory")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise ModelLoadError(f"cannot read the config of model {model!r}: {reason}") from error
    if not hasattr(config, "quantization_config") and (described := modelopt_config(Path(model))) is not None:
        config.quantization_config = described
    decoder_config = _text_part(config)
    _refuse(config, decoder_config)
    _forget_unknown_padding(decoder_config)
    decoder_config.architectures = config.architectures
    if not has_output_layer(decoder_config):
        decoder_config.tie_word_embeddings = True  # The decoder is built with an output layer, which takes no memory.
    return decoder_config


def _text_part(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the text part of one of the `WRAPPERS`; of another model, its own config."""
    if config.model_type not in WRAPPERS:
        return config
    text_config = config.get_text_config(decoder=True)
    decoder_type = WRAPPERS[config.model_type]
    if decoder_type is not None:
        fields = text_config.to_dict()
        rope = fields.pop("rope_parameters", None) or {}
        fields["rope_parameters"] = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
        text_config = CONFIG_MAPPING[decoder_type].from_dict(fields | {"model_type": decoder_type})
    # transformers ties the weights of such a model by the outer config.
    text_config.tie_word_embeddings = config.tie_word_embeddings
    for name in ("eos_token_id", "quantization_config"):
        value = getattr(config, name, None)
        if value is not None:
            setattr(text_config, name, value)
    return text_config


def _forget_unknown_padding(config: PretrainedConfig) -> None:
    """Remove a padding token that the model has no row for: a flat batch has no padding, and torch refuses the id."""
    for part in (config, config.get_text_config(decoder=True)):
        padding, vocab_size = getattr(part, "pad_token_id", None), getattr(part, "vocab_size", None)
        if padding is not None and vocab_size is not None and not 0 <= padding < vocab_size:
            part.pad_token_id = None


def _refuse(config: PretrainedConfig, decoder_config: PretrainedConfig) -> None:
    """Raise UnsupportedModel if no decoder of that architecture can be served."""
    # Imported here, since it takes seconds that the refusal of a broken config need not wait for.
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from replicas.model.attention.probe import refuse_config

    refuse_config(config)
    if not is_encoder(decoder_config) and type(decoder_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(config.model_type, "transformers has no decoder of that type")

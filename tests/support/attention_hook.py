"""Whether a model carries the attention hook. Neither transformers nor torch has a public way to ask."""


def attention_of(model) -> str:
    """Return the name of the attention function that the model runs with."""
    return model.config._attn_implementation


def has_hooks(module) -> bool:
    """Return whether something is called before this module or one inside of it."""
    return any(each._forward_pre_hooks for each in module.modules())

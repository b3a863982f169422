"""Whether a model carries the attention hook. Neither transformers nor torch has a public way to ask."""


def attention_of(model) -> str:
    """Return the name of the attention function that the model runs with."""
    return model.config._attn_implementation


def count_hooks(module) -> int:
    """Return how many functions are called before this module and those inside of it."""
    return sum(len(each._forward_pre_hooks) for each in module.modules())

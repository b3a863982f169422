"""The chat templates of released models, as data: what each writes around a message, and its control tokens.

The Jinja programs are written anew from the formats; default system messages are shortened, tools are left out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A chat template and the names of its control tokens; ``rstrip``: they hold the white space behind them."""

    jinja: str
    controls: tuple[str, ...]
    rstrip: bool = False


def written(text):
    return f"{{{{ {text!r} }}}}"


def of_turns(opening, *, begin="", default_system="", trimmed=False, **turns):
    """Return a template that writes each message between the two texts of its role."""
    content = "m.content | trim" if trimmed else "m.content"
    body = "".join(
        f"{{% if m.role == {role!r} %}}{written(before)}{{{{ {content} }}}}{written(after)}{{% endif %}}"
        for role, (before, after) in turns.items()
    )
    if default_system:
        begin = f"{written(begin)}{{% if messages[0].role != 'system' %}}{written(default_system)}{{% endif %}}"
    else:
        begin = written(begin)
    return (
        f"{begin}{{% for m in messages %}}{body}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{written(opening)}{{% endif %}}"
    )


def system_in_user(user, assistant, *, begin="", system=("", "\n\n"), last=False):
    """Return a template that writes the system message into the first turn of the user, or the last."""
    index = "messages | length - 1" if last else "1"
    return (
        f"{written(begin)}{{% for m in messages %}}{{% if m.role == 'user' %}}{written(user[0])}"
        f"{{% if messages[0].role == 'system' and loop.index0 == {index} %}}"
        f"{written(system[0])}{{{{ messages[0].content }}}}{written(system[1])}{{% endif %}}"
        f"{{{{ m.content }}}}{written(user[1])}"
        f"{{% elif m.role == 'assistant' %}}{written(assistant[0])}{{{{ m.content }}}}{written(assistant[1])}"
        "{% endif %}{% endfor %}"
    )


def chatml(end="<|im_end|>\n", *, separator="\n", begin="", default_system=""):
    turns = {role: (f"<|im_start|>{role}{separator}", end) for role in ("system", "user", "assistant")}
    return of_turns(f"<|im_start|>assistant{separator}", begin=begin, default_system=default_system, **turns)


CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
QWEN = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
SMOLLM2 = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
SMOLLM3 = (
    "<|im_start|>system\n## Metadata\n\nKnowledge Cutoff Date: June 2025\nReasoning Mode: /no_think\n\n"
    "## Custom Instructions\n\nYou are a helpful AI assistant named SmolLM.\n\n<|im_end|>\n"
)
INST = ("[INST]", "[/INST]")
COHERE = "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>"
GRANITE = "<|start_of_role|>{}<|end_of_role|>"


def alike(before, after, assistant="assistant"):
    """Return the turns of a template that writes every role in the same way."""
    return {
        role: (before.format(name), after)
        for role, name in (("system", "system"), ("user", "user"), ("assistant", assistant))
    }


FAMILIES = {
    "qwen2.5": Family(chatml(default_system=QWEN), CHATML),
    "qwen3": Family(chatml(), (*CHATML, "<think>", "</think>")),
    "smollm2": Family(chatml(default_system=SMOLLM2), CHATML),
    "smollm3": Family(
        of_turns(
            "<|im_start|>assistant\n<think>\n\n</think>\n",
            default_system=SMOLLM3,
            **alike("<|im_start|>{}\n", "<|im_end|>\n"),
        ),
        (*CHATML, "<think>", "</think>"),
    ),
    "yi": Family(chatml(), CHATML),
    "internlm2": Family(chatml(begin="<s>"), ("<s>", "</s>", *CHATML)),
    "phi-4": Family(chatml("<|im_end|>", separator="<|im_sep|>"), (*CHATML, "<|im_sep|>")),
    "llama-2": Family(
        system_in_user(("<s>[INST] ", " [/INST]"), (" ", " </s>"), system=("<<SYS>>\n", "\n<</SYS>>\n\n")),
        ("<s>", "</s>"),
    ),
    "llama-3": Family(
        of_turns(
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            begin="<|begin_of_text|>",
            trimmed=True,
            **alike("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"),
        ),
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "llama-4": Family(
        of_turns(
            "<|header_start|>assistant<|header_end|>\n\n",
            begin="<|begin_of_text|>",
            trimmed=True,
            **alike("<|header_start|>{}<|header_end|>\n\n", "<|eot|>"),
        ),
        ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>"),
    ),
    "mistral-v1": Family(
        system_in_user(("[INST] ", " [/INST]"), ("", "</s>"), begin="<s>"),
        ("<s>", "</s>"),
    ),
    "mistral-v3": Family(
        system_in_user(("[INST] ", "[/INST]"), (" ", "</s>"), begin="<s>", last=True),
        ("<s>", "</s>", *INST),
    ),
    "mistral-tekken": Family(
        system_in_user(("[INST]", "[/INST]"), ("", "</s>"), begin="<s>", last=True),
        ("<s>", "</s>", *INST),
    ),
    "gemma": Family(
        system_in_user(
            ("<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n"),
            ("", "<end_of_turn>\n"),
            begin="<bos>",
        ),
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    ),
    "phi-3": Family(
        of_turns("<|assistant|>\n", **alike("<|{}|>\n", "<|end|>\n")),
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        rstrip=True,
    ),
    "zephyr": Family(of_turns("<|assistant|>\n", **alike("<|{}|>\n", "</s>\n")), ("<s>", "</s>")),
    "stablelm-2": Family(of_turns("<|assistant|>\n", **alike("<|{}|>\n", "<|endoftext|>\n")), ("<|endoftext|>",)),
    "vicuna": Family(
        of_turns("ASSISTANT:", begin="<s>", system=("", " "), user=("USER: ", " "), assistant=("ASSISTANT: ", "</s>")),
        ("<s>", "</s>"),
    ),
    "granite-3": Family(
        of_turns(GRANITE.format("assistant"), **alike(GRANITE, "<|end_of_text|>\n")),
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    ),
    "olmo-2": Family(
        of_turns(
            "<|assistant|>\n",
            begin="<|endoftext|>",
            system=("<|system|>\n", "\n"),
            user=("<|user|>\n", "\n"),
            assistant=("<|assistant|>\n", "<|endoftext|>\n"),
        ),
        ("<|endoftext|>",),
    ),
    "command-r": Family(
        of_turns(
            COHERE.format("CHATBOT"),
            begin="<BOS_TOKEN>",
            trimmed=True,
            system=(COHERE.format("SYSTEM"), "<|END_OF_TURN_TOKEN|>"),
            user=(COHERE.format("USER"), "<|END_OF_TURN_TOKEN|>"),
            assistant=(COHERE.format("CHATBOT"), "<|END_OF_TURN_TOKEN|>"),
        ),
        (
            "<BOS_TOKEN>",
            "<|START_OF_TURN_TOKEN|>",
            "<|END_OF_TURN_TOKEN|>",
            "<|SYSTEM_TOKEN|>",
            "<|USER_TOKEN|>",
            "<|CHATBOT_TOKEN|>",
        ),
    ),
    "glm-4": Family(
        of_turns("<|assistant|>", begin="[gMASK]<sop>", **alike("<|{}|>\n", "")),
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
    ),
    "deepseek-v3": Family(
        of_turns(
            "<\uff5cAssistant\uff5c>",
            begin="<\uff5cbegin▁of▁sentence\uff5c>",
            system=("", ""),
            user=("<\uff5cUser\uff5c>", ""),
            assistant=("<\uff5cAssistant\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"),
        ),
        (
            "<\uff5cbegin▁of▁sentence\uff5c>",
            "<\uff5cend▁of▁sentence\uff5c>",
            "<\uff5cUser\uff5c>",
            "<\uff5cAssistant\uff5c>",
        ),
    ),
    "deepseek-llm": Family(
        of_turns(
            "Assistant:",
            begin="<\uff5cbegin▁of▁sentence\uff5c>",
            system=("", "\n\n"),
            user=("User: ", "\n\n"),
            assistant=("Assistant: ", "<\uff5cend▁of▁sentence\uff5c>"),
        ),
        ("<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"),
    ),
    "falcon": Family(
        of_turns("Assistant:", system=("", "\n\n"), user=("User: ", "\n\n"), assistant=("Assistant: ", "\n\n")),
        ("<|endoftext|>",),
    ),
    "falcon-3": Family(
        of_turns("<|assistant|>\n", **alike("<|{}|>\n", "\n")), ("<|system|>", "<|user|>", "<|assistant|>")
    ),
    "openchat": Family(
        of_turns(
            "GPT4 Correct Assistant:",
            begin="<s>",
            system=("", "<|end_of_turn|>"),
            user=("GPT4 Correct User: ", "<|end_of_turn|>"),
            assistant=("GPT4 Correct Assistant: ", "<|end_of_turn|>"),
        ),
        ("<s>", "<|end_of_turn|>"),
    ),
    "alpaca": Family(
        of_turns(
            "### Response:\n",
            begin="<s>",
            system=("", "\n\n"),
            user=("### Instruction:\n", "\n\n"),
            assistant=("### Response:\n", "</s>"),
        ),
        ("<s>", "</s>"),
    ),
}
"""By model family."""

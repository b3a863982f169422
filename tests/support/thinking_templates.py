"""What chat templates of reasoning models do with thoughts, switches and ends of contents, without their tools."""

from __future__ import annotations

_LAST_USER = (
    "{% set ns = namespace(last=-1, think=true) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_SWITCHES = (
    "{% set ns = namespace(think=true) %}{% for m in messages %}{% if m.role != 'assistant' %}"
    "{% if '/no_think' in m.content %}{% set ns.think = false %}{% elif '/think' in m.content %}"
    "{% set ns.think = true %}{% endif %}{% endif %}{% endfor %}"
)
_SPLIT = (
    "{% set c, r = m.content, '' %}{% if '</think>' in c %}"
    "{% set r = c.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
)
_UNSWITCHED = "{{ m.content.replace('/no_think', '').replace('/think', '').strip() }}"
_PLAIN = "{{ m.content }}"


def _template(user: str, assistant: str, opening: str, system: str = _PLAIN, before: str = "") -> str:
    """Return a template from what it writes for each role, before all messages, and to open the answer."""
    return (
        f"{before}{{% for m in messages %}}{{% if m.role == 'system' %}}{system}{{% elif m.role == 'user' %}}{user}"
        f"{{% else %}}{assistant}{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{opening}{{% endif %}}"
    )


def _im(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def _chatml(assistant: str, opening: str = "", user: str = _PLAIN, system: str = _PLAIN, before: str = "") -> str:
    return _template(
        _im("user", user),
        _im("assistant", assistant),
        f"<|im_start|>assistant\n{opening}",
        _im("system", system),
        before,
    )


_AFTER_LAST = "{% if loop.index0 > ns.last and r %}<think>\n{{ r.strip() }}\n</think>\n\n{% endif %}"
_CHANNELS = (
    "{% set parts = namespace(text='') %}{% for p in m.content.split('<channel|>') %}"
    "{% set parts.text = parts.text + p.split('<|channel>')[0] %}{% endfor %}{{ parts.text | trim }}"
)

THINKING_TEMPLATES = {
    "qwq": _chatml("{{ m.content.split('</think>')[-1].lstrip('\\n') }}", "<think>\n"),
    "qwen3": _chatml(_SPLIT + _AFTER_LAST + "{{ c }}", before=_LAST_USER),
    "qwen3.5": _chatml(
        _SPLIT + _AFTER_LAST + "{{ c.strip() }}", "<think>\n", "{{ m.content | trim }}", "{{ m.content | trim }}",
        _LAST_USER,
    ),
    "deepseek-r1": _template(
        "<|User|>{{ m.content }}",
        "<|Assistant|>{% set c = m.content %}{% if '</think>' in c %}{% set c = c.split('</think>')[-1] %}{% endif %}"
        "{{ c }}<|end|>", "<|Assistant|><think>\n",
    ),
    "deepseek-v3.1": _template(
        "<|User|>{{ m.content }}",
        "<|Assistant|></think>{% set c = m.content %}{% if '</think>' in c %}{% set c = c.split('</think>', 1)[1] %}"
        "{% endif %}{{ c }}<|end|>", "<|Assistant|></think>",
    ),
    "smollm3": _chatml(
        "{% if ns.think %}{{ m.content.lstrip('\\n') }}{% else %}<think>\n\n</think>\n{{ m.content.lstrip('\\n') }}"
        "{% endif %}", "{% if not ns.think %}<think>\n\n</think>\n{% endif %}", system=_UNSWITCHED,
        before="{% set ns = namespace(think=true) %}{% if messages[0].role == 'system' and '/no_think' in "
        "messages[0].content %}{% set ns.think = false %}{% endif %}<|im_start|>system\nReasoning Mode: "
        "{{ '/think' if ns.think else '/no_think' }}<|im_end|>\n",
    ),
    "nemotron-nano-2": _template(
        "<S11>User\n" + _UNSWITCHED + "\n",
        "{% set c = m.content %}{% if '</think>' in c %}{% set c = c.split('</think>')[1].strip() %}{% endif %}"
        "<S11>Assistant\n{{ c.strip() }}\n<S12>\n\n",
        "<S11>Assistant\n{% if ns.think %}<think>\n\n{% else %}<think></think>{% endif %}",
        "<S10>System\n" + _UNSWITCHED + "\n\n", _SWITCHES,
    ),
    "nemotron-super": _template(
        "<|user|>\n\n{{ m.content }}<|eot|>",
        "<|assistant|>\n\n{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip() }}{% else %}"
        "{{ m.content }}{% endif %}<|eot|>",
        "<|assistant|>\n\n{% if '/no_think' in messages[0].content %}<think>\n\n</think>\n\n{% endif %}",
        "<|system|>\n\n{{ m.content.replace('/no_think', '') | trim }}\n\n<|eot|>",
    ),
    "glm-4.6": _template(
        "<|user|>\n{{ m.content }}{{ '/nothink' if not ns.think and not m.content.endswith('/nothink') }}",
        "<|assistant|>" + _SPLIT + "{% if loop.index0 > ns.last and r %}\n<think>{{ r.strip() }}</think>{% else %}"
        "\n<think></think>{% endif %}{% if c.strip() %}\n{{ c.strip() }}{% endif %}", "<|assistant|>",
        "<|system|>\n{{ m.content }}", "[gMASK]<sop>" + _LAST_USER,
    ),
    "gemma-4": _template(
        "<|turn>user\n{{ m.content | trim }}<turn|>\n", f"<|turn>model\n{_CHANNELS}<turn|>\n",
        "<|turn>model\n<|channel>thought\n<channel|>", "<|turn>system\n{{ m.content | trim }}<turn|>\n",
    ),
    "lfm2.5": _chatml(
        "{% set c = m.content %}{% if loop.index0 <= ns.last and '</think>' in c %}"
        "{% set c = c.split('</think>')[-1] | trim %}{% endif %}{{ c }}", before=_LAST_USER,
    ),
    "exaone-4": _template(
        "[|user|]\n{{ m.content }}\n",
        "[|assistant|]\n" + _SPLIT + "{% if loop.index0 > ns.last %}<think>\n{{ r }}\n</think>\n\n{% else %}<think>"
        "\n\n</think>\n\n{% endif %}{{ c }}[|endofturn|]\n", "[|assistant|]\n<think>\n",
        "[|system|]\n{{ m.content.strip() }}[|endofturn|]\n", _LAST_USER,
    ),
    "hunyuan": _template(
        "{% set c = m.content %}{% if loop.last and not c.startswith('/no_think') %}{% set c = '/think' + c %}"
        "{% endif %}<|user|>{{ c }}",
        "{% set c = m.content %}{% if '<answer>' in c and '</answer>' in c %}"
        "{% set c = (c.split('<answer>') | last).split('</answer>')[0].strip() %}{% endif %}<|bot|>{{ c }}<|eos|>",
        "<|bot|>",
    ),
    "kimi-k2-thinking": _template(
        "<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|><think></think>{{ m.content }}<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>", "<|im_system|>system<|im_middle|>{{ m.content }}<|im_end|>",
    ),
    "minimax-m2": _template(
        "]~b]user\n{{ m.content }}[e~[\n",
        "]~b]ai\n" + _SPLIT + "{% if r and loop.index0 > ns.last %}<think>\n{{ r }}\n</think>\n\n{% endif %}"
        "{{ c.strip('\\n') }}[e~[\n", "]~b]ai\n<think>\n", "]~!b[]~b]system\n{{ m.content }}[e~[\n", _LAST_USER,
    ),
    "gpt-oss": _template(
        "<|start|>user<|message|>{{ m.content }}<|end|>",
        "{% if '<|channel|>analysis<|message|>' in m.content %}{{ raise_exception('channels') }}{% endif %}"
        "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>", "<|start|>assistant",
        "<|start|>developer<|message|># Instructions\n\n{{ m.content }}\n\n<|end|>",
        "<|start|>system<|message|>Reasoning: medium<|end|>",
    ),
    "apriel-1.6": _template(
        "<|begin_user|>\n{{ m.content }}",
        "<|begin_assistant|>\n{% set c = m.content %}{% if '[BEGIN FINAL RESPONSE]' in c %}"
        "{% set c = c.split('[BEGIN FINAL RESPONSE]')[-1] | trim %}{% endif %}{{ c }}\n<|end|>\n",
        "<|begin_assistant|>\nHere are my reasoning steps:\n", "<|begin_system|>\n{{ m.content }}\n",
    ),
    "ernie-4.5": _chatml(
        _SPLIT + "{% if loop.index0 > ns.last %}<think>\n{{ r }}\n</think>\n\n{% endif %}<response>\n{{ c }}\n"
        "</response>\n", "<think>\n", before=_LAST_USER,
    ),
    "magistral": _template(
        "{% if (loop.index0 - (messages[0].role == 'system') | int) % 2 %}{{ raise_exception('order') }}{% endif %}"
        "[INST]{{ m.content }}[/INST]", "{{ m.content }}</s>", "",
        "[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]", "<s>",
    ),
    "command-a": _template(
        "<|TURN|><|USER|>{{ m.content }}<|/TURN|>",
        "<|TURN|><|CHATBOT|>{% if '<|END_THINKING|>' in m.content %}{{ m.content.split('<|END_THINKING|>')[-1] }}"
        "{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}<|/TURN|>", "<|TURN|><|CHATBOT|>",
    ),
    "granite-4": _template(
        "<|role|>user<|/role|>{{ m.content }}<|end|>\n",
        "<|role|>assistant<|/role|>{{ m.content.strip() if m.content is string }}<|end|>\n",
        "<|role|>assistant<|/role|>", "", "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}"
        "{% else %}{% set s = 'You are helpful.' %}{% endif %}<|role|>system<|/role|>{{ s }}<|end|>\n",
    ),
}  # fmt: skip
"""Family -> its chat template."""

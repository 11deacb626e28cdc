"""Chat templates of our own in the styles of ten families, with a tokenizer that has the special tokens of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from transformers import PreTrainedTokenizerFast

from mega_rl.synthetic.arithmetic import CHATML_TEMPLATE, bpe_tokenizer

TEXTS = ["user assistant system tool <tool_call> <tool_response> name arguments", "What is 2 + 2? It is 4."]


@dataclass(frozen=True)
class Family:
    template: str
    specials: tuple[str, ...]
    eos: str
    ends: tuple[str, ...] = ()  # further tokens that end a turn


QWEN25 = """
{%- if tools %}
<|im_start|>system
{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% else %}Be helpful.{% endif %}

# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% elif messages[0]['role'] == 'system' %}<|im_start|>system
{{ messages[0]['content'] }}<|im_end|>
{% else %}<|im_start|>system
Be helpful.<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message['role'] == 'user' or (message['role'] == 'system' and not loop.first) %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% elif message['role'] == 'assistant' %}{{ '<|im_start|>assistant' }}
{%- if message['content'] or not message['tool_calls'] %}{{ '\\n' + message['content'] }}{% endif %}
{%- for call in message['tool_calls'] %}
{{ '\\n<tool_call>' }}
{"name": "{{ call['function']['name'] }}", "arguments": {{ call['function']['arguments'] | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message['role'] == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message['content'] }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>
{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

QWEN3 = """
{%- set ns = namespace(asked=0) %}
{%- for message in messages %}{% if message['role'] == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message['role'] in ('user', 'system') %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% elif message['role'] == 'assistant' %}
{%- set thought = message['reasoning_content'] or '' %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}<|im_start|>assistant
{% if loop.index0 > ns.asked and (loop.last or thought) %}<think>
{{ thought.strip('\\n') }}
</think>

{{ content.lstrip('\\n') }}{% else %}{{ content }}{% endif %}
{%- for call in message['tool_calls'] %}{% if content or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ call['function']['name'] }}", "arguments": {{ call['function']['arguments'] | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message['role'] == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message['content'] }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>
{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """{{ bos_token }}
{%- if tools %}<|start_header_id|>system<|end_header_id|>

{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|eot_id|>{% endif %}
{%- for message in messages %}
{%- if message['role'] in ('tool', 'ipython') %}<|start_header_id|>ipython<|end_header_id|>

{{ message['content'] | tojson }}<|eot_id|>
{%- elif message['tool_calls'] %}
{%- if message['tool_calls'] | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = message['tool_calls'][0]['function'] %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ call['name'] }}", "parameters": {{ call['arguments'] | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>

{{ message['content'] | trim }}<|eot_id|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

MISTRAL = """{{ bos_token }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
{%- if message['role'] == 'system' %}{{ message['content'] }}

{%- elif message['role'] == 'user' %}
{%- if tools and message is sameas users[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST]{{ message['content'] }}[/INST]
{%- elif message['tool_calls'] %}[TOOL_CALLS][
{%- for call in message['tool_calls'] %}
{%- if call['id'] | length != 9 %}{{ raise_exception('ids of calls have nine letters') }}{% endif %}
{{- {'name': call['function']['name'], 'arguments': call['function']['arguments'], 'id': call['id']} | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}
{%- elif message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}
{%- elif message['role'] == 'tool' %}
{%- if messages[loop.index0 - 1]['role'] == 'assistant' and not messages[loop.index0 - 1]['tool_calls'] %}
{{- raise_exception('results without calls') }}{% endif -%}
[TOOL_RESULTS]{"content": {{ message['content'] | tojson }}, "id": "{{ message['tool_call_id'] }}"}[/TOOL_RESULTS]
{%- endif %}{% endfor %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles take turns') }}{% endif -%}
<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}
{{ message['content'] | trim }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

PHI = """{% for message in messages %}<|{{ message['role'] }}|>
{{ message['content'] }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% else %}{{ eos_token }}{% endif %}"""

DEEPSEEK = """{{ bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'system' %}{{ message['content'] }}
{%- elif message['role'] == 'user' %}<|User|>{{ message['content'] }}
{%- elif message['role'] == 'assistant' and message['content'] is none %}
{%- if messages[loop.index0 - 1]['role'] != 'tool' %}<|Assistant|>{% endif %}
{%- for call in message['tool_calls'] %}<|call_begin|>
{{- call['function']['name'] + '\\n' + call['function']['arguments'] }}<|call_end|>
{%- endfor %}{{ eos_token }}
{%- elif message['role'] == 'assistant' %}
{%- if messages[loop.index0 - 1]['role'] != 'tool' %}<|Assistant|>{% endif %}
{{- message['content'].split('</think>')[-1] }}{{ eos_token }}
{%- elif message['role'] == 'tool' %}
{%- if messages[loop.index0 - 1]['content'] %}{{ raise_exception('an answer without a call') }}{% endif -%}
<|output_begin|>{{ message['content'] }}<|output_end|>
{%- endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1]['role'] != 'tool' %}<|Assistant|>{% endif %}"""

GLM = """[gMASK]<sop>
{%- if tools %}<|system|>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for message in messages %}
{%- if message['role'] == 'tool' %}<|observation|>
{{ message['content'] }}
{%- elif message['tool_calls'] %}{% for call in message['tool_calls'] %}<|assistant|>{{ call['function']['name'] }}
{{ call['function']['arguments'] | tojson }}{% endfor %}
{%- else %}<|{{ message['role'] }}|>
{{ message['content'] }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""

GRANITE = """
{%- if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson(indent=4) }}<|end_of_text|>
{% endif %}
{%- for message in messages %}
{%- set role = 'tool_response' if message['role'] == 'tool' else message['role'] -%}
<|start_of_role|>{{ role }}<|end_of_role|>
{%- if message['tool_calls'] %}<|tool_call|>[
{%- for call in message['tool_calls'] %}{{ call['function'] | tojson }}{% endfor %}]
{%- else %}{{ message['content'] }}{% endif %}<|end_of_text|>
{% endfor %}
{%- if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"""

# A tool's answer says whose it is, which is known from the call alone; turns end with one of two tokens.
HARMONY = """{% for message in messages %}
{%- if message['tool_calls'] %}{% set ns = namespace(name=message['tool_calls'][0]['function']['name']) %}
{{- '<|start|>assistant to=' + ns.name + '<|message|>' + message['tool_calls'][0]['function']['arguments'] | tojson -}}
<|call|>
{%- elif message['role'] == 'tool' %}
{%- set calls = messages[loop.index0 - 1]['tool_calls'] %}
{%- if not calls %}{{ raise_exception('an answer without a call') }}{% endif %}
{{- '<|start|>' + calls[0]['function']['name'] + '<|message|>' + message['content'] }}<|end|>
{%- else %}<|start|>{{ message['role'] }}<|message|>{{ message['content'] }}<|end|>
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

VICUNA = """{% for message in messages %}
{%- if message['role'] == 'assistant' %}ASSISTANT: {{ message['content'] }}{{ eos_token }}
{%- else %}USER: {{ message['content'] }} {% endif %}{% endfor %}
{%- if add_generation_prompt %}ASSISTANT: {% endif %}"""

IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FAMILIES = {
    "chatml": Family(CHATML_TEMPLATE, IM, "<|im_end|>"),
    "qwen2.5": Family(QWEN25.lstrip("\n"), IM, "<|im_end|>", ("<|endoftext|>",)),
    "qwen3": Family(QWEN3.lstrip("\n"), IM, "<|im_end|>", ("<|endoftext|>",)),
    "llama3": Family(LLAMA3, ("<bos>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"),
    "mistral": Family(
        MISTRAL,
        ("<bos>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]")
        + ("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "</s>",
    ),
    "gemma": Family(GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", ("<end_of_turn>",)),
    "phi": Family(
        PHI, ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<|eot|>"), "<|eot|>", ("<|end|>",)
    ),
    "deepseek": Family(
        DEEPSEEK,
        ("<bos>", "<|end_of_sentence|>", "<|User|>", "<|Assistant|>", "<|call_begin|>", "<|call_end|>")
        + ("<|output_begin|>", "<|output_end|>"),
        "<|end_of_sentence|>",
    ),
    "glm": Family(
        GLM,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|eot|>"),
        "<|eot|>",
        ("<|user|>", "<|observation|>"),
    ),
    "granite": Family(
        GRANITE, ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"), "<|end_of_text|>"
    ),
    "harmony": Family(
        HARMONY,
        ("<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
        "<|return|>",
        ("<|end|>", "<|call|>"),
    ),
    "vicuna": Family(VICUNA, ("</s>",), "</s>"),
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Its ``name_or_path`` is the family's name."""
    family = FAMILIES[name]
    tokenizer = bpe_tokenizer(TEXTS, 320)
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.specials), "eos_token": family.eos})
    if "<bos>" in family.specials:
        tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.chat_template, tokenizer.name_or_path = family.template, name
    return tokenizer


def ends_of(name: str) -> list[int]:
    return tokenizer_of(name).convert_tokens_to_ids(list(FAMILIES[name].ends))

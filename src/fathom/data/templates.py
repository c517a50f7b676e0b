"""Built-in chat templates for tokenizers without one, in jinja, as transformers renders them.

    headings   the headings of Alpaca, for any number of turns
    alpaca     Alpaca's own prompt, whose first sentence says whether an input follows the instruction
    react      Question, Thought, Action, Action Input, Observation, Final Answer (arXiv 2210.03629), with tools

`react` is the only one that supports tools. Lines of a tool's result after the first are indented, so that none of them
can be taken for a line of the model.
"""

from __future__ import annotations

import re
from typing import Any

HEADINGS = {"user": "### Instruction:\n", "assistant": "### Response:\n"}
INPUT = "\n\n### Input:\n"  # between an instruction and its input
_REFUSED = "{% else %}{{ raise_exception('no place for the role ' + message['role']) }}{% endif %}"
_TURNS = (
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ '" + HEADINGS["user"] + "' + message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '" + HEADINGS["assistant"] + "' + message['content'] + eos_token }}"
    "{% if not loop.last %}{{ '\n\n' }}{% endif %}"
)
_ASKED = "{% endfor %}{% if add_generation_prompt %}{{ '" + HEADINGS["assistant"] + "' }}{% endif %}"
_DESCRIBED = (
    "{% if messages and messages[0]['role'] != 'system' %}{{ 'Below is an instruction that describes a task' }}"
    "{% if '" + INPUT + "' in messages[0]['content'] %}"
    "{{ ', paired with an input that provides further context' }}{% endif %}"
    "{{ '. Write a response that appropriately completes the request.\n\n' }}{% endif %}"
)
_TOOLS = (
    "{% if tools %}{{ 'Answer the question. Write a Thought, then an Action and its Action Input, a JSON object, to "
    "call a tool and read its Observation, or the Final Answer.\nTools:\n' }}"
    "{% for tool in tools %}{% set tool = tool.function or tool %}{{ tool.name + '(' }}"
    "{% for name, kind in tool.parameters.properties.items() %}{{ name + ': ' }}"
    "{{ kind.enum | join(' or ') if kind.enum else kind.type if kind.type is string else kind | tojson }}"
    "{{ ', ' + kind.description if kind.description }}{{ '; ' if not loop.last }}{% endfor %}"
    "{{ '): ' + tool.description + '\n' }}{% endfor %}{{ '\n' }}{% endif %}"
)
_REACT = (
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'Question: ' + message['content'] + '\n' }}"
    "{% elif message['role'] == 'assistant' and message['tool_calls'] %}"
    "{% if message['content'] %}{{ 'Thought: ' + message['content'] + '\n' }}{% endif %}"
    "{% for call in message['tool_calls'] %}{% set call = call.function or call %}"
    "{{ 'Action: ' + call.name + '\nAction Input: ' }}"
    "{{ call.arguments if call.arguments is string else call.arguments | tojson }}{{ '\n' }}{% endfor %}"
    "{% elif message['role'] == 'assistant' %}{{ 'Final Answer: ' + message['content'] + eos_token }}"
    "{% if not loop.last %}{{ '\n\n' }}{% endif %}"
    "{% elif message['role'] == 'tool' and not loop.first %}"
    "{{ 'Observation: ' + message['content'].replace('\n', '\n  ') + '\n' }}"
)
_EACH = "{% for message in messages %}"
TEMPLATES = {
    "headings": "{{ bos_token }}" + _EACH + _TURNS + _REFUSED + _ASKED,
    "alpaca": "{{ bos_token }}" + _DESCRIBED + _EACH + _TURNS + _REFUSED + _ASKED,
    "react": "{{ bos_token }}" + _TOOLS + _EACH + _REACT + _REFUSED + "{% endfor %}",
}


def takes_tools(tokenizer: Any) -> bool:
    """Whether the tokenizer's chat template lists tools."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return "tool_use" in template
    return bool(template) and re.search(r"\btools\b", template) is not None

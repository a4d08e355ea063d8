"""The tiny model's tokenizer: byte-complete, with one token for each name, word and piece of call syntax.

Any text encodes and decodes back exactly: what is not a known piece falls to its UTF-8 bytes. The known pieces are
plain vocabulary, cut out by the pre-tokenizer, not added tokens: content encoded with added tokens disabled keeps
its ids, and only the three control tokens and four tool marks can be forged by content at all. Piece boundaries do not
cross control tokens, so a conversation encoded segment by segment gives the ids of the whole.

The chat template is ChatML in the manner of Qwen: calls as JSON in ``<tool_call>``, results in a user turn in
``<tool_response>``. It ignores the tool list: the model knows one tool, ``shell``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from uniagent.tasks.shell_quest.words import NAMES, WORDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")  # as in Qwen: added, not special
SYNTAX = (
    '\n{"name": "shell", "arguments": {"command": "',
    '"}}\n',
    "system\n",
    "user\n",
    "assistant\n",
    "You are a shell agent.",
    "Done.",
    "(no output)",
    "exit code ",
)
SHELL = (
    *("answer.txt", "*.txt", "backup/", "backup", " > ", " < ", " | ", " >> "),
    *("ls", "rm", "cp", "mv", "wc", "cat", "grep", "echo", "head", "tail", "sort", "touch", "mkdir"),
    *(" -l", " -w", " -c", " -S", " -Sr", " -t", " -r", " -n"),
)
ENGLISH = (
    *("Delete", "Remove", "Copy", "Put a copy of", "Rename", "Move", "Count", "How many", "Find", "Which"),
    *(" the", " largest", " biggest", " smallest", " file", " to", " into", " in", " of", " lines", " words"),
    *(" contains", " containing", " that", " name", " its", " and", " write", " it", " number"),
    *(" are there", " as", " directory", " the word"),
)
ERRORS = (
    *(" cannot remove '", " cannot stat '", " missing file operand", " missing operand"),
    *("': No such file or directory", ": No such file or directory", "bash: line 1: ", ": command not found"),
    *(": Is a directory", "Try '", " --help' for more information.", "omitting directory '"),
)
TEMPLATE = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a shell agent.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {{- message.content or '' }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {%- set call = tool_call.function or tool_call %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def build(more: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers knows it; 391 tokens, ids fixed by the order of the tables above. ``more`` are
    further pieces with the ids that follow: another tool's syntax."""
    from transformers import PreTrainedTokenizerFast

    pieces = (*SYNTAX, *SHELL, *ENGLISH, *ERRORS, *NAMES)
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = [*CONTROL, *sorted(as_bytes.alphabet()), *MARKS]
    vocabulary += [as_bytes.pre_tokenize_str(piece)[0][0] for piece in (*pieces, *WORDS, *more)]
    # ignore_merges: a pre-token that is in the vocabulary as a whole is one token; with no merges, others are bytes
    model = models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[], ignore_merges=True)
    tokenizer = Tokenizer(model)
    longest_first = "|".join(re.escape(piece) for piece in sorted((*pieces, *more), key=len, reverse=True))
    whole_words = "|".join(WORDS)
    known = Regex(rf"{longest_first}|(?<!\w)(?:{whole_words})(?!\w)")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(known, "isolated"), as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )
    fast.chat_template = TEMPLATE
    return fast

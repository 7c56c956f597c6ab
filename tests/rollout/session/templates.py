"""Chat templates with the structure of public families', in words of our own."""

_CHATML_CALLS = (
    "{%- for t in m.tool_calls or [] %}{% set f = t.function %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + f.name + \'", "arguments": \' }}'
    "{{- f.arguments | tojson + '}\\n</tool_call>' }}"
    "{%- endfor %}"
)
_RESULTS = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
)
_TOOLS = "{% if tools %}{{ '\\n\\n# Tools' }}{% for t in tools %}{{ '\\n' + t | tojson }}{% endfor %}{% endif %}"
_OPEN = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"

# A system message of its own where there is none; tools in it; results of tools together in one turn of the user's.
QWEN25 = (
    "{%- if messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content }}"
    "{%- else %}{{ '<|im_start|>system\\nYou are made of rules.' }}{% endif %}" + _TOOLS + "{{- '<|im_end|>\\n' }}"
    "{%- for m in messages %}"
    "{%- if m.role == 'system' and loop.first %}"
    "{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant' }}"
    "{%- if m.content %}{{ '\\n' + m.content }}{% endif %}" + _CHATML_CALLS + "{{- '<|im_end|>\\n' }}"
    "{%- elif m.role == 'tool' %}" + _RESULTS + "{%- else %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endif %}{% endfor %}" + _OPEN
)  # fmt: skip

# Thoughts of turns before the last question are left out, and those after it written, empty ones of the last too.
QWEN3 = (
    "{%- if tools %}{{ '<|im_start|>system' }}" + _TOOLS + "{{- '<|im_end|>\\n' }}{% endif %}"
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- set thought = (m.reasoning_content or '').strip('\\n') %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}"
    "{{- m.content.lstrip('\\n') }}"
    "{%- for t in m.tool_calls or [] %}{% set f = t.function %}"
    "{%- if m.content or not loop.first %}{{ '\\n' }}{% endif %}"
    '{{- \'<tool_call>\\n{"name": "\' + f.name + \'", "arguments": \' + f.arguments | tojson + \'}\\n</tool_call>\' }}'
    "{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif m.role == 'tool' %}" + _RESULTS + "{%- else %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endif %}{% endfor %}" + _OPEN +
    "{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)  # fmt: skip

SMOLLM2 = (
    "{%- for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\\nYou are small, and called SmolLM.<|im_end|>\\n' }}{% endif %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}" + _OPEN
)
SMOLLM3 = QWEN3.replace(
    "{%- if tools %}{{ '<|im_start|>system' }}", "{{ '<|im_start|>system\\nYou are called SmolLM.' }}{%- if true %}"
)

# Headers by name, text trimmed, tools described in the first question, one call a turn, results by ipython as JSON.
LLAMA3 = (
    "{{- '<|begin_of_text|>' }}"
    "{%- for m in messages %}"
    "{%- if m.tool_calls %}"
    "{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call a turn') }}{% endif %}"
    "{%- set f = m.tool_calls[0].function %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{{- '{\"name\": \"' + f.name + '\", \"parameters\": ' + f.arguments | tojson + '}<|eot_id|>' }}"
    "{%- elif m.role == 'tool' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content | tojson + '<|eot_id|>' }}"
    "{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
    "{%- if tools and loop.first %}{% for t in tools %}{{ t | tojson + '\\n\\n' }}{% endfor %}{% endif %}"
    "{{- m.content | trim + '<|eot_id|>' }}"
    "{%- endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

# Users and models take turns; a system message goes into the first question; text is trimmed.
GEMMA = (
    "{{- '<bos>' }}"
    "{%- set first = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}"
    "{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{%- for m in rest %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}"
    "{%- if loop.first %}{{ first }}{% endif %}{{- m.content | trim + '<end_of_turn>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)

# No end of a turn but the head of the next; a pair of thoughts in every answer, empty before the last question.
GLM = (
    "{{- '[gMASK]<sop>' }}"
    "{%- if tools %}{{ '<|system|>\\n# Tools' }}{% for t in tools %}{{ '\\n' + t | tojson }}{% endfor %}{% endif %}"
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{{ '<|assistant|>' }}"
    "{%- if loop.index0 > ns.last and m.reasoning_content %}"
    "{{ '\\n<think>' + m.reasoning_content.strip() + '</think>' }}"
    "{%- else %}{{ '\\n<think></think>' }}{% endif %}"
    "{%- if m.content.strip() %}{{ '\\n' + m.content.strip() }}{% endif %}"
    "{%- for t in m.tool_calls or [] %}{{ '\\n<tool_call>' + t.function.name }}"
    "{%- for k, v in t.function.arguments.items() %}{{ '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' }}"
    "{{- v if v is string else v | tojson }}{{ '</arg_value>' }}{% endfor %}{{ '\\n</tool_call>' }}{% endfor %}"
    "{%- elif m.role == 'tool' %}"
    "{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}"
    "{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- else %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '\\n<think></think>' }}{% endif %}{% endif %}"
)

# The assistant goes on behind results without a head; arguments of calls are text; calls only without content.
DEEPSEEK_V3 = (
    "{{- '<｜begin▁of▁sentence｜>' }}{% set ns = namespace(tool=false) %}"
    "{%- for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}{% set ns.tool = false %}{{ '<｜User｜>' + m.content }}"
    "{%- elif m.role == 'assistant' and m.content is none %}"
    "{{- '' if ns.tool else '<｜Assistant｜>' }}{% set ns.tool = false %}{{ '<｜tool▁calls▁begin｜>' }}"
    "{%- for t in m.tool_calls %}{{ '' if loop.first else '\\n' }}"
    "{{- '<｜tool▁call▁begin｜>' + t.type + '<｜tool▁sep｜>' + t.function.name + '\\n```json\\n' }}"
    "{{- t.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}"
    "{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}"
    "{%- elif m.role == 'assistant' %}"
    "{{- ('' if ns.tool else '<｜Assistant｜>') + CONTENT + '<｜end▁of▁sentence｜>' }}{% set ns.tool = false %}"
    "{%- elif m.role == 'tool' %}"
    "{{- '\\n' if ns.tool else '<｜tool▁outputs▁begin｜>' }}{% set ns.tool = true %}"
    "{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}"
    "{%- endif %}{% endfor %}"
    "{%- if add_generation_prompt and not ns.tool %}{{ '<｜Assistant｜>' }}OPENED{% endif %}"
)
DEEPSEEK_R1 = DEEPSEEK_V3.replace("OPENED", "{{ '<think>\\n' }}").replace("CONTENT", "m.content.split('</think>')[-1]")
DEEPSEEK_V3 = DEEPSEEK_V3.replace("OPENED", "").replace("CONTENT", "m.content")

# V3.1: a turn begins with thoughts, or with their end alone; calls by name, results without a frame of their own.
DEEPSEEK_V31 = (
    "{{- '<｜begin▁of▁sentence｜>' }}{% set ns = namespace(asked=false) %}"
    "{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}{% set ns.asked = true %}{{ '<｜User｜>' + m.content }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- if ns.asked %}{{ '<｜Assistant｜></think>' }}{% endif %}{% set ns.asked = false %}"
    "{{- (m.content or '').split('</think>')[-1] }}"
    "{%- if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{% for t in m.tool_calls %}"
    "{{- '<｜tool▁call▁begin｜>' + t.function.name + '<｜tool▁sep｜>' + t.function.arguments + '<｜tool▁call▁end｜>' }}"
    "{%- endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}{{ '<｜end▁of▁sentence｜>' }}"
    "{%- elif m.role == 'tool' %}{% set ns.asked = false %}"
    "{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
    "{%- else %}{{ m.content }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt and ns.asked %}"
    "{{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{% endif %}"
)

KIMI = (
    "{%- if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{{- '<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id + '\\n' + m.content + '<|im_end|>' }}"
    "{%- else %}"
    "{{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content }}"
    "{%- if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}{% for t in m.tool_calls %}"
    "{{- '<|tool_call_begin|>' + t.id + '<|tool_call_argument_begin|>' }}"
    "{{- t.function.arguments | tojson + '<|tool_call_end|>' }}"
    "{%- endfor %}{{ '<|tool_calls_section_end|>' }}{% endif %}{{ '<|im_end|>' }}"
    "{%- endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)  # fmt: skip

MINIMAX = (
    "{{- ']~!b[]~b]system\\nYou help.' }}{% for t in tools or [] %}{{ '\\n<tool>' + t | tojson + '</tool>' }}"
    "{% endfor %}"
    "{{- '[e~[\\n' }}"
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{{ ']~b]ai\\n' }}"
    "{%- if m.reasoning_content and loop.index0 > ns.last %}"
    "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}"
    "{%- endif %}{{ m.content }}"
    "{%- if m.tool_calls %}{{ '\\n<minimax:tool_call>\\n' }}{% for t in m.tool_calls %}"
    "{{- '<invoke name=\"' + t.function.name + '\">\\n' }}"
    "{%- for k, v in t.function.arguments.items() %}{{ '<parameter name=\"' + k + '\">' }}"
    "{{- v if v is string else v | tojson }}{{ '</parameter>\\n' }}{% endfor %}{{ '</invoke>\\n' }}{% endfor %}"
    "{{- '</minimax:tool_call>' }}{% endif %}{{ '[e~[\\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{%- if messages[loop.index0 - 1].role != 'tool' %}{{ ']~b]tool' }}{% endif %}"
    "{{- '\\n<response>' + m.content + '</response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '[e~[\\n' }}{% endif %}"
    "{%- else %}{{ ']~b]' + m.role + '\\n' + m.content + '[e~[\\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ ']~b]ai\\n<think>\\n' }}{% endif %}"
)  # fmt: skip

# Channels; an answer ends with return where it is the last and with end elsewhere, without its analysis then.
HARMONY = (
    "{{- '<|start|>system<|message|>You are a tool.<|end|>' }}"
    "{%- if tools %}{{ '<|start|>developer<|message|># Tools\\n' + tools | tojson + '<|end|>' }}{% endif %}"
    "{%- set ns = namespace(last=none, final=-1) %}"
    "{%- for m in messages if m.role == 'assistant' and not m.tool_calls %}"
    "{% set ns.final = messages.index(m) %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' and m.tool_calls %}"
    "{%- if m.thinking and m.content %}{{ raise_exception('not both') }}{% endif %}"
    "{%- if m.thinking and loop.index0 > ns.final %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{%- set ns.last = m.tool_calls[0].function.name %}"
    "{{- '<|start|>assistant to=functions.' + ns.last + '<|channel|>commentary json<|message|>' }}"
    "{{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- if loop.last and not add_generation_prompt %}"
    "{%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}"
    "{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{%- elif m.role == 'tool' %}"
    "{%- if ns.last is none %}{{ raise_exception('a result without a call') }}{% endif %}"
    "{{- '<|start|>functions.' + ns.last + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{- m.content | tojson + '<|end|>' }}"
    "{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)  # fmt: skip

# A family nobody described, which only appends.
PLAIN = (
    "{{- '<s>' }}{% for m in messages %}{{ '[' + m.role + ']' + m.content + '</s>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
# And one that rewrites.
FORGETFUL = PLAIN.replace("m.content +", "(m.content if loop.last or m.role == 'user' else '...') +")

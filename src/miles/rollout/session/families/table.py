"""The families that are known, the more particular before the more general."""

from miles.rollout.session.families.deepseek import DEEPSEEK
from miles.rollout.session.families.family import Family
from miles.rollout.session.families.gemma import GEMMA
from miles.rollout.session.families.glm import GLM
from miles.rollout.session.families.harmony import HARMONY
from miles.rollout.session.families.kimi import KIMI
from miles.rollout.session.families.llama3 import LLAMA3
from miles.rollout.session.families.minimax import MINIMAX
from miles.rollout.session.families.qwen import QWEN
from miles.rollout.session.families.qwen3 import QWEN3
from miles.rollout.session.families.smollm import SMOLLM, SMOLLM3

FAMILIES: tuple[Family, ...] = (
    HARMONY,
    KIMI,
    MINIMAX,
    LLAMA3,
    GEMMA,
    GLM,
    DEEPSEEK,
    SMOLLM3,
    SMOLLM,
    QWEN3,
    QWEN,
)

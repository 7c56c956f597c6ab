"""Which language a reply is in: by its script, and where several share one, by their commonest words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from miles.rollout.reward.instructions.pieces import words
from miles.rollout.reward.instructions.settings import Settings, text
from miles.rollout.reward.score import BadLabel

_SCRIPTS: Mapping[str, re.Pattern[str]] = {
    name: re.compile(f"[{ranges}]")
    for name, ranges in {
        "latin": "A-Za-z\u00c0-\u024f\u1e00-\u1eff",
        "cyrillic": "\u0400-\u04ff",
        "greek": "\u0370-\u03ff",
        "arabic": "\u0600-\u06ff",
        "hebrew": "\u0590-\u05ff",
        "devanagari": "\u0900-\u097f",
        "bengali": "\u0980-\u09ff",
        "gurmukhi": "\u0a00-\u0a7f",
        "gujarati": "\u0a80-\u0aff",
        "tamil": "\u0b80-\u0bff",
        "telugu": "\u0c00-\u0c7f",
        "kannada": "\u0c80-\u0cff",
        "malayalam": "\u0d00-\u0d7f",
        "thai": "\u0e00-\u0e7f",
        "hangul": "\uac00-\ud7af\u1100-\u11ff",
        "kana": "\u3040-\u30ff",
        "han": "\u4e00-\u9fff",
    }.items()
}
# Those that a script gives away, and the others by words that are frequent in one and rare in its neighbours.
_ALONE = {
    "greek": "el", "hebrew": "he", "bengali": "bn", "gurmukhi": "pa", "gujarati": "gu", "tamil": "ta", "telugu": "te",
    "kannada": "kn", "malayalam": "ml", "thai": "th", "hangul": "ko", "kana": "ja", "han": "zh",
}  # fmt: skip
_COMMON: Mapping[str, tuple[str, str]] = {
    "en": ("latin", "the of and to in is that it was for with as be this are on not you have but they from or which"),
    "de": ("latin", "der die und das ist nicht ein eine zu den mit von auf für sich des dem auch es wird sind ich"),
    "fr": ("latin", "le la les et des est une un du dans que qui pour pas sur au avec ce il plus nous vous sont elle"),
    "es": ("latin", "el la los las que y de en un una es por con para del se no su como más pero está lo muy son"),
    "pt": ("latin", "o a os as que e de em um uma é não com para do da se por mais como mas foi são ao na no você"),
    "it": ("latin", "il la che di e un una è per non con del sono della le gli si in nel anche più ma questo dei alla"),
    "nl": ("latin", "de het een en van is dat niet op te zijn met voor die aan er ook als maar om bij wordt naar"),
    "sv": ("latin", "och att det som en är på för med inte av den har till om ett jag men var så kan vi från eller"),
    "fi": ("latin", "ja on ei se että oli hän mutta joka ovat kun myös tai niin mitä olla kuin sen voi jos tämä"),
    "pl": ("latin", "i w na nie się z do to jest że jak o po co ale od przez tak są dla czy może jego tym"),
    "tr": ("latin", "ve bir bu için da de ile çok ne daha gibi olarak var olan kadar sonra ama ben en mi değil"),
    "vi": ("latin", "và của là có không được cho trong một các những với này người để khi đã đó như tôi về rất"),
    "id": ("latin", "yang dan di itu dengan untuk tidak ini dari dalam akan pada juga saya ke karena ada atau oleh"),
    "sw": ("latin", "na ya wa kwa ni za la katika kuwa hii cha watu au lakini pia sana kama yake huo yao kila"),
    "ru": ("cyrillic", "и в не на что я он с это как по но из у за так же от все она они был для бы мы вы"),
    "bg": ("cyrillic", "и на да се не в за от е са с че като по това съм до който или може той след при ще го"),
    "uk": ("cyrillic", "і в не на що я він з це як та у за до але від є вона вони для його ми бути або"),
    "ar": ("arabic", "في من على إلى أن هذا هذه التي الذي كان لا ما مع عن هو هي أو كل بعد قد"),
    "fa": ("arabic", "در به از که این را با است برای آن یک می های خود تا بر بود شود و ما"),
    "ur": ("arabic", "کے میں کی ہے اور سے کا کو نے پر یہ ہیں کہ اس تھا نہیں بھی ایک کر ہو"),
    "hi": ("devanagari", "के में की है और से का को ने पर यह हैं कि इस था नहीं भी एक कर हो"),
    "mr": ("devanagari", "आणि आहे या हे तो ती की मध्ये साठी आहेत होते नाही एक त्या काही पण झाले हा करून वर"),
    "ne": ("devanagari", "छ र को मा हो यो पनि लागि छन् गर्न भएको तर एक थियो उनी गरेको हुन्छ त्यो अनि तथा"),
}
_WORDS = {code: (script, frozenset(said.split())) for code, (script, said) in _COMMON.items()}
KNOWN = frozenset((*_ALONE.values(), *_WORDS))


def response_language(reply: str, settings: Settings) -> bool:
    """The whole reply is in ``language``, a two-letter code."""
    code = text(settings, "language").strip().lower().partition("-")[0]
    if code not in KNOWN:
        raise BadLabel(f"an instruction asks for the language {code}, and told apart are {', '.join(sorted(KNOWN))}")
    return language_of(reply) == code


def language_of(reply: str) -> str | None:
    """The two-letter code of the likeliest language, or None.

    >>> language_of("Der Hund ist nicht im Haus."), language_of("こんにちは世界"), language_of("42")
    ('de', 'ja', None)
    """
    counts = {script: len(pattern.findall(reply)) for script, pattern in _SCRIPTS.items()}
    if counts["kana"] > 0.1 * (counts["kana"] + counts["han"]):
        counts["kana"] += counts.pop("han")
    script = max(counts, key=lambda name: counts[name])
    if not counts[script]:
        return None
    if script in _ALONE:
        return _ALONE[script]
    said = Counter(words(reply.lower()))
    hits = {code: sum(said[word] for word in common) for code, (own, common) in _WORDS.items() if own == script}
    best = max(hits, key=lambda code: hits[code])
    return best if hits[best] else None

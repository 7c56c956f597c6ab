"""Instruction-following graders (IFEval's 25 instructions and IFBench's 58): every check by its published name."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from miles.rollout.reward.ifeval import format, length, linguistic, tasks, words
from miles.rollout.reward.ifeval.common import Check, Settings
from miles.rollout.reward.types import BadLabel, Metadata

CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "keywords:existence": words.existence,
        "keywords:frequency": words.frequency,
        "keywords:forbidden_words": words.forbidden_words,
        "keywords:letter_frequency": words.letter_frequency,
        "language:response_language": linguistic.response_language,
        "length_constraints:number_sentences": length.number_sentences,
        "length_constraints:number_paragraphs": length.number_paragraphs,
        "length_constraints:number_words": length.number_words,
        "length_constraints:nth_paragraph_first_word": length.nth_paragraph_first_word,
        "detectable_content:number_placeholders": format.placeholders,
        "detectable_content:postscript": format.postscript,
        "detectable_format:number_bullet_lists": format.bullet_lists,
        "detectable_format:constrained_response": format.constrained_response,
        "detectable_format:number_highlighted_sections": format.highlighted_sections,
        "detectable_format:multiple_sections": format.multiple_sections,
        "detectable_format:json_format": format.json_format,
        "detectable_format:title": format.title,
        "combination:two_responses": format.two_responses,
        "combination:repeat_prompt": format.repeat_prompt,
        "startend:start_checker": format.starts_with,
        "startend:end_checker": format.ends_with,
        "startend:quotation": format.quotation,
        "change_case:capital_word_frequency": format.capital_words,
        "change_case:english_capital": format.upper_case,
        "change_case:english_lowercase": format.lower_case,
        "punctuation:no_comma": format.no_comma,
        "count:word_count_range": length.word_count_range,
        "count:unique_word_count": length.unique_word_count,
        "count:numbers": length.numbers,
        "count:conjunctions": length.conjunctions,
        "count:pronouns": length.pronouns,
        "count:punctuation": length.punctuation,
        "count:keywords_multiple": words.keywords_multiple,
        "ratio:stop_words": length.stop_words,
        "ratio:overlap": length.overlap,
        "ratio:sentence_type": length.sentence_type,
        "ratio:sentence_balance": length.sentence_balance,
        "ratio:sentence_words": words.sentence_words,
        "words:alphabet": words.alphabet,
        "words:vowel": words.vowels,
        "words:consonants": words.consonants,
        "words:palindrome": words.palindromes,
        "words:prime_lengths": words.prime_lengths,
        "words:repeats": words.repeats,
        "words:no_consecutive": words.no_consecutive,
        "words:last_first": words.last_first,
        "words:paragraph_last_first": words.paragraph_last_first,
        "words:keywords_specific_position": words.specific_position,
        "words:words_position": words.second_and_second_to_last,
        "sentence:keyword": words.in_sentence,
        "sentence:increment": words.increment,
        "sentence:alliteration_increment": words.alliteration_increment,
        "format:parentheses": format.parentheses,
        "format:quotes": format.quotes,
        "format:options": format.options,
        "format:newline": format.newline,
        "format:emoji": format.emoji,
        "format:line_indent": format.line_indent,
        "format:list": format.separated_list,
        "format:sub-bullets": format.sub_bullets,
        "format:title_case": format.title_case,
        "format:output_template": format.output_template,
        "format:no_whitespace": format.no_whitespace,
        "count:person_names": linguistic.person_names,
        "count:words_japanese": linguistic.japanese_words,
        "words:start_verb": linguistic.starts_with_verb,
        "words:odd_even_syllables": linguistic.odd_and_even_syllables,
        "format:quote_unquote": linguistic.explained_quotes,
        "format:thesis": linguistic.thesis,
        "format:no_bullets_bullets": linguistic.sentences_then_bullets,
        "repeat:repeat_change": tasks.repeat_change,
        "repeat:repeat_simple": tasks.repeat_simple,
        "repeat:repeat_span": tasks.repeat_span,
        "custom:multiples": tasks.multiples,
        "custom:mcq_count_length": tasks.multiple_choice,
        "custom:reverse_newline": tasks.countries_in_reverse,
        "custom:word_reverse": tasks.words_in_reverse,
        "custom:character_reverse": tasks.characters_in_reverse,
        "custom:sentence_alphabet": tasks.alphabet_of_sentences,
        "custom:european_capitals_sort": tasks.capitals_by_latitude,
        "custom:csv_city": tasks.csv_city,
        "custom:csv_special_character": tasks.csv_special_character,
        "custom:csv_quotes": tasks.csv_quotes,
        "custom:date_format_list": tasks.dates,
    }
)


def grade(reply: str, label: str, metadata: Metadata) -> dict[str, float]:
    """``score`` is 1 when every instruction is followed, ``share`` the fraction that is; thinking is ignored.

    ``metadata["instruction_id_list"]`` names them, ``metadata["kwargs"]`` has an object of settings for each.
    An empty response follows nothing.
    """
    response = reply.rpartition("</think>")[2].strip("\n")
    followed = [
        bool(response.strip()) and CHECKS[name](response, settings) for name, settings in _parse_instructions(metadata)
    ]
    return {"score": float(all(followed)), "share": sum(followed) / len(followed)}


def _parse_instructions(metadata: Metadata) -> list[tuple[str, Settings]]:
    names = metadata.get("instruction_id_list")
    if not isinstance(names, list | tuple) or not names:
        raise BadLabel("its metadata names no instructions in instruction_id_list")
    for name in names:
        if name not in CHECKS:
            close = get_close_matches(str(name), CHECKS, n=1)
            raise BadLabel(f"there is no check for the instruction {name}{f'; is it {close[0]}?' if close else ''}")
    given: Any = metadata.get("kwargs") or [{}] * len(names)
    if not isinstance(given, list | tuple) or len(given) != len(names):
        raise BadLabel(f"metadata['kwargs'] must be a list with an object for each of the {len(names)} instructions")
    return [(name, _settings(name, settings)) for name, settings in zip(names, given, strict=True)]


def _settings(name: str, given: Any) -> Settings:
    """Drop the empty columns that tabular data has."""
    if given is not None and not isinstance(given, Mapping):
        raise BadLabel(f"the settings of {name} are not an object")
    return {key: value for key, value in (given or {}).items() if value is not None}

"""Every instruction that can be checked, by the name data sets give it (IFEval's 25 and many of IFBench's)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from miles.rollout.reward.instructions import form, keywords, length, wording
from miles.rollout.reward.instructions.language import response_language
from miles.rollout.reward.instructions.settings import Check

CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "keywords:existence": keywords.existence,
        "keywords:frequency": keywords.frequency,
        "keywords:forbidden_words": keywords.forbidden_words,
        "keywords:letter_frequency": keywords.letter_frequency,
        "language:response_language": response_language,
        "length_constraints:number_sentences": length.number_sentences,
        "length_constraints:number_paragraphs": length.number_paragraphs,
        "length_constraints:number_words": length.number_words,
        "length_constraints:nth_paragraph_first_word": length.nth_paragraph_first_word,
        "detectable_content:number_placeholders": form.placeholders,
        "detectable_content:postscript": form.postscript,
        "detectable_format:number_bullet_lists": form.bullet_lists,
        "detectable_format:constrained_response": form.constrained_response,
        "detectable_format:number_highlighted_sections": form.highlighted_sections,
        "detectable_format:multiple_sections": form.multiple_sections,
        "detectable_format:json_format": form.json_format,
        "detectable_format:title": form.title,
        "combination:two_responses": form.two_responses,
        "combination:repeat_prompt": form.repeat_prompt,
        "startend:start_checker": form.starts_with,
        "startend:end_checker": form.ends_with,
        "startend:quotation": form.quotation,
        "change_case:capital_word_frequency": form.capital_words,
        "change_case:english_capital": form.upper_case,
        "change_case:english_lowercase": form.lower_case,
        "punctuation:no_comma": form.no_comma,
        "count:word_count_range": length.word_count_range,
        "count:unique_word_count": length.unique_word_count,
        "count:numbers": length.numbers,
        "count:conjunctions": length.conjunctions,
        "count:pronouns": length.pronouns,
        "count:punctuation": length.punctuation,
        "count:keywords_multiple": keywords.keywords_multiple,
        "ratio:stop_words": length.stop_words,
        "ratio:overlap": length.overlap,
        "ratio:sentence_type": length.sentence_type,
        "ratio:sentence_balance": length.sentence_balance,
        "ratio:sentence_words": wording.sentence_words,
        "words:alphabet": wording.alphabet,
        "words:vowel": wording.vowels,
        "words:consonants": wording.consonants,
        "words:palindrome": wording.palindromes,
        "words:prime_lengths": wording.prime_lengths,
        "words:repeats": wording.repeats,
        "words:no_consecutive": wording.no_consecutive,
        "words:last_first": wording.last_first,
        "words:paragraph_last_first": wording.paragraph_last_first,
        "words:keywords_specific_position": keywords.specific_position,
        "words:words_position": keywords.second_and_second_to_last,
        "sentence:keyword": keywords.in_sentence,
        "sentence:increment": wording.increment,
        "sentence:alliteration_increment": wording.alliteration_increment,
        "format:parentheses": form.parentheses,
        "format:quotes": form.quotes,
        "format:options": form.options,
        "format:newline": form.newline,
        "format:emoji": form.emoji,
        "format:line_indent": form.line_indent,
        "format:list": form.separated_list,
        "format:sub-bullets": form.sub_bullets,
        "format:title_case": form.title_case,
        "format:output_template": form.output_template,
        "format:no_whitespace": form.no_whitespace,
    }
)

r"""The ``math``, ``math_exact`` and ``deepscaler`` rewards: boxed answers, exact first and then by algebra."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rollout.reward.reward_case import value

from miles.core.errors import DataError
from miles.rollout.reward.context import GraderContext
from miles.rollout.reward.grader_pool import GraderPool
from miles.rollout.reward.math import compare, is_equal
from miles.rollout.reward.text import extract_boxed

PIECES = [*"\\{}[](),.$^_-+/% 0123459abx", "\\boxed{", "\\frac", "\\text{", "\\{", "\\}"]
ANYTHING = st.lists(st.sampled_from(PIECES), max_size=60).map("".join)


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\frac{a}{\sqrt{b}}} done", r"\frac{a}{\sqrt{b}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{ 5 }", "5"),
        (r"\boxed {5}", "5"),
        (r"\fbox{6}", "6"),
        (r"\boxed{3} \boxed{4", "3"),
        (r"{ \boxed{8} ", "8"),
        (r"} \boxed{9}", "9"),
        (r"$\\ \boxed{10}$", "10"),
        (r"\boxed{}", ""),
        (r"\boxed{unclosed", None),
        ("boxed{5}", None),
        ("no box", None),
        ("", None),
    ],
)
def test_the_last_complete_box_is_the_answer(text, inside):
    assert extract_boxed(text) == inside


def test_a_pathological_reply_costs_no_more_than_reading_it():
    assert extract_boxed(r"\boxed{" * 20_000) is None
    assert extract_boxed(r"\boxed{" * 20_000 + "1" + "}" * 20_000) == "1"


AGREE = [
    ("42", "42"),
    ("42", "42.0"),
    ("42.", "42"),
    ("+7", "7"),
    (".5", "0.5"),
    ("-0", "0"),
    ("-0.0", "0"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac12", "1/2"),
    (r"\dfrac{3}{4}", r"\tfrac{6}{8}"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"2\frac{1}{2}", "2.5"),
    (r"0.\overline{3}", r"\frac13"),
    (r"-1.2\overline{36}", r"-\frac{68}{55}"),
    ("1,234,567", "1234567"),
    ("1{,}000", "1000"),
    (r"10\,000", "10000"),
    (r"1.5 \times 10^{3}", "1500"),
    (r"1.5 × 10^3", "1500"),
    (r"\$18", "18"),
    ("$18$", "18"),
    (r"50\%", "50"),
    (r"50\%", "0.5"),
    ("12.5%", r"\frac18"),
    ("90^\\circ", "90"),
    ("90^{\\circ}", "90"),
    (r"5\text{ cm}", "5"),
    (r"\frac{3}{4}\text{ cups}", "0.75"),
    (r"12\text{ cm}^2", "12"),
    ("x = 5", "5"),
    ("x_1=3", "3"),
    (r"\left( 1, 2 \right)", "(1,2)"),
    ("(1, 2.0)", "(1,2)"),
    (r"[0, \frac12]", "[0,0.5]"),
    (r"\{2, 1\}", r"\{1,2\}"),
    ("2, 1", "1,2"),
    (r"\{3, 4\}", "4, 3"),
    (r"\text{Yes}", "yes"),
    (r"\text{(C)}", "C"),
    (r"\textbf{B}", "B"),
    (r"\sqrt2", r"\sqrt{2}"),
    (r"2 \sqrt 3", r"2\sqrt{3}"),
    ("x^{2} + 1", "x^2+1"),
    ("−3", "-3"),
    (r"x \le 4", r"x\leq 4"),
    ("{5}", "5"),
    (r"\(\pi\)", r"\pi"),
    ("2π", r"2\pi"),
    (r"(-∞, 3)", r"(-\infty,3)"),
]


@pytest.mark.parametrize(("one", "other"), AGREE)
def test_answers_that_agree_for_certain(one, other):
    assert is_equal(one, other)
    assert is_equal(other, one)


DIFFER = [
    ("42", "43"),
    ("42", "-42"),
    ("0.333", r"\frac{1}{3}"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", "(2,1)"),
    ("(1,2]", "(1,2)"),
    ("1,2", "1,2,3"),
    (r"\{1,1\}", r"\{1,2\}"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    ("x", "X"),
    ("yes", "no"),
    ("abc", "cab"),
    ("50%", "0.05"),
    ("50%", "5"),
    ("1,000", "100"),
    (r"(\frac12, 3)", "(0.5, 4)"),
]


@pytest.mark.parametrize(("one", "other"), DIFFER)
def test_answers_that_differ_for_certain(one, other):
    assert compare(one, other) is False
    assert compare(other, one) is False


OPEN = [
    ("x+1", "1+x"),
    ("", "0"),
    ("1/0", "0"),
    (r"\sqrt{2}", "1.414"),
    ("1e3", "1000"),
    ("2.5.1", "2.5"),
    ("12", "1,2"),
]


@pytest.mark.parametrize(("one", "other"), OPEN)
def test_what_only_algebra_can_tell_is_left_open(one, other):
    assert compare(one, other) is None
    assert not is_equal(one, other)


@given(one=ANYTHING, other=ANYTHING)
def test_no_answer_can_upset_the_comparison_and_agreement_is_mutual(one, other):
    assert is_equal(one, other) == is_equal(other, one)
    assert is_equal(one, one)


def test_numbers_too_large_to_compute_with_are_compared_as_text():
    assert is_equal("9" * 5000, "9" * 5000)
    assert compare("9" * 5000, "9" * 4999) is False


RIGHT = [
    (r"thus \boxed{\frac{1}{2}}", "0.5"),
    (r"\boxed{5} or \boxed{6}", "6"),
    (r"\boxed{72}", "48 / 2 = 24 ... #### 72"),
    (r"\boxed{3}", r"We get \boxed{3}."),
    (r"\boxed{x(x+1)}", "x^2+x"),
    (r"\boxed{x+1}", "1+x"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1"),
    (r"\boxed{\frac{x^2-1}{x-1}}", "x+1"),
    (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt2}"),
    (r"\boxed{3\sqrt{5}}", r"\sqrt{45}"),
    (r"\boxed{\sin^2 x+\cos^2 x}", "1"),
    (r"\boxed{2^{10}}", "1024"),
    (r"\boxed{\log_2 8}", "3"),
    (r"\boxed{5!}", "120"),
    (r"\boxed{\binom{5}{2}}", "10"),
    (r"\boxed{\pm 3}", "3,-3"),
    (r"\boxed{x=1 \text{ or } x=2}", "1,2"),
    (r"\boxed{\{\sqrt4, x\}}", r"\{x, 2\}"),
    (r"\boxed{(3,\infty)\cup(-\infty,2)}", r"(-\infty,2)\cup(3,\infty)"),
    (r"\boxed{1\le x\le 2}", "[1,2]"),
    (r"\boxed{x\in(-1,2]}", r"-1<x\le2"),
    (r"\boxed{3<x}", "x>3"),
    (r"\boxed{x>3}", r"(3,\infty)"),
    (r"\boxed{\left(\frac12,\sqrt{4}\right)}", "(0.5,2)"),
    (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    (r"\boxed{y=2x+1}", "2x+1=y"),
    (r"\boxed{|-5|}", "5"),
    (r"\boxed{\emptyset}", r"\{\}"),
    (r"\boxed{3:4}", r"\frac34"),
    (r"\boxed{1.4142136}", r"\sqrt{2}"),
    (r"\boxed{5 \text{ apples}}", "5"),
]
WRONG = [
    ("the answer is 5", "5"),
    (r"\boxed{}", "0"),
    (r"\boxed{ }", "5"),
    (r"\boxed{\boxed{}}", "5"),
    (r"\boxed{5} \boxed{6}", "5"),
    (r"\boxed{6} and \boxed{5", "5"),
    (r"\boxed{x(x-1)}", "x^2+x"),
    (r"\boxed{x=x}", "5"),
    (r"\boxed{x}", "5"),
    (r"\boxed{5 or 7}", "5"),
    (r"\boxed{5, 7}", "5"),
    (r"\boxed{1,2,3,4,5}", "3"),
    (r"\boxed{5 7}", "5"),
    (r"\boxed{the answer is 5}", "5"),
    (r"\boxed{not 5}", "5"),
    (r"\boxed{?5}", "5"),
    (r"\boxed{=}", "5"),
    (r"\boxed{\mathbb{R}}", "5"),
    (r"\boxed{1.414}", r"\sqrt{2}"),
    (r"\boxed{5.0000001}", "5"),
    (r"\boxed{(2,x)}", "(x,2)"),
    (r"\boxed{\{1,x\}}", "(1,x)"),
    (r"\boxed{x<5}", r"x\le5"),
    (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    (r"\boxed{\text{Monday}}", r"\text{Tuesday}"),
    (r"\boxed{\frac{1}{0}}", r"\infty"),
    (r"\boxed{1/0}", "2/0"),
    (r"\boxed{nothing \text{ at all}", "5"),
]


@pytest.mark.parametrize(("reply", "label"), RIGHT)
def test_right_answers_earn_one(reply, label, means):
    assert value("math", reply, label, means=means) == 1.0


@pytest.mark.parametrize(("reply", "label"), WRONG)
def test_wrong_answers_earn_nothing(reply, label, means):
    assert value("math", reply, label, means=means) == 0.0


def test_what_can_be_told_at_once_needs_no_process():
    closed = GraderPool(1)
    closed.close()  # a call would fail
    alone = GraderContext(pool=closed)
    assert all(value("math", rf"\boxed{{{one}}}", other, means=alone) == 1.0 for one, other in AGREE)
    assert all(value("math", rf"\boxed{{{one}}}", other, means=alone) == 0.0 for one, other in DIFFER)


def test_exact_math_leaves_formulas_apart_and_looks_for_its_own_box():
    assert value("math_exact", r"\boxed{0.5}", r"\frac12") == 1.0
    assert value("math_exact", r"\boxed{x+1}", "1+x") == 0.0
    assert value("boxed_math_exact", r"\boxed{5}", "5.0") == 1.0
    assert value("boxed_math", r"\boxed{5}", "5.0") == 1.0


@pytest.mark.parametrize("label", ["", "  ", r"\boxed{}", "so ####"])
def test_a_label_without_a_value_is_the_data_s_fault(label):
    with pytest.raises(DataError, match=r"Prompt 3 cannot be graded by math: the label .* states no value"):
        value("math", r"\boxed{}", label)


DEEPSCALER = [
    (r"<think>maybe \boxed{4}</think> It is \boxed{5}.", "5", 1.0),
    (r"<think>maybe \boxed{5}</think> It is \boxed{4}.", "5", 0.0),
    (r"<think>\boxed{5}", "5", 0.0),
    (r"\boxed{5}", "5", 0.0),
    (r"<think>hm</think> 5", "5", 0.0),
    (r"hm ###Response \boxed{1+x}", "x+1", 1.0),
    (r"<think>a</think>\boxed{1}<think>b</think>\boxed{2}", r"\boxed{2}", 1.0),
]


@pytest.mark.parametrize(("reply", "label", "score"), DEEPSCALER)
def test_deepscaler_reads_only_what_comes_after_the_thought(reply, label, score, means):
    assert value("deepscaler", reply, label, means=means) == score
    assert value("boxed_deepscaler", reply, label, means=means) == score


GEMMA = [
    (r"<|channel>thought maybe \boxed{4}<channel|> It is \boxed{5}.", "5", 1.0),
    (r"<|channel>thought maybe \boxed{5}<channel|> It is \boxed{4}.", "5", 0.0),
    (r"thought \boxed{5}<channel|> So 5.", "5", 0.0),
    (r"a<channel|>\boxed{1} b<channel|>\boxed{1+x}", "x+1", 1.0),
    (r"\boxed{5}", "5", 1.0),
    (r"<channel|>\boxed{5} </think>", "5", 1.0),
]


@pytest.mark.parametrize(("reply", "label", "score"), GEMMA)
def test_gemma_math_reads_what_comes_after_the_thinking_channel(reply, label, score, means):
    assert value("gemma_math", reply, label, means=means) == score
    assert value("boxed_gemma_math", reply, label, means=means) == score

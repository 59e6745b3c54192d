"""Answers that are mathematically equal, unequal, or too expensive to simplify."""

from pathlib import Path

import pytest

from distill.rewards import math_equal as maths
from distill.rewards.math_equal import math_answer, math_equal
from tests.scripted import load_function

ENDLESS = r"so \boxed{9^{9^{9^{9^{9}}}}!}"


# Pairs of (in the box, the answer) that are equal, decided by hand.
EQUAL = [
    (r"\frac{1}{2^{98}}", r"2^{-98}"), ("0.50", "0.5"), ("0.5", r"\frac12"), ("7", "7.0"),
    ("0.3333333333", r"\frac13"), ("1e-20", "10^{-20}"), ("3.2e8", r"3.2\times 10^8"),
    ("3.2e8", "320000000"), ("5\N{MULTIPLICATION SIGN}10^3", "5000"),
    ("1,000", "1000"), ("-3", "\N{MINUS SIGN}3"),
    ("2^{200}", str(2**200)), (r"\sqrt2+\sqrt3", r"\sqrt{5+2\sqrt6}"),
    (r"\sqrt{2}\sqrt{3}-\sqrt{6}", "0"), (r"\infty", r"\infty"),
    ("x>3", r"(3,\infty)"), (r"(3,\infty)", "x>3"), ("3<x<5", "(3,5)"), ("3<x", "x>3"),
    (r"x<2 \text{ or } x>3", r"(-\infty,2)\cup(3,\infty)"), (r"x \in (3,5)", r"(3,5)"),
    (r"(-\infty,2)\cup(3,\infty)", r"x<2 \text{ or } x>3"), (r"(\frac12,5)", "(0.5,5)"),
    ("1 1/2", r"\frac32"), (r"1\frac{1}{2}", "3/2"), (r"1\frac12", "1.5"), ("1½", "3/2"),
    ("½", "0.5"), ("2 3/4", "2.75"), ("-1 1/2", "-1.5"), ("√2", r"\sqrt2"),
    ("3√2", r"3\sqrt{2}"), ("√(x+1)", r"\sqrt{x+1}"), ("2π", r"2\pi"), ("x²+1", "x^2+1"),
    ("10⁻³", "0.001"), (r"0.\overline{3}", r"\frac13"), (r"0.1\overline{6}", r"\frac16"),
    (r"0.\overline{142857}", "1/7"), (r"1.\overline{9}", "2"), (r"\$18", "18"), ("18", r"\$18"),
    (r"\$18", r"\$18"), ("18.90", r"\$18.90"), ("32348", r"\$32,\!348"), ("18", "US$18"),
    ("US$18", "18"), ("18", "$18"), ("18", r"18\text{ dollars}"), ("$18$", "18"), ("18", "18 USD"),
    (r"50\%", "0.5"), (r"50\%", "50"), ("50", r"50\%"), (r"12.5\%", "12.5"), ("x=5", "5"),
    ("5", "x=5"), ("1,2", "2,1"), (r"\{1,2\}", "1,2"), (r"\pm 2", "-2,2"), ("7", r"\fbox{7}"),
    (r"\begin{pmatrix}1\\0.5\end{pmatrix}", r"\begin{pmatrix}1\\\frac12\end{pmatrix}"),
    ("(x+1)^2", "x^2+2x+1"), (r"\sin^2x+\cos^2x", "1"), ("0.5x", r"\frac{x}{2}"),
    (r"\text{yes}", r"\text{yes}"), ("A", "A"), ("2x+3y=6", "4x+6y=12"), (r"90^\circ", "90"),
    ("7", "The answer is $7$."), ("€18", "18"), ("18", "18€"), (r"1\,000", "1000"),
    ("1 000 000", "1000000"), (r"x\ge 3", r"[3,\infty)"), ("3≤x<5", "[3,5)"), ("⅓", "1/3"),
    (r"[0, 1]", r"0\le x\le 1"), ("1/√2", r"\frac{1}{\sqrt{2}}"), (r"\text{(A)}", "A"),
    ("5.", "5"), (r"\frac12.", "0.5"), (r"(3,\infty).", "x>3"), ("5\N{EN DASH}3", "2"),
    ("\N{NON-BREAKING HYPHEN}3", "-3"), ("3·4", "12"), ("(0,∞)", r"(0,\infty)"),
    ("x∈(3,5)", "(3,5)"),
    ("1001_2", "1001_{2}"), ("12_{10}", "12"), ("even", r"\text{even}"), ("abc", "bca"),
    (r"2.5\text{ million}", "2500000"), ("1.5 million", "1500000"), ("infinity", r"\infty"),
    (r"\frac12\text{ thousand}", "500"), ("infinitely many", r"\text{infinitely many}"),
    (r"\sin 30^\circ", r"\frac12"), (r"\sin^2(15°)", r"\frac{2-\sqrt3}{4}"),
    (r"\cos(-60^{\circ})", "0.5"), (r"90\degree", "90"), (r"(1,4)\cap(2,5)", "(2,4)"),
    ("(1,5)", r"(1,4)\cup(2,5)"), (r"(1,2)\cap(3,4)", r"\varnothing"), ("i^2", "-1"),
    (r"e^{i\pi}", "-1"), (r"\frac{1}{i}", "-i"), (r"\sum_{i=1}^{10} i", "55"), ("(A) 5", "A"),
    (r"\textbf{(A)}\ \frac12", "A"), (r"\frac12\%", r"0.5\%"), (r"33\frac13\%", r"\frac13"),
    (r"33\frac{1}{3}\%", r"\frac{100}{3}\%"), ("2pi", r"2\pi"), ("3.2 x 10^8", "320000000"),
    (r"\nicefrac{1}{2}", r"\frac12"), (r"\sqrt[3]{-8}", "-2"), (r"2\sqrt[3]{-8}", "-4"),
]  # fmt: skip
UNEQUAL = [
    (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"), ("10^{-20}", r"2\cdot 10^{-20}"),
    ("1e-20", "2e-20"), ("0.1000001", "0.1"), (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
    ("3.14159265", r"\pi"), (r"\frac{\pi}{2}", "1.5707963"), ("0.333", r"\frac13"),
    ("2^{200}", "2^{200}+1"), (r"\sqrt{10^{80}+1}", "10^{40}"), (r"[3,\infty)", "x>3"),
    ("x<3", "x>3"), (r"x\ge 3", "x>3"), ("[3,5)", "(3,5)"), ("(3,6)", "(3,5)"), ("2/3", "2 2/3"),
    (r"0.\overline{3}", "0.3"), ("19", "US$18"), (r"50\%", r"0.5\%"), (r"50\%", "5"),
    ("x=5", "y=5"), ("(1,2)", "(2,1)"), ("1,2,3", "1,2"), ("(x+1)^2", "x^2+2x+2"),
    (r"\begin{pmatrix}1\\3\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\frac{x}{2^{98}}", r"\frac{x}{2^{99}}"), (r"\text{yes}", r"\text{no}"), ("A", "B"),
    ("y=2x+1", "y=2x+2"), (r"-\infty", r"\infty"), ("", "18"),
    ("1001_2", "1001_3"), ("1001_2", "1001"), ("12_{3}", "12"), ("x=11_2", "x=2"), ("-11_2", "-11"),
    ("listen", "silent"), ("listen up", "silent up"), ("ABC", "ACB"),
    (r"2.5\text{ million}", "2.5"), (r"33\frac{1}{3}\%", r"\frac{1}{3}\%"),
    (r"\sin 30^\circ", r"\sin 30"), ("(A) or (B) 5", "A"), ("(A) 5", "B"), ("i", "-i"),
    (r"(1,4)\cap(2,5)", "(1,5)"), (r"A\cup B", r"A\cap B"), (r"\sqrt[3]{-8}", "2"),
]  # fmt: skip


def test_equality_is_exact_but_for_decimals() -> None:
    earned = {pair: math_equal(rf"so \boxed{{{pair[0]}}}.", pair[1]) for pair in EQUAL + UNEQUAL}
    assert [pair for pair in EQUAL if earned[pair] != 1] == []
    assert [pair for pair in UNEQUAL if earned[pair] != 0] == []


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"\boxed{} because 42", "42", 0),
        (r"<think>\boxed{9}</think> The answer is 7.", "9", 0),
        (r"<think>\boxed{9}</think> The answer is 7.", "7", 1),
        (r"so \fbox{$73$}, done in 5.", "73", 1),
        (r"\boxed{3}, no: \fbox{4}", "4", 1),
        (r"\boxed{7", "7", 1),
        ("It costs US$18.", "18", 1),
        ("The answer is $1 1/2$.", "3/2", 1),
        (r"\boxed{5}, or \boxed{ }", "5", 0),
        (r"It costs \$18.50 in all.", r"\$18.50", 1),
        ("It costs $18 of $20.", "20", 1),
        ("The answer is ½.", "1/2", 1),
        ("The answer is 3√2.", r"3\sqrt{2}", 1),
        ("The answer is 1 1/2.", "1.5", 1),
        ("The answer is 2 3/4 cups.", "11/4", 1),
        (r"The answer is 0.\overline{3}", "1/3", 1),
        (rf"The answer is 0.\overline{{{'3' * 5000}}}", "1/3", 0),
        # Each of these would take seconds in quadratic time.
        (rf"\boxed{{{'√(' * 3000}1{')' * 3000}}}", "1", 0),
        (rf"\boxed{{{'. ' * 8000}7}}", "7", 1),
        ("\\(" * 9_000 + " so it is 7.", "7", 1),
        ("\\[" * 9_000 + r"\boxed{7}", "7", 1),
        (r"\boxed{" + r"\(" * 9_000 + r"7\)}", "7", 1),
        (r"\( 5 \( 7 \)", "7", 1),
        (
            r"so \[ \begin{pmatrix} 1 \\(2) \end{pmatrix} \]",
            r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
            1,
        ),
        ("The answer is √(√(√(256))).", "2", 1),
        (r"\boxed{5\, .}", "5", 1),
        ("The answer is 1001_2.", "1001", 0),
        ("The answer is 2.5 million.", "2.5", 0),
        ("The answer is 2.5 million.", "2500000", 1),
        ("The answer is 3.2e8.", "320000000", 1),
        ("x² + 1 is $x^2+1$", "x^2+1", 1),
        ("The answer is \N{MINUS SIGN}3.", "-3", 1),
        (r"so it is \boxed{\frac{1}{2}}.", "0.5", 1),
        ("The answer is 1/2.", r"\frac{1}{2}", 1),
        (r"$x^2+2x+1$", "(x+1)^2", 1),
        (r"\boxed{3\sqrt{2}}", r"$\sqrt{18}$", 1),
        (r"\boxed{(1,2)}", r"(1, 2)", 1),
        ("18", "$18$", 1),
        (r"first \boxed{3}, no: \boxed{4}", "4", 1),
        (r"\boxed{\frac{1}{3}}", "0.5", 0),
        ("I do not know", "18", 0),
        ("", "18", 0),
    ],
)
def test_rewards_of_responses(response: str, answer: str, reward: float) -> None:
    assert math_equal(response, answer) == reward
    assert load_function("math_equal")(response, answer) == reward


def test_the_same_answer_in_other_words_votes_together() -> None:
    assert math_answer(r"so \boxed{\frac{2}{4}}") == math_answer("The answer is $1/2$") == "1/2"
    assert math_answer("none") is None


@pytest.mark.parametrize(("response", "digits"), [(r"\boxed{2^{20000}}", 6021), (r"$2000!$", 5736)])
def test_numbers_of_any_length_vote(response: str, digits: int) -> None:
    answer = math_answer(response)
    assert answer is not None and len(answer) == digits
    assert math_equal(response, response) == 1


def test_endless_simplification_is_not_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maths, "TIMEOUT_S", 1.0)
    assert math_equal(ENDLESS, "2") == 0
    assert math_equal("2", "2") == 1  # the next one is not kept waiting


def test_code_is_not_mathematics(tmp_path: Path) -> None:
    written = tmp_path / "written"
    code = f"__import__('pathlib').Path('{written}').write_text('x')"
    for response in (code, rf"\boxed{{{code}}}", f"${code}$", f"The answer is {code}"):
        assert math_equal(response, "2") == 0
    assert not written.exists()

"""What is read from an answer and what it is worth, on golden strings."""

from __future__ import annotations

import pytest

from evals.retrieval import score

NUMBERS = [
    (" 12345. Remember it. 12345 is the pass key.", "12345"),
    ("12345", "12345"),
    (" 12345", "12345"),
    (" 12345.", "12345"),
    ("12,345", "12345"),
    (" 1,234,567.", "1234567"),
    ("The pass key is 12345.", "12345"),
    ("The pass key is **12345**.", "12345"),
    ("The pass key is: 12345, as the text says.", "12345"),
    ("'12345'", "12345"),
    ("\n12345\n", "12345"),
    ("#12345", "12345"),
    ("12345 and 67890", "12345"),
    ("67890 or 12345", "67890"),
    ("12345, 67890", "12345"),
    ("12345,67890", "12345"),
    ("12345,678", "12345"),
    ("123456", "123456"),
    ("1234 5", "1234"),
    ("1 2 3 4 5", "1"),
    ("12345th", "12345"),
    ("key12345", "12345"),
    ("012345", "012345"),
    ("12345-6", "12345"),
    ("-12345", "12345"),
    ("12345.0", "12345"),
    ("12.345", "12"),
    ("1,23456", "1"),
    ("the key", None),
    ("", None),
]

ABCDE = ["ABCDE", "FGHIJ", "KLMNO"]
VARIABLES = [
    (" ABCDE FGHIJ KLMNO", ABCDE),
    (" ABCDE, FGHIJ, KLMNO.", ABCDE),
    ("ABCDE,FGHIJ,KLMNO", ABCDE),
    ("ABCDE FGHIJ and KLMNO", ABCDE),
    ("VAR ABCDE, VAR FGHIJ, VAR KLMNO", ABCDE),
    ("KLMNO ABCDE FGHIJ", ABCDE),
    ("ABCDE FGHIJ KLMNO ABCDE FGHIJ", ABCDE),
    ("\n\nABCDE FGHIJ KLMNO", ABCDE),
    ("1. ABCDE\n2. FGHIJ\n3. KLMNO", ABCDE),
    ("- ABCDE\n- FGHIJ\n- KLMNO\n", ABCDE),
    ("The variables are:\n\nABCDE, FGHIJ, KLMNO\n\nThey hold 12345.", ABCDE),
    ("ABCDE FGHIJ KLMNO\n\nQRSTU", ABCDE),
    ("ABCDE FGHIJ KLMNO\n \nQRSTU", ABCDE),
    ("**ABCDE**, **FGHIJ**, **KLMNO**", ABCDE),
    ("`ABCDE` `FGHIJ` `KLMNO`", ABCDE),
    ("ABCDE = 12345, FGHIJ = ABCDE, KLMNO = FGHIJ", ABCDE),
    ("A variable ABCDE, then FGHIJ and KLMNO", ABCDE),
    ("[ABCDE, FGHIJ, KLMNO]", ABCDE),
    ("ABCDE FGHIJ KLMNO QRSTU", [*ABCDE, "QRSTU"]),
    ("ABCDE FGHIJ", ABCDE[:2]),
    ("ABCDE FGHIJ KLMN", ["ABCDE", "FGHIJ", "KLMN"]),
    ("ABCDE FGHIJ KLMNOP", ["ABCDE", "FGHIJ", "KLMNOP"]),
    ("ABCDE FGHIJKLMNO", ["ABCDE", "FGHIJKLMNO"]),
    ("abcde fghij klmno", []),
    ("Abcde Fghij Klmno", []),
    ("ABCDE\n\nFGHIJ\n\nKLMNO", ["ABCDE"]),
    ("XYZ ABCDE FGHIJ KLMNO", ["XYZ", *ABCDE]),
    ("ABCDE1 FGHIJ KLMNO", ["FGHIJ", "KLMNO"]),
    ("none", []),
    ("", []),
]

CODED = ["abcdef", "ghijkl", "mnopqr"]
FREQUENT = [
    (" abcdef, ghijkl, mnopqr", CODED),
    ("abcdef ghijkl mnopqr", CODED),
    ("abcdef, ghijkl, and mnopqr.", CODED),
    ("1. abcdef\n2. ghijkl\n3. mnopqr", CODED),
    ("\n\n1. abcdef\n\n2. ghijkl\n\n3. mnopqr", CODED),
    ("'abcdef', 'ghijkl', 'mnopqr'", CODED),
    ('"abcdef" "ghijkl" "mnopqr"', CODED),
    ("**abcdef**, **ghijkl**, **mnopqr**", CODED),
    ("[abcdef, ghijkl, mnopqr]", CODED),
    ("mnopqr ghijkl abcdef", CODED),
    ("abcdef abcdef ghijkl ghijkl mnopqr", CODED),
    ("abcdef (40 times), ghijkl (18), mnopqr (10)", CODED),
    ("abcdef ghijkl mnopqr stuvwx yzabcd", CODED),
    ("abcdef, ghijkl, mnopqr are the words.", CODED),
    ("The top is abcdef, then ghijkl, then mnopqr", CODED),
    ("abcdef ... ghijkl ... mnopqr", CODED),
    ("abcdef\tghijkl\tmnopqr", CODED),
    ("abcdef/ghijkl/mnopqr", CODED),
    ("abcdef ghijkl stuvwx mnopqr", ["abcdef", "ghijkl", "stuvwx"]),
    ("stuvwx abcdef ghijkl mnopqr", ["stuvwx", "abcdef", "ghijkl"]),
    ("abcdef ghijkl", CODED[:2]),
    ("abcdef ghijkl mnopq", CODED[:2]),
    ("abcdef ghijkl mnopqrs", CODED[:2]),
    ("abcdefghijkl mnopqr", ["mnopqr"]),
    ("answer: abcdef ghijkl mnopqr", ["answer", "abcdef", "ghijkl"]),
    ("ABCDEF GHIJKL MNOPQR", []),
    ("abcdef1 ghijkl mnopqr", ["ghijkl", "mnopqr"]),
    ("... ... ...", []),
    ("a b c", []),
    ("", []),
]


@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_numbers_are_read(text: str, number: str | None) -> None:
    assert len(NUMBERS) == 30
    for answer in ("12345", "67890", "1234567"):
        row = {"task": "passkey", "answers": [answer]}
        assert score(row, text)["acc"] == float(answer == number)
        assert score({**row, "task": "needle"}, text) == score(row, text)


@pytest.mark.parametrize(("text", "found"), VARIABLES)
def test_variables_are_read(text: str, found: list[str]) -> None:
    assert len(VARIABLES) == 30
    row = {"task": "vartrack", "answers": found or ["NEVER"]}
    assert score(row, text)["acc"] == float(bool(found))
    row = {"task": "vartrack", "answers": ABCDE}
    assert score(row, text)["acc"] == float(set(found) == set(ABCDE))


@pytest.mark.parametrize(("text", "found"), FREQUENT)
def test_frequent_words_are_read(text: str, found: list[str]) -> None:
    assert len(FREQUENT) == 30
    row = {"task": "freqwords", "answers": found or ["never"]}
    assert score(row, text)["acc"] == float(bool(found))
    row = {"task": "freqwords", "answers": CODED}
    assert score(row, text)["acc"] == float(set(found) == set(CODED))


def test_recall_is_the_share_that_is_named_anywhere() -> None:
    row = {"task": "vartrack", "answers": ABCDE}
    assert score(row, "abcde, and perhaps FGHIJ") == {"acc": 0.0, "recall": pytest.approx(2 / 3)}
    assert score({"task": "passkey", "answers": ["12345"]}, "1 12345") == {
        "acc": 0.0,
        "recall": 1.0,
    }

import pytest

from hf_mot.evaluation.scoring import best_of, exact_match, normalize_answer, token_f1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Beatles!", "beatles"),
        ("a an the", ""),
        ("Theatre", "theatre"),  # an article is a whole word
        ("U.S.", "us"),  # punctuation goes first, and joins what it stood between
        ("the-a", "thea"),  # … so this is no article any more
        ("twenty–five", "twenty–five"),  # only ASCII punctuation is punctuation
        ("L'a b", "la b"),
        ("$1,000.50\t\n(approx.)", "100050 approx"),
        ("An apple, a day", "apple day"),
        ("İstanbul", "i̇stanbul"),
    ],
)
def test_normalisation_is_that_of_the_official_script(text, expected):
    assert normalize_answer(text) == expected


@pytest.mark.parametrize(
    ("prediction", "answer", "f1", "em"),
    [
        ("the Denver Broncos", "Denver Broncos", 1.0, 1.0),
        ("Denver", "Denver Broncos", 2 / 3, 0.0),
        ("in Denver, Denver", "Denver", 0.5, 0.0),  # the shared word counts once
        ("Denver Denver", "Denver Denver Broncos", 2 * 1 * (2 / 3) / (1 + 2 / 3), 0.0),
        ("Broncos Denver", "Denver Broncos", 1.0, 0.0),  # a bag of words
        ("Carolina", "Denver", 0.0, 0.0),
        ("", "Denver", 0.0, 0.0),
        ("the", "a", 0.0, 1.0),  # nothing is left of either: equal, but without a shared word
    ],
)
def test_f1_and_exact_match(prediction, answer, f1, em):
    assert token_f1(prediction, answer) == f1
    assert exact_match(prediction, answer) == em


def test_the_best_accepted_answer_counts():
    answers = ["Denver Broncos", "Denver", "Super Bowl 50"]
    assert best_of(token_f1, "the Denver", answers) == 1.0
    assert best_of(exact_match, "Bowl", answers) == 0.0

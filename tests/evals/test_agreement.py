"""Samples against fp16's: what is compared, in which direction, and what cannot be."""

from __future__ import annotations

import math
from typing import Any

import pytest

from evals.accuracy import detectable, mcnemar, paired_interval, wilson
from evals.agreement import paired_metrics

Sample = dict[str, Any]


def _samples(values: list[Any], **more: list[Any]) -> list[Sample]:
    """Return one sample a value, with the fields of ``more`` by place."""
    return [
        {"id": f"t-{i}", "scores": {"acc": value}, **{name: v[i] for name, v in more.items()}}
        for i, value in enumerate(values)
    ]


def test_right_and_wrong_answers() -> None:
    ours = _samples([1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    fp16 = _samples([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0])
    low, high = paired_interval(3, 3, 1, 1, 0.9)
    assert paired_metrics(ours, fp16, "acc", 0.9) == {
        "fidelity/delta_acc": -0.25,
        "fidelity/delta_acc_low": low,
        "fidelity/delta_acc_high": high,
        "fidelity/flips_lost": 3,
        "fidelity/flips_gained": 1,
        "fidelity/mcnemar_p": mcnemar(3, 1),
        "fidelity/detectable_acc": detectable(8, 0.9),
    }
    assert low < -0.25 < high


def test_the_order_of_the_other_run_means_nothing() -> None:
    ours, fp16 = _samples([1.0, 0.0, 1.0]), _samples([0.0, 0.0, 1.0])
    assert paired_metrics(ours, fp16[::-1], "acc", 0.95) == paired_metrics(ours, fp16, "acc", 0.95)


def test_too_few_items_show_nothing() -> None:
    found = paired_metrics(_samples([1.0] * 5), _samples([1.0] * 5), "acc", 0.95)
    assert "fidelity/detectable_acc" not in found
    assert all(math.isfinite(value) for value in found.values())


def test_other_numbers_get_a_bootstrap_and_no_flips() -> None:
    ours = _samples([0.5, 0.25, 0.9, 0.4, 0.75, 0.1])
    fp16 = _samples([0.6, 0.5, 0.8, 0.6, 0.75, 0.4])
    found = paired_metrics(ours, fp16, "acc", 0.95)
    assert set(found) == {
        "fidelity/delta_acc",
        "fidelity/delta_acc_low",
        "fidelity/delta_acc_high",
    }
    assert found["fidelity/delta_acc"] == pytest.approx(-0.75 / 6)
    assert found["fidelity/delta_acc_low"] < -0.75 / 6 < found["fidelity/delta_acc_high"]
    assert paired_metrics(ours, fp16, "acc", 0.95) == found
    assert paired_metrics(ours, fp16, "acc", 0.95, seed=1) != found


def test_one_item_has_no_bootstrap() -> None:
    assert paired_metrics(_samples([0.5]), _samples([0.75]), "acc", 0.95) == {
        "fidelity/delta_acc": -0.25
    }


def test_lists_of_numbers_have_no_difference() -> None:
    ours = _samples([[-3.0, 5.0]], loglikelihoods=[[-3.0]])
    fp16 = _samples([[-2.5, 5.0]], loglikelihoods=[[-2.5]])
    assert paired_metrics(ours, fp16, "acc", 0.95) == {
        "fidelity/loglikelihood_diff_max": 0.5,
        "fidelity/loglikelihood_diff_mean": 0.5,
    }


def test_items_without_the_metric_are_left_out_of_it() -> None:
    ours, fp16 = _samples([1.0, 0.0, 1.0]), _samples([1.0, 1.0, 1.0])
    ours[0]["scores"] = fp16[0]["scores"] = {"f1": 0.5}
    assert paired_metrics(ours, fp16, "acc", 0.95)["fidelity/delta_acc"] == -0.5


def test_generations_agree_or_part_at_a_token() -> None:
    texts = ["a", "b", "c", "d"]
    ours = _samples([1.0] * 4, text=texts, token_ids=[[1, 2], [3], [4, 5, 6], []])
    fp16 = _samples([1.0] * 4, text=texts, token_ids=[[1, 2], [3, 9], [4, 5, 7], []])
    found = paired_metrics(ours, fp16, "acc", 0.95)
    low, high = wilson(2, 4, 0.95)
    assert found["fidelity/agreement"] == 0.5
    assert (found["fidelity/agreement_low"], found["fidelity/agreement_high"]) == (low, high)
    assert found["fidelity/first_divergence_mean"] == 1.5


def test_equal_generations_have_no_divergence() -> None:
    ours = _samples([1.0, 0.0], text=["a", "b"], token_ids=[[1], [2]])
    found = paired_metrics(ours, ours, "acc", 0.95)
    assert found["fidelity/agreement"] == 1.0
    assert "fidelity/first_divergence_mean" not in found


def test_texts_are_compared_where_there_are_no_tokens() -> None:
    ours, fp16 = _samples([1.0, 0.0], text=["a", "b"]), _samples([1.0, 0.0], text=["a", "c"])
    found = paired_metrics(ours, fp16, "acc", 0.95)
    assert found["fidelity/agreement"] == 0.5
    assert "fidelity/first_divergence_mean" not in found


def test_loglikelihoods_of_every_choice_count() -> None:
    ours = _samples([1.0, 0.0], loglikelihoods=[[-1.0, -2.0], [-3.0, -4.0, -5.5]])
    fp16 = _samples([1.0, 0.0], loglikelihoods=[[-1.5, -2.0], [-3.0, -4.25, -5.0]])
    found = paired_metrics(ours, fp16, "acc", 0.95)
    assert found["fidelity/loglikelihood_diff_max"] == 0.5
    assert found["fidelity/loglikelihood_diff_mean"] == 1.25 / 5


@pytest.mark.parametrize("field", ["loglikelihood", "loglikelihoods"])
def test_loglikelihoods_of_other_texts_do_not(field: str) -> None:
    wrap = (lambda x: x) if field == "loglikelihood" else (lambda x: [x])
    ours = _samples([1.0, 0.0], text=["a", "b"], **{field: [wrap(-1.0), wrap(-2.0)]})
    fp16 = _samples([1.0, 0.0], text=["a", "c"], **{field: [wrap(-1.25), wrap(-9.0)]})
    assert paired_metrics(ours, fp16, "acc", 0.95)["fidelity/loglikelihood_diff_max"] == 0.25
    parted = paired_metrics(ours[1:], fp16[1:], "acc", 0.95)
    assert not [name for name in parted if "loglikelihood" in name]


def test_other_numbers_of_choices_are_refused() -> None:
    ours, fp16 = _samples([1.0], loglikelihoods=[[-1.0]]), _samples([1.0])
    with pytest.raises(ValueError, match="item 't-0' has 1 log-likelihoods and 0 in the fp16 run"):
        paired_metrics(ours, fp16, "acc", 0.95)


@pytest.mark.parametrize(
    ("ours", "fp16", "message"),
    [
        (3, 2, r"the fp16 run has no answer to 1 items \(t-2\); expected the same items"),
        (1, 8, r"the run has no answer to 7 items \(t-1, t-2, t-3, t-4, t-5, \.\.\.\)"),
        (0, 0, "no samples to compare"),
    ],
)
def test_items_of_one_side_only_are_named(ours: int, fp16: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paired_metrics(_samples([1.0] * ours), _samples([1.0] * fp16), "acc", 0.95)


def test_an_item_that_is_there_twice_is_named() -> None:
    ours = _samples([1.0, 1.0])
    with pytest.raises(ValueError, match="the run has item 't-0' twice"):
        paired_metrics([*ours, ours[0]], ours, "acc", 0.95)


def test_an_unknown_metric_is_named_with_those_that_are_there() -> None:
    with pytest.raises(ValueError, match="no sample has the metric 'f1'; they have acc"):
        paired_metrics(_samples([1.0]), _samples([1.0]), "f1", 0.95)

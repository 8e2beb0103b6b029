"""How far back keys are found: in the upper half of prompts, the map of stages, and the sentence about it."""

import math

import numpy as np

from torchtitan_cp.evaluation.reach import Reach, describe_reach, found_far_back, reach_map
from torchtitan_cp.evaluation.result import Retrieval

SHORT = Reach("64", 64, {32: 1.0, 64: 0.9, 128: 0.6, 256: 0.2})
LONG = Reach("128", 128, {32: 0.95, 64: 1.0, 128: 0.9, 256: 0.5, 512: 0.1})


def test_only_keys_in_the_upper_half_of_a_prompt_count() -> None:
    accuracy = np.array([[1.0, 0.8, 0.0], [0.5, 0.6, 0.4], [1.0, 1.0, 0.7], [1.0, 1.0, 1.0]])
    found = found_far_back(Retrieval(accuracy, (64, 128, 256), (0.0, 0.25, 0.5, 1.0)))
    assert found == {64: 0.75, 128: np.mean([0.8, 0.6]), 256: 0.2}


def test_lengths_that_were_not_tried_are_left_out() -> None:
    nothing = math.nan
    accuracy = np.array([[nothing, 0.5, nothing], [nothing, nothing, nothing], [1.0, 1.0, 1.0]])
    assert found_far_back(Retrieval(accuracy, (64, 128, 256), (0.0, 0.25, 1.0))) == {128: 0.5}


def test_the_map_has_the_lengths_of_all_stages_and_no_number_where_one_asked_for_nothing() -> None:
    lengths, found = reach_map([SHORT, LONG])
    assert lengths == [32, 64, 128, 256, 512]
    np.testing.assert_array_equal(found, [[1.0, 0.9, 0.6, 0.2, math.nan], [0.95, 1.0, 0.9, 0.5, 0.1]])


def test_the_sentence_says_that_keys_are_found_over_each_length_and_not_far_beyond() -> None:
    assert describe_reach([SHORT, LONG]) == (
        "The model finds keys over each stage's length, and not far beyond it: the longer stages taught it to look "
        "further back."
    )
    assert describe_reach([SHORT]) == "The model finds keys over the stage's length, and not far beyond it."


def test_the_sentence_says_where_that_does_not_hold() -> None:
    missed = LONG._replace(found=LONG.found | {128: 0.89})
    assert describe_reach([SHORT, missed]) == (
        "The model does not find keys over each stage's length: 89% after stage 128, in prompts of 128 tokens."
    )
    hole = LONG._replace(found=LONG.found | {64: 0.79})
    assert describe_reach([SHORT, hole]) == (
        "The model does not find keys over each stage's length: 79% after stage 128, in prompts of 64 tokens."
    )
    noise = LONG._replace(found=LONG.found | {64: 0.88})
    assert "finds keys over each stage's length, and not far beyond it" in describe_reach([SHORT, noise])
    far = SHORT._replace(found=SHORT.found | {256: 0.21})
    assert describe_reach([far, LONG]) == (
        "The model finds keys over each stage's length, and some far beyond it: 21% after stage 64, in prompts of "
        "256 tokens."
    )
    near = Reach("64", 64, {32: 1.0, 64: 0.9, 128: 0.6})
    assert describe_reach([near]) == (
        "The model finds keys over the stage's length. Longer prompts were not tried (evaluation.passkey.lengths)."
    )
    none = LONG._replace(found=dict.fromkeys(LONG.found, 0.05) | {32: 0.2})
    assert (
        describe_reach([SHORT, none])
        == "The model does not find planted keys yet: 20% at most, in prompts of any length."
    )


def test_what_json_holds_of_an_accuracy_is_read_back() -> None:
    read = Retrieval.of_lists(accuracy=[[1.0, None]], lengths=[64, 128], depths=[0.5])
    assert (read.lengths, read.depths) == ((64, 128), (0.5,))
    np.testing.assert_array_equal(read.accuracy, [[1.0, math.nan]])

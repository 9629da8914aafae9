import numpy as np
import pytest

from panoply.evaluation.surprise import oddness, surprise


def test_surprise_is_a_product_of_ranks() -> None:
    # returns 0 0 1 2: ranks ¼ ¼ ⅝ ⅞; oddness 3 1 2 9: ranks ⅝ ⅛ ⅜ ⅞
    found = surprise([0.0, 0.0, 1.0, 2.0], [3.0, 1.0, 2.0, 9.0])
    np.testing.assert_allclose(found, [5 / 32, 1 / 32, 15 / 64, 49 / 64])


def test_surprise_does_not_depend_on_scales() -> None:
    returns, odd = np.array([0.0, 3.0, -1.0]), np.array([0.2, 0.1, 4.0])
    np.testing.assert_array_equal(surprise(returns, odd), surprise(1000 * returns - 7, np.exp(odd)))


def test_an_episode_without_a_number_is_not_surprising() -> None:
    nan = float("nan")
    assert surprise([nan, 1.0], [5.0, 1.0]).tolist() == [0.0, 0.125]  # rank ½ of one return, ¼ of two
    assert surprise([nan], [nan]).tolist() == [0.0]


def test_oddness_is_the_mean_over_what_is_known() -> None:
    assert oddness([-1.0, None, -3.0]) == pytest.approx(2.0)
    assert np.isnan(oddness([None]))

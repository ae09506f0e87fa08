"""Time in which kernels ran, and in which none did."""

import pytest
from benchmarks.cases.kernels import kind_of, occupancy


def test_kernels_that_overlap_count_once_and_gaps_come_longest_first():
    ran = [
        (0.0, 2.0, "a"),
        (1.0, 3.0, "b"),
        (1.5, 1.6, "within b"),
        (3.5, 4.0, "c"),
        (6.0, 7.0, "d"),
    ]
    busy, gaps = occupancy(reversed(ran))
    assert busy == pytest.approx(4.5)
    assert gaps == [(2.0, "c", "d"), (0.5, "b", "c")]
    assert busy + sum(gap for gap, _, _ in gaps) == pytest.approx(7.0)


def test_kernels_back_to_back_leave_no_gap():
    assert occupancy([(0.0, 1.0, "a"), (1.0, 2.0, "b")]) == (2.0, [])
    assert occupancy([]) == (0.0, [])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>", "attention"),
        ("triton_poi_fused__grouped_mm__to_copy_1", "compiled pointwise and reductions"),
        ("_ZN7cutlass13device_kernelI17GroupProblemShapeE", "grouped products"),
        ("triton_tem_fused_flex_attention_8", "attention"),
        ("nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_NNN", "products"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
    ],
)
def test_kinds_of_kernels(name, kind):
    assert kind_of(name) == kind

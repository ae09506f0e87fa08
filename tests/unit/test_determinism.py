"""What a deterministic step asks of PyTorch, and that the process has its own settings again."""

from __future__ import annotations

import os

import pytest
import torch

from headrace.models.attention import pinned_backend
from headrace.models.determinism import deterministic_algorithms


def settings():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


def test_the_switch_is_on_inside_and_as_it_was_after_an_error(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = settings()
    inside = []

    def fail():
        with deterministic_algorithms():
            inside.append(settings())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert inside == [(True, False, False, ":4096:8")]
    assert settings() == before


def test_what_a_caller_has_set_stays(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic_algorithms():
            assert settings() == (True, False, False, ":16:8")
        assert settings() == (True, True, True, ":16:8")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_that_adds_in_any_order_is_left_out(monkeypatch, deterministic):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pinned_backend(deterministic=deterministic):
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.cudnn_sdp_enabled() != deterministic
        assert torch.backends.cuda.mem_efficient_sdp_enabled() != deterministic
    assert not torch.are_deterministic_algorithms_enabled()

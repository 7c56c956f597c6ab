"""What the tests of recurrent kernels share: a batch of sequences against a loop over its tokens."""

from hypothesis import strategies as st

# Ones, short ones, several chunks, ends of chunks.
LENGTHS = st.lists(st.one_of(st.integers(0, 3), st.integers(14, 18), st.integers(60, 140)), min_size=1, max_size=5)


def copies(tensors, count=2):
    """The same tensors as leaves of so many graphs."""
    return [[t.detach().clone().requires_grad_() for t in tensors] for _ in range(count)]


def apart(ours, theirs):
    """The largest difference, against the largest value."""
    if theirs.numel() == 0:
        return 0.0
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-3)).item()

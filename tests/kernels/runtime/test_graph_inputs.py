"""The first launch of a recorded step, against the torch operations it stands for."""

import pytest
import torch
from tests.kernels.device import DEVICE, needs_triton

from miles.kernels.runtime import graph_inputs as module
from miles.kernels.runtime.graph_inputs import unpack_graph_inputs


def sent(rows, news, *, slots=20, table=(9, 31)):
    """What a host may send: some tokens known, some drawn before, some entries of the table, the rest for nobody."""
    size = table[0] * table[1]

    def ints(high, *shape, low=0):
        return torch.randint(low, high, shape, dtype=torch.int32, device=DEVICE)

    places = torch.full((news,), size - 1, dtype=torch.int32, device=DEVICE)
    new = min(news, size - 1) // 2
    places[:new] = torch.randperm(size - 1, device=DEVICE)[:new].int()
    return (
        [ints(100, rows, low=-1), ints(5000, rows), ints(1 << 20, rows), ints(slots, rows)],
        {
            "last_tokens_S": torch.randint(100, (slots,), device=DEVICE),
            "table_index_N": places,
            "pages_N": ints(900, news),
            "block_table_RM": ints(900, *table),
        },
    )


@needs_triton
@pytest.mark.parametrize("news", [1, 40, 1024, 1500])
@pytest.mark.parametrize("rows", [1, 2, 7, 1024, 1100])
def test_one_launch_begins_a_step_as_torch_does(monkeypatch, poisoned, rows, news):
    columns, rest = sent(rows, news)
    other = {**rest, "block_table_RM": rest["block_table_RM"].clone()}
    wanted = unpack_graph_inputs(*columns, **rest)
    monkeypatch.setattr(module, "use_triton_inference", lambda x: True)
    got = unpack_graph_inputs(*columns, **other)
    assert all(torch.equal(one, two) and one.dtype == torch.int64 for one, two in zip(got, wanted, strict=True))
    assert torch.equal(other["block_table_RM"].view(-1)[:-1], rest["block_table_RM"].view(-1)[:-1])
    assert all(each.data_ptr() % 16 == 0 for each in got)


def test_a_token_that_is_not_known_is_the_one_its_slot_drew():
    columns, rest = sent(3, 4)
    columns[0] = torch.tensor([-1, 5, -1], dtype=torch.int32, device=DEVICE)
    columns[3] = torch.tensor([7, 0, 2], dtype=torch.int32, device=DEVICE)
    begun = unpack_graph_inputs(*columns, **rest)
    assert begun.tokens_n.tolist() == [int(rest["last_tokens_S"][7]), 5, int(rest["last_tokens_S"][2])]
    assert begun.req_slots_n.tolist() == [7, 0, 2]

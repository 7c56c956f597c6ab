"""A decoder that several ranks hold together, as the training plane wants it.

Each rank's decoder has some heads, channels and rows of the vocabulary (``tensor``), some experts (``expert``), and
of these FSDP keeps some rows (``wrap``); what a rank holds of a parameter is one ``Holding``.

``_T`` packed input tokens, ``_R`` trained tokens, ``L`` layers with experts, ``k`` experts a token, ``D`` hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles.backends.fsdp import expert, tensor
from miles.backends.fsdp.collective import rows_joined
from miles.backends.fsdp.holding import holdings
from miles.backends.fsdp.leaves import Leaves
from miles.backends.fsdp.mesh import Mesh
from miles.backends.fsdp.packed import Packed, packed_of
from miles.backends.fsdp.routing import routing_of, told_by
from miles.backends.fsdp.wrap import wrapped
from miles.core.errors import CheckpointError, UsageError
from miles.kernels.segments_rows import pick
from miles.models import hub
from miles.models.decoder import Decoder, Layer
from miles.models.lora import Adapters
from miles.models.matrices import Matrices, matrices
from miles.models.moe import Routing
from miles.models.outline import Outline, outline
from miles.models.rank import decoder_of_rank
from miles.models.recompute import Recompute, set_recompute
from miles.models.shard import shares
from miles.models.spec import DecoderSpec
from miles.train.logits import Output
from miles.train.roles import Judge, Kept
from miles.train.rows import Rows
from miles.train.stopwatch import Stopwatch


def open_sharded(
    folder: Path,
    spec: DecoderSpec,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    config: Mapping[str, Any] | None = None,
    like: Path | None = None,
    recompute: Recompute = "none",
    recompute_layers: int | None = None,
    cpu_offload: bool = False,
    frozen: bool = False,
) -> ShardedModel:
    """The model in ``folder``, held by all ranks of ``mesh``; they all open it at once."""
    model = ShardedModel(
        spec,
        mesh,
        dtype=dtype,
        config=config,
        like=like,
        recompute=recompute,
        recompute_layers=recompute_layers,
        cpu_offload=cpu_offload,
        frozen=frozen,
    )
    model.load(folder)
    return model


class ShardedModel:
    """A TrainModel whose parameters start as whatever was in memory; a ``frozen`` one takes no gradient.

    It computes in ``dtype``, and its parameters are float32 unless it is frozen. With ``cpu_offload`` they live on the
    host. Saved weights are accompanied by the tokenizer files of the folder ``like`` and by ``config``, else
    ``like``'s config, else one made from the spec.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        config: Mapping[str, Any] | None = None,
        like: Path | None = None,
        recompute: Recompute = "none",
        recompute_layers: int | None = None,
        cpu_offload: bool = False,
        frozen: bool = False,
    ) -> None:
        problem = mesh.layout.misfit(spec)
        if problem is not None:
            raise UsageError(problem)
        self.spec, self.mesh, self.dtype = spec, mesh, dtype
        self._config, self._like = config, like
        cut = mesh.shard is not None
        self._decoder = self._made(torch.float32 if cut and not frozen else dtype)
        if frozen:
            self._decoder.requires_grad_(False)
        set_recompute(self._decoder, recompute, recompute_layers)
        self._watch, self._tokens = Stopwatch(mesh.device), 0
        self._time_layers()
        parts = {name: parameter.shape for name, parameter in self._decoder.named_parameters()}
        apart = wrapped(self._decoder, mesh, dtype=dtype if cut and not frozen else None, cpu_offload=cpu_offload)
        whole = dict(Decoder(spec, device="meta", dtype=dtype).named_parameters())
        wholes = {name: parameter.shape for name, parameter in whole.items()}
        self._holdings = holdings(shares(spec), wholes, parts, mesh, apart=apart)
        self._decoder.to_empty(device="cpu" if cpu_offload and cut else mesh.device)
        for name in apart:  # what FSDP does not bring to the device is to be there
            self._decoder.get_parameter(name).data = self._decoder.get_parameter(name).data.to(mesh.device)
        self._leaves = Leaves(self._decoder)
        alone = mesh.tensor.world == 1
        self._vocabulary = None if alone else tensor.Rows(spec.vocab_size, mesh.tensor)

    def leave_head(self) -> None:
        """Train the head no more, unless it is the embedding; before the first forward."""
        if self._decoder.lm_head is not None:
            self._decoder.lm_head.requires_grad_(False)
            self.parameters()["lm_head.weight"].requires_grad_(False)

    def adapt(self, adapters: Adapters) -> None:
        """Let gradients reach these factors, of which every rank has all; before the first forward."""
        assert self.mesh.tensor.world == 1, "adapters are for layers that are whole on a rank"
        adapters.attach(self._decoder)

    def first_row(self, name: str) -> int:
        """Which row of the whole this rank's part of a matrix begins with."""
        return self._holdings[name].bounds[0]

    def added(self, grad: Tensor) -> Tensor:
        """What all ranks' tokens give together, of what each rank's own gave."""
        return self.mesh.rows.sum(grad)

    def _made(self, dtype: torch.dtype) -> Decoder:
        """This rank's decoder, without storage, joined to the others'."""
        joints = tensor.joints(self.mesh.tensor, sequence=self.mesh.layout.sequence)
        decoder = decoder_of_rank(self.spec, self.mesh.tensor, device="meta", dtype=dtype, joints=joints)
        expert.cut(decoder, self.mesh.expert)
        return decoder

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    # -- what it holds ------------------------------------------------------------------------

    def parameters(self) -> Mapping[str, Tensor]:
        return self._leaves.tensors

    def settle(self) -> None:
        grads = self._leaves.collect()
        starts = {name: self._holdings[name].bounds[0] for name in grads}
        tensor.settle(grads, shares(self.spec), starts, self.mesh.tensor, sequence=self.mesh.layout.sequence)

    def squares(self, grads: Mapping[str, Tensor]) -> Tensor:
        """The sum of the squares of what no earlier rank has."""
        found = [self._holdings[name].squares(grad).to(self.device) for name, grad in grads.items()]
        return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64, device=self.device)

    def norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        return self.mesh.everyone.sum(self.squares(grads)).sqrt().float()

    def updated(self) -> None:
        self._leaves.written()

    def gather(self, name: str, local: Tensor) -> Tensor:
        return self._holdings[name].gather(local)

    def cut(self, name: str, whole: Tensor) -> Tensor:
        return self._holdings[name].cut(whole)

    def matrices(self) -> Mapping[str, Matrices]:
        return matrices(self.spec)

    def move(self, device: torch.device) -> None:
        self._leaves.move(device)

    # -- what it reads ------------------------------------------------------------------------

    def each(self, plan: Sequence[Rows], judge: Judge) -> list[Kept]:
        kept: list[Kept] = []
        for number, rows in enumerate(plan):
            output = self._output(rows)
            with self._watch:
                loss, found = judge(number, output)
            self._tokens += len(rows.tokens_T)
            if loss is not None:
                loss.backward()
            kept.append(found)
        return kept

    def pace(self) -> float | None:
        """Of the layers' forward, each with its weights brought together already, and of the loss."""
        seconds, tokens, self._tokens = self._watch.taken(), self._tokens, 0
        return seconds / tokens if tokens else None

    def _time_layers(self) -> None:
        """Before FSDP takes them: it brings a layer's weights together first, and then calls what is timed here."""
        for layer in self._decoder.layers:
            assert isinstance(layer, Layer)
            layer.pending = self._watch.around(layer.pending)
            layer.register_forward_pre_hook(lambda module, given: self._watch.__enter__())
            layer.register_forward_hook(lambda module, given, out: self._watch.__exit__(None, None, None))

    def _output(self, rows: Rows) -> Output:
        packed = packed_of(rows, self.mesh, self.spec)
        routing = routing_of(self.spec, packed.replay_TLk, rows.used, device=self.device, fill=packed.fill)
        hidden_rD = self.read(packed, routing)
        told = told_by(routing, rows.used, self.mesh.context.sum)
        return Output(
            hidden_RD=hidden_rD,
            head_VD=self._decoder.head(),
            softcap=self.spec.logit_softcap,
            vocabulary=self._vocabulary,
            tokens=packed.tokens,
            flips=told.flips,
            replayed=told.replayed,
            load_LE=told.load_LE,
        )

    def read(self, packed: Packed, routing: Routing | None = None) -> Tensor:
        """The hidden states that are wanted of this rank, [r, D], the same on all tensor ranks."""
        hidden_TD = self._decoder(packed.tokens_T, packed.positions_T, packed.attend, routing)
        if self.mesh.layout.sequence:
            hidden_TD = rows_joined(hidden_TD, self.mesh.tensor)
        return pick(hidden_TD, packed.at_r, repeated=packed.repeated)

    # -- where it is kept ---------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        decoder = Decoder(self.spec, device="meta", dtype=self.dtype)
        lead = self.mesh.peers.lead
        found: dict[str, Tensor] = {}
        for name, wanted in decoder.named_parameters():
            whole = self.gather(name, self.parameters()[name].detach())
            if lead:
                found[name] = whole.to(device="cpu", dtype=wanted.dtype)
        if lead:
            decoder.load_state_dict(found, assign=True)
            hub.export(decoder, folder, like=self._like, config=self._config)
        self.wait()  # nobody goes on before it is written

    def wait(self) -> None:
        """Until every rank has come here."""
        self.mesh.everyone.sum(torch.zeros((), device=self.device))

    def outline(self) -> Outline:
        return outline(self.spec, dtype=self.dtype, like=self._like, config=self._config)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        left = dict(self.parameters())
        dtype = next((p.dtype for name, p in left.items() if not name.endswith(".correction")), self.dtype)
        for name, whole in hub.load_slices(folder, rank=0, world=1, device="cpu", dtype=dtype):
            live = left.pop(name, None)
            if live is None or whole.shape != self._holdings[name].whole:
                raise CheckpointError(f"{folder} holds another model than the one in training (see {name}).")
            live.copy_(self.cut(name, whole))
        if left:
            raise CheckpointError(f"{folder} holds another model than the one in training (see {min(left)}).")
        self.updated()

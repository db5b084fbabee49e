"""A fake GPU: 'cuda' tensors have shapes, dtypes and bytes, but no values.

CPU tensors stay real, except while models load (`host_is_fake`). What the host fetches from the GPU
is zeros or True. Needs `cuda_guard.load()` before the first `import torch`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from rl.rehearsal.tally import Tally, calling_line

aten = torch.ops.aten
MAX_FETCHED_BYTES = 2**26
"""A larger tensor that is copied to the host stays fake there."""
WAITING = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
}
"""Operations whose result's size or value the host needs."""
ONE_DTYPE = {
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "linear",
    "addcmul",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_varlen_attn",
}
"""Operations that CUDA refuses for inputs of several dtypes; fake tensors do not check it."""
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


class FakeGpu(TorchDispatchMode):
    """Runs every operation on 'cuda' tensors without values, and counts it in `tally`."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = Tally()
        self.host_is_fake = False
        """While models load: their weights have no values on the host either."""
        self.num_moving = 0
        """Nested calls of `Module.to` in progress; weights that they move to the host stay fake."""
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __enter__(self) -> Any:
        self._lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(self._lifts)
        super().__exit__(*error)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, new CPU tensors are fake, too."""
        self.host_is_fake = True
        try:
            yield
        finally:
            self.host_is_fake = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_fake = any(isinstance(leaf, FakeTensor) for leaf in leaves)
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        is_born_fake = self.host_is_fake and not leaves and str(device) != "meta"
        if not is_fake and not is_born_fake and (device is None or device.type != "cuda"):
            return func(*args, **kwargs)
        name = func.__name__.split(".")[0]
        answer = self._fetched(func, name, args, kwargs, device)
        if answer is not NotImplemented:
            return answer
        if name in INDEXING:
            args = self._indexed(name, args)
        if name in ONE_DTYPE:
            dtypes = {leaf.dtype for leaf in leaves if leaf.dtype.is_floating_point}
            if len(dtypes) > 1:
                mix = f"{name} of {' and '.join(sorted(map(str, dtypes)))}"
                self.tally.mixed_dtypes[f"{mix}: {calling_line()}"] += 1
        args, kwargs = tree_map(self._as_fake, (args, kwargs))
        with self._fake:
            out = func(*args, **kwargs)
        # Weak references in this memo would keep `Module.to` from swapping parameters.
        self._fake.fake_tensor_converter.meta_converter.tensor_memo.clear()
        # PyTorch's FLOP formulas without its `FlopCounterMode`, which keeps recomputed activations
        # alive, so that memory peaks would be wrong.
        if formula := flop_registry.get(func._overloadpacket):
            self.tally.flops[self.tally.phase] += formula(*args, **kwargs, out_val=out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor):
                self.tally.track(tensor)
        return out

    def _as_fake(self, leaf: Any) -> Any:
        """Make a real tensor fake. FakeTensorMode alone would keep a small tensor as a constant and
        run the real CUDA kernel on it."""
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor):
            return self._fake.from_tensor(leaf)
        return leaf

    def _fetched(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any], device: torch.device | None
    ) -> Any:
        """The result of an operation that copies between host and GPU, or makes the host wait;
        NotImplemented for all others, which run on fake tensors."""
        tally = self.tally
        if func is aten._local_scalar_dense.default:
            tally.wait("item")
            return on_host(args[0]).item()
        if func in WAITING:
            tally.wait(name)
            [like, *_] = args
            values = func(*tree_map(on_host, args), **kwargs)
            return tree_map(lambda leaf: self._on_device(leaf, like.device), values)
        if func is aten._to_copy.default and device is not None:
            source = args[0]
            if device.type == source.device.type:
                return NotImplemented
            if self.num_moving or not kwargs.get("non_blocking"):
                tally.wait("to host" if device.type == "cpu" else "to GPU")
            stays_fake = self.num_moving or self.host_is_fake or source.nbytes > MAX_FETCHED_BYTES
            if device.type == "cpu" and not stays_fake:
                return on_host(source).to(kwargs.get("dtype") or source.dtype)
        if func is aten.copy_.default and args[0].device.type != args[1].device.type:
            is_async = len(args) > 2 and args[2]
            if not is_async:
                tally.wait("to host" if args[0].device.type == "cpu" else "to GPU")
            if not isinstance(args[0], FakeTensor):
                return args[0]
        return NotImplemented

    def _on_device(self, leaf: Any, device: torch.device) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        with self._fake:
            return self._fake.from_tensor(leaf).to(device)

    def _indexed(self, name: str, args: Any) -> Any:
        """The arguments of an indexing operation; a boolean mask, whose values are unknown,
        selects everything."""
        resolved: list[torch.Tensor | None] = []
        for index in args[1]:
            is_mask = index is not None and index.dtype == torch.bool
            if is_mask or (index is not None and index.device != args[0].device):
                self.tally.wait("boolean index" if is_mask else "to GPU")
            if is_mask and name == "index":
                places = on_host(index).nonzero(as_tuple=True)
                resolved += [self._on_device(place, args[0].device) for place in places]
            else:
                resolved.append(index)
        return (args[0], resolved, *args[2:])


def on_host(leaf: Any) -> Any:
    """What the host gets for a tensor without values: zeros; for a boolean True, because a run
    fetches booleans to check that all is well."""
    if not isinstance(leaf, FakeTensor):
        return leaf
    fill = torch.ones if leaf.dtype == torch.bool else torch.zeros
    return fill(leaf.shape, dtype=leaf.dtype)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Scaled dot-product attention as a GPU computes it. A CPU build of PyTorch would choose the
    math backend, which makes [S, S] scores in float32."""
    if query.device.type != "cuda" or attn_mask is not None or query.dtype == torch.float32:
        return _SDPA(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa and key.shape[1] != query.shape[1]:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    attend = aten._scaled_dot_product_flash_attention
    return attend(query, key, value, dropout_p, is_causal, scale=scale)[0]


_SDPA = torch.nn.functional.scaled_dot_product_attention


class _Properties:
    name, gcnArchName = "a GPU of a rehearsal", ""  # noqa: N815 - PyTorch's names
    major, minor, multi_processor_count, total_memory = 9, 0, 132, int(150.8e9)


@contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """Inside, `torch.cuda` reports one GPU of compute capability 9.0, and `cuda:0` is fake."""
    gpu = FakeGpu()
    apply, tolist = torch.nn.Module._apply, torch.Tensor.tolist

    def moving(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        gpu.num_moving += 1
        try:
            return apply(module, *args, **kwargs)
        finally:
            gpu.num_moving -= 1

    def one_wait(tensor: torch.Tensor) -> Any:
        """Replaces FakeTensor's `tolist`, which fetches one element at a time."""
        if not isinstance(tensor, FakeTensor):
            return tolist(tensor)
        if tensor.device.type == "cuda":
            gpu.tally.wait("tolist")
        return tolist(on_host(tensor))

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: _Properties,
        "get_device_name": lambda device=None: _Properties.name,
        "synchronize": lambda device=None: gpu.tally.wait("synchronize"),
        "empty_cache": lambda: None,
        "_lazy_init": lambda: None,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "mem_get_info": lambda device=None: (int(1e11), _Properties.total_memory),
        "reset_peak_memory_stats": lambda device=None: None,
        "max_memory_allocated": lambda device=None: gpu.tally.now["cuda"],
        "memory_allocated": lambda device=None: gpu.tally.now["cuda"],
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        patch = mock.patch.object
        stack.enter_context(patch(torch.nn.Module, "_apply", moving))
        stack.enter_context(patch(torch.nn.functional, "scaled_dot_product_attention", _flash))
        stack.enter_context(patch(FakeTensor, "tolist", one_wait))
        stack.enter_context(patch(torch.Tensor, "pin_memory", lambda tensor: tensor))
        stack.enter_context(gpu)
        yield gpu

"""A GPU that is not there: 'cuda' tensors have shapes, dtypes and bytes, but no values.

CPU tensors stay real, except while models load (`host_is_fake`). Small integer tensors that are
computed from real ones carry their values along, so that `.tolist()`, masks and `nonzero` answer
truly. Needs `cuda_guard.load()` before the first `import torch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from rl.rehearsal.tally import Tally, calling_line

aten = torch.ops.aten
MAX_KNOWN_VALUES = 2**20
"""Integer tensors up to this size carry their values."""
MAX_KNOWN_FLOATS = 2048
MAX_FETCHED_BYTES = 2**26
"""A larger tensor that is copied to the host stays fake there."""
WAITING = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
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
BIRTHS = ("zeros", "ones", "full", "scalar_tensor")


class FakeGpu(TorchDispatchMode):
    """Runs every operation on 'cuda' tensors without values, and counts it in `tally`."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = Tally()
        self.host_is_fake = False
        """While models load: their weights have no values on the host either."""
        self.num_moving = 0
        """Depth of `Module.to`: weights that move to the host stay fake there."""
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._values: WeakIdKeyDictionary = WeakIdKeyDictionary()

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

    def values_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real tensor behind a fake one; None if its values are unknown."""
        return self._values.get(tensor) if isinstance(tensor, FakeTensor) else tensor

    def _known(self, real: torch.Tensor, device: torch.device) -> torch.Tensor:
        fake = self._fake.from_tensor(real).to(device)
        self._values[fake] = real
        return fake

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        is_born_fake = (
            self.host_is_fake and not leaves and (device is None or device.type != "meta")
        )
        if not fakes and not is_born_fake and (device is None or device.type != "cuda"):
            return func(*args, **kwargs)
        self.tally.num_ops += 1
        name = func.__name__.split(".")[0]
        answer = self._fetched(func, name, args, kwargs, device)
        if answer is not NotImplemented:
            return answer
        if name in INDEXING:
            args = self._indexed(name, args)
        if name in ONE_DTYPE:
            dtypes = {leaf.dtype for leaf in leaves if leaf.dtype.is_floating_point}
            if len(dtypes) > 1:
                wrong = f"{name} of {' and '.join(sorted(map(str, dtypes)))}"
                self.tally.wrong[wrong, calling_line()] += 1
        values = self._computed(func, name, leaves, args, kwargs)
        if func in WAITING and values is not None:
            # Its shape follows from the values, which a fake tensor does not know.
            with self._fake:
                out = tree_map(lambda v: self._moved(v, fakes[0].device), values)
        else:
            args, kwargs = tree_map(self._converted, (args, kwargs))
            with self._fake:
                out = func(*args, **kwargs)
        # Its weak references would keep `Module.to` from swapping parameters.
        self._fake.fake_tensor_converter.meta_converter.tensor_memo.clear()
        self._count_flops(func, args, kwargs, out)
        known = [None] * len(tree_leaves(out)) if values is None else tree_leaves(values)
        for tensor, value in zip(tree_leaves(out), known, strict=True):
            if isinstance(tensor, FakeTensor):
                self.tally.track(tensor)
                self._remember(tensor, value)
        return out

    def _fetched(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any], device: torch.device | None
    ) -> Any:
        """The answer of an operation that copies between host and GPU, or makes the host wait;
        NotImplemented for the others, which are computed as fake ones."""
        tally = self.tally
        if func is aten._local_scalar_dense.default:
            tally.wait("item")
            real = self.values_of(args[0])
            return (real if real is not None else _unknown(args[0])).item()
        if func in WAITING:
            tally.wait(name)
        if func is aten.equal.default and any(self.values_of(tensor) is None for tensor in args):
            return True
        if func is aten._to_copy.default and device is not None:
            source = args[0]
            if device.type == source.device.type:
                return NotImplemented
            if self.num_moving or not kwargs.get("non_blocking"):
                tally.wait("to host" if device.type == "cpu" else "to GPU")
            if device.type == "cpu" and not self.num_moving and not self.host_is_fake:
                real = self.values_of(source)
                dtype = kwargs.get("dtype") or source.dtype
                if real is not None:
                    return real.to(dtype, copy=True)
                if source.nbytes <= MAX_FETCHED_BYTES:
                    return _unknown(source).to(dtype)
        if func is aten.copy_.default and args[0].device.type != args[1].device.type:
            is_async = len(args) > 2 and args[2]
            if not is_async:
                tally.wait("to host" if args[0].device.type == "cpu" else "to GPU")
            if not isinstance(args[0], FakeTensor):
                return args[0]
        return NotImplemented

    def _indexed(self, name: str, args: Any) -> Any:
        """The arguments of an indexing operation, with boolean masks of known values resolved."""
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype == torch.bool for index in indices):
            self.tally.wait("boolean index")
            if name == "index" and all(self.values_of(index) is not None for index in indices):
                resolved: list[torch.Tensor | None] = []
                for index in args[1]:
                    if index is None or index.dtype != torch.bool:
                        resolved.append(index)
                        continue
                    real = self.values_of(index)
                    assert real is not None
                    places = real.nonzero(as_tuple=True)
                    resolved += [self._known(place, args[0].device) for place in places]
                return (args[0], resolved)
        elif args[0].device.type == "cuda" and any(i.device.type == "cpu" for i in indices):
            self.tally.wait("to GPU")
        return args

    def _computed(
        self, func: Any, name: str, leaves: Sequence[torch.Tensor], args: Any, kwargs: Any
    ) -> Any:
        """The values of a small operation on known values; None where they are not known."""
        if self.host_is_fake or sum(leaf.numel() for leaf in leaves) > MAX_KNOWN_VALUES:
            return None
        if any(self.values_of(leaf) is None for leaf in leaves):
            return None
        # A parameter must carry no values: `Module.to` swaps it, which no weak reference survives.
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        is_born = name in BIRTHS and not dtype.is_floating_point
        if not leaves and not is_born and name not in ("arange", "linspace"):
            return None
        on_host = {k: "cpu" if k == "device" else v for k, v in kwargs.items()}
        real_args, real_kwargs = tree_map(
            lambda leaf: self.values_of(leaf) if isinstance(leaf, torch.Tensor) else leaf,
            (args, on_host),
        )
        with suppress(Exception):
            return func(*real_args, **real_kwargs)
        return None

    def _moved(self, leaf: Any, device: torch.device) -> Any:
        return self._fake.from_tensor(leaf).to(device) if isinstance(leaf, torch.Tensor) else leaf

    def _converted(self, leaf: Any) -> Any:
        """A real tensor as a fake one. The mode by itself would keep a small one as a constant, and
        run the real CUDA kernel on it."""
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor):
            return self._fake.from_tensor(leaf)
        return leaf

    def _remember(self, tensor: FakeTensor, value: torch.Tensor | None) -> None:
        if value is not None and not self.num_moving and isinstance(value, torch.Tensor):
            most = MAX_KNOWN_FLOATS if value.dtype.is_floating_point else MAX_KNOWN_VALUES
            if value.numel() <= most:
                self._values[tensor] = value
                return
        if tensor in self._values:
            del self._values[tensor]

    def _count_flops(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Counted here, by PyTorch's formulas: under its own `FlopCounterMode` recomputed
        activations stay alive, so that peaks would be wrong."""
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.tally.flops[self.tally.phase] += formula(*args, **kwargs, out_val=out)


def _unknown(tensor: torch.Tensor) -> torch.Tensor:
    """On the host, what stands for values that are not known: zeros, and True, since the booleans
    that a run fetches ask whether all is well."""
    fill = torch.ones if tensor.dtype == torch.bool else torch.zeros
    return fill(tensor.shape, dtype=tensor.dtype)


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
    """Scaled dot-product attention as a GPU computes it. A CPU build chooses the arithmetic path,
    which makes the [S, S] scores in float32."""
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
        """FakeTensor's own asks for one element at a time."""
        if not isinstance(tensor, FakeTensor):
            return tolist(tensor)
        if tensor.device.type == "cuda":
            gpu.tally.wait("tolist")
        real = gpu.values_of(tensor)
        return tolist(_unknown(tensor) if real is None else real)

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

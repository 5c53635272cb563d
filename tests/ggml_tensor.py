"""struct ggml_tensor, for callbacks that look at a graph's nodes."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from snapkv_gguf import _lib

_base = ctypes.CDLL(str(next(_lib.lib_dir().glob("libggml-base.*"))))
_base.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
_base.ggml_op_desc.argtypes = [ctypes.c_void_p]
_base.ggml_op_desc.restype = ctypes.c_char_p


class Tensor(ctypes.Structure):
    """The fields up to the name."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    ]

    @classmethod
    def at(cls, pointer: int) -> Tensor:
        return ctypes.cast(pointer, ctypes.POINTER(cls)).contents

    def op_name(self) -> str:
        """As in upstream's support tables: GET_ROWS, TANH, ..."""
        return str(_base.ggml_op_desc(ctypes.byref(self)).decode())

    def sources(self) -> list[Tensor]:
        return [Tensor.at(src) for src in self.src if src]

    def f32(self) -> npt.NDArray[np.float32]:
        """The data of a contiguous F32 tensor, wherever it is, in NumPy's order of the axes."""
        out = np.empty(tuple(reversed(self.ne)), np.float32)
        _base.ggml_backend_tensor_get(ctypes.byref(self), out.ctypes.data, 0, out.nbytes)
        return out

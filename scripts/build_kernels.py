#!/usr/bin/env python3
"""Compiles kernels/*.cu to the checked-in kernels/*.ptx. Needs no GPU and no CUDA installation.

usage: scripts/build_kernels.py [--check] [--venv DIR] [NAME...]

  --check     write nothing: fail when a .ptx differs from what its source compiles to, and
              assemble every .ptx with ptxas for each GPU generation the kernels promise
  --venv DIR  where the compiler is installed, by default target/kernels-venv
  NAME        only these kernels (file names without .cu), by default all

The compiler is NVRTC from PyPI, the oldest release of CUDA 12: its PTX (ISA 8.0) is read by every
driver since CUDA 12.0. ptxas comes from CUDA 12.8, the oldest that knows sm_100 and sm_120.
"""

import argparse
import ctypes
import pathlib
import re
import subprocess
import sys
import tempfile

NVRTC = "nvidia-cuda-nvrtc-cu12==12.0.76"
PTXAS = "nvidia-cuda-nvcc-cu12==12.8.93"
# fmad=false: products and sums round separately, as on the CPU, so the bits agree.
OPTIONS = ["--gpu-architecture=compute_80", "--fmad=false", "--std=c++17", "--device-as-default-execution-space"]
ASSEMBLE_FOR = ["sm_80", "sm_90", "sm_100", "sm_120"]

ROOT = pathlib.Path(__file__).resolve().parent.parent
KERNELS = ROOT / "kernels"


def tools(venv):
    """Installs the pinned compiler when it is absent; gives (libnvrtc, ptxas)."""
    stamp = venv / "installed"
    if not stamp.exists() or stamp.read_text() != NVRTC + PTXAS:
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([venv / "bin" / "pip", "install", "-q", "--disable-pip-version-check", NVRTC, PTXAS], check=True)
        stamp.write_text(NVRTC + PTXAS)
    lib = next(venv.glob("lib/python*/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"))
    ptxas = next(venv.glob("lib/python*/site-packages/nvidia/cuda_nvcc/bin/ptxas"))
    return lib, ptxas


class Nvrtc:
    """The few calls of NVRTC that turn one source into PTX."""

    def __init__(self, lib):
        # NVRTC opens its builtins by name; have them loaded first.
        for builtins in lib.parent.glob("libnvrtc-builtins.so*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self.lib = ctypes.CDLL(str(lib))
        self.lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    def text(self, program, what):
        size = ctypes.c_size_t()
        getattr(self.lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self.lib, f"nvrtcGet{what}")(program, buffer)
        return buffer.value.decode()

    def compile(self, source):
        """PTX of the file `source`; kernels/*.cuh are its only headers."""
        headers = sorted(KERNELS.glob("*.cuh"))
        names = (ctypes.c_char_p * len(headers))(*[h.name.encode() for h in headers])
        texts = (ctypes.c_char_p * len(headers))(*[h.read_bytes() for h in headers])
        program = ctypes.c_void_p()
        code = self.lib.nvrtcCreateProgram(
            ctypes.byref(program), source.read_bytes(), source.name.encode(), len(headers), texts, names
        )
        if code == 0:
            options = (ctypes.c_char_p * len(OPTIONS))(*[o.encode() for o in OPTIONS])
            code = self.lib.nvrtcCompileProgram(program, len(OPTIONS), options)
        if code != 0:
            sys.exit(f"{source.name}: {self.lib.nvrtcGetErrorString(code).decode()}\n{self.text(program, 'ProgramLog')}")
        ptx = self.text(program, "PTX")
        self.lib.nvrtcDestroyProgram(ctypes.byref(program))
        return ptx


def assemble(ptxas, ptx):
    """Assembles for every promised GPU; prints what each kernel takes on the first."""
    for arch in ASSEMBLE_FOR:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as out:
            run = subprocess.run([ptxas, "-v", f"-arch={arch}", ptx, "-o", out.name], capture_output=True, text=True)
        if run.returncode != 0:
            sys.exit(f"{ptx.name}: {arch}: {run.stderr}")
        spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", run.stderr))
        registers = re.findall(r"Used (\d+) registers", run.stderr)
        print(f"{ptx.name}: {arch}: registers {' '.join(registers)}, {spills} bytes spilled")


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].split("\n")[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--venv", type=pathlib.Path, default=ROOT / "target" / "kernels-venv")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    lib, ptxas = tools(args.venv)
    nvrtc = Nvrtc(lib)
    sources = [KERNELS / f"{n}.cu" for n in args.names] or sorted(KERNELS.glob("*.cu"))
    if not sources:
        sys.exit(f"{KERNELS}: no .cu file")
    stale = []
    for source in sources:
        ptx = source.with_suffix(".ptx")
        text = nvrtc.compile(source)
        if not args.check:
            ptx.write_text(text)
        elif not ptx.exists() or ptx.read_text() != text:
            stale.append(ptx.name)
            continue
        assemble(ptxas, ptx)
    if stale:
        sys.exit(f"{', '.join(stale)}: differs from its source: run scripts/build_kernels.py and commit the result")


main()

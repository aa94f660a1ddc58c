#!/usr/bin/env python3
"""Compiles kernels/*.cu to kernels/generated/. Needs no GPU and no CUDA installation.

usage: scripts/build_kernels.py [--check] [--venv DIR] [NAME...]

  --check     write nothing: fail when a generated file holds something else than what its source
              compiles to, or when a file is missing or has no source any more
  --venv DIR  where the compiler is installed, by default target/kernels-venv
  NAME        only these kernels (file names without .cu), by default all

Of each source come one PTX (NAME.ptx.z), for GPUs that do not exist yet, and one cubin for each
generation in GENERATIONS (NAME.sm_90.z), which the driver takes without compiling. All are zlib
streams: `zlib-flate -uncompress`, or `python3 -c 'import sys, zlib; ...'`, shows them.

PTX comes from NVRTC of PyPI, the oldest release of CUDA 12: its PTX (ISA 8.0) is read by every driver
since CUDA 12.0. ptxas comes from CUDA 12.9, the oldest that knows sm_103.
"""

import argparse
import ctypes
import pathlib
import re
import subprocess
import sys
import tempfile
import zlib

NVRTC = "nvidia-cuda-nvrtc-cu12==12.0.76"
PTXAS = "nvidia-cuda-nvcc-cu12==12.9.86"
# fmad=false: products and sums round separately, as on the CPU, so the bits agree.
OPTIONS = ["--gpu-architecture=compute_80", "--fmad=false", "--std=c++17", "--device-as-default-execution-space"]
# As in src/gpu/image.rs.
GENERATIONS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"]

ROOT = pathlib.Path(__file__).resolve().parent.parent
KERNELS = ROOT / "kernels"
GENERATED = KERNELS / "generated"


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


def assemble(ptxas, ptx, arch, name):
    """The cubin of `ptx` for `arch`; prints what its kernels take."""
    with tempfile.TemporaryDirectory() as folder:
        # A name of its own: it goes into the cubin, which has to be the same on every machine.
        (pathlib.Path(folder) / f"{name}.ptx").write_text(ptx)
        run = subprocess.run(
            [ptxas, "-v", f"-arch={arch}", f"{name}.ptx", "-o", "cubin"], capture_output=True, text=True, cwd=folder
        )
        if run.returncode != 0:
            sys.exit(f"{name}: {arch}: {run.stderr}")
        cubin = (pathlib.Path(folder) / "cubin").read_bytes()
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", run.stderr))
    registers = max((int(n) for n in re.findall(r"Used (\d+) registers", run.stderr)), default=0)
    print(f"{name}: {arch}: {len(cubin)} bytes, at most {registers} registers, {spills} bytes spilled")
    return cubin


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
    GENERATED.mkdir(exist_ok=True)
    stale, known = [], set()
    for source in sources:
        ptx = nvrtc.compile(source)
        images = {"ptx": ptx.encode()}
        images |= {arch: assemble(ptxas, ptx, arch, source.stem) for arch in GENERATIONS}
        for form, image in images.items():
            path = GENERATED / f"{source.stem}.{form}.z"
            known.add(path)
            # The contents count: another zlib may compress the same bytes otherwise.
            if path.exists() and zlib.decompress(path.read_bytes()) == image:
                continue
            if args.check:
                stale.append(path.name)
            else:
                path.write_bytes(zlib.compress(image, 9))
    if not args.names:
        for path in sorted(set(GENERATED.iterdir()) - known):
            if args.check:
                stale.append(path.name)
            else:
                path.unlink()
    if stale:
        sys.exit(f"{', '.join(stale)}: differs from its source: run scripts/build_kernels.py and commit the result")


main()

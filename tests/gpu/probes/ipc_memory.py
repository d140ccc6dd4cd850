"""Memory of cudaMalloc, opened by another process on the same GPU: both see what the other writes."""

from .pair import Pair, probe


def exporter(pipe):
    from cupy.cuda import runtime

    from .calls import Gpu

    gpu = Gpu()
    address = gpu.allocate()
    pipe.send(bytes(runtime.ipcGetMemHandle(address)))
    pipe.recv()  # the importer has written
    seen = gpu.read(address)
    gpu.spin(0.0, address + 8, 4242)
    gpu.stream.synchronize()
    pipe.send("written")
    pipe.recv()  # the importer has closed
    runtime.free(address)
    return seen, runtime.deviceCanAccessPeer(0, 0) if runtime.getDeviceCount() == 1 else None


def importer(pipe):
    from cupy.cuda import runtime

    from .calls import Gpu

    gpu = Gpu()
    address = runtime.ipcOpenMemHandle(pipe.recv(), runtime.cudaIpcMemLazyEnablePeerAccess)
    gpu.write(address, 1717)
    pipe.send("written")
    pipe.recv()
    seen = gpu.read(address + 8)
    runtime.ipcCloseMemHandle(address)
    pipe.send("closed")
    return seen


def body():
    pair = Pair(exporter, importer)
    try:
        second, (first, reaches_itself) = pair.result(1), pair.result(0)
    finally:
        pair.end()
    print(f"the exporter read {first} (1717 expected), the importer {second} (4242 expected)")
    print(f"deviceCanAccessPeer(0, 0) says {reaches_itself}")
    return [] if (first, second) == (1717, 4242) else ["a process does not see what the other wrote"]


if __name__ == "__main__":
    probe(body)

"""Stream memory operations on memory of another process: a stream waits for a word that the other's stream writes."""

from .pair import Pair, probe

BUSY, ROUNDS = 0.3, 200


def operations():
    from cuda.bindings import driver as cuda

    from .calls import driver

    def wait(stream, address, value):
        driver(
            cuda.cuStreamWaitValue32(
                stream.ptr, address, value, cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ.value
            )
        )

    def write(stream, address, value):
        driver(cuda.cuStreamWriteValue32(stream.ptr, address, value, 0))

    return wait, write


def owner(pipe):
    """Owns the words: +0 data, +64 the owner's signal, +128 the visitor's, +192 one that only a host writes."""
    from cupy.cuda import runtime

    from .calls import Gpu

    gpu, (wait, write) = Gpu(), operations()
    address = gpu.allocate()
    pipe.send(bytes(runtime.ipcGetMemHandle(address)))
    pipe.recv()
    gpu.spin(BUSY, address, 99)
    write(gpu.stream, address + 64, 1)
    pipe.send("enqueued")
    pipe.recv()
    for i in range(2, ROUNDS + 2):  # write, then wait: the visitor answers each
        write(gpu.stream, address + 64, i)
        wait(gpu.stream, address + 128, i)
    pipe.send("enqueued")
    gpu.stream.synchronize()
    pipe.recv()
    return None


def visitor(pipe):
    import threading
    import time

    import cupy
    from cupy.cuda import runtime

    from .calls import Gpu

    gpu, (wait, write) = Gpu(), operations()
    address = runtime.ipcOpenMemHandle(pipe.recv(), runtime.cudaIpcMemLazyEnablePeerAccess)
    pipe.send("open")
    pipe.recv()
    began = time.monotonic()
    wait(gpu.stream, address + 64, 1)
    enqueued, value = time.monotonic() - began, gpu.read(address)
    found = {"enqueued": enqueued, "value": value, "seconds": time.monotonic() - began}
    pipe.send("read")
    pipe.recv()
    began = time.monotonic()
    for i in range(2, ROUNDS + 2):
        wait(gpu.stream, address + 64, i)
        write(gpu.stream, address + 128, i)
    gpu.stream.synchronize()
    found["round trip us"] = (time.monotonic() - began) / ROUNDS * 1e6
    # A wait that nobody answers: what else goes on meanwhile, and does a write from this host end it?
    other = cupy.cuda.Stream(non_blocking=True)
    wait(gpu.stream, address + 192, 1)
    allocated = threading.Event()

    def allocate():
        cupy.cuda.Device(0).use()
        runtime.free(runtime.malloc(1 << 20))
        allocated.set()

    thread = threading.Thread(target=allocate, daemon=True)
    thread.start()
    found["malloc goes on"] = allocated.wait(1.0)
    found["pending"] = not gpu.stream.done
    began = time.monotonic()
    write(other, address + 192, 1)
    gpu.stream.synchronize()
    found["released after"] = time.monotonic() - began
    thread.join(5)
    pipe.send("done")
    return found


def body():
    try:
        from cuda.bindings import driver  # noqa: F401
    except ImportError as error:
        print(f"NOT RUN: {error}")
        raise SystemExit(3) from None
    pair = Pair(owner, visitor)
    try:
        found = pair.result(1, 20)
        pair.result(0, 5)
    finally:
        pair.end()
    print(
        f"the wait was enqueued in {found['enqueued'] * 1e6:.0f} us; the value, {found['value']} (99 expected), came "
        "after "
        f"{found['seconds']:.3f} s (the other process was busy for {BUSY} s)"
    )
    print(f"a round trip between the two streams takes {found['round trip us']:.1f} us ({ROUNDS} in a row)")
    print(
        f"while a wait is pending, cudaMalloc {'goes on' if found['malloc goes on'] else 'BLOCKS (1 s waited)'}; "
        f"a write on another stream of the same process released it after {found['released after'] * 1e3:.1f} ms"
    )
    wrong = [] if found["value"] == 99 else ["the stream did not wait for the word"]
    wrong += [] if found["pending"] else ["a wait that nobody answered was over"]
    return wrong + (["the host waited"] if found["enqueued"] > BUSY / 2 else [])


if __name__ == "__main__":
    probe(body)
